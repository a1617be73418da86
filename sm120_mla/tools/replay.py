"""``sm120-mla replay``: judge one case file."""

from __future__ import annotations

from pathlib import Path

from .. import settings
from . import exits
from .suite import prepare

__all__ = ["replay"]


def replay(path: Path, target_name: str | None, mode: str | None, backend: str | None = None) -> int:
    """Judge the case of a file on a target and print the verdict; returns an exit code.

    Raises ``CaseFileError``, ``ArgumentError`` for an unknown invariant or target, ``UnavailableError``.
    """
    from .. import case

    file = case.load(path)
    prepare(mode, backend)
    from ..targets import resolve
    from ..testing import text, verdict

    inv = verdict.by_id(file.invariant)
    target = resolve(target_name or settings.get("SM120_MLA_TARGET"))
    found = verdict.judge(inv, target, file.case)
    if found.violated:
        print(text.render(inv, found, target, file.case, str(path)))
    else:
        print(f"{inv.id} {found.outcome}: {inv.statement}")
        print(f"  target {text.called(target)} ({text.how()})      {text.about(file.case)}")
        if found.headline:
            print(f"  {found.headline}")
    return exits.verdict_code(found)
