"""Strategies reach every region the suite speaks of, often enough that a run of 50 examples meets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sm120_mla.case import (
    ENTRY_KINDS,
    LENGTH_KINDS,
    IndexSpec,
    MetaCase,
    Offset64Case,
    OrderCase,
    SplitCase,
    Step,
)
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4, LAYOUTS, SUB_PAGE, PageGeometry, by_name
from sm120_mla.pages import owned
from sm120_mla.reference.split import counted
from sm120_mla.testing import strategies
from sm120_mla.testing.derive import indices_of, lengths_of

DRAWS = 800


def drawn(strategy: st.SearchStrategy[Any], draws: int = DRAWS) -> list[Any]:
    """What Hypothesis draws; the same on every run."""
    found: list[Any] = []

    @settings(
        max_examples=draws,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


# ---- split cases


def lane(case: SplitCase) -> int:
    """Bytes of the widest load the case allows; storages begin at multiples of 64 bytes."""
    geometry = PageGeometry(
        case.page_layout, case.page_size, case.pages, case.page_stride, case.offset, case.dtype
    )
    return geometry.lane_bytes(case.offset)


def is_split(case: SplitCase) -> bool:
    return case.page_size > SUB_PAGE and case.pages > 0


def calls(case: SplitCase, test: Callable[[IndexSpec], Any]) -> int:
    """How many calls with entries, on a pool that is really split, are as the test says."""
    specs = [spec for spec in case.calls if spec is not None and spec.rows * spec.width]
    return sum(bool(test(spec)) for spec in specs) if is_split(case) else 0


def any_spec(case: SplitCase, test: Callable[[IndexSpec], Any]) -> bool:
    return any(spec is not None and test(spec) for spec in case.calls)


def claims(spec: IndexSpec) -> bool:
    return not owned(spec.rows, spec.width)


def tokens_counted(case: SplitCase, spec: IndexSpec) -> int:
    tokens = case.pages * case.page_size
    lengths = lengths_of(spec)
    rows = indices_of(spec, tokens, case.page_size).reshape(spec.rows, spec.width)
    return counted(rows, None if lengths is None else lengths.reshape(-1), tokens).numel()


ROUNDED = {row.name: row.default_stride for row in LAYOUTS}
SPLIT_REGIONS: dict[str, tuple[float, Callable[[SplitCase], Any]]] = {
    **{f"page size {n}": (0.03, lambda c, n=n: c.page_size == n) for n in sorted(set(strategies.PAGE_SIZES))},
    "page size not of 128": (0.05, lambda c: c.page_size % 128),
    **{f"view {v}": (0.08, lambda c, v=v: c.view == v) for v in ("2d", "3d", "nhd", "hnd")},
    **{f"{d}": (0.25, lambda c, d=d: c.dtype == d) for d in ("uint8", "float8_e4m3fn")},
    **{f"layout {row.name}": (0.03, lambda c, row=row: c.layout == row.name) for row in LAYOUTS},
    "layout dsv4, mostly": (0.5, lambda c: c.layout == "dsv4"),
    **{f"{n}-byte lanes": (0.02, lambda c, n=n: is_split(c) and lane(c) == n) for n in (16, 8, 4, 2, 1)},
    "an empty pool": (0.03, lambda c: c.pages == 0),
    "one page": (0.1, lambda c: c.pages == 1),
    "three pages or more": (0.1, lambda c: c.pages >= 3),
    "a stride of the exact payload": (0.1, lambda c: c.pages > 1 and c.stride_gap == 0),
    "a stride rounded up": (
        0.03,
        lambda c: c.pages > 1 and c.stride_gap and c.page_stride == ROUNDED[c.layout](c.page_size),
    ),
    "a stride of interleaved layers": (
        0.05,
        lambda c: c.pages > 1 and c.page_stride in strategies.INTERLEAVED,
    ),
    "an odd stride": (0.003, lambda c: c.pages > 1 and c.page_stride % 2),
    "a storage offset": (0.2, lambda c: c.offset),
    "an odd storage offset": (0.02, lambda c: c.offset % 2),
    "a full split": (0.15, lambda c: is_split(c) and None in c.calls),
    "an owned split": (0.15, lambda c: calls(c, lambda i: not claims(i))),
    "a claimed split": (0.08, lambda c: calls(c, claims)),
    "two claimed splits": (0.02, lambda c: calls(c, claims) > 1),
    "a claimed split of int64": (0.02, lambda c: calls(c, lambda i: claims(i) and i.dtype == "int64")),
    "a claimed split with lengths": (0.02, lambda c: calls(c, lambda i: claims(i) and i.lengths != "none")),
    "a row gap read by a claimed split": (0.02, lambda c: calls(c, lambda i: claims(i) and i.row_gap)),
    "several calls": (0.25, lambda c: len(c.calls) > 1),
    "a full split and one by indices": (0.05, lambda c: None in c.calls and any(c.calls)),
    **{
        f"entries {kind}": (0.02, lambda c, kind=kind: calls(c, lambda i: kind in i.kinds))
        for kind in ENTRY_KINDS
    },
    "valid tokens only": (0.02, lambda c: calls(c, lambda i: i.kinds == ("valid",))),
    "a hole beside a token": (0.05, lambda c: calls(c, lambda i: {"valid", "minus_one"} <= set(i.kinds))),
    "no token at all": (0.01, lambda c: any_spec(c, lambda i: not set(i.kinds) - {"minus_one"})),
    **{
        f"lengths {kind}": (0.02, lambda c, kind=kind: calls(c, lambda i: i.lengths == kind))
        for kind in LENGTH_KINDS
    },
    "int32": (0.15, lambda c: calls(c, lambda i: i.dtype == "int32")),
    "int64": (0.15, lambda c: calls(c, lambda i: i.dtype == "int64")),
    "lengths of int64": (
        0.08,
        lambda c: calls(c, lambda i: i.lengths != "none" and i.length_dtype == "int64"),
    ),
    "lengths of rank 2": (0.08, lambda c: calls(c, lambda i: i.lengths != "none" and i.length_rank == 2)),
    "indices of rank 3": (0.15, lambda c: calls(c, lambda i: i.rank == 3)),
    "rows apart": (0.15, lambda c: calls(c, lambda i: i.row_gap)),
    "no columns": (0.02, lambda c: any_spec(c, lambda i: i.width == 0)),
    "no rows": (0.02, lambda c: any_spec(c, lambda i: i.rows == 0)),
    "one row": (0.04, lambda c: calls(c, lambda i: i.rows == 1)),
    "many rows": (0.02, lambda c: calls(c, lambda i: i.rows > 40)),
    "more than 1,024 columns": (0.01, lambda c: calls(c, lambda i: i.width > 1024)),
    "a width kernels are built for, or next to it": (
        0.1,
        lambda c: calls(c, lambda i: any(abs(i.width - n) < 2 for n in strategies.NAMED_WIDTHS)),
    ),
}


def short_of(
    cases: list[Any], regions: dict[str, tuple[float, Callable[[Any], Any]]]
) -> dict[str, tuple[float, float]]:
    """Regions that too few cases lie in: the share of cases there, and the least it should be."""
    shares = {
        name: (sum(bool(inside(case)) for case in cases) / len(cases), least)
        for name, (least, inside) in regions.items()
    }
    return {name: (share, least) for name, (share, least) in shares.items() if share < least}


def test_split_cases_reach_every_region_and_stay_cheap() -> None:
    cases: list[SplitCase] = drawn(strategies.split_cases())

    assert short_of(cases, SPLIT_REGIONS) == {}
    for case in cases:
        assert case.pages * case.page_stride <= 8 << 20
        assert all(spec is None or spec.rows * max(spec.width, 1) <= 4200 for spec in case.calls)


@pytest.mark.skipif(not INTERPRETED, reason="values are counted on the CPU")
def test_most_calls_touch_something_and_some_nothing() -> None:
    split_cases: list[SplitCase] = drawn(strategies.split_cases(), 300)
    counts = [
        (spec, tokens_counted(case, spec))
        for case in split_cases
        if is_split(case)
        for spec in case.calls
        if spec is not None and spec.rows * spec.width
    ]

    assert len(counts) > 0.5 * len(split_cases)
    assert sum(n > 0 for _, n in counts) > 0.6 * len(counts)
    assert sum(n == 0 for _, n in counts) > 0.05 * len(counts)
    assert sum(n > 0 and claims(spec) for spec, n in counts) > 0.08 * len(split_cases)


@pytest.mark.parametrize("with_indices", [True, False])
def test_index_calls_can_be_asked_for(with_indices: bool) -> None:
    for case in drawn(strategies.split_cases(with_indices=with_indices), 30):
        assert all((spec is not None) == with_indices for spec in case.calls)


def test_every_width_that_kernels_are_built_for_is_drawn_and_both_next_to_it() -> None:
    found = set(drawn(strategies.widths(), 2000))

    assert {n + by for n in strategies.NAMED_WIDTHS for by in (-1, 0, 1)} <= found
    assert set(range(10)) <= found


def test_offsets_straddle_both_boundaries_at_every_stride() -> None:
    found: list[Offset64Case] = drawn(strategies.offset64_cases(), 200)

    assert {case.boundary_bits for case in found} == {31, 32}
    assert {case.page_size for case in found} == {128, 256, 512}
    assert len({(case.page_stride, case.boundary_bits) for case in found}) == 8
    assert not any(case.full for case in found), "a full split would touch gigabytes"
    assert all(case.page_stride >= by_name(case.layout).payload(case.page_size) for case in found)


# ---- boots

TOUCH = ("split", "warm_up", "grow")
Wanted = tuple[tuple[str, ...] | str, ...]


def takes(order: OrderCase, wanted: Wanted, inference: bool | None = None) -> bool:
    """Whether the order takes these steps, in this order, with any others in between.

    ``inference`` is the mode of the first one.
    """
    steps = iter(order.steps)

    def meets(step: Step, want: tuple[str, ...] | str, n: int) -> bool:
        fits = step.do in want if isinstance(want, tuple) else step.do == want
        return fits and (n > 0 or inference is None or step.inference == inference)

    return all(any(meets(step, want, n) for step in steps) for n, want in enumerate(wanted))


def first_touch(order: OrderCase) -> str:
    """In what mode the first persistent buffer is asked for."""
    for step in order.steps:
        if step.do == "capture":
            return "in a capture"
        if step.do in (*TOUCH, "reserve", "second_device", "second_scope", "second_layout"):
            return "in inference mode" if step.inference else "outside"
    return "never"


ORDER_REGIONS: dict[str, tuple[float, Callable[[OrderCase], bool]]] = {
    **{
        f"step {do}": (0.02, lambda o, do=do: takes(o, (do,)))
        for do in (
            "load", "split", "warm_up", "torch_write", "reserve", "capture", "replay", "grow", "drop_graph",
            "second_device", "second_layout", "second_scope", "restart",
        )
    },
    "first touch in inference mode": (0.15, lambda o: first_touch(o) == "in inference mode"),
    "first touch outside": (0.2, lambda o: first_touch(o) == "outside"),
    "first touch in a capture": (0.03, lambda o: first_touch(o) == "in a capture"),
    "autotune in inference mode, then capture": (0.15, lambda o: takes(o, (TOUCH, "capture"), True)),
    "autotune in inference mode, then serve": (0.1, lambda o: takes(o, (TOUCH, "capture", "replay"), True)),
    "autotune outside, then serve": (0.1, lambda o: takes(o, (TOUCH, "capture", "replay"), False)),
    "inference mode, then a torch write": (0.02, lambda o: takes(o, (TOUCH, "torch_write"), True)),
    "reserve, then capture": (0.08, lambda o: takes(o, ("reserve", "capture"))),
    "reserve, then serve": (0.05, lambda o: takes(o, ("reserve", "capture", "replay"))),
    "capture, grow, replay": (0.08, lambda o: takes(o, ("capture", "grow", "replay"))),
    "touch, capture, grow, replay": (0.06, lambda o: takes(o, (TOUCH, "capture", "grow", "replay"))),
    "growth twice under a graph": (0.02, lambda o: takes(o, ("capture", "grow", "grow", "replay"))),
    "two graphs, one replayed": (0.01, lambda o: takes(o, (TOUCH, "capture", "capture", "replay"))),
    "growth after a dropped graph": (0.005, lambda o: takes(o, ("capture", "drop_graph", TOUCH))),
    "a split between capture and replay": (0.03, lambda o: takes(o, ("capture", "split", "replay"))),
    "a second device": (0.05, lambda o: takes(o, (TOUCH, "second_device"))),
    "a second scope": (0.03, lambda o: takes(o, (TOUCH, "second_scope"))),
    "a second layout": (0.03, lambda o: takes(o, (TOUCH, "second_layout"))),
    "a restart": (0.003, lambda o: takes(o, (TOUCH, "restart", TOUCH))),
    "splits that keep marks": (0.1, lambda o: not owned(o.rows, o.width)),
    "splits that keep none": (0.3, lambda o: owned(o.rows, o.width)),
    "one step": (0.01, lambda o: len(o.steps) == 1),
    "seven steps or more": (0.1, lambda o: len(o.steps) >= 7),
}  # fmt: skip


def test_orders_reach_every_region_and_stay_cheap() -> None:
    orders: list[OrderCase] = drawn(strategies.orders())

    assert short_of(orders, ORDER_REGIONS) == {}
    assert max(len(order.steps) for order in orders) <= 9
    assert max(order.rows * order.width for order in orders) <= 1200
    assert max(DSV4.payload(order.page_size) for order in orders) <= 150_000


def test_a_longest_order_can_be_asked_for() -> None:
    assert max(len(order.steps) for order in drawn(strategies.orders(max_steps=3), 50)) <= 9


# ---- metadata


def test_metadata_cases_reach_every_capability_and_both_sides_of_64_rows() -> None:
    found: list[MetaCase] = drawn(strategies.meta_cases(), 300)
    builds = [build for case in found for build in case.builds]
    capabilities = Counter(case.capability for case in found)
    rows = Counter(build.decode for build in builds)

    assert set(capabilities) == set(strategies.CAPABILITIES)
    assert min(capabilities.values()) >= 0.03 * len(found)
    assert all(rows[n] >= 3 for n in (0, 1, 63, 64, 65, 66))
    assert sum(build.padding > 0 for build in builds) >= 0.1 * len(builds)
    assert sum(build.prefill > 0 for build in builds) >= 0.3 * len(builds)
    assert sum(build.short for build in builds) >= 0.05 * len(builds)
    assert sum(len(case.builds) > 1 for case in found) >= 0.2 * len(found)
    assert sum(b.max_seq_len > case.max_model_len for case in found for b in case.builds) >= 3
