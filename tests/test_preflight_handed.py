"""What a release takes as it is, against the contract written out again, and the installed FlashInfer."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import replace
from types import ModuleType

import pytest

from sm120_mla.envelopes import NOT_SERVED, VERSIONS, for_version
from sm120_mla.errors import ArgumentError
from sm120_mla.preflight.handed import DSA_DECODE_WIDTHS, handed
from sm120_mla.preflight.launches import Cache, Launch
from sm120_mla.preflight.releases import rules

HEADS = (1, 4, 8, 12, 16, 32, 64, 96, 128, 129)
WIDTHS = (64, 100, 128, 192, 256, 384, 512, 640, 1024, 1152, 2048, 2176)
GRID = {8, 16, 32, 64, 128}
# Release, rows, two caches: heads and widths; None: every one (widths above 64 rows: multiples of 64).
TABLE = {
    ("0.6.14", 64, False): (GRID, {128, 512, 1024}),
    ("0.6.17", 64, True): (GRID, {128, 512, 1024}),
    ("0.6.17", 65, False): (GRID - {8}, {128, 512, 1024, 2048}),
    ("0.6.14", 65, True): (GRID - {8}, {128}),
    ("0.6.18", 64, True): (GRID, {128, 192, 256, 512, 1024}),
    ("0.6.18", 65, False): (GRID, {128, 192, 256, 512, 1024, 2048}),
    ("0.6.18", 65, True): (GRID, {128}),
    ("0.7.4", 64, True): (set(range(1, 129)), None),
    ("0.7.4", 65, False): (GRID, None),
    ("0.7.1", 65, True): (GRID, None),
    ("0.7.0", 64, True): (set(range(1, 129)), None),
    ("0.7.0.post1", 65, True): (GRID, None),
}


def launch(tokens: int, heads: int = 64, width: int = 128, page: int = 64, **more: object) -> Launch:
    return replace(
        Launch("serving", "decode", "SWA", tokens, tokens, heads, Cache(page, page, (width,))),
        **more,  # type: ignore[arg-type]
    )


def second(page: int = 64, width: int = 512, row_stride: int = 0) -> Cache:
    return Cache(page, page, (width,), row_stride)


@pytest.mark.parametrize(("release", "tokens", "dual"), TABLE, ids=str)
def test_heads_and_widths(release: str, tokens: int, dual: bool) -> None:
    heads, widths = TABLE[release, tokens, dual]
    extra = second() if dual else None
    for count in HEADS:
        for width in WIDTHS:
            want = count in heads and (
                width in widths if widths is not None else tokens <= 64 or width % 64 == 0
            )
            found = handed(release, launch(tokens, count, width, extra=extra), public_api=False)
            assert bool(found) == want, (count, width)
            if not want:
                assert found.argument in ("heads", "indices width")
                assert found.value in (str(count), str(width))


def test_the_public_function_takes_fewer_heads() -> None:
    assert handed("0.7.4", launch(8, 12), public_api=False)
    assert handed("0.7.4", launch(8, 12), public_api=True).argument == "heads"


@pytest.mark.parametrize(
    ("release", "tokens", "page", "state"),
    [
        ("0.6.18", 64, 64, "ok"),
        ("0.6.18", 64, 32, "refused"),
        ("0.6.18", 64, 256, "refused"),
        ("0.6.18", 65, 256, "wrong"),
        ("0.6.14", 65, 32, "wrong"),
        ("0.7.4", 65, 32, "ok"),
        ("0.7.4", 64, 256, "ok"),
        ("0.7.0", 64, 256, "refused"),
        ("0.7.0", 65, 256, "refused"),
    ],
)
def test_pages_of_the_main_cache(release: str, tokens: int, page: int, state: str) -> None:
    found = handed(release, launch(tokens, page=page), public_api=False)
    assert (found.state, found.argument) == (state, "" if state == "ok" else "page size")


@pytest.mark.parametrize("page", [2, 64, 1, 32, 128, 256])
def test_pages_of_the_second_cache(page: int) -> None:
    few, many = (launch(tokens, extra=second(page)) for tokens in (64, 65))

    assert handed("0.6.18", few, False)
    assert bool(handed("0.6.18", many, False)) == (page in (2, 64))
    assert bool(handed("0.7.0", many, False)) == (page in (2, 64))
    assert handed("0.7.4", many, False)


@pytest.mark.parametrize(
    ("release", "tokens", "state", "says"),
    [
        ("0.6.18", 1, "ok", ""),
        ("0.6.18", 2, "wrong", "nothing"),
        ("0.6.18", 65, "refused", "eidx must be contiguous"),
        ("0.7.0", 64, "ok", ""),
        ("0.7.0", 65, "refused", "eidx must be contiguous"),
        ("0.7.1", 64, "ok", ""),
        ("0.7.1", 65, "refused", "no decode kernel for this shape"),
        ("0.7.4", 65, "refused", "no decode kernel for this shape"),
    ],
)
def test_rows_that_lie_apart(release: str, tokens: int, state: str, says: str) -> None:
    apart = handed(release, launch(tokens, extra=second(width=128, row_stride=2048)), False)

    assert apart.state == state
    assert says in apart.says
    assert apart.argument == ("" if state == "ok" else "extra indices view")
    assert handed(release, launch(tokens, extra=second(width=2048, row_stride=2048)), False)


@pytest.mark.parametrize("extra", [second(128), second(32, width=500)], ids=str)
def test_what_is_refused_reads_no_wrong_bytes(extra: Cache) -> None:
    found = handed("0.6.18", launch(65, page=32, extra=extra), False)

    assert (found.state, found.argument) == ("refused", "extra page size")


def test_a_ragged_second_row_is_read_past_its_end() -> None:
    ragged = second(width=500)

    assert handed("0.6.18", launch(65, extra=ragged), False).argument == "extra indices width"
    assert handed("0.7.0", launch(65, extra=ragged), False).argument == "extra indices width"
    assert handed("0.6.18", launch(64, extra=ragged), False)
    assert handed("0.7.4", launch(65, extra=ragged), False)


def test_a_release_without_kernels_and_one_that_nobody_knows() -> None:
    assert handed("0.6.13", launch(1), False).argument == "flashinfer version"
    for release in NOT_SERVED:
        assert (rules(release) is None) == release.startswith("0.6.")
    with pytest.raises(ArgumentError, match="flashinfer version"):
        handed("9.9", launch(1), False)


@pytest.mark.parametrize(
    ("release", "tokens", "heads", "width", "served"),
    [
        ("0.6.18", 64, 8, 2048, True),
        ("0.6.18", 64, 8, 2176, False),
        ("0.6.18", 64, 4, 2048, False),
        ("0.6.18", 65, 8, 2048, True),
        ("0.6.18", 65, 64, 1024, False),
        ("0.7.4", 64, 4, 2176, True),
        ("0.7.4", 65, 64, 2176, True),
        ("0.7.4", 65, 4, 2048, False),
    ],
)
def test_dsa(release: str, tokens: int, heads: int, width: int, served: bool) -> None:
    assert bool(handed(release, launch(tokens, heads, width, layout="dsv32"), False)) == served


# ---- the installed release


@pytest.fixture(scope="module")
def sparse() -> ModuleType:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    return importlib.import_module("flashinfer.mla._sparse_mla_sm120")


@pytest.mark.parametrize("layout", ["dsv4", "dsv32"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_the_installed_release_says_the_same(sparse: ModuleType, layout: str, tokens: int) -> None:
    release = importlib.metadata.version("flashinfer-python")
    assert release in VERSIONS
    older = for_version(release).contract == "A/B"
    if older:
        table = sparse._DECODE_DSV4_DISPATCH if layout == "dsv4" else sparse._DECODE_DSV3_2_DISPATCH
        said = {(heads, width): (heads, width) in table for heads in HEADS for width in WIDTHS}
        assert layout == "dsv4" or {width for _, width in table} == set(DSA_DECODE_WIDTHS)
    else:
        name = "dsv4" if layout == "dsv4" else "dsv3_2"
        config = importlib.import_module("flashinfer.mla").supported_sparse_mla_sm120_configs()[name]
        said = {
            (heads, width): config.supports_decode(heads, width, num_tokens=tokens, page_block_size=64)
            for heads in HEADS
            for width in WIDTHS
        }
    assert any(said.values())
    for (heads, width), yes in said.items():
        found = handed(release, launch(tokens, heads, width, layout=layout), public_api=False)
        assert bool(found) == yes, (heads, width, found)


def test_the_installed_release_decodes_up_to_the_same_number_of_rows(sparse: ModuleType) -> None:
    release = importlib.metadata.version("flashinfer-python")
    if for_version(release).contract == "C/D":
        config = importlib.import_module("flashinfer.mla").supported_sparse_mla_sm120_configs()["dsv4"]
        assert not config.supports_decode(64, 128, num_tokens=65, page_block_size=64)
    else:
        assert not sparse._decode_dsv4_dispatchable(65, 64, 128, 512, 64, 0)
        assert not sparse._decode_dsv4_dispatchable(1, 64, 128, 512, 256, 0)
    assert handed(release, launch(64), False).route == "flashinfer decode"
    assert handed(release, launch(65), False).route == "flashinfer prefill"
