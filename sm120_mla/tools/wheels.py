"""Bisect over versions of a wheel: which release of Triton or FlashInfer changed a verdict?

    python -m sm120_mla.tools.wheels triton 3.6.0 3.7.0 3.8.0 3.9.0 -- sm120-mla replay CASE.json

Each version that is asked about is installed into a folder of its own, which the command that follows sees
first. Its exit code decides: 0 good, 1 bad, anything else unknown. See docs/bisect.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import settings
from ..errors import ArgumentError, Sm120MlaError
from . import exits
from .search import Answer, Found, first_bad, most_questions
from .worktrees import terminable

__all__ = ["first_bad_version", "main", "pip_install"]

Installer = Callable[[str, Path], bool]
"""Put a requirement into a folder; False where it cannot be had."""

_TIMEOUT = 600.0
"""Seconds for one command."""


def pip_install(requirement: str, folder: Path) -> bool:
    """``pip install --target``, without dependencies: those that are installed serve."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--no-deps", "--target", str(folder), requirement], check=False)
    return done.returncode == 0


def first_bad_version(
    package: str,
    versions: Sequence[str],
    command: Sequence[str],
    *,
    install: Installer = pip_install,
    timeout: float = _TIMEOUT,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Find where ``command`` turns from exit code 0 to 1 among ``versions`` of ``package``, oldest first.

    Any other code, a version that cannot be installed and a command that takes longer than ``timeout``
    seconds are unknown. Raises ``EndsError`` where the first version is not good or the last not bad.
    """

    def ask(i: int) -> Answer:
        with tempfile.TemporaryDirectory(prefix="sm120-mla-wheel-") as folder:
            answer, why = _asked(f"{package}=={versions[i]}", Path(folder), command, install, timeout)
        say(f"{package} {versions[i]}: {answer} ({why})")
        return answer

    return first_bad(len(versions), ask)


def _asked(
    requirement: str, folder: Path, command: Sequence[str], install: Installer, timeout: float
) -> tuple[Answer, str]:
    if not install(requirement, folder):
        return Answer.unknown, "cannot be installed"
    path = os.pathsep.join(filter(None, [str(folder), settings.environment().get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            command,
            env=settings.environment(PYTHONPATH=path, TRITON_CACHE_DIR=str(folder / ".triton")),
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer.unknown, f"timed out after {timeout:g} s"
    known = {exits.HELD: Answer.good, exits.VIOLATED: Answer.bad}
    return known.get(done.returncode, Answer.unknown), f"exit code {done.returncode}"


def main(arguments: Sequence[str], install: Installer = pip_install) -> int:
    """``PACKAGE VERSION... -- COMMAND...``; returns an exit code: 0 where one version was found, 125 where
    versions that cannot be judged hide which of a few it is."""
    try:
        package, versions, command = _parsed(arguments)
        print(f"{len(versions)} versions; about {most_questions(len(versions))} are judged")
        with terminable():
            found = first_bad_version(package, versions, command, install=install, say=print)
    except Sm120MlaError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return exits.WRONG_USE
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    names = " or ".join(versions[i] for i in found.candidates)
    print(f"first bad: {package} {names}; last good: {versions[found.good]}")
    return exits.HELD if found.exact else exits.NOTHING_JUDGED


def _parsed(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    before, command = list(arguments), []
    if "--" in before:
        at = before.index("--")
        before, command = before[:at], before[at + 1 :]
    if len(before) < 3 or not command:
        raise ArgumentError(
            "arguments",
            " ".join(arguments),
            "PACKAGE VERSION VERSION... -- COMMAND...",
            "See docs/bisect.md.",
        )
    if shutil.which(command[0]) is None:
        raise ArgumentError("command", command[0], "a program", "Correct it.")
    return before[0], before[1:], command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
