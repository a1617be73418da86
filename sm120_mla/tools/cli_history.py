"""The commands over commits, and their options. What they do is in ``history`` and ``bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import settings
from ..errors import ArgumentError
from .cli_options import JsonFlag, ModeOption, TargetOption

__all__ = ["bisect", "history"]


def history(
    target: TargetOption = None,
    first: Annotated[
        str | None, typer.Option("--from", metavar="A", help="First commit (default: the first concerned).")
    ] = None,
    last: Annotated[str, typer.Option("--to", metavar="B", help="Last commit.")] = "HEAD",
    invariant: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this invariant; may be repeated.")
    ] = None,
    path_only: Annotated[
        bool,
        typer.Option(
            "--path-only", help="Only commits that change the code under test, not what it imports."
        ),
    ] = False,
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Files concerned, instead of the target's own; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the newest N commits.")] = None,
    mode: ModeOption = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds for a commit; what takes longer is unknown.")
    ] = 120,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", min=1, metavar="N", help="Commits judged at a time.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge again what was judged before.")] = False,
    json: JsonFlag = False,
) -> None:
    """Judge every commit that changes the files concerned: the timeline of each invariant.

    The target names a repository (own, own:PATH, sglang:PATH, vllm:PATH), of which nothing is changed or
    installed. What is interrupted goes on from there.
    """
    from .history import Wanted, show_history

    wanted = Wanted(
        target=target or settings.get("SM120_MLA_TARGET"),
        first=first,
        last=last,
        invariants=tuple(invariant or ()),
        paths=tuple(path or ()),
        path_only=path_only,
        limit=limit,
        mode=mode and mode.value,
        timeout=timeout,
        workers=workers,
        fresh=fresh,
        json=json,
    )
    raise typer.Exit(show_history(wanted))


def bisect(
    good: Annotated[str | None, typer.Option(metavar="A", help="A commit where it holds.")] = None,
    bad: Annotated[str, typer.Option(metavar="B", help="A later commit where it is violated.")] = "HEAD",
    invariant: Annotated[str | None, typer.Option(metavar="ID", help="What is violated.")] = None,
    case: Annotated[
        Path | None, typer.Option(metavar="CASE.json", help="Judge by this case, not by the stored ones.")
    ] = None,
    target: TargetOption = None,
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Judge each commit N times; contradiction is unknown.")
    ] = 1,
    absent_is_good: Annotated[
        bool, typer.Option("--absent-is-good", help="A commit without what is judged is good, not unknown.")
    ] = False,
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Files concerned, instead of the target's own; may be repeated."),
    ] = None,
    mode: ModeOption = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds for a commit; what takes longer is unknown.")
    ] = 120,
    save: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the shrunk case goes.", show_default=True)
    ] = Path(".sm120/cases"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge again what was judged before.")] = False,
    json: JsonFlag = False,
    export_driver: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only copy this suite aside, for git bisect run; see docs."),
    ] = None,
) -> None:
    """Find the first commit that violates an invariant, and report it ready to paste.

    Both ends are judged first. Commits that cannot be judged are skipped. Exits with 0 where one commit was
    found, with 125 where commits that cannot be judged hide which of a few it is.
    """

    if export_driver is not None:
        from .driver import export

        raise typer.Exit(export(export_driver))
    if good is None:
        raise ArgumentError("--good", None, "a commit where the invariant holds", "Say --good A.")
    from .bisect import Wanted
    from .bisect import bisect as search

    wanted = Wanted(
        target=target or settings.get("SM120_MLA_TARGET"),
        good=good,
        bad=bad,
        invariant=invariant,
        case=case,
        repeat=repeat,
        timeout=timeout,
        absent_is_good=absent_is_good,
        paths=tuple(path or ()),
        mode=mode and mode.value,
        save=save,
        fresh=fresh,
        json=json,
    )
    raise typer.Exit(search(wanted))
