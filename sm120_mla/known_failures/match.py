"""Find known failures in a log of any size: one pass, block by block."""

from __future__ import annotations

import io
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from . import FAILURES
from .row import KnownFailure, Signature, Strength

__all__ = ["PASTE", "Diagnosis", "Match", "Sighting", "diagnose", "diagnose_paste"]

BLOCK = 1 << 22
"""Bytes read at a time."""

LONGEST_LINE = 1 << 24
"""Bytes after which a line is cut."""

PASTE = 1 << 12
"""Bytes up to which a text counts as pasted: a terminal or a report may have wrapped its lines."""

SHOWN = 3
"""Sightings kept of each failure, and last lines kept that look like an error."""

WINDOW = 240
"""Characters shown of a line, around what was found."""

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SUSPECTS = (b"Error: ", b"Exception: ", b"ssertion", b"fatal", b"FATAL")


@dataclass(frozen=True)
class Sighting:
    """Where a failure shows: 1-based line number, the line (or the part of it around the finding), values."""

    line: int
    text: str
    values: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """One failure found: ``count`` lines show it, the first few are ``sightings``, the last ``last_line``."""

    failure: KnownFailure
    strength: Strength
    weight: int
    count: int
    last_line: int
    sightings: tuple[Sighting, ...]

    @property
    def values(self) -> dict[str, list[str]]:
        """What the lines shown say, each name with its values in order of appearance."""
        found: dict[str, list[str]] = {}
        for sighting in self.sightings:
            for name, value in sighting.values.items():
                if value not in found.setdefault(name, []):
                    found[name].append(value)
        return found


@dataclass(frozen=True)
class Diagnosis:
    """``matches``, the most specific first; ``suspects`` are the last lines that look like errors."""

    matches: tuple[Match, ...]
    lines: int
    bytes: int
    suspects: tuple[Sighting, ...]


def diagnose(stream: BinaryIO, failures: Sequence[KnownFailure] = FAILURES) -> Diagnosis:
    """Read ``stream`` to its end. Memory does not grow with it, unless one line has more than 16 MiB."""
    return _read(stream, _Scan(failures))


def _read(stream: BinaryIO, scan: _Scan) -> Diagnosis:
    for block in _blocks(stream):
        scan.feed(block)
    return scan.result()


def diagnose_paste(text: bytes, failures: Sequence[KnownFailure] = FAILURES) -> Diagnosis:
    """As ``diagnose``; up to ``PASTE`` bytes also with its lines as one and in any case, if that shows more.

    Sightings in joined lines are in line 1.
    """
    found = diagnose(io.BytesIO(text), failures)
    if len(text) > PASTE:
        return found
    lines = [line.strip() for line in text.splitlines()]
    for glue in (b" ", b"") if len(lines) > 1 else ():  # wrapped between words, or cut at a column
        joined = diagnose(io.BytesIO(glue.join(lines)), failures)
        if {m.failure.id for m in joined.matches} > {m.failure.id for m in found.matches}:
            found = replace(joined, lines=found.lines, bytes=found.bytes, suspects=found.suspects)
    if not found.matches:
        shouted = _read(io.BytesIO(text), _Scan(failures, any_case=True))
        found = replace(shouted, suspects=found.suspects)
    return found


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines, some MiB at a time."""
    rest = b""
    while chunk := stream.read(BLOCK):
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            if len(chunk) < LONGEST_LINE:
                rest = chunk
                continue
            cut = len(chunk)
        yield chunk[:cut]
        rest = chunk[cut:]
    if rest:
        yield rest


@dataclass
class _Found:
    """What is known of one failure while the log is read, by the set of its signatures that a line has."""

    lines: Counter[int] = field(default_factory=Counter)
    last: dict[int, int] = field(default_factory=dict)
    sightings: dict[int, list[Sighting]] = field(default_factory=dict)


class _Scan:
    def __init__(self, failures: Sequence[KnownFailure], any_case: bool = False) -> None:
        self.failures = failures
        self.any_case = any_case
        self.lines = self.bytes = 0
        self.ended = True  # the last block ended with a newline
        self.found: dict[int, _Found] = {}
        self.suspects: deque[Sighting] = deque(maxlen=SHOWN)
        self.owners: dict[bytes, list[tuple[int, int, re.Pattern[str]]]] = {}
        for number, failure in enumerate(failures):
            for bit, signature in enumerate(failure.signatures):
                flags = re.IGNORECASE if any_case else 0
                pattern = re.compile(signature.pattern or re.escape(signature.text), flags)
                anchor = self._cased(signature.text.encode())
                self.owners.setdefault(anchor, []).append((number, bit, pattern))
        self.anchors = (*self.owners, *(s for s in _SUSPECTS if s not in self.owners))
        self.near = {t: False for f in failures for s in f.signatures for t in s.near}

    def _cased(self, text: bytes) -> bytes:
        return text.lower() if self.any_case else text

    def feed(self, block: bytes) -> None:
        """Search one block of whole lines."""
        self.bytes += len(block)
        if b"\x1b" in block:
            block = _ESCAPES.sub(b"", block)
        searched = self._cased(block)
        for text, seen in self.near.items():
            self.near[text] = seen or self._cased(text.encode()) in searched
        starts = set()
        for anchor in self.anchors:
            at = searched.find(anchor)
            while at >= 0:
                starts.add(block.rfind(b"\n", 0, at) + 1)
                end = block.find(b"\n", at)
                at = searched.find(anchor, end) if end >= 0 else -1
        number, counted = self.lines + 1, 0
        for start in sorted(starts):
            number += block.count(b"\n", counted, start)
            counted = start
            end = block.find(b"\n", start)
            self._line(number, block[start : end if end >= 0 else len(block)])
        self.lines += block.count(b"\n")
        self.ended = block.endswith(b"\n")

    def _line(self, number: int, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace")
        masks: dict[int, int] = {}
        hits: dict[int, tuple[int, dict[str, str]]] = {}
        for anchor, owners in self.owners.items():
            if anchor not in self._cased(raw):
                continue
            for failure, bit, pattern in owners:
                hit = pattern.search(line)
                if hit is None:
                    continue
                masks[failure] = masks.get(failure, 0) | 1 << bit
                at, values = hits.get(failure, (hit.start(), {}))
                hits[failure] = at, values | {k: v.strip() for k, v in hit.groupdict().items() if v}
        for failure, mask in masks.items():
            found = self.found.setdefault(failure, _Found())
            found.lines[mask] += 1
            found.last[mask] = number
            kept = found.sightings.setdefault(mask, [])
            if len(kept) < SHOWN:
                kept.append(Sighting(number, _window(line, hits[failure][0]), hits[failure][1]))
        suspect = next((raw.find(s) for s in _SUSPECTS if s in raw), -1)
        if suspect >= 0:
            text = _window(line, suspect)
            if all(text != known.text for known in self.suspects):
                self.suspects.append(Sighting(number, text))

    def result(self) -> Diagnosis:
        """What the log as a whole shows."""
        matches = [m for number, found in self.found.items() if (m := self._match(number, found))]
        matches.sort(key=_rank)
        lines = self.lines + (not self.ended)
        return Diagnosis(tuple(matches), lines, self.bytes, tuple(self.suspects))

    def _match(self, number: int, found: _Found) -> Match | None:
        failure = self.failures[number]
        valid = 0
        best: Signature | None = None
        for bit, signature in enumerate(failure.signatures):
            count = sum(n for mask, n in found.lines.items() if mask & 1 << bit)
            near = not signature.near or any(self.near[text] for text in signature.near)
            if count < signature.times or not near:
                continue
            valid |= 1 << bit
            if best is None or (signature.strength, signature.weight) > (best.strength, best.weight):
                best = signature
        if best is None:
            return None
        masks = [mask for mask in found.lines if mask & valid]
        sightings = sorted((s for mask in masks for s in found.sightings[mask]), key=lambda s: s.line)
        return Match(
            failure,
            best.strength,
            best.weight,
            sum(found.lines[mask] for mask in masks),
            max(found.last[mask] for mask in masks),
            tuple(sightings[:SHOWN]),
        )


def _rank(match: Match) -> tuple[int, bool, int, int, str]:
    """Strength first; then the case before the rule, and what had to agree in more."""
    failure = match.failure
    return -match.strength, not failure.narrows, -match.weight, match.sightings[0].line, failure.id


def _window(line: str, at: int) -> str:
    """The line without its blanks, or the part of it around ``at`` where it is long."""
    if len(line.strip()) <= WINDOW:
        return line.strip()
    start = max(0, min(at - WINDOW // 3, len(line) - WINDOW))
    cut = line[start : start + WINDOW].strip()
    return ("…" if start else "") + cut + ("…" if start + WINDOW < len(line) else "")
