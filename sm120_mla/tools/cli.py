"""The command line. Nothing heavy is imported before a command needs it: ``--help`` is quick.

Every way out goes through ``run``, which turns it into one of the exit codes of ``exits``.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .. import __version__
from ..errors import ArgumentError, UnavailableError
from . import cli_history, cli_preflight, exits
from .cli_options import BackendOption, JsonFlag, ModeOption, Profile, TargetOption
from .worktrees import terminable

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="sm120-mla",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Property tests and invariant checks of the sm120_mla kernel stack. Exit codes: "
    + "; ".join(f"{code} {meaning}" for code, meaning in exits.MEANING.items())
    + ".",
)
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The base of wrong use of the command line, which typer has from click, or brings itself since 0.29."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sm120-mla {__version__}")
        raise typer.Exit(exits.HELD)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(_say("no command given", exits.WRONG_USE))


@app.command()
def verify(
    mode: ModeOption = None,
    target: TargetOption = None,
    backend: BackendOption = None,
    invariant: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this invariant; may be repeated.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Examples of each property test, before scaling.")
    ] = None,
    profile: Annotated[Profile | None, typer.Option(help="Hypothesis profile.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit report.")] = None,
    workers: Annotated[
        str, typer.Option("-n", "--workers", metavar="N", help="Processes: a number, or auto.")
    ] = "auto",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show pytest's own output.")] = False,
) -> None:
    """Run the suite in the mode this machine allows, and print one table."""
    from .verify import Wanted, verify

    wanted = Wanted(
        mode=mode and mode.value,
        target=target,
        backend=backend and backend.value,
        invariants=tuple(invariant or ()),
        examples=examples,
        profile=profile and profile.value,
        json=json,
        junit=junit,
        workers=workers,
        verbose=verbose,
    )
    raise typer.Exit(verify(wanted))


@app.command()
def invariants(json: JsonFlag = False) -> None:
    """List the invariants: statement, origin, and where each can be decided."""
    from .catalogue import show_invariants

    raise typer.Exit(show_invariants(json))


@app.command()
def faults(
    fault: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Only these faults.")] = None,
    json: JsonFlag = False,
) -> None:
    """Put each fault into a copy of the code and show which invariants notice: the kill matrix."""
    from .kills import show_faults

    raise typer.Exit(show_faults(tuple(fault or ()), json))


@app.command()
def replay(
    case: Annotated[Path, typer.Argument(metavar="CASE.json", help="A case file, as a failure writes it.")],
    target: TargetOption = None,
    mode: ModeOption = None,
    backend: BackendOption = None,
) -> None:
    """Judge one case file."""
    from .replay import replay

    raise typer.Exit(replay(case, target, mode and mode.value, backend and backend.value))


app.command()(cli_history.history)
app.command()(cli_history.bisect)
app.command()(cli_preflight.preflight)


@app.command()
def doctor(json: JsonFlag = False) -> None:
    """Show what this machine can run, and why not what it cannot."""
    from .doctor import show_doctor

    raise typer.Exit(show_doctor(json))


@app.command()
def diagnose(
    log: Annotated[
        str | None,
        typer.Argument(metavar="TEXT|FILE|-", help="An error line, a server's log, or - for stdin."),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the known failures instead.")] = False,
    json: JsonFlag = False,
) -> None:
    """Say what an error line or a whole server log is known to mean: cause, invariant, remedy, reference."""
    from .diagnose import show_diagnosis, show_known

    if (log is None) != list_all:
        raise ArgumentError("log", log, "a text, a file or - (or --list alone)", "Pass the error line.")
    raise typer.Exit(show_known(json) if log is None else show_diagnosis(log, json))


@app.command()
def aot(
    target: TargetOption = "own",
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this kernel (its module, function or a configuration's name)."
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(metavar="SM", help="Only this target, such as sm_120; may be repeated."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show the gap to this JSON of an earlier run.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", min=1, metavar="N", help="Processes (default: the cores)."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds for all of it.")] = 1800.0,
    json: JsonFlag = False,
) -> None:
    """Compile every kernel for sm_120 and sm_121 with no GPU, and hold it to its budgets (COMPILE-SM120)."""
    from .aot import Wanted, show_aot

    wanted = Wanted(
        target=target or "own",
        kernels=tuple(kernel or ()),
        archs=tuple(arch or ()),
        baseline=baseline,
        format="json" if json else "markdown" if markdown else "table",
        workers=workers,
        timeout_s=timeout,
    )
    raise typer.Exit(show_aot(wanted))


@app.command()
def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="Only split, metadata or attention; may be repeated."),
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases; needs no GPU.")] = False,
    json: JsonFlag = False,
) -> None:
    """Time the kernels on a CUDA GPU: medians of CUDA-graph replays on cold memory. Judges nothing."""
    from .bench import show_bench

    raise typer.Exit(show_bench(json, tuple(only or ()), list_cases))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; no exception leaves as 1, or at all."""
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        return code if isinstance(code, int) else exits.HELD
    except _USAGE_ERROR as error:
        command = getattr(getattr(error, "ctx", None), "info_name", None)
        asked = f"sm120-mla {command}" if command and command in _names() else "sm120-mla"
        return _say(f"{error.format_message().rstrip('.')}. See {asked} --help.", exits.WRONG_USE)
    except ArgumentError as error:
        return _say(str(error), exits.WRONG_USE)
    except UnavailableError as error:
        return _say(str(error), exits.NOTHING_JUDGED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", exits.INTERRUPTED)
    except SystemExit as error:  # typer's way out where the reader of the output went away
        return _say(f"cut short ({error.code})", exits.INTERNAL)
    except Exception:
        return _say(f"internal error\n{traceback.format_exc()}", exits.INTERNAL)


def _names() -> set[str]:
    commands = app.registered_commands
    return {str(command.name or getattr(command.callback, "__name__", "")) for command in commands}


def _say(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # where nobody listens, the code still says it
        print(f"sm120-mla: {message}", file=sys.stderr)
    return code


def main() -> NoReturn:
    """Entry point of the ``sm120-mla`` command."""
    for stream in (sys.stdout, sys.stderr):  # a screen that lacks a letter costs no verdict
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with terminable():
        code = run()
    sys.exit(code)


if __name__ == "__main__":
    main()
