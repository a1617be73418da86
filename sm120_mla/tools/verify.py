"""``sm120-mla verify``: run the property tests in a process of their own, and print one table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import settings
from ..errors import ArgumentError
from . import exits
from .suite import SUITE, find_suite, prepare, require

__all__ = ["Wanted", "exit_code", "verify"]

_INTERRUPTED = 2
"""Pytest's own code for a run that a signal, or a failed collection, ended early."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line; None is the default."""

    mode: str | None = None
    target: str | None = None
    backend: str | None = None
    invariants: tuple[str, ...] = ()
    examples: int | None = None
    profile: str | None = None
    json: Path | None = None
    junit: Path | None = None
    workers: str = "auto"
    verbose: bool = False


def verify(wanted: Wanted) -> int:
    """Run the suite and print what it found; returns an exit code.

    Raises ``SuiteNotFoundError`` outside a checkout, ``ArgumentError`` for an unknown invariant or target,
    ``UnavailableError`` where the mode, the target or a package is not to be had.
    """
    root = find_suite(Path.cwd())
    require("pytest", "hypothesis")
    if wanted.workers != "auto" and not wanted.workers.isdecimal():
        raise ArgumentError("-n", repr(wanted.workers), "a number of processes, or auto", "Correct it.")
    prepare(wanted.mode, wanted.backend)
    markers = [_marker(id) for id in wanted.invariants]
    target = wanted.target or settings.get("SM120_MLA_TARGET")
    hints: list[str] = []
    if target != "own":
        from ..targets import base, lazy_scan

        # A name that is wrong is told before anything runs, and no code of a checkout runs in this process:
        # to load one of this repository is to run it, and engines load nothing yet.
        if not base.is_checkout(target) or not target.startswith("own:"):
            hints = [str(hint) for hint in lazy_scan.hints(base.resolve(target))]
    with tempfile.TemporaryDirectory(prefix="sm120-mla-") as scratch:
        found = Path(scratch) / "found.json"
        progress = Path(scratch) / "progress"
        log = Path(scratch) / "pytest.log"
        command = [
            *(sys.executable, "-m", "pytest", SUITE, "-m", " or ".join(markers)),
            *("--tb=short", "--sm120-target", target, "--sm120-json", str(found)),
            *("--sm120-progress", str(progress), *_options(wanted)),
        ]
        code = _run(command, root, log, progress, wanted.verbose)
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if not found.exists():
            return _no_findings(code, output)
        document = json.loads(found.read_text(encoding="utf-8"))
    if wanted.json is not None:
        wanted.json.parent.mkdir(parents=True, exist_ok=True)
        wanted.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document, Console(), hints)
    return exit_code(document, code)


def _marker(id: str) -> str:
    from ..testing import verdict

    return verdict.by_id(id).marker


def _options(wanted: Wanted) -> Iterator[str]:
    for id in wanted.invariants:
        yield from ("--sm120-invariant", id)
    if wanted.examples is not None:
        yield from ("--sm120-examples", str(wanted.examples))
    if wanted.profile is not None:
        yield from ("--hypothesis-profile", wanted.profile)
    if wanted.junit is not None:
        yield from ("--junitxml", str(wanted.junit.absolute()))
    if _installed("xdist"):
        yield from ("-n", wanted.workers)


def _installed(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def _run(command: list[str], root: Path, log: Path, progress: Path, verbose: bool) -> int:
    """Pytest's exit code; its output goes to ``log`` unless it is to be seen."""
    with log.open("wb") as file, _progress(verbose) as bar, _terminable():
        child = subprocess.Popen(
            command,
            cwd=root,
            env=settings.environment("PYTEST_XDIST_WORKER"),
            stdout=None if verbose else file,
            stderr=None if verbose else subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches it once, through us
        )
        try:
            while child.poll() is None:
                _follow(bar, progress)
                time.sleep(0.2)
        finally:
            _end(child)
        return child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the suite as Ctrl-C does, rather than leave it running alone."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(verbose: bool) -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tests"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=verbose or not console.is_terminal
    ) as bar:
        bar.add_task("property tests", total=None)
        yield bar


def _follow(bar: Progress, path: Path) -> None:
    if bar.disable or not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    totals = [int(line.split()[1]) for line in lines[:-1] if line.startswith("total ")]
    bar.update(bar.task_ids[0], completed=lines.count("done"), total=max(totals, default=None))


def _no_findings(code: int, output: str) -> int:
    if code == _INTERRUPTED or code < 0:
        raise KeyboardInterrupt
    print(output, file=sys.stderr)
    print(f"sm120-mla: pytest ended with {code} and left no findings", file=sys.stderr)
    return exits.INTERNAL


def exit_code(document: dict[str, Any], pytest_code: int) -> int:
    """The code of a run from what it found; ``pytest_code`` tells an interrupted run."""
    if document["failures"]:
        return exits.VIOLATED
    if document["errors"]:
        return exits.INTERNAL
    if pytest_code == _INTERRUPTED:
        return exits.INTERRUPTED
    if not any(row["held"] for row in document["invariants"]):
        return exits.NOTHING_JUDGED
    return exits.HELD if pytest_code == 0 else exits.INTERNAL


def show(document: dict[str, Any], console: Console, hints: Sequence[str] = ()) -> None:
    """Each violation's text, then the table, what was not run, what failed otherwise, and what to look at."""
    for failure in document["failures"]:
        console.print(failure["text"], markup=False, highlight=False, soft_wrap=True)
        console.print(f"  test: {failure['test']}\n", markup=False, highlight=False, soft_wrap=True)
    for error in document["errors"]:
        console.print(f"{error['test']} failed, and names no invariant:", style="red", markup=False)
        console.print(error["text"], markup=False, highlight=False, soft_wrap=True)
    from ..testing.report import one_line

    drawn = f"{document['generated']:,} generated"
    table = Table(title=f"{document['examples']:,} examples judged, {drawn}, target {document['target']}")
    table.add_column("invariant", no_wrap=True)
    columns = ["held", "violated", "unknown", "tests"]
    if any(row.get("absent") for row in document["invariants"]):
        columns.insert(3, "absent")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("mode")
    table.add_column("verdict")
    for row in document["invariants"]:
        numbers = (str(row.get(key, 0)) for key in columns)
        table.add_row(row["id"], *numbers, document["mode"], _word(row))
    console.print(table)
    for entry in document["not_run"]:
        line = f"not run: {entry['count']} x {entry['what']}: {one_line(entry['why'])}"
        console.print(line, style="dim", markup=False, highlight=False)
    for hint in hints:
        line = f"hint, no verdict: cached lazily, in whatever mode it is called: {hint}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _word(row: dict[str, Any]) -> str:
    if row["violated"]:
        return "[bold red]violated[/bold red]"
    if row["held"]:
        return "[green]holds[/green]"
    only_absent = row.get("absent") and not row["unknown"]
    return "[yellow]absent[/yellow]" if only_absent else "[yellow]unknown[/yellow]"
