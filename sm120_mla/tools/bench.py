"""``sm120-mla bench``: time the kernels on a CUDA GPU. Benchmarks report; they judge nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ArgumentError
from . import bench_attention, bench_metadata, bench_split, exits
from .bench_timing import Row

__all__ = ["GROUPS", "environment", "listing", "show_bench"]

GROUPS = {"split": bench_split, "metadata": bench_metadata, "attention": bench_attention}
"""Each has ``CASES`` and ``measure``."""

_COLUMNS = ("what", "median us", "best us", "floor us", "target us", "SM120 us", "MB moved", "GB/s", "note")


def environment() -> dict[str, str]:
    """What the figures were taken on."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def listing() -> list[dict[str, object]]:
    """Every case, with the time to reach where there is one; needs no GPU."""
    return [
        {"group": group, "name": case.name, "target_us": case.target_us}
        for group, module in GROUPS.items()
        for case in module.CASES
    ]


def show_bench(as_json: bool, only: Sequence[str] = (), list_cases: bool = False) -> int:
    """Time the groups asked for (default: all) and print one table, or JSON; or list the cases.

    Raises ``ArgumentError`` for a group that is none, and ``UnavailableError`` without a GPU.
    """
    for group in only:
        if group not in GROUPS:
            raise ArgumentError("only", repr(group), f"one of {', '.join(GROUPS)}", "Correct it.")
    if list_cases:
        cases = [case for case in listing() if not only or case["group"] in only]
        print(json.dumps(cases, indent=2) if as_json else "\n".join(map(_listed, cases)))
        return exits.HELD
    rows = [row for name, group in GROUPS.items() if not only or name in only for row in group.measure()]
    if as_json:
        print(json.dumps({"environment": environment(), "rows": [row.as_dict() for row in rows]}, indent=2))
    else:
        Console().print(table(rows, str(environment())))
    return exits.HELD


def _listed(case: dict[str, object]) -> str:
    target = f" (target {case['target_us']:g} us)" if case["target_us"] else ""
    return f"{case['group']}: {case['name']}{target}"


def table(rows: Iterable[Row], title: str) -> Table:
    """One line a row; a column that no row has a figure for is left out."""
    lines = [_cells(row) for row in rows]
    used = [i for i in range(len(_COLUMNS)) if any(line[i] for line in lines)]
    made = Table(title=title)
    for i in used:
        made.add_column(_COLUMNS[i], justify="left" if _COLUMNS[i] in ("what", "note") else "right")
    for line in lines:
        made.add_row(*(Text(line[i]) for i in used))
    return made


def _cells(row: Row) -> tuple[str, ...]:
    def us(value: float | None) -> str:
        return "" if value is None else f"{value:,.2f}"

    moved, rate = (f"{row.bytes_moved / 1e6:,.2f}", f"{row.gbps:,.0f}") if row.bytes_moved else ("", "")
    target = "" if row.target_us is None else f"{row.target_us:g}"
    return (
        row.name,
        us(row.median_us),
        us(row.best_us),
        us(row.floor_us),
        target,
        us(row.sm120_us),
        moved,
        rate,
        row.note,
    )
