"""write_cache: byte for byte what the codec packs, nothing else, and every bad input refused.

Runs on the machine's device: the interpreter, or a CUDA GPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sm120_mla import graphs
from sm120_mla.cache import write_cache
from sm120_mla.codec import (
    DEEPSEEK,
    ENGINES,
    RECIPES,
    SGLANG_TRITON_OLD,
    Recipe,
    dequantise_pages,
    view_field,
)
from sm120_mla.errors import ArgumentError, IndexValueError, LayoutError, NonFiniteError
from sm120_mla.kernels import cache_write as kernels
from sm120_mla.layout import (
    DSV4,
    DSV32,
    DSV41_FOOTER,
    DSV41_INLINE,
    LAYOUTS,
    Field,
    PageGeometry,
    PageLayout,
)
from sm120_mla.testing.cache_cases import after_write, differences, k_rows, sweep_rows
from sm120_mla.testing.derive import Pool, make_pool, run_device
from sm120_mla.testing.guards import noise

DEVICE = run_device()
GOLDEN = Path(__file__).parents[1] / "fixtures" / "pages" / "dsv4_pages.npz"
LARGEST = float(torch.finfo(torch.bfloat16).max)
LOWEST = Recipe("lowest", 2.0**-116, "scale", "ceil_log2", "the lowest floor allowed: byte 11")

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.name)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda row: row.name)
both_levels = pytest.mark.parametrize("validate", ["values", "metadata"])


def on_device(k: torch.Tensor) -> torch.Tensor:
    return k.to(DEVICE)


def scattered(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Distinct slots of a cache, in no order."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=gen)[:rows].to(DEVICE)


def pool_for(k: torch.Tensor, layout: PageLayout = DSV4, page_size: int = 64, **how: Any) -> Pool:
    """A pool of noise with room for the rows and a few tokens more."""
    return make_pool(layout, page_size, -(-len(k) // page_size) + 1, **how)


def check_write(
    k: torch.Tensor,
    slots: torch.Tensor,
    pool: Pool,
    *,
    recipe: Recipe = DEEPSEEK,
    dummy_slot: int | None = None,
    validate: str | None = None,
) -> None:
    """Write, and compare every byte of the pool's storage: payload, tails and guard zones."""
    g = pool.geometry
    want = after_write(pool.bytes, k, slots, g.layout, g.page_size, recipe, dummy_slot)

    write_cache(
        k,
        slots,
        pool.view,
        page_size=g.page_size,
        layout=g.layout,
        recipe=recipe,
        dummy_slot=dummy_slot,
        validate=validate,
    )

    assert differences(pool.bytes, want, g.layout, g.page_size) == []
    elsewhere = pool.guard.before.cpu().clone()
    payload = g.layout.payload(g.page_size)
    elsewhere.as_strided((g.pages, payload), (g.page_stride, 1), pool.guard.start).copy_(want)
    assert torch.equal(pool.guard.storage.cpu(), elsewhere)


def untouched(pool: Pool) -> bool:
    return not pool.guard.stray()


def token_with(values: dict[int, float], layout: PageLayout = DSV4) -> torch.Tensor:
    """One row ``[1, head_dim]``, zero but for ``values`` by dimension."""
    k = torch.zeros((1, layout.head_dim), dtype=torch.bfloat16)
    for dim, value in values.items():
        k[0, dim] = value
    return on_device(k)


def slots_of(*slots: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(slots, dtype=dtype, device=DEVICE)


# ---- bytes


@every_layout
@every_recipe
def test_bytes_are_the_codecs(layout: PageLayout, recipe: Recipe) -> None:
    k = on_device(k_rows(130, layout, seed=1))
    pool = pool_for(k, layout)
    check_write(k, scattered(130, pool.geometry.tokens), pool, recipe=recipe)


@every_recipe
def test_every_bf16_is_the_largest_of_some_tile(recipe: Recipe) -> None:
    magnitudes = torch.arange(0x7F80)
    signed = (magnitudes + 0x8000 * (magnitudes % 2)).to(torch.int16)
    rows = -(-len(signed) // 7)
    k = torch.zeros((rows, 512), dtype=torch.int16)
    tiles = torch.zeros(rows * 7, dtype=torch.int16)
    tiles[: len(signed)] = signed
    k[:, :448].unflatten(1, (7, 64))[:, :, 17] = tiles.view(rows, 7)
    k = on_device(k.view(torch.bfloat16))
    pool = pool_for(k, page_size=256, page_stride=256 * 584)
    check_write(k, torch.arange(rows, device=DEVICE), pool, recipe=recipe)


@pytest.mark.parametrize(
    ("layout", "recipe", "largest"),
    [
        (DSV4, DEEPSEEK, 448.0),
        (DSV4, DEEPSEEK, 449.0 * 2.0**-13),
        (DSV4, DEEPSEEK, LARGEST),
        (DSV4, SGLANG_TRITON_OLD, 448.0 * 2.0**-35),
        (DSV4, ENGINES, 2.0**-22),
        (DSV4, LOWEST, 448.0 * 2.0**-116),
        (DSV32, LOWEST, 2.0**-126),
        (DSV41_FOOTER, DEEPSEEK, 2.0**50),
        (DSV32, DEEPSEEK, 300.0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_bf16_is_an_element_beneath_a_largest(layout, recipe, largest) -> None:
    k = on_device(sweep_rows(layout, largest))
    pool = pool_for(k, layout)
    check_write(k, torch.arange(len(k), device=DEVICE), pool, recipe=recipe)


def next_bf16(value: float) -> float:
    bits = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16) + 1
    return float(bits.view(torch.bfloat16))


AT_448 = [448.0 * 2.0**power for power in (-40, -36, -35, -24, -23, -22, -14, -13, -12, -1, 0, 1, 30, 119)]
BOUNDARIES = [0.0, 1e-38, 1e-9, 1e-8, 5.34e-5, 1e-4, 0.02734375, 1.0, 447.0, *AT_448]
BOUNDARIES += [next_bf16(value) for value in (0.02734375, *AT_448)] + [LARGEST]


@every_recipe
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative only"])
def test_boundary_tiles_are_the_codecs(recipe: Recipe, sign: int) -> None:
    k = torch.cat([token_with({3 * 64 + 17: sign * amax, 200: sign * amax / 3}) for amax in BOUNDARIES])
    check_write(k, torch.arange(len(k), device=DEVICE), pool_for(k), recipe=recipe)


def test_a_token_by_hand() -> None:
    """Independent of the codec: token 65 of a cache of 64-token pages."""
    k = token_with(
        {
            0: 448.0,  # tile 0: scale 2^0
            1: -1.0625,  # a tie, down to even
            2: 1.1875,  # a tie, up to even
            3: -(2.0**-9),  # the smallest subnormal
            4: 2.0**-10,  # a tie below it
            5: 15.5 * 2.0**-10,  # carries from the subnormals into 2^-6
            64: -450.0,  # tile 1: scale 2^1
            65: 1.9375,  # carries into the next exponent
            448: 1.5,
            511: -2.0,
        }
    )
    pool = make_pool(DSV4, 64, 2)
    write_cache(k, slots_of(65), pool.view, page_size=64)

    page = pool.bytes[1].tolist()
    assert page[576 : 576 + 7] == [0x7E, 0xB8, 0x3A, 0x81, 0x00, 0x08, 0x00]
    assert page[576 + 64 : 576 + 67] == [0xF6, 0x38, 0x00]
    assert page[576 + 67 : 576 + 448] == [0] * 381
    assert page[576 + 448 : 576 + 576] == [0xC0, 0x3F, *[0] * 124, 0x00, 0xC0]
    assert page[64 * 576 + 8 : 64 * 576 + 16] == [127, 128, 114, 114, 114, 114, 114, 0]
    assert pool.guard.stray()[0] >= 37_440 + 576  # page 0 and token 64 are as they were


def golden(page_size: int, field: str) -> torch.Tensor:
    with np.load(GOLDEN) as arrays:
        return torch.from_numpy(arrays[f"p{page_size}_{field}"]).to(DEVICE)


@pytest.mark.parametrize("page_size", [2, 53, 64, 256])
def test_the_layout_owners_pages_are_reproduced(page_size: int) -> None:
    k = golden(page_size, "input_bf16_bits").view(torch.bfloat16).flatten(0, 1)
    want, stride = golden(page_size, "page_bytes"), int(golden(page_size, "page_stride"))
    pool = make_pool(DSV4, page_size, len(want), page_stride=stride)
    slots = scattered(len(k), len(k))

    write_cache(k[slots], slots, pool.view, page_size=page_size)

    assert differences(pool.bytes, want, DSV4, page_size) == []


# ---- where


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("view", ["2d", "3d", "nhd", "hnd"])
def test_any_view_of_the_cache(view: str, dtype: str) -> None:
    k = on_device(k_rows(40, DSV4, seed=2))
    pool = pool_for(k, page_size=128, view=view, dtype=dtype)
    check_write(k, scattered(40, pool.geometry.tokens), pool)


@every_layout
@pytest.mark.parametrize(("extra", "offset"), [(0, 1), (1, 0), (2, 6), (8, 8), (16, 16), (1_001, 5)])
def test_any_stride_and_alignment_of_pages(layout: PageLayout, extra: int, offset: int) -> None:
    k = on_device(k_rows(70, layout, seed=3))
    pool = pool_for(k, layout, page_stride=layout.payload(64) + extra, offset=offset)
    check_write(k, scattered(70, pool.geometry.tokens), pool)


@pytest.mark.parametrize("page_size", [1, 2, 61, 192])
def test_the_page_size_of_a_view_may_be_any_and_need_not_be_given(page_size: int) -> None:
    k = on_device(k_rows(3, DSV4))
    slots = slots_of(2 * page_size - 1, 2 * page_size, 0)
    pool = make_pool(DSV4, page_size, 3, view="nhd")
    want = after_write(pool.bytes, k, slots, DSV4, page_size)
    write_cache(k, slots, pool.view)
    assert differences(pool.bytes, want, DSV4, page_size) == []


@pytest.mark.parametrize(("width", "first"), [(512, 0), (576, 0), (513, 0), (600, 7), (1_024, 512)])
def test_any_row_stride_and_alignment_of_k(width: int, first: int) -> None:
    fused = torch.full((66, width), math.nan, dtype=torch.bfloat16)
    fused[:, first : first + 512] = k_rows(66, DSV4, seed=4)
    k = on_device(fused)[:, first : first + 512]
    pool = pool_for(k)
    check_write(k, scattered(66, pool.geometry.tokens), pool)


def test_one_row_may_be_written_to_many_slots() -> None:
    k = on_device(k_rows(1, DSV4)).expand(5, -1)
    check_write(k, slots_of(3, 9, 100, 64, 0), make_pool(DSV4, 64, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [1, 3])
def test_slots_of_both_widths_and_any_stride(dtype: torch.dtype, step: int) -> None:
    k = on_device(k_rows(67, DSV4, seed=5))
    pool = pool_for(k)
    wide = torch.full((67, step), 5, dtype=dtype, device=DEVICE)
    wide[:, 0] = scattered(67, pool.geometry.tokens).to(dtype)
    check_write(k, wide[:, 0], pool)


def test_an_interleaved_pool_keeps_its_other_layers() -> None:
    """Three layers page by page in one allocation, of which the middle one is written."""
    k = on_device(k_rows(90, DSV4, seed=6))
    pool = pool_for(k, page_stride=3 * DSV4.default_stride(64), offset=DSV4.default_stride(64))
    check_write(k, scattered(90, pool.geometry.tokens), pool)


# ---- what is not written


NEAR = [-1, -2, -64, 128, 129, 192]  # where a stray write stays inside the storage, and shows
FAR = [-(2**31), 2**31 - 1]
WIDE = [2**31, 2**32, 2**32 + 5, 2**33 + 64, 2**63 - 1, -(2**63), -(2**32) + 5]


@pytest.mark.parametrize(
    ("dtype", "outside"),
    [(torch.int32, NEAR), (torch.int64, NEAR), (torch.int32, NEAR + FAR), (torch.int64, NEAR + FAR + WIDE)],
    ids=["near32", "near64", "far32", "far64"],
)
def test_rows_without_a_slot_of_the_cache_write_nothing(dtype: torch.dtype, outside: list[int]) -> None:
    slots = torch.tensor([7, *outside, 127], dtype=dtype, device=DEVICE)
    k = on_device(k_rows(len(slots), DSV4, seed=7))
    k[1:-1:2, 5] = math.nan
    check_write(k, slots, make_pool(DSV4, 64, 2), validate="metadata")


def test_a_skipped_row_may_hold_anything_on_both_levels() -> None:
    k = on_device(k_rows(70, DSV4, seed=8))
    slots = torch.arange(70, device=DEVICE)
    slots[::3] = -1
    k[::3] = math.nan
    check_write(k, slots, make_pool(DSV4, 64, 2), validate="values")


def test_no_row_is_written_where_all_are_padding() -> None:
    pool = make_pool(DSV4, 64, 2)
    write_cache(on_device(k_rows(9, DSV4)), torch.full((9,), -1, device=DEVICE), pool.view, page_size=64)
    assert untouched(pool)


@every_layout
def test_no_rows_and_no_pages(layout: PageLayout) -> None:
    pool = make_pool(layout, 64, 1)
    none = torch.empty((0, layout.head_dim), dtype=torch.bfloat16, device=DEVICE)
    write_cache(none, slots_of(), pool.view, page_size=64, layout=layout)
    assert untouched(pool)
    empty = make_pool(layout, 64, 0)
    k = on_device(k_rows(2, layout))
    write_cache(k, slots_of(0, -1), empty.view, page_size=64, layout=layout, validate="metadata")
    write_cache(k, slots_of(-1, -1), empty.view, page_size=64, layout=layout, validate="values")
    assert untouched(empty)


# ---- one slot for several rows


@both_levels
@every_layout
def test_a_dummy_slot_takes_any_number_of_rows(layout: PageLayout, validate: str) -> None:
    k = on_device(k_rows(100, layout, seed=9))
    slots = scattered(100, 128) + 1
    slots[slots == 128] = 0
    slots[40:] = 0
    k[40:80] = math.nan
    pool = make_pool(layout, 64, 2)
    check_write(k, slots, pool, dummy_slot=0, validate=validate)
    assert torch.isfinite(dequantise_pages(pool.bytes, layout, 64)[0, 0]).all()


@both_levels
def test_the_dummy_slot_may_be_any_and_is_no_other(validate: str) -> None:
    k = on_device(k_rows(5, DSV4, seed=10))
    check_write(k, slots_of(127, 0, 127, 126, 127), make_pool(DSV4, 64, 2), dummy_slot=127, validate=validate)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_two_rows_with_one_slot_are_refused(dtype: torch.dtype) -> None:
    slots = slots_of(5, 9, -1, 9, 5, -1, 9, 0, 0, dtype=dtype)
    pool = make_pool(DSV4, 64, 2)

    with pytest.raises(IndexValueError) as error:
        write_cache(
            on_device(k_rows(9, DSV4)), slots, pool.view, page_size=64, dummy_slot=0, validate="values"
        )

    assert (error.value.argument, error.value.value) == ("slot_mapping[3]", 9)
    assert "row 1 has it too" in str(error.value)
    assert "dummy_slot" in str(error.value)
    assert untouched(pool)


def test_unchecked_each_byte_of_a_shared_slot_is_some_rows() -> None:
    k = on_device(k_rows(3, DSV4, seed=11))
    pool = make_pool(DSV4, 64, 1)
    wants = [after_write(pool.bytes, k[n : n + 1], slots_of(33), DSV4, 64) for n in range(3)]

    write_cache(k, slots_of(33, 33, 33), pool.view, page_size=64, validate="metadata")

    got = pool.bytes.cpu()
    assert torch.stack([got == want for want in wants]).any(0).all()


# ---- not finite


NAN_PLACES = [
    (DSV4, 0, "nope, tile 0"),
    (DSV4, 447, "nope, tile 6"),
    (DSV4, 448, "rope[0]"),
    (DSV4, 511, "rope[63]"),
    (DSV32, 511, "nope, tile 3"),
    (DSV32, 575, "rope[63]"),
    (DSV41_INLINE, 511, "nope, tile 15"),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("layout", "dim", "where"), NAN_PLACES)
def test_what_is_not_finite_is_refused_and_nothing_is_written(value, layout, dim, where) -> None:
    k = on_device(k_rows(6, layout))
    k[1, 3] = math.nan  # skipped
    k[3, dim] = value
    k[4, 0] = value  # a later one; the first is named
    pool = make_pool(layout, 64, 1)

    with pytest.raises(NonFiniteError) as error:
        write_cache(k, slots_of(0, -1, 1, 2, 3, 4), pool.view, page_size=64, layout=layout, validate="values")

    assert error.value.argument == f"k[3, {dim}]"
    assert error.value.value == f"{value} (token 3, {where})"
    assert untouched(pool)


@every_layout
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_unchecked_a_tile_that_is_not_finite_is_nan_whole_and_alone(layout: PageLayout, bits: int) -> None:
    k = k_rows(5, layout, seed=12)
    k[1, layout.tile + 3] = 1.0
    raw = k.view(torch.int16)
    signed = bits - (1 << 16) if bits & 0x8000 else bits
    raw[1, layout.tile + 9] = signed
    raw[3, -1] = signed
    pool = make_pool(layout, 64, 1)

    check_write(on_device(k), torch.arange(5, device=DEVICE), pool, validate="metadata")

    values = dequantise_pages(pool.bytes, layout, 64)[0, :5].cpu()
    nan = values.isnan()
    assert nan[1, layout.tile : 2 * layout.tile].all()
    assert not nan[[0, 2, 4]].any()
    if any(field.name == "rope" for field in layout.fields):
        assert values[3, -1].view(torch.int16).item() == signed
        assert nan.sum() - nan[3, -1].int() == layout.tile


def test_unchecked_the_bytes_of_such_a_tile_by_hand() -> None:
    for layout, scale in ((DSV4, [255]), (DSV41_INLINE, [255]), (DSV32, [0x00, 0x00, 0xC0, 0x7F])):
        k = token_with({0: math.inf, 1: 1.0, layout.tile: 448.0}, layout)
        pool = make_pool(layout, 64, 1)
        write_cache(k, slots_of(1), pool.view, page_size=64, layout=layout, validate="metadata")
        nope = view_field(pool.bytes, layout, "nope", 64)[0, 1].tolist()
        scales = view_field(pool.bytes, layout, "scales", 64)[0, 1].tolist()
        assert nope[: layout.tile + 2] == [0x7F] * layout.tile + [0x7E, 0x00]
        assert scales[: len(scale)] == scale


# ---- far away


def far_storage(nbytes: int) -> torch.Tensor:
    """Untouched address space on the CPU, memory on a GPU."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < nbytes + (1 << 31):
        pytest.skip(f"{nbytes / 1e9:.0f} GB of GPU memory are needed and are not free")
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no {nbytes / 1e9:.1f} GB of address space: {error}")


@pytest.mark.parametrize("bits", [31, 32])
@pytest.mark.parametrize("stride", [149_760, 1_077_120])
def test_pages_past_two_and_four_gibibytes(bits: int, stride: int) -> None:
    boundary = (1 << bits) // stride
    pages = [0, boundary - 1, boundary, boundary + 1]
    lead, payload = 1 << 31, DSV4.payload(256)  # an offset that wraps below zero stays in the storage
    storage = far_storage(lead + (pages[-1] + 1) * stride)
    cache = storage.as_strided((pages[-1] + 1, payload), (stride, 1), lead)
    for n, page in enumerate(pages):
        cache[page] = noise(payload, n, DEVICE)
    near = torch.stack([cache[page] for page in pages])
    slots = scattered(100, 4 * 256)
    k = on_device(k_rows(100, DSV4, seed=13))
    want = after_write(near, k, slots, DSV4, 256)

    far_slots = torch.tensor(pages, device=DEVICE)[slots // 256] * 256 + slots % 256
    write_cache(k, far_slots, cache, page_size=256)

    got = torch.stack([cache[page] for page in pages])
    assert differences(got, want, DSV4, 256) == []


def test_rows_of_k_past_two_gibi_elements() -> None:
    stride = 1 << 30
    lead = 1 << 31  # elements
    storage = far_storage(2 * (lead + 2 * stride + 512)).view(torch.bfloat16)
    k = storage.as_strided((3, 512), (stride, 1), lead)
    k.copy_(k_rows(3, DSV4, seed=14))
    check_write(k, slots_of(5, 64, 1), make_pool(DSV4, 64, 2))


# ---- capture


def test_a_captured_write_replays_with_new_inputs_and_looks_at_no_value() -> None:
    k, slots = on_device(k_rows(70, DSV4, seed=15)), scattered(70, 128)
    pool = make_pool(DSV4, 64, 2, view="nhd", dtype="float8_e4m3fn")

    def write() -> None:
        write_cache(k, slots, pool.view, dummy_slot=3, validate="values")

    graph = graphs.capture(write, warmup=1)
    assert not any(held.inside for held in graph.addresses() or [])

    k.copy_(k_rows(70, DSV4, seed=16))
    k[5, 70] = math.nan
    slots.copy_(scattered(70, 128, seed=1))
    slots[50:] = 3
    slots[:2] = slots_of(-1, 128)
    want = after_write(pool.bytes, k, slots, DSV4, 64, dummy_slot=3)
    graph.replay()

    assert differences(pool.bytes, want, DSV4, 64) == []


# ---- bad input


def k_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def cache_of(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


ELSEWHERE = torch.device("meta")
NEAREST = Recipe("nearest", 1e-4, "amax", "nearest", "nobody")
TINY = Recipe("tiny", 2.0**-117, "scale", "ceil_log2", "nobody")
HUGE = Recipe("huge", 2.0**121, "scale", "ceil_log2", "nobody")
ODD_TILE = PageLayout(
    "odd",
    96,
    48,
    (Field("nope", "token", 0, 96, "e4m3fn", ""), Field("scales", "token", 96, 2, "ue8m0", "")),
    1,
    "",
)

BAD = {
    "k no tensor": ({"k": [[0.0] * 512] * 2}, ArgumentError, "k"),
    "k one row flat": ({"k": k_of(512)}, LayoutError, "k.shape"),
    "k with a head axis": ({"k": k_of(2, 1, 512)}, LayoutError, "k.shape"),
    "k of another head dim": ({"k": k_of(2, 576)}, LayoutError, "k.shape"),
    "k fp32": ({"k": k_of(2, 512, dtype=torch.float32)}, ArgumentError, "k.dtype"),
    "k fp16": ({"k": k_of(2, 512, dtype=torch.float16)}, ArgumentError, "k.dtype"),
    "k strided": ({"k": k_of(2, 1024)[:, ::2]}, ArgumentError, "k.stride(1)"),
    "k elsewhere": ({"k": k_of(2, 512).to(ELSEWHERE)}, ArgumentError, "k.device"),
    "slots no tensor": ({"slot_mapping": [0, 1]}, ArgumentError, "slot_mapping"),
    "slots float": ({"slot_mapping": k_of(2)}, ArgumentError, "slot_mapping.dtype"),
    "slots uint8": ({"slot_mapping": cache_of(2)}, ArgumentError, "slot_mapping.dtype"),
    "slots 2-D": ({"slot_mapping": slots_of(0, 1)[:, None]}, ArgumentError, "slot_mapping.shape"),
    "slots too few": ({"slot_mapping": slots_of(0)}, ArgumentError, "slot_mapping.shape"),
    "slots too many": ({"slot_mapping": slots_of(0, 1, 2)}, ArgumentError, "slot_mapping.shape"),
    "slots elsewhere": (
        {"slot_mapping": slots_of(0, 1).to(ELSEWHERE)},
        ArgumentError,
        "slot_mapping.device",
    ),
    "slot past the end": ({"slot_mapping": slots_of(0, 128)}, IndexValueError, "slot_mapping[1]"),
    "slot past int32": ({"slot_mapping": slots_of(2**32, 0)}, IndexValueError, "slot_mapping[0]"),
    "slots alike": ({"slot_mapping": slots_of(5, 5)}, IndexValueError, "slot_mapping[1]"),
    "cache no tensor": ({"cache": bytearray(9)}, ArgumentError, "cache"),
    "cache bf16": ({"cache": k_of(2, 64, 584)}, LayoutError, "cache.dtype"),
    "cache e5m2": ({"cache": cache_of(2, 64, 584).view(torch.float8_e5m2)}, LayoutError, "cache.dtype"),
    "cache 1-D": ({"cache": cache_of(74_752)}, LayoutError, "cache.shape"),
    "cache of short pages": ({"cache": cache_of(2, 37_375)}, LayoutError, "cache.shape[1]"),
    "cache of other tokens": ({"cache": cache_of(2, 64, 1, 656)}, LayoutError, "cache.shape[-1]"),
    "cache strided": ({"cache": cache_of(2, 80_000)[:, ::2]}, LayoutError, "cache.stride(-1)"),
    "cache expanded": ({"cache": cache_of(1, 40_000).expand(2, -1)}, LayoutError, "cache.stride(0)"),
    "k in the cache": ({"k": "in the cache"}, ArgumentError, "cache"),
    "slots in the cache": ({"slot_mapping": "in the cache"}, ArgumentError, "cache"),
    "page size 2-D without": ({"page_size": None}, LayoutError, "cache.shape"),
    "page size 0": ({"page_size": 0}, LayoutError, "page_size"),
    "page size contradicts": ({"cache": cache_of(2, 128, 584)}, LayoutError, "page_size"),
    "layout by name": ({"layout": "dsv4"}, LayoutError, "layout"),
    "layout of odd tiles": ({"layout": ODD_TILE, "k": k_of(2, 96)}, LayoutError, "layout.nope (odd)"),
    "recipe by name": ({"recipe": "deepseek"}, ArgumentError, "recipe"),
    "recipe that rounds otherwise": ({"recipe": NEAREST}, ArgumentError, "recipe.rounding"),
    "recipe of too small a floor": ({"recipe": TINY}, ArgumentError, "recipe.floor"),
    "recipe of too large a floor": ({"recipe": HUGE}, ArgumentError, "recipe.floor"),
    "dummy slot text": ({"dummy_slot": "0"}, ArgumentError, "dummy_slot"),
    "dummy slot bool": ({"dummy_slot": False}, ArgumentError, "dummy_slot"),
    "dummy slot negative": ({"dummy_slot": -1}, IndexValueError, "dummy_slot"),
    "dummy slot past the end": ({"dummy_slot": 128}, IndexValueError, "dummy_slot"),
    "validate": ({"validate": "all"}, ArgumentError, "validate"),
}


@pytest.mark.parametrize(("change", "kind", "argument"), BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_and_nothing_is_written(change, kind, argument) -> None:
    storage = noise(200_000, 1, DEVICE)
    before = storage.clone()
    arguments = {
        "k": k_of(2, 512),
        "slot_mapping": slots_of(0, 1),
        "cache": storage.as_strided((2, DSV4.payload(64)), (80_000, 1)),
        "page_size": 64,
        "validate": "values",
    } | change
    if arguments["k"] == "in the cache":
        arguments["k"] = storage[100_000:102_048].view(torch.bfloat16).view(2, 512)
    if arguments["slot_mapping"] == "in the cache":
        arguments["slot_mapping"] = storage[8:24].view(torch.int64)

    with pytest.raises(ArgumentError) as error:
        write_cache(**arguments)

    assert type(error.value) is kind
    assert error.value.argument == argument
    assert error.value.remedy
    assert torch.equal(storage, before)


def test_a_cache_the_kernels_cannot_reach_is_refused() -> None:
    where = torch.device("meta")
    k, slots = k_of(1, 512).to(where), slots_of(0).to(where)
    with pytest.raises(ArgumentError, match=r"cache\.device"):
        write_cache(k, slots, torch.empty((1, 64, 584), dtype=torch.uint8, device=where), validate="metadata")


NOPE = Field("nope", "token", 0, 64, "e4m3fn", "")
SCALES = Field("scales", "token", 64, 1, "ue8m0", "")
LATE_SCALES = Field("scales", "token", 128, 1, "ue8m0", "")
UNWRITABLE = {
    "nope not in fp8": ((Field("nope", "token", 0, 64, "ue8m0", ""), SCALES), 64, "nope"),
    "two tiles, one scale": ((Field("nope", "token", 0, 128, "e4m3fn", ""), LATE_SCALES), 128, "nope"),
    "no scales": ((NOPE,), 64, "fields"),
    "another field": ((NOPE, SCALES, Field("sum", "token", 65, 1, "fp32", "")), 64, "fields"),
    "scales in bf16": ((NOPE, Field("scales", "token", 64, 1, "bf16", "")), 64, "scales"),
    "rope of 48": ((NOPE, SCALES, Field("rope", "token", 65, 48, "bf16", "")), 112, "rope"),
    "rope in fp32": ((NOPE, SCALES, Field("rope", "token", 65, 64, "fp32", "")), 128, "rope"),
    "dimensions left over": ((NOPE, SCALES), 65, "head_dim"),
    "pad elsewhere": ((NOPE, SCALES, Field("scale_pad", "footer", 0, 1, "pad", "")), 64, "scale_pad"),
}


@pytest.mark.parametrize(("fields", "head_dim", "part"), UNWRITABLE.values(), ids=list(UNWRITABLE))
def test_a_layout_the_kernel_cannot_write_is_refused(fields, head_dim: int, part: str) -> None:
    layout = PageLayout("mine", head_dim, 64, fields, 1, "nowhere")
    pool = make_pool(layout, 64, 1)
    with pytest.raises(LayoutError) as error:
        write_cache(k_of(1, head_dim), slots_of(0), pool.view, page_size=64, layout=layout)
    assert error.value.argument == f"layout.{part} (mine)"
    assert untouched(pool)


# ---- compile specs


def test_specs_name_every_argument_and_every_layout() -> None:
    specs = kernels.compile_specs()
    names = set(kernels.write_kernel.arg_names)
    assert all(set(spec.signature) | set(spec.constexprs) == names for spec in specs)
    assert all(set(spec.aligned) <= set(spec.signature) for spec in specs)
    assert len({spec.name for spec in specs}) == len(specs)
    written = {(spec.constexprs["NOPE_RECORD"], spec.constexprs["PAGE_SIZE"]) for spec in specs}
    assert {(layout.token_bytes, 64) for layout in LAYOUTS} <= written


def test_a_launch_gives_what_the_specs_compile() -> None:
    geometry = PageGeometry(DSV4, 64, 2, 37_440, 0, "uint8")
    given = kernels.arguments(
        k_of(2, 512), slots_of(0, 1), cache_of(2, 37_440), geometry, min_byte=114, dummy_slot=None
    )
    spec = kernels.compile_specs()[0]
    assert set(given) == {*spec.signature, *spec.constexprs, "num_warps"}
    same = {name: value for name, value in given.items() if name in spec.constexprs and name != "TOKENS"}
    assert same == {name: value for name, value in spec.constexprs.items() if name != "TOKENS"}
