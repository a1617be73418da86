"""ROUTE: every call a configuration can make has a way, or is refused before anything happens."""

from __future__ import annotations

from collections.abc import Callable

from ...case import RouteCase
from ...envelopes import Envelope
from ...targets.base import AttentionInputs, Target
from ...targets.routes import Routed, Routes, Way
from ..flashinfer_rules import broken_rules, missing_kernel
from ..observe import run
from ..route_calls import Numbers, envelope_of, expected, inputs_of, layout_by_name, numbers_of
from ..verdict import HOLDS, Verdict, invariant, unknown, violated

__all__ = ["handed_over"]

_REFUSALS = ("ArgumentError", "UnavailableError")
"""By name: a patched copy of the package has classes of its own."""


def _ask(target: Target, case: RouteCase, launch: bool) -> tuple[AttentionInputs, Routed] | None:
    """The call and what became of it; None for a target that tells no routes."""
    if not isinstance(target, Routes):
        return None
    inputs = inputs_of(case)
    way = Way(case.backend, case.capability, case.flashinfer, layout_by_name(case.layout), launch)
    asked: Routes = target
    return inputs, run("asking for the route", lambda: asked.route(inputs, way))


@invariant(
    "ROUTE-TOTAL",
    "every launch a supported configuration can make has a route, or the configuration is refused before the "
    "first launch, naming the argument at fault; what is said beforehand is what happens, and an order never "
    "falls back",
    origin="FlashInfer #4380, #5135, sglang #33407: a width or head count without a kernel dies at start-up; "
    "gaps 19-21, 24 of docs/upstream-gaps.md",
    where=("reference", "cuda", "sm120"),
    cases=("route",),
)
def route_total(target: Target, case: RouteCase) -> Verdict:
    """The question, the call with launches noted instead of made, and the tables of the generation."""
    asked = _ask(target, case, launch=False)
    if asked is None:
        return unknown(f"target {target.name} does not tell the routes of its calls")
    inputs, routed = asked
    numbers = numbers_of(case, inputs)
    judges: tuple[Callable[[RouteCase, Routed, Numbers | None], Verdict], ...] = (
        _refused_in_time,
        _said_is_done,
        _who_must,
        _evidence,
    )
    for judge in judges:
        found = judge(case, routed, numbers)
        if not found.holds:
            return found
    return HOLDS


def _how(answer: str | None, error: Exception | None) -> str:
    if error is not None:
        return f"raised {type(error).__name__}: {error}"
    return answer or "no backend"


def _said_is_done(case: RouteCase, routed: Routed, numbers: Numbers | None) -> Verdict:
    said, done = _how(routed.said, routed.said_error), _how(routed.served, routed.error)
    early = [name for name in routed.launches if name.endswith("while asked")]
    if early:
        return violated("asking for the route launches", f"launched: {', '.join(early)}")
    if said != done:
        return violated("the call does not go where it was said to", f"said: {said}\ndone: {done}")
    return HOLDS


def _refused_in_time(case: RouteCase, routed: Routed, numbers: Numbers | None) -> Verdict:
    error = routed.error
    if error is None:
        return HOLDS
    names = {cls.__name__ for cls in type(error).__mro__}
    said = f"{type(error).__name__}: {error}"
    if not names & set(_REFUSALS) or not (getattr(error, "argument", "") or getattr(error, "what", "")):
        return violated("a call dies without naming an argument", said)
    if routed.launches or routed.changed:
        happened = [*(f"launched {n}" for n in routed.launches), *(f"wrote {n}" for n in routed.changed)]
        return violated(
            "a call is refused when something has happened already", f"{'; '.join(happened)}\n{said}"
        )
    return HOLDS


def _who_must(case: RouteCase, routed: Routed, numbers: Numbers | None) -> Verdict:
    if numbers is None:
        return HOLDS if routed.served == "" else violated("a call without work is served", str(routed.served))
    wanted, reasons = expected(case, numbers)
    if wanted == routed.served:
        return HOLDS
    if wanted:
        done = _how(routed.served, routed.error)
        return violated(f"the call is not served by {wanted}", f"by {case.backend}: {done}")
    if routed.error is None:
        faults = "; ".join(f"{name}: {fault}" for name, fault in reasons.items())
        return violated(f"{routed.served} serves a call that is to be refused", faults)
    silent = [fault for fault in reasons.values() if fault not in str(routed.error)]
    if silent:
        return violated(f"the refusal does not name {silent[0]}", str(routed.error))
    return HOLDS


def _evidence(case: RouteCase, routed: Routed, numbers: Numbers | None) -> Verdict:
    """That what served left the traces of that backend, and of FlashInfer's kernels that there are."""
    handed = routed.handed
    if (routed.served == "flashinfer") != (handed is not None):
        return violated(f"{routed.served} serves, and FlashInfer is called {handed is not None}")
    launched = bool(routed.launches)
    if routed.error is None and launched != (routed.served in ("flashinfer", "triton")):
        return violated(f"{routed.served or 'no backend'} serves by {routed.launches or 'no launch'}")
    envelope = envelope_of(case)
    if handed is not None and envelope is not None:
        missing = missing_kernel(envelope, handed)
        if missing:
            return violated(f"FlashInfer {envelope.name} has no kernel for what it is handed", missing)
    return HOLDS


def handed_over(target: Target, case: RouteCase) -> Verdict:
    """ROUTE-CONTRACT of one attention call: what is prepared for FlashInfer, by its generation's rules."""
    envelope: Envelope | None = envelope_of(case)
    if envelope is None:
        return unknown("no FlashInfer counts as installed")
    asked = _ask(target, case, launch=True)
    if asked is None:
        return unknown(f"target {target.name} does not tell the routes of its calls")
    routed = asked[1]
    if routed.handed is None:
        return unknown(f"FlashInfer is not called: {_how(routed.served, routed.error)}")
    broken = list(broken_rules(envelope, routed.handed, routed.finite_slot_zero))
    missing = missing_kernel(envelope, routed.handed)
    if missing:
        broken.append(missing)
    if broken:
        headline = f"FlashInfer {envelope.name} would refuse or misread what it is handed"
        return violated(headline, "\n".join([f"{case.tokens} rows: {broken[0]}", *broken[1:6]]))
    return HOLDS
