"""ROUTE: what the invariants ask, what they see, and the rules that a handed-over call is judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_bench import MAIN, bench_of
from flashinfer_cases import CallSpec, exact, make
from hypothesis import HealthCheck, Phase, given, settings

from sm120_mla import attention, device, pages
from sm120_mla.backends.flashinfer import FlashInferBackend
from sm120_mla.backends.flashinfer_api import Installed
from sm120_mla.case import CacheSpec, IndexSpec, RouteCase
from sm120_mla.envelopes import by_name
from sm120_mla.errors import ArgumentError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.targets.own import OwnTarget
from sm120_mla.targets.routes import Handed, HasServes, Routed, Routes, Way
from sm120_mla.testing import route_calls, strategies
from sm120_mla.testing.field_model import FieldTarget
from sm120_mla.testing.flashinfer_rules import broken_rules, missing_kernel
from sm120_mla.testing.invariants import route
from sm120_mla.testing.verdict import by_id, judge

prepared_here = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")


def cache(width: int = 3, page_size: int = 256, **index: Any) -> CacheSpec:
    spec = IndexSpec(rows=1, width=width, **index)
    return CacheSpec(page_size=page_size, stride_gap=256, index=spec)


def routed_by(case: RouteCase, launch: bool = False) -> Routed:
    way = Way(case.backend, case.capability, case.flashinfer, route_calls.layout_by_name(case.layout), launch)
    return OwnTarget().route(route_calls.inputs_of(case), way)


# ---- what the own target tells


@pytest.mark.parametrize(
    ("case", "served"),
    [
        (RouteCase(flashinfer="C", heads=64), "flashinfer"),
        (RouteCase(flashinfer="C", heads=64, capability=(12, 1)), "flashinfer"),
        (RouteCase(flashinfer=None), "triton"),
        (RouteCase(flashinfer="C", capability=(9, 0)), "triton"),
        (RouteCase(flashinfer="C", heads=64, backend="reference"), "reference"),
        (RouteCase(flashinfer="A", heads=16, scale=2.0**-70), "triton"),
        (RouteCase(tokens=0), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_backend_that_runs_is_the_one_that_was_told(case: RouteCase, served: str) -> None:
    found = routed_by(case)

    assert (found.said, found.served, found.error) == (served, served, None)
    assert bool(found.launches) == (served in ("flashinfer", "triton"))
    assert (found.handed is not None) == (served == "flashinfer")


def test_without_launching_no_kernel_runs() -> None:
    found = routed_by(RouteCase(backend="triton", heads=16))

    assert found.launches
    assert "out" not in found.changed


@prepared_here
def test_with_launching_kernels_run_and_flashinfers_do_not() -> None:
    assert "out" in routed_by(RouteCase(backend="triton", heads=16), launch=True).changed
    found = routed_by(RouteCase(backend="flashinfer", flashinfer="B", heads=16, main=cache()), launch=True)
    assert found.launches.count("flashinfer") == 2  # and again over dirty scratch
    assert found.handed is not None
    assert found.handed.indices[:, :3].ge(64).all()


def test_watching_leaves_nothing_behind() -> None:
    instances, kernel = dict(attention._instances), pages.kernels.owned_kernel

    routed_by(RouteCase(backend="flashinfer", flashinfer="B", heads=16, main=cache()))

    assert attention._instances == instances
    assert pages.kernels.owned_kernel is kernel
    assert device._pretence == []


def test_a_package_without_routes_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    target = OwnTarget()
    monkeypatch.setattr(FlashInferBackend, "__init__", lambda self: None)  # as before it took what was found

    found = judge(by_id("ROUTE-TOTAL"), target, RouteCase())

    assert found.unknown
    assert "route of an attention call" in found.headline


@pytest.mark.parametrize("id", ["ROUTE-TOTAL", "ROUTE-CONTRACT"])
def test_a_target_that_tells_no_routes_is_unknown(id: str) -> None:
    target = FieldTarget()
    assert not isinstance(target, Routes)
    assert not isinstance(target, HasServes)

    assert judge(by_id(id), target, RouteCase()).unknown


# ---- what ROUTE-TOTAL sees


class Told(OwnTarget):
    """Answers with what it is given."""

    def __init__(self, answer: Routed) -> None:
        super().__init__()
        self.answer = answer

    def route(self, inputs: Any, way: Way) -> Routed:
        return self.answer


GOOD = Routed("triton", None, "triton", None, ("kernel",), ("out",))
REFUSED = ArgumentError("backend", "'flashinfer'", "installed", "Install it.")
SILENT = ArgumentError("backend", "'flashinfer'", "another", "Try another.")
TRITON, ORDER = RouteCase(flashinfer=None), RouteCase(flashinfer=None, backend="flashinfer")


@pytest.mark.parametrize(
    ("case", "answer", "headline"),
    [
        (TRITON, GOOD, ""),
        (TRITON, replace(GOOD, said="reference"), "does not go where it was said to"),
        (TRITON, replace(GOOD, said=None, said_error=REFUSED), "does not go where it was said to"),
        (TRITON, replace(GOOD, launches=("kernel, while asked",)), "asking for the route launches"),
        (TRITON, replace(GOOD, launches=()), "triton serves by no launch"),
        (TRITON, Routed("reference", None, "reference", None), "not served by triton"),
        (ORDER, GOOD, "triton serves a call that is to be refused"),
        (ORDER, Routed(None, REFUSED, None, REFUSED), ""),
        (ORDER, Routed(None, REFUSED, None, REFUSED, ("kernel",)), "something has happened already"),
        (ORDER, Routed(None, REFUSED, None, REFUSED, (), ("out",)), "something has happened already"),
        (ORDER, Routed(None, KeyError("x"), None, KeyError("x")), "dies without naming an argument"),
        (
            ORDER,
            Routed(None, SILENT, None, SILENT),
            "the refusal does not name installed",
        ),
        (RouteCase(tokens=0), GOOD, "a call without work is served"),
    ],
)
def test_total_sees(case: RouteCase, answer: Routed, headline: str) -> None:
    found = judge(by_id("ROUTE-TOTAL"), Told(answer), case)

    assert found.violated is bool(headline)
    assert headline in found.headline


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (RouteCase(heads=12, tokens=65, flashinfer="C"), "triton"),
        (RouteCase(heads=12, tokens=64, flashinfer="C"), "flashinfer"),
        (RouteCase(heads=8, tokens=65, flashinfer="A"), "triton"),
        (RouteCase(heads=8, tokens=65, flashinfer="B"), "flashinfer"),
        (RouteCase(capability=(7, 5)), ""),
        (RouteCase(layout="dsv41"), ""),
        (RouteCase(layout="dsv41", backend="reference"), "reference"),
        (RouteCase(capability=None, layout="dsv41"), "reference"),
    ],
)
def test_who_must_serve(case: RouteCase, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "interpreting", lambda: True)
    numbers = route_calls.numbers_of(case, route_calls.inputs_of(case))
    assert numbers is not None

    found, reasons = route_calls.expected(case, numbers)

    assert found == backend
    assert bool(reasons) == (backend == "")


# ---- what a handed-over call is judged by


@pytest.fixture(scope="module")
def sound() -> Callable[[str, int], tuple[Handed, tuple[str, ...]]]:
    """What is prepared for a generation at a number of rows, two caches."""
    made: dict[tuple[str, int], tuple[Handed, tuple[str, ...]]] = {}

    def of(generation: str, rows: int) -> tuple[Handed, tuple[str, ...]]:
        if (generation, rows) not in made:
            kinds = ("valid", "minus_one")
            case = RouteCase(
                tokens=rows,
                heads=16,
                main=cache(kinds=kinds),
                extra=cache(2, 64, kinds=("minus_one",)),
                backend="flashinfer",
                flashinfer=generation,
            )
            found = routed_by(case, launch=True)
            assert found.handed is not None
            made[generation, rows] = found.handed, found.finite_slot_zero
        return made[generation, rows]

    return of


SPOILED: dict[str, tuple[str, Callable[[Handed], dict[str, Any]], str]] = {
    "strided indices": ("B", lambda h: {"indices": torch.cat([h.indices] * 2, 1)[:, :128]}, "indices"),
    "int64 indices": ("A", lambda h: {"indices": h.indices.long()}, "indices"),
    "int64 lengths": ("C", lambda h: {"lengths": h.lengths.long()}, "tl"),
    "half a tile": ("C", lambda h: {"extra_indices": h.extra_indices[:, :32].contiguous()}, "whole tiles"),
    "length past the row": ("C", lambda h: {"lengths": h.lengths + 500}, "outside [0"),
    "hollow row": ("B", lambda h: {"extra_lengths": h.extra_lengths * 0 + 64}, "nothing but"),
    "stale column": ("C", lambda h: {"indices": h.indices.clone().fill_(1 << 20)}, "stale column"),
    "past the length": ("C", lambda h: {"indices": h.indices.clone().fill_(0)}, "past its length"),
    "rows missing": ("C", lambda h: {"lengths": h.lengths[:-1]}, "rows for"),
    "wide q": ("A", lambda h: {"q": torch.stack([h.q, h.q], 1)[:, 0]}, "q is"),
    "fp16 out": ("C", lambda h: {"out": h.out.half()}, "output is"),
    "other results": ("C", lambda h: {"lse": h.lse[:, :1].contiguous()}, "results of shape"),
    "odd base": ("C", lambda h: {"cache": h.cache[..., 8:]}, "16-byte aligned"),
    "no page": ("A", lambda h: {"cache": h.cache[:0]}, "no slot 0"),
    "dirty slot 0": ("B", lambda h: {"cache": h.cache.clone().fill_(255)}, "slot 0 of kv_cache"),
    "fp32 cache": ("C", lambda h: {"cache": h.cache.float()}, "kv_cache is"),
    "fp64 sink": ("C", lambda h: {"sink": torch.zeros(16, dtype=torch.float64)}, "sink"),
}


@prepared_here
@pytest.mark.parametrize("rows", [2, 65])
@pytest.mark.parametrize("name", SPOILED)
def test_a_broken_rule_is_seen(name: str, rows: int, sound: Any) -> None:
    generation, change, said = SPOILED[name]
    handed, excused = sound(generation, rows)
    envelope = by_name(generation)

    assert list(broken_rules(envelope, handed, excused)) == []
    assert excused == (("extra_kv_cache",) if envelope.gathers_slot_zero else ())

    found = list(broken_rules(envelope, replace(handed, **change(handed)), excused))
    assert [line for line in found if said in line], found


@prepared_here
def test_small_scratch_is_seen_where_it_is_written(sound: Any) -> None:
    for rows, seen in ((2, True), (65, False)):
        handed, excused = sound("C", rows)
        small = replace(handed, mid_out=handed.mid_out[:0])
        assert bool(list(broken_rules(by_name("C"), small, excused))) is seen


@prepared_here
@pytest.mark.parametrize(
    ("generation", "rows", "change", "said"),
    [
        ("A", 2, lambda h: {"indices": h.indices[:, :64]}, "64 columns"),
        ("C", 2, lambda h: {"indices": h.indices[:, :32]}, "32 columns"),
        ("B", 65, lambda h: {"cache": h.cache.repeat(1, 2, 1, 1)}, "pages of 128"),
        ("B", 65, lambda h: {"extra_cache": h.extra_cache.repeat(1, 2, 1, 1)}, "extra pages of 128"),
        ("A", 65, lambda h: {"q": h.q[:, :8]}, "8 heads"),
    ],
)
def test_a_missing_kernel_is_seen(generation: str, rows: int, change: Any, said: str, sound: Any) -> None:
    handed, _ = sound(generation, rows)
    assert missing_kernel(by_name(generation), handed) == ""
    assert said in missing_kernel(by_name(generation), replace(handed, **change(handed)))


def test_a_call_that_is_not_handed_over_is_unknown() -> None:
    refused = RouteCase(tokens=65, heads=12, backend="flashinfer", flashinfer="C", main=cache())
    assert route.handed_over(OwnTarget(), refused).unknown
    assert route.handed_over(OwnTarget(), replace_case(refused, flashinfer=None)).unknown
    assert judge(by_id("ROUTE-CONTRACT"), OwnTarget(), replace_case(refused, capability=(9, 0))).unknown


def replace_case(case: RouteCase, **changed: Any) -> RouteCase:
    return case.model_copy(update=changed)


# ---- routes that were none before


def told(generation: str) -> FlashInferBackend:
    return FlashInferBackend(Installed("told", by_name(generation), lambda call: None, needs_gpu=False))


@pytest.mark.parametrize(("generation", "yes"), [("A", False), ("B", False), ("C", True)])
def test_a_scale_is_known_beforehand(generation: str, yes: bool) -> None:
    shape = replace(make(CallSpec(1, 16, MAIN)).shape, scale=2.0**-70)
    said = told(generation).supports(shape, (12, 0))
    assert bool(said) is yes
    assert yes or "softmax_scale" in said.reason


@prepared_here
@pytest.mark.parametrize("generation", ["A", "B"])
def test_more_index_entries_than_one_split_takes(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    split = pages.split_pages
    monkeypatch.setattr(pages, "rows_at_once", lambda width: 3)
    monkeypatch.setattr(pages, "split_pages", lambda *a, **k: (seen.append(a[2].shape[0]), split(*a, **k))[1])
    call = make(CallSpec(8, 16, MAIN))

    bench_of(generation).run(call)

    assert seen == [3, 3, 2]
    torch.testing.assert_close(call.lse.double(), exact(call)[1], rtol=1e-5, atol=1e-5)


def test_what_one_split_takes() -> None:
    assert pages.rows_at_once(2048) * 2048 < 1 << 24 <= (pages.rows_at_once(2048) + 1) * 2048
    assert pages.rows_at_once(0) == (1 << 24) - 1


# ---- what is drawn


def test_drawn_calls_reach_every_backend_every_refusal_and_both_kernels() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=700,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.route_cases())
    def collect(case: RouteCase) -> None:
        numbers = route_calls.numbers_of(case, route_calls.inputs_of(case))
        if numbers is None:
            seen["nothing to do"] += 1
            return
        served, _ = route_calls.expected(case, numbers)
        seen[served or "refused"] += 1
        # What stands against FlashInfer, whichever backend was asked for.
        seen.update(route_calls.expected(replace_case(case, backend="flashinfer"), numbers)[1].values())
        seen["tiny scale"] += (case.scale or 1.0) < 1e-9 and case.flashinfer in ("A", "B")
        if served == "flashinfer":
            seen[f"{case.flashinfer}, {'decode' if case.tokens <= 64 else 'prefill'}"] += 1

    collect()

    kernels = [f"{name}, {kernel}" for name in "ABC" for kernel in ("decode", "prefill")]
    refusals = ["installed", "capability", "layout", "query heads", "indices width", "tiny scale"]
    refusals += ["kv_cache page size", "kv_cache alignment"]
    wanted = ["flashinfer", "triton", "reference", "refused", "nothing to do", *kernels, *refusals]
    assert {name: seen[name] for name in wanted if not seen[name]} == {}
