"""What a run found: collected from tests' properties, shown as a table, written as JSON.

Plain data only: a worker's part travels in ``report.user_properties`` and ``workeroutput``, and is put
together in the process that reports.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MARKS", "PROPERTY", "Row", "Summary", "decode", "encode", "one_line"]

PROPERTY = "sm120_mla"
"""Name of the property that holds a test's record, as JSON text: JUnit keeps text only."""

MARKS = "sm120_mla_marks"
"""Name of the property that holds a test's invariants, separated by blanks."""

SCHEMA_VERSION = 1
_MOST_REASONS = 5
_LONGEST_REASON = 300
_NAMED = 6


@dataclass
class Row:
    """One invariant's line: numbers of examples by verdict, and of tests that asked about it."""

    id: str
    held: int = 0
    violated: int = 0
    unknown: int = 0
    absent: int = 0
    tests: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def examples(self) -> int:
        """Examples of any verdict."""
        return self.held + self.violated + self.unknown + self.absent

    @property
    def undecided(self) -> str:
        """The word for examples that were not judged."""
        words = ("unknown",) * bool(self.unknown) + ("absent",) * bool(self.absent)
        return " or ".join(words) or "unknown"


def encode(tallies: dict[str, Any], failures: list[dict[str, str]], generated: int) -> str:
    """A test's record: ``tallies`` by id (``held``, ``unknown``, ``absent``, ``reasons``), ``failures`` as
    dicts of ``invariant``, ``text`` and ``case``, and how many examples Hypothesis ``generated``."""
    counted = {
        id: {
            "held": tally.held,
            "unknown": tally.unknown,
            "absent": tally.absent,
            "reasons": {r[:_LONGEST_REASON]: n for r, n in tally.reasons.most_common(_MOST_REASONS)},
        }
        for id, tally in tallies.items()
        if tally.held or tally.unknown or tally.absent
    }
    return json.dumps({"invariants": counted, "failures": failures, "generated": generated})


def decode(properties: list[tuple[str, object]]) -> tuple[dict[str, Any], list[str]]:
    """The record and the marks among a report's properties; empty where there are none."""
    named = dict(properties)
    record = named.get(PROPERTY)
    return (json.loads(str(record)) if record else {}), str(named.get(MARKS, "")).split()


@dataclass
class Summary:
    """What a run found, so far. ``catalogue``: (id, statement, where it can be decided) of each invariant."""

    mode: str = "unknown"
    target: str = "own"
    profile: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    catalogue: list[tuple[str, str, list[str]]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    generated: int = 0

    def row(self, id: str) -> Row:
        """The line of an invariant, made if need be."""
        return self.rows.setdefault(id, Row(id))

    def add(self, nodeid: str, outcome: str, properties: list[tuple[str, object]], detail: str) -> None:
        """One test's end. ``detail`` is the reason of a skip or the text of a failure."""
        record, marks = decode(properties)
        asked = record.get("invariants", {})
        failures = record.get("failures", []) if outcome == "failed" else []
        for id in sorted({*marks, *asked, *(failure["invariant"] for failure in failures)}):
            self.row(id).tests += 1
        for id, counts in asked.items():
            row = self.row(id)
            row.held += counts["held"]
            row.unknown += counts["unknown"]
            row.absent += counts["absent"]
            row.reasons.update(counts["reasons"])
        for failure in failures:
            self.row(failure["invariant"]).violated += 1
            self.failures.append(failure | {"test": nodeid})
        self.outcomes[outcome] += 1
        self.generated += record.get("generated", 0)
        if outcome == "skipped":
            about = f" ({', '.join(marks)})" if marks else ""
            self.skips[f"{detail}{about}"] += 1
        elif outcome == "failed" and not failures:
            self.errors.append({"test": nodeid, "text": detail})

    @property
    def judged(self) -> int:
        """Examples that were judged: held or violated."""
        return sum(row.held + row.violated for row in self.rows.values())

    @property
    def examples(self) -> int:
        """Examples of any verdict."""
        return sum(row.examples for row in self.rows.values())

    def ordered(self) -> list[Row]:
        """The lines in catalogue order, what the catalogue lacks last."""
        place = {id: n for n, (id, _, _) in enumerate(self.catalogue)}
        return sorted(self.rows.values(), key=lambda row: (place.get(row.id, len(place)), row.id))

    def not_run(self) -> list[tuple[str, int, str]]:
        """(what, how many, why) of everything that was not run or not decided."""
        found = [("skipped", count, reason) for reason, count in sorted(self.skips.items())]
        for row in self.ordered():
            found += [(f"{row.id} {row.undecided}", n, reason) for reason, n in row.reasons.most_common()]
        unasked = [id for id, _, _ in self.catalogue if id not in self.rows]
        if unasked:
            more = f" and {len(unasked) - _NAMED} more" if len(unasked) > _NAMED else ""
            found.append(("no test selected", len(unasked), ", ".join(unasked[:_NAMED]) + more))
        for mode in ("reference", "cuda", "sm120"):
            ids = [id for id, _, where in self.catalogue if mode in where and id in self.rows]
            if ids and self._lacks(mode):
                why = f"invariants that can be decided there too; this run: {self.mode}"
                found.append((f"{mode} mode", len(ids), why))
        return found

    def _lacks(self, mode: str) -> bool:
        covers = {"reference": ("reference",), "cuda": ("cuda",), "sm120": ("cuda", "sm120")}
        return mode not in covers.get(self.mode, (self.mode,))

    def lines(self) -> list[str]:
        """The table and what was not run, as text."""
        rows = [row for row in self.ordered() if row.tests]
        if not rows:
            return []
        width = max(len(row.id) for row in rows)
        lacks = any(row.absent for row in rows)  # a column only foreign targets need
        title = f" {'absent':>6}" if lacks else ""
        lines = [
            f"{'invariant':<{width}}  {'held':>6} {'violated':>8} {'unknown':>7}{title} {'tests':>5}  mode"
        ]
        for row in rows:
            absent = f" {row.absent:>6}" if lacks else ""
            numbers = f"{row.held:>6} {row.violated:>8} {row.unknown:>7}{absent} {row.tests:>5}"
            lines.append(f"{row.id:<{width}}  {numbers}  {self.mode}")
        drawn = f"{self.generated:,} examples generated by Hypothesis in all tests"
        lines.append(f"{self.examples:,} examples, target {self.target}; {drawn}")
        missing = self.not_run()
        if missing:
            lines.append("not run:")
            lines += [f"  {count:>4} x {what}: {one_line(why)}" for what, count, why in missing]
        return lines

    def document(self) -> dict[str, Any]:
        """Everything, as JSON data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode,
            "target": self.target,
            "profile": self.profile,
            "versions": self.versions,
            "examples": self.examples,
            "generated": self.generated,
            "tests": dict(self.outcomes),
            "invariants": [
                {
                    "id": row.id,
                    "held": row.held,
                    "violated": row.violated,
                    "unknown": row.unknown,
                    "absent": row.absent,
                    "tests": row.tests,
                    "reasons": dict(row.reasons),
                }
                for row in self.ordered()
            ],
            "not_run": [{"what": what, "count": n, "why": why} for what, n, why in self.not_run()],
            "failures": self.failures,
            "errors": self.errors,
        }

    def write(self, path: Path) -> None:
        """Write the document."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")


def one_line(text: str) -> str:
    """A reason, cut to a line and a half."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 160 else f"{flat[:157]}..."
