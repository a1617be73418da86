"""COMPILE and INTERP: what is compiled for SM120 without a GPU, and what the interpreter is trusted with."""

from __future__ import annotations

from ...case import SubjectCase
from ...kernels.spec import CompileSpec
from ...targets.base import Target
from .. import compile_check, interp_facts
from ..verdict import HOLDS, Verdict, invariant, unknown, violated


def compile_subjects(target: Target) -> list[SubjectCase]:
    """One case per launch configuration of the target."""
    return [SubjectCase(subject=spec.name) for spec in target.compile_specs()]


def fact_subjects() -> list[SubjectCase]:
    """One case per interpreter fact."""
    return [SubjectCase(subject=fact.name) for fact in interp_facts.FACTS]


@invariant(
    "COMPILE-SM120",
    "every kernel and every launch configuration compiles for sm_120 and sm_121 within 101,376 bytes of "
    "shared memory and with no register spill beyond its declared budget",
    origin="what asks for more shared memory than a GPU has fails at its launch, with OutOfResources",
    where=("reference", "compile"),
    cases=("subject",),
)
def compile_sm120(target: Target, case: SubjectCase) -> Verdict:
    """All configurations of the target are compiled together, once."""
    specs = {spec.name: spec for spec in target.compile_specs()}
    if case.subject not in specs:
        return unknown(f"target {target.name} has no launch configuration {case.subject!r}")
    return _judge(target, specs[case.subject], tuple(specs.values()))


def _judge(target: Target, spec: CompileSpec, specs: tuple[CompileSpec, ...]) -> Verdict:
    package, path = target.compile_origin()
    if path is not None:  # a patched copy: compile what is asked, not all of it again
        specs = (spec,)
    results = [r for r in compile_check.compile_all(specs, package=package, path=path) if r.name == spec.name]
    for result in results:
        if result.unknown:
            return unknown(f"{spec.name} for {result.target}: {result.error}")
        if not result.ok:
            return violated(f"{spec.name} does not compile for {result.target}", str(result.error))
        problems = compile_check.judge(result, spec)
        if problems:
            return violated(f"{spec.name} for {result.target}: {problems[0]}", "\n".join(problems[1:]))
    return HOLDS if results else unknown(f"no result for {spec.name}")


@invariant(
    "INTERP-FACT",
    "the interpreter behaves as it was seen to, fact by fact; on a Triton nobody looked at, unknown",
    origin="each fact was met, and measured on Triton 3.6 to 3.9: testing/interp_facts.py",
    where=("reference",),
    cases=("subject",),
)
def interp_fact(target: Target, case: SubjectCase) -> Verdict:
    """The fact's probe, in this process."""
    if case.subject not in {fact.name for fact in interp_facts.FACTS}:
        return unknown(f"there is no interpreter fact {case.subject!r}")
    fact = interp_facts.fact(case.subject)
    standing, text = interp_facts.check(fact)
    if standing == "holds":
        return HOLDS
    if standing == "changed":
        return violated(f"interpreter fact {fact.name} changed", f"{text}\nrelied on by: {fact.relied_on_by}")
    return unknown(text)
