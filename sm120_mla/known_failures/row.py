"""What a known failure is: its signatures in a log, the invariant it breaks, its cause and the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["CLASSES", "KnownFailure", "Signature", "Strength", "likely", "named", "symptom"]

CLASSES = {
    "a": "inference mode, lazy buffers, capture order, stale addresses",
    "b": "contiguity, strides, adaptive width, argument contracts",
    "c": "shapes without a kernel, the 64-row cutoff, hangs on those paths",
    "d": "page layout, page size, alignment, 32-bit offsets",
    "e": "index semantics: -1, out of range, lengths, empty rows",
    "f": "log-sum-exp, sink, NaN, quantisation",
    "g": "SM120 resources, compilers and capability gates",
    "h": "the reference interpreter and the test suite itself",
    "i": "stale binaries and mixed versions",
}
"""Classes of failure, by the letter a failure's id starts with."""


class Strength(IntEnum):
    """How much a line says: it names the fault, is usual with it, or is a symptom of several faults."""

    SYMPTOM = 1
    LIKELY = 2
    NAMED = 3


@dataclass(frozen=True)
class Signature:
    """One way in which a failure shows up in a log.

    A line is searched where it contains ``text`` (ASCII, as written); ``pattern``, a regular expression,
    must then be found in it, and its named groups are the values shown. ``near`` asks for one of these
    texts anywhere in the log, ``times`` for that many lines.
    """

    strength: Strength
    text: str
    pattern: str = ""
    near: tuple[str, ...] = ()
    times: int = 1

    @property
    def weight(self) -> int:
        """How much has to agree, in characters."""
        return len(self.text) + len(self.pattern) + 8 * bool(self.near)


def named(text: str, pattern: str = "", **more: object) -> Signature:
    """A signature that names the fault."""
    return Signature(Strength.NAMED, text, pattern, **more)  # type: ignore[arg-type]


def likely(text: str, pattern: str = "", **more: object) -> Signature:
    """A signature that is usual with the fault, and rare without it."""
    return Signature(Strength.LIKELY, text, pattern, **more)  # type: ignore[arg-type]


def symptom(text: str, pattern: str = "", **more: object) -> Signature:
    """A signature that several faults share."""
    return Signature(Strength.SYMPTOM, text, pattern, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class KnownFailure:
    """One row. ``id`` starts with the letter of its class.

    ``reports`` are the numbers of the surveyed public reports it stands for; ``references`` are
    ``owner/repository#number`` on GitHub. ``invariants`` are ids of the suite. ``example`` is a line (or a
    few) as it stands in a log, which the row's signatures match. ``narrows`` is the row of which this one is
    a case: both match, and this one is shown first.
    """

    id: str
    title: str
    signatures: tuple[Signature, ...]
    engine: str
    versions: str
    invariants: tuple[str, ...]
    cause: str
    remedy: str
    references: tuple[str, ...]
    example: str
    reports: tuple[str, ...] = ()
    narrows: str = ""

    @property
    def family(self) -> str:
        """Letter of the class."""
        return self.id[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """The references as addresses; GitHub forwards an issue number to a pull request."""
        found = (re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", reference) for reference in self.references)
        return tuple(f"https://github.com/{m[1]}/issues/{m[2]}" for m in found if m)
