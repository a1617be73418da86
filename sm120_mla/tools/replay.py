"""``sm120-mla replay``: judge one case file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import settings
from . import exits, judge_tree
from .nursery import Nursery
from .suite import prepare
from .worktrees import terminable

if TYPE_CHECKING:
    from ..case import CaseFile

__all__ = ["replay"]

_PATIENCE = 600.0
"""Seconds for a checkout to be judged on one case: git goes on with a commit that hangs."""


def replay(path: Path, target_name: str | None, mode: str | None, backend: str | None = None) -> int:
    """Judge the case of a file on a target and print the verdict; returns an exit code.

    A checkout is judged in a process of its own: whatever its code does there, it exits, crashes or hangs,
    is unknown. Raises ``CaseFileError``, ``ArgumentError`` for an unknown invariant or target,
    ``UnavailableError``.
    """
    from .. import case

    file = case.load(path)
    prepare(mode, backend)
    from ..targets import base
    from ..testing import text, verdict

    inv = verdict.by_id(file.invariant)
    name = target_name or settings.get("SM120_MLA_TARGET")
    if base.is_checkout(name):
        return _apart(path, file, name)
    target = base.resolve(name)
    found = verdict.judge(inv, target, file.case)
    if found.violated:
        print(text.render(inv, found, target, file.case, str(path)))
    else:
        _say(file, found.outcome, text.called(target), found.headline)
    return exits.verdict_code(found)


def _apart(path: Path, file: CaseFile, name: str) -> int:
    with terminable(), Nursery() as nursery:
        verdicts = judge_tree.judge(nursery, name, [file.invariant], timeout=_PATIENCE, cases=[path])
    found = verdicts[file.invariant]
    if found.outcome == "violated":
        print(found.text.replace("replay CASE ", f"replay {path} "))
    else:
        _say(file, found.outcome, name, found.headline)
    return {"violated": exits.VIOLATED, "holds": exits.HELD}.get(found.outcome, exits.NOTHING_JUDGED)


def _say(file: CaseFile, outcome: str, target: str, headline: str) -> None:
    from ..testing import text, verdict

    print(f"{file.invariant} {outcome}: {verdict.by_id(file.invariant).statement}")
    print(f"  target {target} ({text.how()})      {text.about(file.case)}")
    if headline:
        print(f"  {headline}")
