"""Many preflights at once: engines, speculation and FlashInfer releases against tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .engines import Engine
from .handed import SERVED_HEADS
from .hazards import hazards
from .judge import Request, Row, judge
from .launches import Speculation

__all__ = ["FLASHINFER", "SPECULATION", "TP", "Cell", "Line", "cell", "markdown", "matrix"]

TP = (1, 2, 4, 8, 16)
SPECULATION = (Speculation(), Speculation("dspark", 5), Speculation("dspark", 7))
FLASHINFER = ("0.6.14", "0.6.18", "0.7.4")
_HANG = "prefill-hang"
_UNITS = {
    "heads": "{} heads",
    "indices width": "width {}",
    "page size": "pages of {}",
    "extra page size": "extra pages of {}",
    "extra indices view": "strided extra rows",
    "flashinfer version": "{}",
}


@dataclass(frozen=True)
class Cell:
    """``yes``; or ``no`` with each argument at fault and its launches, or ``-`` where no engine starts so."""

    state: str
    faults: tuple[str, ...] = ()
    hangs: bool = False

    def __str__(self) -> str:
        if self.state != "no":
            return f"{self.state}*" if self.hangs else self.state
        return "no: " + "; ".join(self.faults)


@dataclass(frozen=True)
class Line:
    """One engine, speculation and release: a cell for each TP."""

    engine: str
    speculation: str
    flashinfer: str
    cells: tuple[Cell, ...]


def cell(request: Request) -> Cell:
    """What one configuration comes to."""
    rows = judge(request)
    bad: dict[str, dict[str, None]] = {}
    for row in rows:
        if not row.verdict:
            bad.setdefault(_fault(row), {})[row.launch.what] = None
    if bad:
        return Cell("no", tuple(f"{fault} ({', '.join(who)})" for fault, who in bad.items()))
    return Cell("yes", hangs=any(hazard.id == _HANG for hazard in hazards(request, rows)))


def _fault(row: Row) -> str:
    text = _UNITS.get(row.verdict.argument, f"{row.verdict.argument} {{}}")
    return text.format(row.verdict.value)


def matrix(
    request: Request,
    engines: Sequence[Engine],
    tp: Sequence[int] = TP,
    speculation: Sequence[Speculation] = SPECULATION,
    flashinfer: Sequence[str] = FLASHINFER,
) -> tuple[Line, ...]:
    """Every combination; the rest of ``request`` stays as it is. Raises ``ArgumentError`` for a release."""
    lines = []
    for engine in engines:
        for scheme in speculation:
            for release in flashinfer:
                cells = []
                for size in tp:
                    heads = request.setup.model.heads
                    if heads % size or heads // size > max(SERVED_HEADS):
                        cells.append(Cell("-"))
                        continue
                    fields: dict[str, Any] = {"engine": engine, "speculation": scheme, "flashinfer": release}
                    setup = replace(request.setup, tp=size, **fields)
                    cells.append(cell(replace(request, setup=setup)))
                lines.append(Line(engine.name, str(scheme), release, tuple(cells)))
    return tuple(lines)


def markdown(lines: Sequence[Line], tp: Sequence[int] = TP) -> str:
    """The lines as a table; what repeats the cell to its left is a ditto mark."""
    header = "| engine | speculation | FlashInfer | " + " | ".join(f"TP {size}" for size in tp) + " |"
    rows = [header, "|" + "---|" * (3 + len(tp))]
    for line in lines:
        shown, before = [], ""
        for entry in map(str, line.cells):
            shown.append("〃" if entry == before and entry.startswith("no") else entry)
            before = entry
        cells = (line.engine, line.speculation, line.flashinfer, *shown)
        rows.append("| " + " | ".join(cells) + " |")
    if any(entry.hangs for line in lines for entry in line.cells):
        rows += ["", "\\* served, but prefill may hang: FlashInfer issue 3700, mended in 0.6.18"]
    return "\n".join(rows) + "\n"
