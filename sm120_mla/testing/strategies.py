"""Hypothesis strategies: they draw Cases, dozens of integers each. Tensors are derived later."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ..case import (
    ENTRY_KINDS,
    AttnCase,
    CacheSpec,
    IndexSpec,
    MetaBatch,
    MetaCase,
    Offset64Case,
    OrderCase,
    RouteCase,
    SplitCase,
    Step,
    WriteCase,
)
from ..codec.recipe import RECIPES
from ..layout import LAYOUTS, by_name

__all__ = [
    "attn_cases",
    "cache_specs",
    "handed_over_cases",
    "index_specs",
    "meta_batches",
    "meta_cases",
    "offset64_cases",
    "orders",
    "route_cases",
    "split_cases",
    "steps",
    "widths",
    "write_cases",
]

SEEDS = st.integers(0, 2**16)
NAMED_WIDTHS = (64, 128, 192, 256, 512, 1024, 2048)
PAGE_SIZES = (256, 128, 256, 192, 320, 512, 576, 1024, 64)
"""In tokens; what the field splits counts twice."""
INTERLEAVED = (1_039_680, 1_077_120, 1_308_672)
"""Page strides in bytes of pools that interleave layers (docs/design.md, section 3)."""
LENGTHS = ("none", "none", "random", "random", "full", "beyond", "negative", "zero")
"""What cuts every row to nothing is rarer than the rest."""


def mostly_some(most: int) -> st.SearchStrategy[int]:
    """Up to ``most``, and now and then 0."""
    return st.one_of(st.integers(1, most), st.integers(1, most), st.integers(0, most))


def widths() -> st.SearchStrategy[int]:
    """Top-k widths: small ones, the widths kernels are built for, each also one less and one more."""
    near = st.sampled_from([width + by for width in NAMED_WIDTHS for by in (0, 1, -1)])
    return st.one_of(st.integers(0, 9), near, st.integers(0, 300))


@st.composite
def index_specs(draw: st.DrawFn, most_entries: int = 4200) -> IndexSpec:
    """Index rows of any width, as few rows as keep the interpreter quick."""
    width = draw(widths())
    rows = draw(mostly_some(max(1, min(70, most_entries // max(width, 1)))))
    dtype: Any = draw(st.sampled_from(("int32", "int64")))
    allowed: list[Any] = [k for k in ENTRY_KINDS if k != "wide" or dtype == "int64"]
    kinds = draw(st.lists(st.sampled_from(allowed), max_size=4))
    some = draw(st.sampled_from((["valid"], ["window"], ["valid", "minus_one"], [])))
    return IndexSpec(
        rows=rows,
        width=width,
        kinds=tuple(dict.fromkeys(kinds + some)),
        rank=draw(st.sampled_from((2, 3))),
        dtype=dtype,
        row_gap=draw(st.sampled_from((0, 0, 1, 3, 64))),
        lengths=draw(st.sampled_from(LENGTHS)),
        length_dtype=draw(st.sampled_from(("int32", "int64"))),
        length_rank=draw(st.sampled_from((1, 2))),
        seed=draw(SEEDS),
    )


@st.composite
def split_cases(draw: st.DrawFn, with_indices: bool | None = None) -> SplitCase:
    """Pools of any page size, stride, offset, rank and dtype, and one to three calls on them."""
    layout = by_name(draw(st.sampled_from([row.name for row in LAYOUTS] + ["dsv4"] * 5)))
    page_size = draw(st.sampled_from(PAGE_SIZES))
    payload = layout.payload(page_size)
    unit = draw(st.sampled_from((16, 8, 4, 2, 1)))  # bytes that every address is a multiple of
    gap = draw(
        st.one_of(
            st.just(0),
            st.just(layout.default_stride(page_size) - payload),
            st.sampled_from([s - payload for s in INTERLEAVED if s > payload]),
            st.integers(0, 700 // unit).map(lambda n: n * unit),
        )
    )
    calls: st.SearchStrategy[IndexSpec | None] = index_specs()
    if with_indices is None:
        calls = st.one_of(st.none(), calls, calls)
    elif not with_indices:
        calls = st.none()
    most = 6 if page_size <= 256 else 3
    return SplitCase(
        layout=layout.name,
        page_size=page_size,
        pages=draw(mostly_some(most)),
        stride_gap=gap,
        offset=unit * draw(st.sampled_from((0, 1, 3, 36))),
        view=draw(st.sampled_from(("2d", "3d", "nhd", "hnd"))),
        dtype=draw(st.sampled_from(("uint8", "float8_e4m3fn"))),
        calls=tuple(draw(st.lists(calls, min_size=1, max_size=3))),
        seed=draw(SEEDS),
    )


def offset64_cases() -> st.SearchStrategy[Offset64Case]:
    """Page sizes and strides for which pages straddle 2^31 and 2^32 bytes; touched pages only."""
    return st.builds(
        Offset64Case,
        page_size=st.sampled_from((256, 128, 512)),
        page_stride=st.sampled_from((299_520, 1_308_672, 1_077_120, 512 * 584)),
        boundary_bits=st.sampled_from((31, 32)),
        seed=SEEDS,
    )


def steps() -> st.SearchStrategy[Step]:
    """One step of a boot; only steps that run work have a mode."""
    modal = st.sampled_from(("split", "warm_up", "grow", "second_device", "second_layout", "second_scope"))
    plain = st.sampled_from(
        ("load", "torch_write", "reserve", "capture", "replay", "drop_graph", "restart", "split")
    )
    arg = st.integers(0, 40)
    return st.one_of(
        st.builds(Step, do=modal, inference=st.booleans(), arg=arg),
        st.builds(Step, do=plain, arg=arg),
        st.builds(Step, do=st.sampled_from(("reserve", "capture", "replay", "grow")), arg=arg),
    )


TOUCHES = ("warm_up", "reserve", "split", "grow")
MIDDLES = (
    *("grow", "capture", "grow", "split", "torch_write", "second_scope", "second_device", "grow"),
    *("drop_graph", "second_layout"),
)


@st.composite
def served(draw: st.DrawFn) -> tuple[Step, ...]:
    """A boot that gets as far as serving: touch, capture, something in between, replay."""
    arg = st.integers(0, 40)
    touch = st.builds(Step, do=st.sampled_from(TOUCHES), inference=st.booleans(), arg=arg)
    middle = st.builds(Step, do=st.sampled_from(MIDDLES), inference=st.booleans(), arg=arg)
    return (
        *draw(st.lists(touch, min_size=1, max_size=2)),
        Step(do="capture", arg=draw(arg)),
        *draw(st.one_of(st.lists(middle, max_size=3), st.lists(middle, min_size=1, max_size=3))),
        Step(do="replay", arg=draw(arg)),
        *draw(st.lists(steps(), max_size=2)),
    )


def orders(max_steps: int = 9) -> st.SearchStrategy[OrderCase]:
    """Boots: half in any order, half that get as far as serving."""
    anything = st.lists(steps(), min_size=1, max_size=max_steps).map(tuple)
    shape = st.sampled_from(((2, 5), (1, 1), (3, 64), (9, 130)))
    return st.builds(
        lambda shape, **rest: OrderCase(rows=shape[0], width=shape[1], **rest),
        shape=shape,
        page_size=st.sampled_from((128, 192, 256)),
        steps=st.one_of(anything, served()),
        seed=SEEDS,
    )


CAPABILITIES = ((12, 0), (12, 1), (9, 0), (10, 0), (10, 3), (11, 0), None)
"""Every branch of the capability seam."""
MODEL_LENGTHS = (65_536, 40_000, 16_384, 131_072, 1_000, 200_001)
"""Tokens; powers of two and not."""
ROW_COUNTS = (0, 1, 2, 3, 63, 64, 65, 66)
"""Decode rows: few, and both sides of the 64/65 switch."""


@st.composite
def meta_batches(draw: st.DrawFn, max_model_len: int, most_rows: int = 66) -> MetaBatch:
    """One batch within a model length; the capture dummy run's length plus a block included."""
    longest = st.one_of(
        st.integers(0, max_model_len),
        st.sampled_from((127, 128, 255, 16_384, 16_385, max_model_len, max_model_len + 256)),
    )
    return MetaBatch(
        decode=min(draw(st.one_of(st.integers(0, 6), st.sampled_from(ROW_COUNTS))), most_rows),
        prefill=draw(st.integers(0, 5)),
        padding=draw(st.sampled_from((0, 0, 1, 3))),
        max_seq_len=draw(longest),
        dtype=draw(st.sampled_from(("int32", "int64"))),
        short=draw(st.sampled_from((False, False, False, True))),
        seed=draw(SEEDS),
    )


@st.composite
def meta_cases(
    draw: st.DrawFn,
    capabilities: tuple[tuple[int, int] | None, ...] = CAPABILITIES,
    most_rows: int = 66,
    most_tokens: int = 1 << 20,
) -> MetaCase:
    """One to three builds into the same buffers, at widths of their own.

    ``most_rows`` and ``most_tokens`` (of the model length) bound what a consumer has to read.
    """
    max_model_len = draw(st.sampled_from([n for n in MODEL_LENGTHS if n <= most_tokens]))
    return MetaCase(
        capability=draw(st.sampled_from(capabilities)),
        max_model_len=max_model_len,
        block_size=draw(st.sampled_from((2, 2, 1, 64))),
        requests=draw(st.integers(1, 6)),
        table_gap=draw(st.sampled_from((0, 1, 8))),
        builds=tuple(draw(st.lists(meta_batches(max_model_len, most_rows), min_size=1, max_size=3))),
        seed=draw(SEEDS),
    )


ATTN_WIDTHS = (63, 64, 65, 128, 129, 190)
"""Index rows of more than one tile, and at its edges."""
ATTN_LENGTHS = ("none", "random", "full", "random", "beyond", "none", "random", "full", "negative", "zero")
"""What cuts every row to nothing is rarer still, as most of what is asked needs something that counts."""


@st.composite
def cache_specs(draw: st.DrawFn, page_sizes: tuple[int, ...], most_width: int = 40) -> CacheSpec:
    """One cache of an attention call: few pages, any page size and stride, index rows that mostly count."""
    page_size = draw(st.sampled_from(page_sizes))
    kinds: list[Any] = draw(st.lists(st.sampled_from(ENTRY_KINDS), max_size=3, unique=True))
    # Where nothing counts, little is judged: most rows have something beside whatever else they hold.
    kinds += draw(st.sampled_from((["valid"], ["valid"], ["valid", "minus_one"], ["window"], [])))
    narrow, wide = mostly_some(most_width), st.sampled_from(ATTN_WIDTHS)
    index = IndexSpec(
        rows=1,
        width=draw(st.one_of(mostly_some(9), narrow, narrow, wide)),
        kinds=tuple(dict.fromkeys(kinds)),
        dtype="int64" if "wide" in kinds else draw(st.sampled_from(("int32", "int64"))),
        row_gap=draw(st.sampled_from((0, 0, 3))),
        lengths=draw(st.sampled_from(ATTN_LENGTHS)),
        length_dtype=draw(st.sampled_from(("int32", "int64"))),
        seed=draw(SEEDS),
    )
    return CacheSpec(
        page_size=page_size,
        pages=draw(mostly_some(3)),
        stride_gap=draw(st.sampled_from((0, 0, 64, 256, 13, 1000))),
        offset=draw(st.sampled_from((0, 0, 16, 8, 2, 1))),
        index=index,
    )


@st.composite
def attn_cases(
    draw: st.DrawFn, most_tokens: int = 3, most_heads: int = 20, least_tokens: int = 0
) -> AttnCase:
    """Attention calls small enough for the interpreter; every kind of entry, length, sink and poison.

    Rows of several tiles and several blocks of heads are among them.
    """
    extra = st.one_of(st.none(), cache_specs((2, 64, 1)))
    few = st.one_of(st.sampled_from((8, 16)), st.integers(1, most_heads))
    heads = draw(st.one_of(few, few, few, st.sampled_from((33, 64, 65, 128))))
    if heads > most_heads:  # kernels of a program a head are slow in the interpreter
        most_tokens = max(least_tokens, 1)
    return AttnCase(
        tokens=draw(st.integers(least_tokens, most_tokens) if least_tokens else mostly_some(most_tokens)),
        heads=heads,
        main=draw(cache_specs((64, 256, 3, 128))),
        extra=draw(extra),
        sink=draw(st.sampled_from(("none", "random", "random", "neg_inf", "mixed", "random", "pos_inf"))),
        scale=draw(st.sampled_from((None, None, 0.05, 0.2))),
        spread=draw(st.sampled_from(("small", "wide", "small", "huge"))),
        poison=draw(st.sampled_from(("nan", "inf", "noise"))),
        q_gap=draw(st.sampled_from((0, 0, 2))),
        seed=draw(SEEDS),
    )


ROUTE_ROWS = (1, 2, 63, 64, 65, 66, 128)
"""Both sides of the switch from decode to prefill."""
HEADS = (8, 16, 32, 64, 128)
"""Query heads that kernels are built for."""


def route_indices(columns: st.SearchStrategy[int]) -> st.SearchStrategy[IndexSpec]:
    """Index rows as calls bring them: both dtypes, rows apart, entries that count for nothing."""
    return st.builds(
        IndexSpec,
        rows=st.just(1),
        width=columns,
        kinds=st.lists(st.sampled_from(("valid", "minus_one", "past_end")), max_size=3).map(tuple),
        dtype=st.sampled_from(("int32", "int64")),
        row_gap=st.sampled_from((0, 0, 3)),
        lengths=st.sampled_from(LENGTHS),
        seed=SEEDS,
    )


def route_caches(page_sizes: tuple[int, ...]) -> st.SearchStrategy[CacheSpec]:
    """One cache of a call whose way is asked: any width, few pages, any page stride and alignment."""
    return st.builds(
        CacheSpec,
        page_size=st.sampled_from(page_sizes),
        pages=mostly_some(3),
        stride_gap=st.sampled_from((0, 256, 0, 560, 256, 13)),
        offset=st.sampled_from((0, 0, 0, 0, 16, 16, 8, 1)),
        index=route_indices(widths()),
    )


def route_cases() -> st.SearchStrategy[RouteCase]:
    """Calls of every shape a configuration can make, on every GPU, beside every FlashInfer and none."""
    return st.builds(
        RouteCase,
        layout=st.sampled_from(("dsv4",) * 11 + ("dsv41",)),
        tokens=st.one_of(st.sampled_from(ROUTE_ROWS), st.integers(0, 130)),
        heads=st.one_of(st.sampled_from(HEADS), st.sampled_from(HEADS), st.integers(1, 128)),
        main=route_caches((256, 64, 256, 64, 128, 96, 3)),
        extra=st.one_of(st.none(), route_caches((2, 64, 2, 64, 256, 4))),
        sink=st.booleans(),
        scale=st.sampled_from((None, None, None, 0.2, 2.0**-70)),
        q_gap=st.sampled_from((0, 0, 2)),
        backend=st.sampled_from(("auto", "auto", "flashinfer", "flashinfer", "triton", "reference")),
        capability=st.sampled_from(((12, 0), (12, 1)) * 4 + (*CAPABILITIES, (7, 5))),
        flashinfer=st.sampled_from(("A", "A", "B", "B", "C", None)),
        seed=SEEDS,
    )


def handed_over_cases() -> st.SearchStrategy[RouteCase]:
    """Calls that FlashInfer serves in every generation, narrow enough for the interpreter to prepare."""

    def cache(page_sizes: tuple[int, ...]) -> st.SearchStrategy[CacheSpec]:
        return st.builds(
            CacheSpec,
            page_size=st.sampled_from(page_sizes),
            pages=st.integers(1, 3),
            stride_gap=st.sampled_from((0, 256, 560)),
            offset=st.sampled_from((0, 0, 16)),
            index=route_indices(st.integers(1, 20)),
        )

    return st.builds(
        RouteCase,
        tokens=st.one_of(st.sampled_from(ROUTE_ROWS[:-1]), st.integers(1, 70)),
        heads=st.sampled_from((16, 16, 32)),
        main=cache((256, 64, 128)),
        extra=st.one_of(st.none(), cache((2, 64, 256))),
        sink=st.booleans(),
        q_gap=st.sampled_from((0, 2)),
        backend=st.just("flashinfer"),
        capability=st.sampled_from(((12, 0), (12, 1))),
        flashinfer=st.sampled_from(("A", "B", "C")),
        seed=SEEDS,
    )


@st.composite
def write_cases(draw: st.DrawFn) -> WriteCase:
    """Calls of the cache writer."""
    kinds = ("normal", "zero", "tiny", "huge", "edge", "negative")
    return WriteCase(
        recipe=draw(st.sampled_from([recipe.name for recipe in RECIPES])),
        tokens=draw(st.integers(0, 9)),
        page_size=draw(st.sampled_from((64, 256, 2, 53))),
        pages=draw(st.integers(1, 3)),
        stride_gap=draw(st.sampled_from((0, 64, 256, 7))),
        offset=draw(st.sampled_from((0, 0, 16, 2, 1))),
        slots=draw(st.sampled_from(("distinct", "distinct", "skipped", "past_end", "none"))),
        tiles=tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4, unique=True))),
        dtype=draw(st.sampled_from(("int32", "int64"))),
        seed=draw(SEEDS),
    )
