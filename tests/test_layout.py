"""Page layouts as data: sizes, offsets and their inverse, spans of a split, and which views are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sm120_mla.errors import LayoutError
from sm120_mla.layout import (
    DSV4,
    DSV32,
    DSV41_FOOTER,
    DSV41_INLINE,
    LAYOUTS,
    Field,
    Location,
    PageGeometry,
    PageLayout,
    Span,
    by_name,
)

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.name)
PAYLOAD_256, STRIDE_256 = 149_504, 149_760


def resolve(
    view: torch.Tensor, layout: PageLayout = DSV4, page_size: int | None = None, multiple_of: int = 1
) -> PageGeometry:
    return layout.resolve(
        shape=view.shape,
        stride=view.stride(),
        storage_offset=view.storage_offset(),
        dtype=str(view.dtype).removeprefix("torch."),
        storage_bytes=view.untyped_storage().nbytes(),
        page_size=page_size,
        multiple_of=multiple_of,
    )


def pool(pages: int = 3, stride: int = STRIDE_256, offset: int = 0) -> torch.Tensor:
    """2-D pool of whole page strides, ``offset`` bytes into its storage."""
    return torch.empty(offset + pages * stride, dtype=torch.uint8)[offset:].view(pages, stride)


def nominal(flat: torch.Tensor, page_size: int, layout: PageLayout = DSV4, head: int | None = None):
    """The pool as engines hand it over: 3-D, or 4-D with a head axis at ``head``."""
    view = flat[:, : layout.payload(page_size)].unflatten(1, (page_size, layout.bytes_per_token))
    return view if head is None else view.unsqueeze(head)


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "token", "footer", "head_dim", "tiles"),
    [
        (DSV4, 576, 8, 512, 7),
        (DSV32, 656, 0, 576, 4),
        (DSV41_FOOTER, 512, 16, 512, 16),
        (DSV41_INLINE, 528, 0, 512, 16),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_row_has_the_sizes_of_its_format(
    layout: PageLayout, token: int, footer: int, head_dim: int, tiles: int
) -> None:
    got = (layout.token_bytes, layout.footer_bytes, layout.bytes_per_token, layout.head_dim)
    assert got == (token, footer, token + footer, head_dim)
    assert layout.field("scales").count == tiles


@every_layout
def test_a_row_is_consistent(layout: PageLayout) -> None:
    rope = sum(field.count for field in layout.fields if field.name == "rope")
    nope = layout.field("nope").count
    assert nope + rope == layout.head_dim
    assert layout.field("scales").count * layout.tile == nope
    assert layout.source
    assert all(field.unit for field in layout.fields)
    assert all(field.offset % field.item_bytes == 0 for field in layout.fields)
    assert by_name(layout.name) is layout


@pytest.mark.parametrize(
    ("page_size", "payload", "stride"),
    [(256, 149_504, 149_760), (128, 74_752, 74_880), (64, 37_376, 37_440), (2, 1_168, 1_728)],
)
def test_dsv4_pages_have_the_sizes_seen_in_the_field(page_size: int, payload: int, stride: int) -> None:
    assert (DSV4.payload(page_size), DSV4.default_stride(page_size)) == (payload, stride)


def test_dsv4_offsets_are_those_of_the_format() -> None:
    at = {name: DSV4.offset(name, 12, 64) for name in ("nope", "rope", "scales", "scale_pad")}
    assert at == {"nope": 6_912, "rope": 7_360, "scales": 36_960, "scale_pad": 36_967}


def test_a_row_with_a_gap_is_refused() -> None:
    fields = (Field("nope", "token", 0, 448, "e4m3fn", "value"), Field("rope", "token", 450, 64, "bf16", "v"))
    with pytest.raises(LayoutError, match=r"dsv4\.rope\.offset = 450: expected 448"):
        dataclasses.replace(DSV4, fields=fields)


@pytest.mark.parametrize("ask", [DSV4.field, by_name])
def test_an_unknown_name_is_answered_with_the_known_ones(ask) -> None:
    with pytest.raises(LayoutError, match=r"'dsv5': expected one of (nope|dsv4), "):
        ask("dsv5")


# --- locate ----------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("page_size", [1, 2, 53, 64])
def test_locate_inverts_offset_for_every_byte(layout: PageLayout, page_size: int) -> None:
    expected: dict[int, tuple[int, str, int]] = {}
    for token in range(page_size):
        for field in layout.fields:
            start = layout.offset(field.name, token, page_size)
            for within in range(field.nbytes):
                assert start + within not in expected
                expected[start + within] = (token, field.name, within // field.item_bytes)

    found = {at: layout.locate(at, page_size) for at in range(layout.payload(page_size))}

    assert {at: (f.token, f.field, f.element) for at, f in found.items()} == expected


@every_layout
def test_locate_names_the_tile_that_shares_a_scale(layout: PageLayout) -> None:
    nope, scales = layout.offset("nope", 1, 64), layout.offset("scales", 1, 64)
    width = layout.field("scales").item_bytes
    for tile in range(layout.field("scales").count):
        ends = (nope + tile * layout.tile, nope + (tile + 1) * layout.tile - 1, scales + tile * width)
        assert [layout.locate(at, 64).tile for at in ends] == [tile] * 3


@pytest.mark.parametrize(
    ("byte", "text"),
    [
        (36_963, "token 12, scale of tile 3 (byte 36,963)"),
        (36_967, "token 12, pad of the scales (byte 36,967)"),
        (576 + 130, "token 1, nope[130], tile 2 (byte 706)"),
        (448 + 3, "token 0, rope[1] (byte 451)"),
        (37_376, "byte 37,376 (page tail)"),
    ],
)
def test_a_location_prints_as_the_format_calls_it(byte: int, text: str) -> None:
    assert str(DSV4.locate(byte, 64)) == text


@every_layout
def test_every_byte_past_the_payload_is_tail(layout: PageLayout) -> None:
    end = layout.payload(64)
    assert layout.locate(end - 1, 64).field != "tail"
    for byte in (end, end + 1, 10 * end):
        assert layout.locate(byte, 64) == Location(byte, -1, "tail", -1, -1)


def test_a_byte_before_the_page_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"byte = -1"):
        DSV4.locate(-1, 64)


# --- spans -----------------------------------------------------------------------------------------------


def test_dsv4_spans_of_256_are_those_of_the_field() -> None:
    assert [DSV4.spans(256, sub) for sub in range(4)] == [
        (Span(sub * 36_864, 0, 36_864), Span(147_456 + sub * 512, 36_864, 512)) for sub in range(4)
    ]


@every_layout
@pytest.mark.parametrize("page_size", [64, 128, 192, 1024])
def test_spans_move_each_byte_to_where_the_sub_page_keeps_it(layout: PageLayout, page_size: int) -> None:
    for sub in range(page_size // 64):
        target_end = 0
        for span in layout.spans(page_size, sub):
            assert span.target == target_end
            target_end += span.nbytes
            for within in (*range(0, span.nbytes, 97), span.nbytes - 1):
                old = layout.locate(span.source + within, page_size)
                new = layout.locate(span.target + within, 64)
                assert (old.token, old.field, old.element) == (new.token + 64 * sub, new.field, new.element)
        assert target_end == layout.payload(64)


@pytest.mark.parametrize("value", [0, -64, 32, 65, 100, True, 64.0, "64", None])
def test_a_page_size_that_cannot_be_split_is_refused(value: object) -> None:
    with pytest.raises(LayoutError, match=r"a positive multiple of 64 tokens") as error:
        DSV4.check_page_size(value)  # type: ignore[arg-type]
    assert error.value.argument == "page_size"


# --- resolve: accepted -----------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rank", ["2-D", "3-D", "NHD", "HND"])
@pytest.mark.parametrize("offset", [0, 4_097])
@pytest.mark.parametrize("gap", [0, 577])
def test_every_usual_view_is_resolved(layout, dtype, rank, offset, gap) -> None:
    stride = layout.payload(128) + gap
    flat = pool(pages=3, stride=stride, offset=offset).view(dtype)
    views = {
        "2-D": flat,
        "3-D": nominal(flat, 128, layout),
        "NHD": nominal(flat, 128, layout, head=2),
        "HND": nominal(flat, 128, layout, head=1),
    }

    geometry = resolve(views[rank], layout, page_size=128 if rank == "2-D" else None)

    name = str(dtype).removeprefix("torch.")
    assert geometry == PageGeometry(layout, 128, 3, stride, offset, name)
    assert (geometry.tokens, geometry.sub_pages_per_page, geometry.sub_pages) == (384, 2, 6)


@pytest.mark.parametrize("stride", [1_039_680, 1_077_120, 1_308_672])
def test_a_pool_that_interleaves_layers_is_resolved(stride: int) -> None:
    layers = torch.empty((2, stride), dtype=torch.uint8)
    layer = layers[:, STRIDE_256 : 2 * STRIDE_256]
    assert resolve(nominal(layer, 256)) == PageGeometry(DSV4, 256, 2, stride, STRIDE_256, "uint8")


def test_the_last_page_may_end_with_its_payload() -> None:
    storage = torch.empty(STRIDE_256 + PAYLOAD_256, dtype=torch.uint8)
    view = storage.as_strided((2, 256, 1, 584), (STRIDE_256, 584, 584, 1))
    assert resolve(view).page_stride == STRIDE_256


def test_one_page_takes_the_usual_stride_whatever_the_view_says() -> None:
    view = pool(pages=1).as_strided((1, 256, 584), (0, 584, 1))
    assert resolve(view).page_stride == STRIDE_256


def test_a_pool_of_no_pages_is_resolved() -> None:
    geometry = resolve(torch.empty((0, 256, 584), dtype=torch.uint8))
    assert (geometry.pages, geometry.tokens, geometry.sub_pages) == (0, 0, 0)


# --- resolve: refused ------------------------------------------------------------------------------------

BAD_VIEWS = {
    "stride below payload": (
        lambda: pool().flatten().as_strided((3, 256, 584), (PAYLOAD_256 - 1, 584, 1)),
        None,
        "pool.stride(0)",
        "pages that overlap",
    ),
    "2-D stride below payload": (
        lambda: pool().flatten().as_strided((2, PAYLOAD_256), (PAYLOAD_256 - 1, 1)),
        256,
        "pool.stride(0)",
        "pages that overlap",
    ),
    "expanded": (lambda: nominal(pool(1), 256).expand(3, -1, -1), None, "pool.stride(0)", "an expanded view"),
    "wrong last dimension": (
        lambda: torch.empty((2, 256, 585), dtype=torch.uint8),
        None,
        "pool.shape[-1]",
        "584 bytes",
    ),
    "another layout's token": (
        lambda: torch.empty((2, 64, 656), dtype=torch.uint8),
        None,
        "pool.shape[-1]",
        "584 bytes",
    ),
    "1-D": (lambda: pool().flatten(), 256, "pool.shape", "2, 3 or 4 dimensions"),
    "5-D": (lambda: nominal(pool(), 256)[None, None], 256, "pool.shape", "2, 3 or 4 dimensions"),
    "two heads": (lambda: torch.empty((1, 64, 2, 584), dtype=torch.uint8), None, "pool.shape", "one head"),
    "tokens apart": (
        lambda: torch.empty((2, 64, 1168), dtype=torch.uint8)[..., :584],
        None,
        "pool.stride(1)",
        "584 bytes from token to token",
    ),
    "HND tokens apart": (
        lambda: torch.empty((2, 1, 64, 1168), dtype=torch.uint8)[..., :584],
        None,
        "pool.stride(2)",
        "584 bytes from token to token",
    ),
    "last dimension strided": (
        lambda: torch.empty((2, 64, 1168), dtype=torch.uint8)[..., ::2],
        None,
        "pool.stride(-1)",
        "dense",
    ),
    "float32": (lambda: torch.empty((2, 256, 584)), None, "pool.dtype", "uint8, float8_e4m3fn"),
    "2-D without page size": (pool, None, "pool.shape", "page_size given for a 2-D pool"),
    "2-D too short": (lambda: pool(stride=PAYLOAD_256 - 1), 256, "pool.shape[1]", "149,504 bytes"),
    "2-D page size 100": (pool, 100, "page_size", "multiple of 64"),
    "3-D page size 100": (
        lambda: torch.empty((2, 100, 584), dtype=torch.uint8),
        None,
        "pool page size",
        "multiple of 64",
    ),
    "3-D page size 0": (
        lambda: torch.empty((2, 0, 584), dtype=torch.uint8),
        None,
        "pool page size",
        "multiple of 64",
    ),
    "4-D page size 1": (
        lambda: torch.empty((2, 1, 1, 584), dtype=torch.uint8),
        None,
        "pool page size",
        "multiple of 64",
    ),
    "page size contradicts the shape": (lambda: nominal(pool(), 256), 64, "page_size", "256, as pool.shape"),
}


@pytest.mark.parametrize(("make", "page_size", "argument", "hint"), BAD_VIEWS.values(), ids=list(BAD_VIEWS))
def test_a_view_the_layout_cannot_address_is_refused(make, page_size, argument, hint) -> None:
    view = make()

    with pytest.raises(LayoutError) as error:
        resolve(view, page_size=page_size, multiple_of=64)

    assert error.value.argument == argument
    assert hint in str(error.value)


@pytest.mark.parametrize("page_size", [1, 2, 53, 100])
def test_any_page_size_is_addressable_where_nothing_is_split(page_size: int) -> None:
    view = torch.empty((2, page_size, 584), dtype=torch.uint8)

    assert resolve(view, page_size=page_size).page_size == page_size
    with pytest.raises(LayoutError, match="multiple of 64"):
        resolve(view, page_size=page_size, multiple_of=64)


@pytest.mark.parametrize("short_by", [1, 1_000])
def test_a_view_past_its_storage_is_refused(short_by: int) -> None:
    whole = {"shape": (2, 256, 584), "stride": (STRIDE_256, 584, 1), "storage_offset": 8, "dtype": "uint8"}
    need = 8 + STRIDE_256 + PAYLOAD_256
    assert DSV4.resolve(**whole, storage_bytes=need).pages == 2

    with pytest.raises(LayoutError, match=f"at least {need:,} bytes") as error:
        DSV4.resolve(**whole, storage_bytes=need - short_by)

    assert error.value.argument == "pool storage"


def test_a_refusal_names_the_argument_as_the_caller_calls_it() -> None:
    with pytest.raises(LayoutError, match=r"^extra_k_cache\.dtype = float32"):
        DSV4.resolve(
            shape=(1, 64, 584),
            stride=(1, 1, 1),
            storage_offset=0,
            dtype="float32",
            storage_bytes=0,
            argument="extra_k_cache",
        )


# --- alignment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "stride", "lane"),
    [
        (0, STRIDE_256, 16),
        (8, STRIDE_256, 8),
        (0, STRIDE_256 + 8, 8),
        (0, STRIDE_256 + 4, 4),
        (2, STRIDE_256, 2),
        (0, STRIDE_256 + 1, 1),
    ],
)
def test_the_widest_lane_is_the_alignment_of_every_page(base: int, stride: int, lane: int) -> None:
    geometry = resolve(pool(stride=stride), page_size=256)
    assert geometry.lane_bytes(base) == lane
    geometry.require_lane(base, lane)
    with pytest.raises(LayoutError, match=rf"pool alignment = {lane} bytes .*{2 * lane}-byte alignment"):
        geometry.require_lane(base, 2 * lane)


def test_the_stride_of_a_single_page_does_not_narrow_its_lanes() -> None:
    geometry = PageGeometry(DSV4, 256, 1, STRIDE_256 + 1, 0, "uint8")
    assert geometry.lane_bytes(0) == 16
