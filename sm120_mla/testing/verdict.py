"""Verdict and Invariant, and the registry of both: what every check says, and how it is asked.

A check returns a verdict; it does not assert. ``judge`` is the only way to ask: it turns a target that
declines into unknown, one that has no such operation into absent, and a target that raises into a
violation that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import device
from ..errors import ArgumentError, UnavailableError
from ..targets.base import AbsentError, Target

__all__ = [
    "FAMILIES",
    "HOLDS",
    "Invariant",
    "TargetRaised",
    "Verdict",
    "absent",
    "all_invariants",
    "by_id",
    "invariant",
    "judge",
    "of_raised",
    "unknown",
    "violated",
]

FAMILIES = ("SPLIT", "BUF", "META", "ATTN", "CACHE", "ROUTE", "GRAPH", "COMPILE", "INTERP")
"""Families in the order they are shown; an invariant's family is what precedes the first dash."""


@dataclass(frozen=True)
class Verdict:
    """``holds``, ``violated``, ``unknown`` or ``absent``. Neither of the last two is a pass.

    Unknown: it could not be judged. Absent: there is nothing to judge, as the target has no such operation.
    ``headline`` is one line, ``details`` more. ``raised`` marks a violation in which the target raised
    rather than gave a wrong answer.
    """

    outcome: str
    headline: str = ""
    details: str = ""
    raised: bool = False

    @property
    def holds(self) -> bool:
        """Whether the check ran and found nothing."""
        return self.outcome == "holds"

    @property
    def violated(self) -> bool:
        """Whether the check ran and found a violation."""
        return self.outcome == "violated"

    @property
    def unknown(self) -> bool:
        """Whether nothing could be judged."""
        return self.outcome == "unknown"

    @property
    def absent(self) -> bool:
        """Whether the target has nothing to judge."""
        return self.outcome == "absent"


HOLDS = Verdict("holds")

_PACKAGE = __name__.split(".", 1)[0]


def violated(headline: str, details: str = "", *, raised: bool = False) -> Verdict:
    """A violation, in the domain's words."""
    return Verdict("violated", headline, details, raised)


def unknown(reason: str) -> Verdict:
    """Nothing could be judged, and why."""
    return Verdict("unknown", reason)


def absent(reason: str) -> Verdict:
    """There is nothing to judge, and why."""
    return Verdict("absent", reason)


class TargetRaised(Exception):
    """A target raised on a case it claims to serve. ``doing`` says in which step."""

    def __init__(self, doing: str, error: BaseException) -> None:
        self.doing, self.error = doing, error
        super().__init__(f"{doing}: {type(error).__name__}: {error}")


Check = Callable[[Target, Any], Verdict]


@dataclass(frozen=True)
class Invariant:
    """One statement, where it came from, and the check that decides it.

    ``case_kinds`` are the kinds of Case it applies to; ``where`` the places it can be decided:
    reference, compile, cuda, sm120.
    """

    id: str
    statement: str
    origin: str
    where: tuple[str, ...]
    case_kinds: tuple[str, ...]
    check: Check = field(repr=False)

    @property
    def family(self) -> str:
        """What precedes the first dash of the id."""
        return self.id.split("-", 1)[0]

    @property
    def marker(self) -> str:
        """The id as a pytest marker."""
        return self.id.replace("-", "_")

    def applies(self, case: Any) -> bool:
        """Whether the case is of a kind this invariant judges."""
        return case.kind in self.case_kinds


_registry: dict[str, Invariant] = {}


def invariant(
    id: str, statement: str, *, origin: str, where: tuple[str, ...], cases: tuple[str, ...]
) -> Callable[[Check], Check]:
    """Register the check below under ``id``; raises ``ArgumentError`` for an id twice or of no family."""

    def register(check: Check) -> Check:
        if id in _registry:
            raise ArgumentError("id", id, "an id used once", "Choose another.")
        if id.split("-", 1)[0] not in FAMILIES:
            raise ArgumentError("id", id, f"a family of {FAMILIES}", "Add the family to FAMILIES.")
        _registry[id] = Invariant(id, statement, origin, where, cases, check)
        return check

    return register


def all_invariants() -> list[Invariant]:
    """Every invariant, family by family."""
    from . import invariants  # noqa: F401  registers them

    order = {family: n for n, family in enumerate(FAMILIES)}
    return sorted(_registry.values(), key=lambda i: order[i.family])


def by_id(id: str) -> Invariant:
    """The invariant called ``id``; raises ``ArgumentError`` with the nearest names."""
    import difflib

    known = {i.id: i for i in all_invariants()}
    if id in known:
        return known[id]
    near = difflib.get_close_matches(id, known, n=3, cutoff=0.3) or sorted(known)
    raise ArgumentError(
        "invariant", repr(id), f"one of {', '.join(near)}, ...", "See `sm120-mla invariants`."
    )


def of_raised(raised: TargetRaised) -> Verdict:
    """What a target that raised is judged: a violation, unless it says what it lacks."""
    if isinstance(raised.error, AbsentError):
        return absent(f"{raised}")
    if isinstance(raised.error, ImportError) or _says_unavailable(raised.error):
        return unknown(f"{raised}")
    return violated(f"{raised.doing} raised {type(raised.error).__name__}", str(raised.error), raised=True)


def _says_unavailable(error: BaseException) -> bool:
    """Whether it is an ``UnavailableError``; by name, as a copy of the package has classes of its own."""
    return any(
        cls.__name__ == UnavailableError.__name__ and cls.__module__.startswith(_PACKAGE)
        for cls in type(error).__mro__
    )


def judge(inv: Invariant, target: Target, case: Any) -> Verdict:
    """Ask one invariant about one case of one target."""
    if not inv.applies(case):
        return unknown(f"{inv.id} does not judge cases of kind {case.kind!r}")
    support = target.supports(case, device.capability())
    if not support and support.missing:
        return absent(f"target {target.name} has nothing of the kind: {support.reason}")
    if not support:
        return unknown(f"target {target.name} does not serve this case: {support.reason}")
    try:
        return inv.check(target, case)
    except TargetRaised as raised:
        return of_raised(raised)
    except AbsentError as error:
        return absent(str(error))
    except Exception as error:
        if not _says_unavailable(error):
            raise
        return unknown(str(error))
