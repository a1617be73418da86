"""``sm120-mla faults``: the kill matrix."""

from __future__ import annotations

import json
import time
from typing import Any

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
        console.print(_table(rows))
        for row in survived:
            for problem in row["problems"]:
                console.print(f"{row['id']}: {problem}", style="red", markup=False, highlight=False)
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


def _table(rows: list[dict[str, Any]]) -> Table:
    """A fault a line: declared kills bold, other kills plain, what held counted."""
    table = Table(title="kill matrix")
    table.add_column("fault")
    table.add_column("violated ([bold]declared[/bold], others)")
    table.add_column("held", justify="right")
    table.add_column("seconds", justify="right")
    for row in rows:
        outcomes = row["outcomes"]
        killed = [
            f"[bold]{id}[/bold]" if id in row["violates"] else id
            for id, outcome in outcomes.items()
            if outcome == "violated"
        ]
        missed = [f"[red]not {id}[/red]" for id in row["violates"] if outcomes.get(id) != "violated"]
        held = sum(outcome == "holds" for outcome in outcomes.values())
        table.add_row(
            f"[bold]{row['id']}[/bold]\n{row['sentence']}",
            "\n".join(killed + missed),
            str(held),
            f"{row['seconds']:.1f}",
        )
    return table


def _on_terminal() -> bool:
    return Console(stderr=True).is_terminal
