"""What ``sm120-mla aot`` shows: a line a launch configuration, the budgets, and the gap to an earlier run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import device
from ..errors import ArgumentError
from ..kernels.spec import CompileSpec
from ..testing.compile_check import CompileResult

__all__ = ["Gap", "Report", "Row", "load_baseline", "markdown", "resident_blocks", "show"]

SCHEMA = 1

SHARED_PER_SM = 102_400
"""Bytes of shared memory a multiprocessor of capability 12.x has; each block takes 1,024 besides its own.
This and the following from the CUDA C++ programming guide's table of compute capabilities."""
RESERVED_PER_BLOCK = 1024
REGISTERS_PER_SM = 65_536
WARPS_PER_SM = 48
BLOCKS_PER_SM = 24

_NUMBERS = ("ok", "unknown", "ptx_target", "shared_bytes", "registers", "stack_bytes", "spill_bytes")
"""What the gap compares; the time is not among them."""


@dataclass(frozen=True)
class Row:
    """One configuration for one target, and how it breaks its budget (empty where it holds)."""

    spec: CompileSpec
    result: CompileResult
    problems: tuple[str, ...]

    @property
    def kernel(self) -> str:
        """Module of the kernel, below ``kernels``."""
        return self.spec.module.removeprefix("kernels.")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json`` and a later ``--baseline``."""
        spec = self.spec
        return asdict(self.result) | {
            "kernel": self.kernel,
            "function": spec.function,
            "num_warps": spec.num_warps,
            "num_stages": spec.num_stages,
            "shared_budget": min(spec.shared_bytes, device.SM120_SHARED_MEMORY),
            "spill_budget": spec.spill_bytes,
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class Gap:
    """What differs from an earlier run, one sentence each."""

    source: str
    versions: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def sentences(self) -> Iterator[str]:
        """Everything there is to say."""
        same = "" if self.added or self.removed or self.changed else "no number differs, "
        yield (
            f"against {self.source}: {same}{len(self.added)} added, {len(self.removed)} removed, "
            f"{len(self.changed)} changed"
        )
        yield from (f"  toolchain: {text}" for text in self.versions)
        yield from (f"  added: {text}" for text in self.added)
        yield from (f"  removed: {text}" for text in self.removed)
        yield from (f"  changed: {text}" for text in self.changed)


@dataclass(frozen=True)
class Report:
    """One run: ``versions`` of the toolchain, a row a configuration and target, wall-clock ``seconds``."""

    target: str
    versions: dict[str, str]
    rows: tuple[Row, ...]
    seconds: float
    gap: Gap | None = None

    @property
    def broken(self) -> list[Row]:
        """Rows that break their budget or do not compile."""
        return [row for row in self.rows if row.problems]

    @property
    def unknown(self) -> list[Row]:
        """Rows that could not be judged."""
        return [row for row in self.rows if row.result.unknown]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "versions": self.versions,
            "shared_limit": device.SM120_SHARED_MEMORY,
            "seconds": round(self.seconds, 1),
            "rows": [row.as_dict() for row in self.rows],
            "gap": asdict(self.gap) if self.gap else None,
        }


def resident_blocks(shared_bytes: int, registers: int, num_warps: int) -> int:
    """Blocks that one multiprocessor of capability 12.x holds at once, by shared memory, registers, warps."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(
        SHARED_PER_SM // (shared_bytes + RESERVED_PER_BLOCK),
        REGISTERS_PER_SM // max(per_warp * num_warps, 1),
        WARPS_PER_SM // num_warps,
        BLOCKS_PER_SM,
    )


# ---- the gap to an earlier run


def load_baseline(path: Path) -> dict[str, Any]:
    """An earlier run's ``--json``. Raises ``ArgumentError`` where it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, not {SCHEMA}")
        rows = {(row["name"], row["target"]): row for row in data["rows"]}
        versions = dict(data["versions"])
        for row in rows.values():
            missing = {"kernel", "function", *_NUMBERS} - row.keys()
            if missing:
                raise ValueError(f"a row without {', '.join(sorted(missing))}")
    except OSError as error:
        raise ArgumentError("baseline", path, "a file that can be read", f"{error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ArgumentError(
            "baseline", path, "the JSON of an earlier run", f"{problem}. Write it with sm120-mla aot --json."
        ) from error
    return {"source": path.name, "versions": versions, "rows": rows}


def gap(
    baseline: dict[str, Any],
    versions: dict[str, str],
    rows: Sequence[Row],
    asked: Callable[[str, str, str, str], bool],
) -> Gap:
    """What differs. ``asked`` says of (name, kernel, function, target) whether this run looked at it."""
    before: dict[tuple[str, str], dict[str, Any]] = {
        key: row
        for key, row in baseline["rows"].items()
        if asked(row["name"], row["kernel"], row["function"], row["target"])
    }
    now = {(row.result.name, row.result.target): asdict(row.result) for row in rows}
    changed = []
    for key in (key for key in now if key in before):
        old, new = before[key], now[key]
        differs = [f"{n} {_figure(old[n])} -> {_figure(new[n])}" for n in _NUMBERS if old[n] != new[n]]
        if differs:
            changed.append(f"{key[0]} {key[1]}: {', '.join(differs)}")
    names = sorted(versions.keys() | baseline["versions"].keys())
    tools = [
        f"{name} {baseline['versions'].get(name, 'none')} -> {versions.get(name, 'none')}"
        for name in names
        if baseline["versions"].get(name) != versions.get(name)
    ]
    return Gap(
        baseline["source"],
        tuple(tools),
        tuple(" ".join(key) for key in now if key not in before),
        tuple(" ".join(key) for key in before if key not in now),
        tuple(changed),
    )


def _figure(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# ---- tables

_COLUMNS = ("configuration", "warps", "shared bytes", "budget", "registers", "spill bytes", "blocks/SM")


def _lines(rows: Sequence[Row]) -> Iterator[tuple[tuple[Row, ...], tuple[str, ...]]]:
    """A line a configuration, its targets together where they agree in every number."""
    for _, group in groupby(rows, key=lambda row: row.spec):
        same: dict[tuple[object, ...], list[Row]] = {}
        for row in group:
            key = tuple(getattr(row.result, n) for n in _NUMBERS if n != "ptx_target")
            same.setdefault(key, []).append(row)
        for merged in same.values():
            yield tuple(merged), _cells(merged)


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    spec, result = rows[0].spec, rows[0].result
    targets = ", ".join(row.result.target for row in rows)
    times = " ".join(f"{row.result.seconds:.1f}" for row in rows if row.result.seconds is not None)
    budget = f"{min(spec.shared_bytes, device.SM120_SHARED_MEMORY):,}"
    if not result.ok:
        said = "unknown" if result.unknown else "does not compile"
        return spec.name, str(spec.num_warps), said, budget, "", "", "", targets, times
    shared, registers, spill = result.shared_bytes or 0, result.registers or 0, result.spill_bytes or 0
    spilled = f"{spill:,} of {spec.spill_bytes:,}" if spill or spec.spill_bytes else "0"
    blocks = resident_blocks(shared, registers, spec.num_warps)
    cells = (spec.name, str(spec.num_warps), f"{shared:,}", budget, str(registers), spilled, str(blocks))
    return *cells, targets, times


def _summary(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A line a kernel: how many configurations, and the worst of each number."""
    for kernel, group in groupby(rows, key=lambda row: row.kernel):
        found = list(group)
        good = [row.result for row in found if row.result.ok]
        shared, registers, spill = (
            max((getattr(r, n) or 0 for r in good), default=0)
            for n in ("shared_bytes", "registers", "spill_bytes")
        )
        share = f"{shared:,} ({100 * shared / device.SM120_SHARED_MEMORY:.0f} %)"
        number = len({row.spec.name for row in found})
        bad = sum(bool(row.problems) for row in found) or "none"
        yield kernel, str(number), share, str(registers), f"{spill:,}", str(bad)


_SUMMARY = ("kernel", "configurations", "most shared bytes", "most registers", "most spill bytes", "broken")


def show(console: Console, report: Report) -> None:
    """The table, what is broken or unknown, and the gap."""
    table = Table(title=_title(report))
    for column in (*_COLUMNS, "targets", "s"):
        table.add_column(column, justify="left" if column in ("configuration", "targets") else "right")
    for _, group in groupby(_lines(report.rows), key=lambda line: line[0][0].kernel):
        table.add_section()
        for rows, cells in group:
            style = "red" if any(row.problems for row in rows) else ""
            style = style or ("yellow" if rows[0].result.unknown else "")
            table.add_row(*(Text(cell) for cell in cells), style=style)
    console.print(table)
    for line in closing(report):
        console.print(line, markup=False, highlight=False)


def closing(report: Report) -> Iterator[str]:
    """What the table does not say, in sentences."""
    for row in report.broken:
        for problem in row.problems:
            yield f"COMPILE-SM120 violated: {row.spec.name} for {row.result.target}: {problem}"
    for row in report.unknown:
        yield f"unknown: {row.spec.name} for {row.result.target}: {row.result.error}"
    if report.gap:
        yield from report.gap.sentences()
    held = len(report.rows) - len(report.broken) - len(report.unknown)
    yield (
        f"{held} of {len(report.rows)} hold, {len(report.broken)} broken, {len(report.unknown)} unknown, "
        f"in {report.seconds:.0f} s"
    )


def _title(report: Report) -> str:
    tools = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"{report.target}: shared memory limit {device.SM120_SHARED_MEMORY:,} bytes; {tools}"


def markdown(report: Report) -> str:
    """The same as Markdown: a table by kernel, one by configuration, and the sentences."""
    blocks = [_title(report), _markdown_table(_SUMMARY, _summary(report.rows))]
    blocks.append(_markdown_table((*_COLUMNS, "targets"), (cells[:-1] for _, cells in _lines(report.rows))))
    blocks.append("\n".join(f"- {line.strip()}" for line in closing(report)))
    return "\n\n".join(blocks)


def _markdown_table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
