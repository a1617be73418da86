"""``sm120-mla faults``: the kill matrix."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..errors import ArgumentError
from . import exits
from .suite import prepare, require

__all__ = ["show_faults"]


def show_faults(ids: tuple[str, ...], as_json: bool) -> int:
    """Run the faults, in reference mode, and print what each violated.

    1 if an invariant that a fault declares did not notice it, or one it declares kept did; 125 if there
    are no faults to run. Raises ``ArgumentError`` for an unknown id.
    """
    require("hypothesis")
    prepare("reference")
    from ..testing import faults

    chosen = _chosen(faults.FAULTS, ids)
    rows = []
    with Progress(console=Console(stderr=True), transient=True, disable=not _on_terminal()) as progress:
        task = progress.add_task("faults", total=len(chosen))
        for fault in chosen:
            progress.update(task, description=fault.id)
            start = time.perf_counter()
            rows.append(_row(faults.run_fault(fault), time.perf_counter() - start))
            progress.advance(task)
    survived = [row for row in rows if row["problems"]]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        console = Console()
        console.print(_matrix(rows))
        for line in _legend(rows):
            console.print(line, markup=False, highlight=False)
        for row in rows if ids else survived:
            console.print(f"{row['id']}: {row['sentence']}", markup=False, highlight=False)
            for problem in row["problems"]:
                console.print(f"  {problem}", style="red", markup=False, highlight=False)
        console.print(f"{len(rows) - len(survived)} of {len(rows)} faults noticed as declared")
    if not rows:
        return exits.NOTHING_JUDGED
    return exits.VIOLATED if survived else exits.HELD


def _chosen(every: tuple[Any, ...], ids: tuple[str, ...]) -> list[Any]:
    known = {fault.id for fault in every}
    for id in ids:
        if id not in known:
            raise ArgumentError("fault", repr(id), f"one of {', '.join(sorted(known))}", "Correct the id.")
    return [fault for fault in every if not ids or fault.id in ids]


def _row(result: Any, seconds: float) -> dict[str, Any]:
    fault = result.fault
    return {
        "id": fault.id,
        "sentence": fault.sentence,
        "violates": list(fault.violates),
        "keeps": list(fault.keeps),
        "outcomes": {id: verdict.outcome for id, verdict in result.verdicts.items()},
        "headlines": {id: v.headline for id, v in result.verdicts.items() if v.violated},
        "problems": list(result.problems),
        "seconds": round(seconds, 3),
    }


def _cell(row: dict[str, Any], id: str) -> str:
    outcome, declared = row["outcomes"].get(id), id in row["violates"]
    if outcome == "violated":
        return "[bold green]X[/bold green]" if declared else "[red]x![/red]" if id in row["keeps"] else "x"
    if declared:
        return "[bold red]![/bold red]"
    return {"holds": ".", "unknown": "?", None: ""}[outcome]


def _matrix(rows: list[dict[str, Any]]) -> Table:
    """A fault a line, an invariant a column, numbered as in the legend."""
    table = Table(title="kill matrix", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    ids = _columns(rows)
    for number in range(1, len(ids) + 1):
        table.add_column(str(number), justify="center")
    table.add_column("s", justify="right")
    for row in rows:
        table.add_row(row["id"], *(_cell(row, id) for id in ids), f"{row['seconds']:.1f}")
    return table


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    from ..testing import verdict

    met = {id for row in rows for id in (*row["outcomes"], *row["violates"])}
    known = [inv.id for inv in verdict.all_invariants()]
    return [id for id in known if id in met] + sorted(met - set(known))


def _legend(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "  ".join(f"{n} {id}" for n, id in enumerate(_columns(rows), 1))
    yield "X violated as declared   x violated too   . held   ? unknown   ! not as declared"


def _on_terminal() -> bool:
    return Console(stderr=True).is_terminal
