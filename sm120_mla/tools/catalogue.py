"""``sm120-mla invariants``: what the suite checks."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from . import exits
from .suite import prepare

__all__ = ["show_invariants"]


def show_invariants(as_json: bool) -> int:
    """Print every invariant with its statement, origin and where it can be decided."""
    prepare(None)
    from ..testing import verdict

    found = verdict.all_invariants()
    if as_json:
        rows = [
            {"id": i.id, "statement": i.statement, "origin": i.origin, "where": list(i.where)} for i in found
        ]
        print(json.dumps(rows, indent=2))
        return exits.HELD
    table = Table(title=f"{len(found)} invariants", show_lines=True)
    for column in ("id", "statement", "origin", "decided in"):
        table.add_column(column, no_wrap=column == "id")
    for inv in found:
        table.add_row(inv.id, inv.statement, inv.origin, ", ".join(inv.where))
    Console().print(table)
    return exits.HELD
