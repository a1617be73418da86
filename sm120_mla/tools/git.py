"""Reading a git repository, and nothing but reading: no hook, no filter, no index, no ref, no user's setting.

Every call is plumbing with an environment of its own. Trees are written out from the objects, so that a
repository without a checkout (bare, a mirror) serves as well, and one with a checkout is never touched:
neither its files nor its index, HEAD, refs or list of worktrees. Only what is committed is seen.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import settings
from ..errors import ArgumentError, UnavailableError

__all__ = ["Commit", "Entry", "Repository", "RepositoryError"]

_OPTIONS = (
    "--no-pager",
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.quotePath=false"),
    *("-c", "safe.directory=*"),  # whoever owns the files: nothing of the repository is run
    *("-c", "log.showSignature=false"),
    *("-c", "diff.external="),
)
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",  # no refresh of the index
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",  # a partial clone asks nobody for what it lacks,
    "GIT_ALLOW_PROTOCOL": "none",  # also where git is too old to know the former
    "LC_ALL": "C",
}
_REGULAR, _EXECUTABLE, _LINK = "100644", "100755", "120000"


class RepositoryError(ArgumentError):
    """What was named is no repository, or the repository has no such revision."""


@dataclass(frozen=True)
class Commit:
    """One commit. ``date`` is the committer's day, ``subject`` the first line of the message."""

    sha: str
    date: str
    subject: str

    @property
    def short(self) -> str:
        """The first ten digits."""
        return self.sha[:10]

    def __str__(self) -> str:
        """Hash, date and subject in one line."""
        return f"{self.short} {self.date} {self.subject}"


@dataclass(frozen=True)
class Entry:
    """A file of a tree: mode, blob, and path from the top."""

    mode: str
    blob: str
    path: str


class Repository:
    """The repository at ``path``: the top of a checkout, or a bare one.

    Raises ``RepositoryError`` where there is none, or where ``path`` lies inside one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_dir():
            raise RepositoryError("repository", str(path), "a folder", "Correct the path.")
        try:
            found = self._text("rev-parse", "--is-bare-repository", "--is-inside-git-dir", "--show-prefix")
        except subprocess.CalledProcessError as error:
            raise RepositoryError(
                "repository",
                str(path),
                f"a git repository ({_last_line(error.stderr)})",
                "Name the top of a checkout, or a bare repository.",
            ) from error
        prefix = ([*found.splitlines(), "", "", ""])[2]
        if prefix:
            top = self.path.parents[len(PurePosixPath(prefix).parts) - 1]
            raise RepositoryError("repository", str(path), "the top of a checkout", f"Name {top}.")

    def __str__(self) -> str:
        """The path."""
        return str(self.path)

    # Commits

    def commit(self, revision: str, what: str = "revision") -> Commit:
        """The commit of a revision; raises ``RepositoryError``, naming the argument ``what``."""
        remedy = "See `git log`; a shallow clone lacks older ones."
        if not revision or revision.startswith("-") or re.search(r"\s|\.\.|:", revision):
            raise RepositoryError(what, repr(revision), "a commit: a hash, a tag or a branch", remedy)
        try:
            sha = self._text("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError as error:
            raise RepositoryError(
                what, repr(revision), f"a commit of the repository at {self.path}", remedy
            ) from error
        return self._log("--no-walk", sha.strip())[0]

    def line(self, first: Commit, last: Commit, patterns: Sequence[str] = ()) -> list[Commit]:
        """The commits after ``first`` up to ``last`` along first parents, oldest first: a merged branch is
        one commit. With ``patterns``, those only that change a file they match.

        Raises ``RepositoryError`` where ``first`` is not on that line.
        """
        if first != last:
            self._on_line(first, last)
        return self._log("--reverse", "--first-parent", f"{first.sha}..{last.sha}", patterns=patterns)

    def all_until(self, last: Commit, patterns: Sequence[str]) -> list[Commit]:
        """As ``line``, from the first commit on."""
        return self._log("--reverse", "--first-parent", last.sha, patterns=patterns)

    def _on_line(self, first: Commit, last: Commit) -> None:
        parents = set(self._text("rev-list", "--first-parent", last.sha).split())
        if first.sha in parents:
            return
        if self._is_ancestor(last, first):
            raise RepositoryError(
                "ends", f"{first.short} and {last.short}", "the older one first", "Exchange them."
            )
        try:
            base = self._text("merge-base", first.sha, last.sha).strip()
        except subprocess.CalledProcessError:
            base = ""
        nearest = next((sha for sha in self._first_parents(base) if sha in parents), "") if base else ""
        raise RepositoryError(
            "ends",
            f"{first.short} and {last.short}",
            "the first one on the line of first parents that ends in the last one",
            f"The nearest commit on it is {nearest[:10]}." if nearest else "They have no commit in common.",
        )

    def _first_parents(self, sha: str) -> list[str]:
        return self._text("rev-list", "--first-parent", sha).split()

    def _is_ancestor(self, a: Commit, b: Commit) -> bool:
        return self._run("merge-base", "--is-ancestor", a.sha, b.sha, check=False).returncode == 0

    def _log(self, *arguments: str, patterns: Sequence[str] = ()) -> list[Commit]:
        paths = ["--", *map(_pathspec, patterns)] if patterns else ["--"]
        text = self._text("log", "-z", "--format=%H%x09%cs%x09%s", *arguments, *paths)
        return [Commit(*entry.split("\t", 2)) for entry in text.split("\0") if entry]

    # Trees

    def files(self, commit: Commit, patterns: Sequence[str]) -> list[Entry]:
        """The files of a commit that match, sorted by path: no submodules, and no bytecode."""
        raw = self._text(
            *("diff-tree", "-r", "-z", "--no-renames", "--raw", self._empty_tree, commit.sha),
            *("--", *map(_pathspec, patterns)),
        )
        fields = raw.split("\0")
        entries = [Entry(head.split()[1], head.split()[3], path) for head, path in _pairs(fields)]
        kept = [e for e in entries if e.mode in (_REGULAR, _EXECUTABLE, _LINK) and not _bytecode(e.path)]
        return sorted(kept, key=lambda e: e.path)

    def write(self, entries: Sequence[Entry], folder: Path) -> None:
        """Write files of the repository below ``folder``, byte for byte as they were committed.

        Raises ``UnavailableError`` for one whose content the repository lacks.
        """
        wanted = "".join(f"{entry.blob}\n" for entry in entries).encode()
        out = self._run("cat-file", "--batch", stdin=wanted, check=False).stdout
        for entry in entries:
            head, _, out = out.partition(b"\n")
            words = head.split()
            if len(words) != 3 or words[1] != b"blob":
                raise UnavailableError(
                    entry.path, "the repository lacks its content", "Fetch it: the clone is partial."
                )
            size = int(words[2])
            _place(folder, entry, out[:size])
            out = out[size + 1 :]

    def uncommitted(self, patterns: Sequence[str]) -> list[str]:
        """Files that match and differ from what is committed, or are new; () of a bare repository."""
        if self._text("rev-parse", "--is-inside-work-tree").strip() != "true":
            return []
        status = ("status", "-z", "--porcelain", "--no-renames", "--ignore-submodules=all")
        text = self._text(*self._no_filters(), *status, "--", *map(_pathspec, patterns))
        return [entry[3:] for entry in text.split("\0") if entry]

    def _no_filters(self) -> list[str]:
        """Options that switch off every filter of the repository, which a look at its files would run."""
        pattern = r"^filter\..*\.(clean|process|required)$"
        found = self._run("config", "-z", "--name-only", "--get-regexp", pattern, check=False).stdout
        keys = [key.decode("utf-8", "surrogateescape") for key in found.split(b"\0") if key]
        return [
            word for key in keys for word in ("-c", f"{key}={'false' if key.endswith('.required') else ''}")
        ]

    def diff(self, first: Commit | None, last: Commit, patterns: Sequence[str]) -> str:
        """What changed in the files that match; with ``first`` None, since the parent (or nothing)."""
        before = first.sha if first is not None else self._parent(last)
        return self._text(
            *("diff-tree", "-p", "-r", "-M", "--no-ext-diff", "--no-textconv", "--no-color"),
            *("--full-index", before, last.sha, "--", *map(_pathspec, patterns)),
        )

    def _parent(self, commit: Commit) -> str:
        done = self._run("rev-parse", "--verify", "--quiet", f"{commit.sha}^1", check=False)
        return done.stdout.decode().strip() if done.returncode == 0 else self._empty_tree

    @functools.cached_property
    def _empty_tree(self) -> str:
        return self._run("hash-object", "-t", "tree", "--stdin", stdin=b"").stdout.decode().strip()

    # Git

    def _text(self, *arguments: str) -> str:
        return self._run(*arguments).stdout.decode("utf-8", "replace")

    def _run(
        self, *arguments: str, stdin: bytes | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        command = ["git", "-C", str(self.path), *_OPTIONS, *arguments]
        try:
            if stdin is None:
                return subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, check=check, env=environment()
                )
            return subprocess.run(command, input=stdin, capture_output=True, check=check, env=environment())
        except FileNotFoundError as error:
            raise UnavailableError("git", "it is not installed", "Install git.") from error


def environment() -> dict[str, str]:
    """This process's environment without git's variables, and with those that keep git to itself."""
    theirs = [name for name in settings.environment() if name.startswith("GIT_")]
    return settings.environment(*theirs, **_ENVIRONMENT)


def _pathspec(pattern: str) -> str:
    return f":(top,glob){pattern}"


def _pairs(fields: list[str]) -> list[tuple[str, str]]:
    return list(zip(fields[0:-1:2], fields[1::2], strict=False))


def _bytecode(path: str) -> bool:
    return path.endswith((".pyc", ".pyo"))


def _place(folder: Path, entry: Entry, content: bytes) -> None:
    parts = PurePosixPath(entry.path).parts
    if ".." in parts or PurePosixPath(entry.path).is_absolute():
        raise UnavailableError(entry.path, "its path leaves the tree", "Mistrust this repository.")
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    if entry.mode == _LINK:
        path.symlink_to(content.decode("utf-8", "surrogateescape"))
        return
    path.write_bytes(content)
    if entry.mode == _EXECUTABLE:
        path.chmod(0o755)


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("fatal: ") if lines else "git says nothing"
