"""How a property test asks: ``hold("SPLIT-BYTES", target, case)``."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..case import CaseFile
from ..targets.base import Target
from . import text, verdict
from .verdict import Invariant, Verdict

__all__ = ["CASES", "Record", "Tally", "Violation", "ask_only", "collecting", "hold", "settle", "wanted"]

CASES = ".sm120/cases"
"""Where the case of a failing test is written, below the root of the run."""


class Violation(AssertionError):
    """An invariant does not hold; the message is the rendered text.

    Each invariant raises a subclass of its own: Hypothesis tells failures apart by type and place, and all
    of them come from one place.
    """

    def __init__(self, inv: Invariant, found: Verdict, target: Target, case: Any) -> None:
        self.invariant, self.verdict, self.target_name = inv, found, target.name
        self.file = CaseFile(invariant=inv.id, note=found.headline, case=case)
        super().__init__(text.render(inv, found, target, case, f"{CASES}/{self.file.name}"))


@functools.cache
def _violation_of(marker: str, raised: bool) -> type[Violation]:
    name = f"{marker}_raised" if raised else marker
    return type(name, (Violation,), {"__module__": Violation.__module__})


@dataclass
class Tally:
    """Examples of one invariant."""

    held: int = 0
    unknown: int = 0
    absent: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class Record:
    """What one test asked. Closed by its first violation: what follows is Hypothesis shrinking it."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    closed: bool = False

    def note(self, inv: Invariant, found: Verdict) -> None:
        """Count one verdict."""
        tally = self.tallies.setdefault(inv.id, Tally())
        self.closed |= found.violated
        if self.closed:
            return
        if found.unknown or found.absent:
            tally.unknown += found.unknown
            tally.absent += found.absent
            tally.reasons[found.headline] += 1
        else:
            tally.held += 1

    @property
    def nothing_judged(self) -> bool:
        """Whether something was asked and every answer was unknown or absent."""
        return bool(self.tallies) and not self.closed and not any(t.held for t in self.tallies.values())


_records: list[Record] = []
_asked: frozenset[str] = frozenset()
"""The invariants a run is about; empty: all of them."""


def ask_only(ids: Iterable[str] = ()) -> None:
    """From now on judge these invariants only, also in tests that ask more; without any, all of them.

    Raises ``ArgumentError`` for an id that does not exist.
    """
    global _asked
    _asked = frozenset(verdict.by_id(id).id for id in ids)


def wanted(inv_id: str) -> bool:
    """Whether the run is about that invariant."""
    return not _asked or inv_id in _asked


@contextlib.contextmanager
def collecting() -> Iterator[Record]:
    """A record of every ``hold`` inside; the innermost one counts."""
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def hold(inv_id: str, target: Target, case: Any) -> Verdict:
    """Judge, and raise ``Violation`` where the invariant is violated.

    An unknown or absent verdict is recorded and returned: a test all of whose examples were is reported as
    skipped. Raises ``ArgumentError`` for an id that does not exist.
    """
    __tracebackhide__ = True
    inv = verdict.by_id(inv_id)
    if not wanted(inv.id):
        return verdict.unknown("this run is about others")
    return settle(inv, verdict.judge(inv, target, case), target, case)


def settle(inv: Invariant, found: Verdict, target: Target, case: Any) -> Verdict:
    """Record a verdict reached elsewhere, and raise ``Violation`` where the invariant is violated.

    One of an invariant that the run is not about (``ask_only``) is neither recorded nor raised.
    """
    __tracebackhide__ = True
    if not wanted(inv.id):
        return found
    if _records:
        _records[-1].note(inv, found)
    if found.violated:
        raise _violation_of(inv.marker, found.raised)(inv, found, target, case)
    return found
