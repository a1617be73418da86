"""``sm120-mla diagnose``: what a line of a log, or a whole log, is known to mean. Imports no torch."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ArgumentError
from ..known_failures import CLASSES, FAILURES, KnownFailure, Strength
from ..known_failures.match import PASTE, Diagnosis, Match, Sighting, diagnose, diagnose_paste
from . import exits

__all__ = ["show_diagnosis", "show_known"]

STDIN = "-"
_LOG_ENDINGS = (".log", ".txt", ".out", ".err", ".gz")

_HEADINGS = {
    Strength.NAMED: "the log names it",
    Strength.LIKELY: "likely, by what is usual with such a line",
    Strength.SYMPTOM: "a symptom that several faults share",
}

_TO_SEND = (
    "the log from its first line to the first traceback, with the launch command",
    "versions: the engine, flashinfer-python, flashinfer-cubin, flashinfer-jit-cache, torch, triton, CUDA",
    "the GPUs, and their number: nvidia-smi --query-gpu=name,compute_cap --format=csv",
    "sm120-mla doctor --json",
)


def show_diagnosis(log: str, as_json: bool) -> int:
    """Print what is known about ``log``: a text, a file (``.gz`` too), or ``-`` for standard input.

    0 if a known failure was recognised, 125 if none was. Raises ``ArgumentError`` for a file that is not
    there or cannot be read, and for an empty text.
    """
    with _opened(log) as (source, stream):
        head = stream.read(PASTE + 1)
        found = diagnose_paste(head) if len(head) <= PASTE else diagnose(cast(BinaryIO, _After(head, stream)))
    if as_json:
        print(json.dumps(_as_data(source, found), indent=2))
    else:
        _show(Console(), source, found)
    return exits.HELD if found.matches else exits.NOTHING_JUDGED


def show_known(as_json: bool) -> int:
    """List the known failures."""
    if as_json:
        print(json.dumps([_about(failure) for failure in FAILURES], indent=2))
        return exits.HELD
    table = Table(title=f"{len(FAILURES)} known failures")
    for column in ("id", "what", "engine", "invariants"):
        table.add_column(column, no_wrap=column == "id", overflow="fold")
    for letter, group in groupby(FAILURES, key=lambda failure: failure.family):
        table.add_section()
        table.add_row(Text(letter, style="bold"), Text(CLASSES[letter], style="bold"))
        for failure in group:
            cells = (failure.id, failure.title, failure.engine, ", ".join(failure.invariants))
            table.add_row(*map(Text, cells))
    Console().print(table)
    return exits.HELD


@contextlib.contextmanager
def _opened(log: str) -> Iterator[tuple[str, BinaryIO]]:
    """A name to show and the bytes, for each kind of ``log``."""
    if log == STDIN:
        if sys.stdin is None:
            raise ArgumentError("log", log, "an open standard input", "Pass the text or the file.")
        yield "standard input", sys.stdin.buffer
        return
    path = Path(log)
    if _is_there(path):
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rb") as stream:
                yield path.name, cast(BinaryIO, stream)
        except (OSError, EOFError) as error:
            raise ArgumentError("log", log, "a file that can be read", f"{error}.") from error
        return
    if not log.strip():
        raise ArgumentError("log", repr(log), "a text, a file or -", "Pass the error line.")
    if len(log.split()) == 1 and ("/" in log or log.endswith(_LOG_ENDINGS)):
        raise ArgumentError("log", log, "a file that exists, or a text", "Correct the path.")
    yield "the text given", io.BytesIO(log.encode())


class _After:
    """A stream of which the beginning was read."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self.head, self.stream = head, stream

    def read(self, size: int) -> bytes:
        head, self.head = self.head, b""
        return head or self.stream.read(size)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()  # pipes as well, and of a folder it is said that it cannot be read
    except (OSError, ValueError):  # a text that is too long for a name, or has a NUL
        return False


def _show(console: Console, source: str, found: Diagnosis) -> None:
    size = f"{_many(found.lines, 'line')}, {found.bytes:,} bytes"
    if not found.matches:
        _show_unknown(console, source, size, found)
        return
    known = _many(len(found.matches), "known failure")
    _say(console, f"{source}: {size}: {known}", style="bold")
    ruled = {match.failure.narrows for match in found.matches}
    for strength, group in groupby(found.matches, key=lambda match: match.strength):
        console.print()
        _say(console, _HEADINGS[strength], style="bold underline")
        for match in group:
            console.print()
            _show_match(console, match, short=match.failure.id in ruled)


def _show_match(console: Console, match: Match, short: bool) -> None:
    """Everything about one match; of the rule that another match is a case of, its title and remedy."""
    failure = match.failure
    count = f", {match.count:,} times, last in line {match.last_line:,}" if match.count > 1 else ""
    _say(console, f"{failure.id}: {failure.title}{count}", style="bold red")
    rows = [] if short else [(f"line {s.line:,}", s.text) for s in match.sightings]
    if match.values and not short:
        rows.append(("it says", ", ".join(f"{k} {' and '.join(v)}" for k, v in match.values.items())))
    if not short:
        rows += [
            ("where", f"{failure.engine}; {failure.versions}"),
            ("invariant", ", ".join(failure.invariants)),
            ("cause", failure.cause),
        ]
    rows.append(("remedy", failure.remedy))
    rows += [] if short else [("more", url) for url in failure.urls]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text:
            grid.add_row(Text(f"  {label}", style="dim"), Text(text))
    console.print(grid)


def _show_unknown(console: Console, source: str, size: str, found: Diagnosis) -> None:
    signatures = sum(len(failure.signatures) for failure in FAILURES)
    _say(
        console,
        f"{source}: {size}: nothing recognised. None of {signatures} signatures of {len(FAILURES)} known "
        "failures is in it, which does not mean that nothing is wrong.",
        style="bold",
    )
    if found.suspects:
        _say(console, "The last lines that look like an error:")
        for suspect in found.suspects:
            _say(console, f"  line {suspect.line:,}  {suspect.text}")
    _say(console, "To have it looked at, send:")
    for item in _TO_SEND:
        _say(console, f"  - {item}")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _about(failure: KnownFailure) -> dict[str, object]:
    return {
        "id": failure.id,
        "class": failure.family,
        "title": failure.title,
        "engine": failure.engine,
        "versions": failure.versions,
        "invariants": list(failure.invariants),
        "cause": failure.cause,
        "remedy": failure.remedy,
        "references": list(failure.urls),
    }


def _sighting(sighting: Sighting) -> dict[str, object]:
    return {"line": sighting.line, "text": sighting.text}


def _as_data(source: str, found: Diagnosis) -> dict[str, object]:
    return {
        "source": source,
        "lines": found.lines,
        "bytes": found.bytes,
        "matches": [
            _about(match.failure)
            | {
                "strength": match.strength.name.lower(),
                "count": match.count,
                "last_line": match.last_line,
                "sightings": [_sighting(s) for s in match.sightings],
                "values": match.values,
            }
            for match in found.matches
        ],
        "suspects": [_sighting(s) for s in found.suspects],
    }
