"""What a fault is, and how it is judged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...case import load
from ...errors import CaseFileError
from ...targets.base import Target
from ...targets.own import Patch, patched
from ..verdict import Verdict, all_invariants, judge, unknown

__all__ = ["Fault", "FaultResult", "case_names", "load_case", "run_fault"]

_CASES = Path(__file__).resolve().parents[3] / "fixtures" / "faults"


@dataclass(frozen=True)
class Fault:
    """One regression.

    ``violates`` are the invariants that must be violated by it, each on at least one of ``cases`` and by a
    wrong answer rather than an exception; ``keeps`` those that must not be violated on any. ``patches`` are
    put into a copy of this package, or ``make`` gives the faulty target.
    """

    id: str
    sentence: str
    violates: tuple[str, ...]
    cases: tuple[str, ...]
    patches: tuple[Patch, ...] = ()
    keeps: tuple[str, ...] = ()
    make: Callable[[], AbstractContextManager[Target]] | None = field(default=None, repr=False)

    def target(self) -> AbstractContextManager[Target]:
        """The faulty target."""
        if self.make is not None:
            return self.make()
        return patched(self.patches, f"own with fault {self.id}")


@dataclass(frozen=True)
class FaultResult:
    """Every verdict by invariant (the worst over the cases), and what is not as declared."""

    fault: Fault
    verdicts: dict[str, Verdict]
    problems: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """Whether the fault is caught by exactly what it names."""
        return not self.problems


def case_names() -> list[str]:
    """Names of the stored cases."""
    return sorted(path.stem for path in _CASES.glob("*.json"))


def load_case(name: str) -> Any:
    """A stored case by name; raises ``CaseFileError`` where there is none."""
    path = _CASES / f"{name}.json"
    if not path.is_file():
        raise CaseFileError(
            "case", name, f"a file of fixtures/faults ({', '.join(case_names())})", "Run in a checkout."
        )
    return load(path).case


def worse(a: Verdict, b: Verdict) -> Verdict:
    """Of two verdicts on one invariant: violated by an answer, violated by raising, unknown, holds."""

    def rank(v: Verdict) -> int:
        return 3 - v.raised if v.violated else int(v.unknown)

    return b if rank(b) > rank(a) else a


def run_fault(fault: Fault, *, everything: bool = True) -> FaultResult:
    """Judge the faulty target by every invariant that applies to the fault's cases.

    Without ``everything``, by those only of which the fault declares something.
    """
    verdicts: dict[str, Verdict] = {}
    cases = [load_case(name) for name in fault.cases]
    declared = {*fault.violates, *fault.keeps}
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(fault.target())
        for case in cases:
            for inv in all_invariants():
                if inv.applies(case) and (everything or inv.id in declared):
                    verdict = judge(inv, target, case)
                    verdicts[inv.id] = worse(verdicts.get(inv.id, verdict), verdict)
    problems = []
    for id in fault.violates:
        verdict = verdicts.get(id, unknown("no case of this fault is judged by it"))
        if not verdict.violated:
            problems.append(f"{id} does not catch it: {verdict.outcome} {verdict.headline}".rstrip())
        elif verdict.raised:
            problems.append(f"{id} catches it by an exception only: {verdict.headline}")
    for id in fault.keeps:
        if id in verdicts and verdicts[id].violated:
            problems.append(f"{id} is violated too: {verdicts[id].headline}")
    return FaultResult(fault, verdicts, tuple(problems))
