"""``sm120-mla history``: what every commit did to every invariant."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import UnavailableError
from . import exits, judge_child
from .commits import Verdicts, judging
from .git import Commit, RepositoryError
from .subjects import Subject, subject
from .suite import prepare, require

__all__ = ["Row", "Transition", "Wanted", "count", "show_history", "transitions"]

MARKS = {"holds": ".", "violated": "X", "unknown": "?", "absent": "-"}
_STYLES = {"holds": "green", "violated": "red", "unknown": "yellow", "absent": "dim"}
_WORDS = {"holds": "held", "violated": "violated", "unknown": "unknown", "absent": "absent"}
_PIPED_WIDTH = 140
"""Columns of the table where nobody says how wide the screen is."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line; None is the default. ``first`` and ``last`` are revisions."""

    target: str
    first: str | None = None
    last: str = "HEAD"
    invariants: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    path_only: bool = False
    limit: int | None = None
    mode: str | None = None
    timeout: float = 120
    workers: int | None = None
    fresh: bool = False
    json: bool = False


@dataclass(frozen=True)
class Row:
    """One commit and its verdicts."""

    commit: Commit
    verdicts: Verdicts


@dataclass(frozen=True)
class Transition:
    """Where an invariant's verdict changes from ``before`` to ``after`` (neither is unknown).

    ``commit`` is the first with the new verdict. ``candidates`` are the commits one of which made the
    change: more than ``commit`` where those before it could not be judged.
    """

    id: str
    before: str
    after: str
    commit: Commit
    candidates: tuple[Commit, ...] = field(default=())
    headline: str = ""


def transitions(rows: Sequence[Row]) -> list[Transition]:
    """Every change of a verdict, oldest commit first. What is unknown is passed over."""
    found = []
    last: dict[str, str] = {}
    hidden: dict[str, list[Commit]] = {}
    for row in rows:
        for id, verdict in row.verdicts.items():
            if verdict.outcome == "unknown":
                hidden.setdefault(id, []).append(row.commit)
                continue
            between, before = hidden.pop(id, []), last.get(id, verdict.outcome)
            if before != verdict.outcome:
                candidates = (*between, row.commit)
                found.append(
                    Transition(id, before, verdict.outcome, row.commit, candidates, verdict.headline)
                )
            last[id] = verdict.outcome
    return found


def show_history(wanted: Wanted) -> int:
    """Judge the commits and print the table, or JSON; returns an exit code.

    Raises ``ArgumentError`` for a target, an invariant, a revision or paths that lead nowhere, and
    ``UnavailableError`` where the mode or a package is not to be had.
    """
    require("hypothesis")
    mode = prepare(wanted.mode)
    from ..targets import lazy_scan

    ids = chosen(wanted.invariants)
    what = subject(wanted.target, wanted.paths)
    commits = _commits(what, wanted)
    dirty = what.repository.uncommitted(what.files.written)
    console = Console(stderr=True)
    if dirty:
        names = ", ".join(dirty[:3]) + (", ..." if len(dirty) > 3 else "")
        note = f"note: commits are judged; uncommitted changes are not ({names})"
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    with (
        judging(what, timeout=wanted.timeout, workers=wanted.workers, fresh=wanted.fresh) as judge,
        progress(console, len(commits)) as bar,
    ):
        try:
            found = judge.many(commits, ids, lambda _: bar.advance(bar.task_ids[0]))
        except KeyboardInterrupt:
            if judge.cache is not None and not judge.forgetful:
                console.print("what was judged so far is kept: the same command goes on from there")
            raise
        rows = [Row(commit, found[commit.sha]) for commit in commits]
        hints = []
        with contextlib.suppress(UnavailableError), judge.trees.written(commits[-1]) as tree:
            hints = [str(hint) for hint in lazy_scan.scan_unguarded(tree)]
    if judge.forgetful:
        note = f"note: what was judged is not remembered ({judge.forgetful})"
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if wanted.json:
        print(json.dumps(document(what, mode, ids, rows, hints), indent=2))
    else:
        show(what, mode, ids, rows, judge.judged, hints)
    return exit_code(rows)


def chosen(invariants: Sequence[str]) -> list[str]:
    """The invariants named, or all that say something of a target; raises ``ArgumentError``."""
    from ..testing import verdict

    return [verdict.by_id(id).id for id in invariants] or list(judge_child.default_invariants())


def _commits(what: Subject, wanted: Wanted) -> list[Commit]:
    patterns = what.files.code if wanted.path_only else what.files.followed
    last = what.repository.commit(wanted.last, "--to")
    if wanted.first is None:
        commits = what.repository.all_until(last, patterns)
    else:
        first = what.repository.commit(wanted.first, "--from")
        commits = [first, *what.repository.line(first, last, patterns)]
    if wanted.limit is not None:
        commits = commits[-wanted.limit :]
    if not any(what.repository.files(commit, patterns) for commit in commits):
        raise RepositoryError(
            "target",
            f"{what.name} up to {last.short}",
            f"commits that hold a file like {', '.join(patterns[:3])}",
            "Choose another --to, or name the files with --path.",
        )
    return commits


def progress(console: Console, total: int) -> Progress:
    """A bar of commits, on a terminal only."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("commits"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task("judging", total=total)
    return bar


def exit_code(rows: Sequence[Row]) -> int:
    """Violated if any commit is; held if one holds and none is violated."""
    outcomes = {verdict.outcome for row in rows for verdict in row.verdicts.values()}
    if "violated" in outcomes:
        return exits.VIOLATED
    return exits.HELD if "holds" in outcomes else exits.NOTHING_JUDGED


def document(
    what: Subject, mode: str, ids: Sequence[str], rows: Sequence[Row], hints: Sequence[str] = ()
) -> dict[str, Any]:
    """The history as plain data."""
    return {
        "schema_version": 1,
        "target": what.name,
        "repository": what.place,
        "mode": mode,
        "invariants": list(ids),
        "commits": [
            {
                **vars(row.commit),
                "verdicts": {id: verdict.to_json() for id, verdict in row.verdicts.items()},
            }
            for row in rows
        ],
        "transitions": [
            {
                "invariant": t.id,
                "before": t.before,
                "after": t.after,
                "commit": t.commit.sha,
                "candidates": [c.sha for c in t.candidates],
                "headline": t.headline,
            }
            for t in transitions(rows)
        ],
        "hints": list(hints),
    }


def show(
    what: Subject, mode: str, ids: Sequence[str], rows: Sequence[Row], judged: int, hints: Sequence[str]
) -> None:
    """The table, its legend, the transitions, why what is unknown is, and hints about the last commit."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    shown = [id for id in ids if any(row.verdicts[id].outcome != "absent" for row in rows)]
    changes = transitions(rows)
    changed = {(t.commit.sha, t.id): t for t in changes}
    families = [(name, list(members)) for name, members in groupby(shown, lambda id: id.split("-")[0])]
    title = f"{what.name} ({mode}): {count(len(rows), 'commit')}, {judged} judged now"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("commit", no_wrap=True, min_width=10)
    table.add_column("date", no_wrap=True, min_width=10)
    widths = [max(len(name), len(members)) for name, members in families]
    room = max(console.width - sum(widths) - 2 * len(widths) - 26, 12)
    table.add_column("subject", no_wrap=True, overflow="ellipsis", max_width=room)
    for (name, _), width in zip(families, widths, strict=True):
        table.add_column(name, no_wrap=True, min_width=width)
    for row in rows:
        marks = [_marks(row, members, changed) for _, members in families]
        table.add_row(row.commit.short, row.commit.date, Text(row.commit.subject), *marks)
    console.print(table)
    parts = (
        _legend(ids, shown, families),
        _changes(changes),
        _from_the_start(rows, shown),
        _reasons(rows, shown),
        _hinted(hints),
    )
    for line in chain.from_iterable(parts):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _marks(row: Row, ids: Sequence[str], changed: dict[tuple[str, str], Transition]) -> Text:
    text = Text()
    for id in ids:
        outcome = row.verdicts[id].outcome
        style = _STYLES[outcome] + (" bold reverse" if (row.commit.sha, id) in changed else "")
        text.append(MARKS[outcome], style)
    return text


def _legend(
    ids: Sequence[str], shown: Sequence[str], families: Sequence[tuple[str, list[str]]]
) -> Iterator[str]:
    yield "  ".join(f"{MARKS[outcome]} {word}" for outcome, word in _WORDS.items())
    for name, members in families:
        yield f"{name}: {' '.join(id.removeprefix(f'{name}-') for id in members)}"
    lacking = [id for id in ids if id not in shown]
    if lacking:
        yield f"absent throughout: {', '.join(lacking)}"


def _changes(changes: Sequence[Transition]) -> Iterator[str]:
    """Commit by commit, and for each kind of change the invariants."""
    if not changes:
        yield "no verdict changes"
    for commit, members in groupby(changes, lambda t: t.commit):
        yield ""
        yield str(commit)
        alike = sorted(members, key=lambda t: (t.before, t.after, t.candidates))
        for (before, after), same in groupby(alike, lambda t: (t.before, t.after)):
            yield f"  {_WORDS[before]} -> {_WORDS[after]}:"
            for t in same:
                yield f"    {t.id}{': ' if t.headline else ''}{_shorter(t.headline)}"
                if len(t.candidates) > 1:
                    names = ", ".join(c.short for c in t.candidates)
                    yield f"      by one of {names}: those before could not be judged"


def _from_the_start(rows: Sequence[Row], ids: Sequence[str]) -> Iterator[str]:
    """What no transition explains: violated by the first commit that says anything of it."""
    firsts = [(id, next((row for row in rows if row.verdicts[id].outcome != "unknown"), None)) for id in ids]
    found = [(id, row) for id, row in firsts if row and row.verdicts[id].outcome == "violated"]
    if found:
        yield ""
        yield "violated by the first commit judged:"
    for id, row in found:
        yield f"  {id} at {row.commit.short}: {_shorter(row.verdicts[id].headline)}"


def _reasons(rows: Sequence[Row], ids: Sequence[str]) -> Iterator[str]:
    """Each reason of what is unknown once, with the commits it was met at."""
    met: dict[str, tuple[list[str], list[str]]] = {}
    for row in rows:
        for id in ids:
            verdict = row.verdicts[id]
            if verdict.outcome == "unknown":
                commits, invariants = met.setdefault(verdict.headline, ([], []))
                commits += [row.commit.short] if row.commit.short not in commits else []
                invariants += [id] if id not in invariants else []
    if met:
        yield ""
        yield "unknown:"
    for reason, (commits, invariants) in met.items():
        yield f"  {_shorter(reason)}"
        yield f"    {', '.join(invariants)} at {_few(commits)}"


def _hinted(hints: Sequence[str]) -> Iterator[str]:
    if hints:
        yield ""
        yield "hints, which are no verdicts: kept tensors allocated in whatever mode, at the last commit:"
        yield from (f"  {hint}" for hint in hints)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} commits)"


def _shorter(text: str, most: int = 220) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def count(count: int, noun: str) -> str:
    """``1 commit``, ``2 commits``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
