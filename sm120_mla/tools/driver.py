"""A copy of this suite aside, to judge what ``git bisect run`` checks out.

The suite in a checkout changes with every step of a bisection of that checkout; one that lies elsewhere
does not. The copy's command, ``FOLDER/sm120-mla``, is the usual one, run from the copy: paths in its
arguments count from where it is called, and without ``--target`` it judges that folder as ``own``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError
from . import exits
from .suite import find_suite

__all__ = ["arguments", "export", "main"]

_COPIED = (
    "sm120_mla",
    "property_tests",
    "fixtures",
    "conftest.py",
    "sm120_mla_pytest.py",
    "pyproject.toml",
)
_JUDGING = ("verify", "replay")
_COMMAND = """#!/bin/sh
# Judges the tree in the current folder by the suite beside this file.
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1 exec {python} -m {module} "$@"
"""


def export(folder: Path) -> int:
    """Copy the suite that runs into ``folder``, with a command to run it; returns an exit code.

    Raises ``ArgumentError`` for a folder that has something in it, or that lies in the checkout.
    """
    root = find_suite(Path(__file__).resolve().parents[2])
    folder = folder.expanduser().resolve()
    if folder == root or root in folder.parents:
        raise ArgumentError(
            "--export-driver",
            str(folder),
            "a folder outside the checkout",
            "It must not be bisected with it.",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError("--export-driver", str(folder), "a new or empty folder", "Name another.")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        source = root / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)
    command = folder / "sm120-mla"
    text = _COMMAND.format(python=shlex.quote(sys.executable), module=__spec__.name)
    command.write_text(text, encoding="utf-8")
    command.chmod(0o755)
    print(f"git bisect run {shlex.quote(str(command))} replay CASE.json")
    return exits.HELD


def arguments(given: Sequence[str], where: Path) -> list[str]:
    """The arguments with their paths from ``where``, and a target where a command that judges has none."""
    made: list[str] = []
    for n, argument in enumerate(given):
        option, equals, value = argument.partition("=")
        if option == "--target" and equals:
            made.append(f"--target={_target(value, where)}")
        elif n and given[n - 1] == "--target":
            made.append(_target(argument, where))
        elif not argument.startswith("-") and (where / argument).is_file():
            made.append(str(where / argument))
        else:
            made.append(argument)
    named = any(argument.partition("=")[0] == "--target" for argument in given)
    if not named and given and given[0] in _JUDGING:
        made += ["--target", f"own:{where}"]
    return made


def _target(name: str, where: Path) -> str:
    """The name with its path absolute, if it has one: ``module:attr`` stays."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{(where / path).resolve()}" if colon and (where / path).is_dir() else name


def main() -> int:
    """The copy's command."""
    from . import cli

    given = arguments(sys.argv[1:], Path.cwd())
    os.chdir(Path(__file__).resolve().parents[2])
    return cli.run(given)


if __name__ == "__main__":
    sys.exit(main())
