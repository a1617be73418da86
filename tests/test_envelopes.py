"""The version tables, against the contract written out again, and against the installed FlashInfer."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120_mla import envelopes
from sm120_mla.envelopes import ENVELOPES, Plan, Refusal, by_name, for_version, plan
from sm120_mla.errors import ArgumentError


@dataclass(frozen=True)
class Cache:
    page_size: int = 256
    pages: int = 100
    page_stride: int = 149_760
    width: int = 128
    lane_bytes: int = 16


@dataclass(frozen=True)
class Call:
    tokens: int = 1
    heads: int = 64
    main: Cache = Cache()
    extra: Cache | None = None
    layout: str = "dsv4"


def served(name: str, **call: Any) -> bool:
    return isinstance(plan(by_name(name), Call(**call)), Plan)


def planned(name: str, **call: Any) -> Plan:
    found = plan(by_name(name), Call(**call))
    assert isinstance(found, Plan), found
    return found


def refused(name: str, **call: Any) -> Refusal:
    found = plan(by_name(name), Call(**call))
    assert isinstance(found, Refusal), found
    return found


WIDTHS = (1, 64, 128, 129, 192, 193, 256, 512, 513, 1024, 1025, 2048, 2049)
HEADS = (1, 7, 8, 12, 16, 32, 48, 64, 96, 128)
# Rows, two caches; the widest main rows and the head counts. Entry by entry from the sources.
TABLE = {
    ("A", 64, False): (1024, {8, 16, 32, 64, 128}),
    ("A", 64, True): (1024, {8, 16, 32, 64, 128}),
    ("A", 65, False): (2048, {16, 32, 64, 128}),
    ("A", 65, True): (128, {16, 32, 64, 128}),
    ("B", 64, False): (1024, {8, 16, 32, 64, 128}),
    ("B", 64, True): (1024, {8, 16, 32, 64, 128}),
    ("B", 65, False): (2048, {8, 16, 32, 64, 128}),
    ("B", 65, True): (128, {8, 16, 32, 64, 128}),
    ("C", 64, False): (None, set(range(1, 129))),
    ("C", 64, True): (None, set(range(1, 129))),
    ("C", 65, False): (None, {8, 16, 32, 64, 128}),
    ("C", 65, True): (None, {8, 16, 32, 64, 128}),
}


@pytest.mark.parametrize(("name", "tokens", "dual"), TABLE, ids=str)
def test_who_is_served(name: str, tokens: int, dual: bool) -> None:
    widest, heads = TABLE[name, tokens, dual]
    extra = Cache(page_size=64, width=512) if dual else None
    for width in WIDTHS:
        for count in HEADS:
            want = count in heads and (widest is None or width <= widest)
            got = served(name, tokens=tokens, heads=count, main=Cache(width=width), extra=extra)
            assert got == want, (width, count)


@pytest.mark.parametrize(
    ("name", "tokens", "width", "to"),
    [
        ("A", 1, 0, 128),
        ("A", 1, 129, 512),
        ("A", 64, 192, 512),
        ("A", 65, 1025, 2048),
        ("B", 1, 129, 192),
        ("B", 1, 193, 256),
        ("B", 65, 257, 512),
        ("C", 1, 0, 64),
        ("C", 1, 1, 64),
        ("C", 65, 100, 128),
        ("C", 65, 192, 192),
        ("C", 65, 2049, 2112),
    ],
)
def test_main_rows_are_padded_to_the_next_width(name: str, tokens: int, width: int, to: int) -> None:
    assert planned(name, tokens=tokens, main=Cache(width=width)).main_width == to


@pytest.mark.parametrize("name", ["A", "B", "C"])
@pytest.mark.parametrize(("width", "to"), [(0, 0), (1, 64), (64, 64), (65, 128), (8192, 8192)])
def test_extra_rows_are_padded_to_whole_tiles(name: str, width: int, to: int) -> None:
    for tokens in (64, 65):
        assert planned(name, tokens=tokens, extra=Cache(page_size=2, width=width)).extra_width == to


def test_an_extra_cache_without_columns_is_none() -> None:
    alone = planned("B", tokens=65, main=Cache(width=192), extra=Cache(page_size=3, width=0, lane_bytes=1))
    assert alone == planned("B", tokens=65, main=Cache(width=192))


@pytest.mark.parametrize(
    ("name", "tokens", "page", "main", "extra"),
    [
        # True: split; False: as it is; None: refused
        ("A", 1, 64, False, False),
        ("A", 1, 256, True, True),
        ("A", 65, 256, True, True),
        ("A", 1, 2, None, False),
        ("A", 65, 2, None, False),
        ("A", 1, 4, None, False),
        ("A", 65, 4, None, None),
        ("B", 1, 128, True, True),
        ("B", 65, 96, None, None),
        ("C", 1, 256, False, False),
        ("C", 65, 256, False, False),
        ("C", 65, 2, False, False),
        ("C", 65, 7, False, False),
    ],
)
def test_pages(name: str, tokens: int, page: int, main: bool | None, extra: bool | None) -> None:
    cache = Cache(page_size=page)
    for want, call in ((main, Call(tokens, main=cache)), (extra, Call(tokens, extra=cache))):
        found = plan(by_name(name), call)
        if want is None:
            assert isinstance(found, Refusal)
            assert "page size" in found.argument
        else:
            assert isinstance(found, Plan)
            assert (found.split_main if call.extra is None else found.split_extra) is want


def test_what_must_be_finite_is_what_is_read_as_it_is() -> None:
    dual = {"main": Cache(page_size=64), "extra": Cache(page_size=64)}
    assert planned("A", **dual).finite_slot_zero == ("kv_cache", "extra_kv_cache")
    assert planned("B", main=Cache(page_size=256), extra=Cache(page_size=2)).finite_slot_zero == (
        "extra_kv_cache",
    )
    assert planned("B", main=Cache(page_size=256)).finite_slot_zero == ()
    assert planned("B", main=Cache(page_size=256), extra=Cache(page_size=256)).finite_slot_zero == ()
    assert planned("C", **dual).finite_slot_zero == ()


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_alignment_matters_where_the_pool_is_read_as_it_is(name: str) -> None:
    loose = Cache(page_size=64, lane_bytes=8)
    assert "alignment" in refused(name, main=loose).argument
    assert "alignment" in refused(name, extra=loose).argument
    assert served(name, main=replace(loose, pages=0))
    if name != "C":
        assert served(name, main=replace(loose, page_size=256), extra=replace(loose, page_size=256))


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_indices_are_int32(name: str) -> None:
    assert served(name, main=Cache(pages=2**23 - 1))
    assert "tokens" in refused(name, main=Cache(pages=2**23)).argument


@pytest.mark.parametrize(
    ("name", "heads", "scratch"), [("A", 8, 8), ("B", 16, 16), ("C", 8, 8), ("C", 1, 16), ("C", 100, 112)]
)
def test_scratch(name: str, heads: int, scratch: int) -> None:
    found = planned(name, heads=heads, tokens=64, extra=Cache(page_size=2, width=100))
    assert (found.splits, found.scratch_heads) == (4, scratch)
    assert planned(name, tokens=65).splits == 0


CALLS = st.builds(
    Call,
    tokens=st.sampled_from((0, 1, 63, 64, 65, 4096)),
    heads=st.integers(0, 140),
    main=st.builds(
        Cache,
        page_size=st.sampled_from((1, 2, 32, 64, 96, 128, 256)),
        pages=st.sampled_from((0, 1, 5000, 2**24)),
        width=st.integers(0, 2200),
        lane_bytes=st.sampled_from((1, 8, 16)),
    ),
    extra=st.none() | st.builds(Cache, page_size=st.sampled_from((2, 4, 64, 256)), width=st.integers(0, 600)),
    layout=st.sampled_from(("dsv4", "dsv4", "dsv4", "dsv32")),
)


@given(call=CALLS, envelope=st.sampled_from(ENVELOPES))
def test_every_call_has_a_plan_or_a_reason(call: Call, envelope: envelopes.Envelope) -> None:
    found = plan(envelope, call)
    if isinstance(found, Refusal):
        assert found.argument
        assert found.expected
        assert found.remedy
        return
    assert found.main_width >= call.main.width
    assert found.main_width % 64 == found.extra_width % 64 == 0
    among = envelopes.widths(envelope, call.tokens, found.extra_width > 0)
    assert among is None or found.main_width in among


@given(call=CALLS, envelope=st.sampled_from(ENVELOPES))
def test_the_nearest_shape_works(call: Call, envelope: envelopes.Envelope) -> None:
    for _ in range(6):  # one argument at a time, as one would follow the messages
        found = plan(envelope, call)
        if isinstance(found, Plan):
            return
        near = re.search(r"Nearest that works: (?:pages of )?(\d+)", found.remedy)
        if near is None:
            assert found.argument in ("layout", "q rows") or re.search("alignment|tokens", found.argument)
            return
        value = int(near[1])
        if found.argument == "query heads":
            call = replace(call, heads=value)
        elif found.argument == "indices width":
            call = replace(call, main=replace(call.main, width=value))
        elif found.argument == "kv_cache page size":
            call = replace(call, main=replace(call.main, page_size=value))
        else:
            assert call.extra is not None
            call = replace(call, extra=replace(call.extra, page_size=value))
    raise AssertionError(f"the advice leads in circles: {call}")


@given(call=CALLS, envelope=st.sampled_from(ENVELOPES))
def test_the_other_side_of_64_rows_is_named_where_it_works(call: Call, envelope: envelopes.Envelope) -> None:
    found = plan(envelope, call)
    if isinstance(found, Refusal) and found.argument in ("indices width", "query heads"):
        other = re.search(r"or (?:calls of up to )?(\d+) rows", found.remedy)
        moved = plan(envelope, replace(call, tokens=64 if call.tokens > 64 else 65))
        if other is not None:
            assert int(other[1]) == (64 if call.tokens > 64 else 65)
            assert isinstance(moved, Plan) or moved.argument != found.argument


def test_versions() -> None:
    names = {"0.6.14": "A", "0.6.17": "A", "0.6.18": "B", "0.7.1": "C", "0.7.4": "C", "0.7.4+cu130": "C"}
    assert {version: for_version(version).name for version in names} == names
    with pytest.raises(ArgumentError, match=r"0\.7\.0 lies between the generations"):
        for_version("0.7.0")
    with pytest.raises(ArgumentError, match=r"has no SM120 kernels"):
        for_version("0.6.13")
    with pytest.raises(ArgumentError, match=r"flashinfer version = '1\.0'"):
        for_version("1.0")
    with pytest.raises(ArgumentError, match="one of A, B, C"):
        by_name("D")


def test_no_torch_is_needed() -> None:
    code = "import sys, sm120_mla.envelopes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the installed release


@pytest.fixture(scope="module")
def found() -> Any:
    from flashinfer_standin import missing

    from sm120_mla.backends import flashinfer_api

    why = missing()
    if why is not None:
        pytest.skip(why)
    return flashinfer_api.probe()


def test_the_installed_release_is_in_the_table_it_shows_itself_to_be(found: Any) -> None:
    assert for_version(found.version) == found.envelope


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_the_installed_release_says_the_same_of_decoding(found: Any, tokens: int) -> None:
    if found.envelope.name == "C":
        config = importlib.import_module("flashinfer.mla").supported_sparse_mla_sm120_configs()["dsv4"]
        said = {
            (heads, width): config.supports_decode(heads, width, num_tokens=tokens, page_block_size=256)
            for heads in range(131)
            for width in (1, 64, 128, 192, 2048, 4096)
        }
    else:
        sparse = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
        said = {
            (heads, width): sparse._decode_dsv4_dispatchable(tokens, heads, width, 512, 64, 512)
            for heads in range(131)
            for width in range(64, 2049, 64)
        }
    for (heads, width), yes in said.items():
        call = Call(tokens, heads, Cache(page_size=64, width=width), Cache(page_size=2, width=512))
        ours = plan(found.envelope, call)
        exactly = isinstance(ours, Plan) and ours.kernel == "decode" and ours.main_width == max(width, 64)
        assert (exactly or (width == 1 and isinstance(ours, Plan) and tokens <= 64)) == yes, (heads, width)
