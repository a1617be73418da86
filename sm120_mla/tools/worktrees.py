"""Trees of commits, written aside for as long as they are judged.

They are written from the repository's objects into a temporary folder, so no worktree is registered and
nothing needs pruning. All are gone afterwards: also after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from .git import Commit, Entry, Repository

__all__ = ["Trees", "terminable"]


class Trees:
    """The files of ``repository`` that match ``patterns``, at any commit. Use it in a ``with`` block."""

    def __init__(self, repository: Repository, patterns: Sequence[str]) -> None:
        self.repository, self.patterns = repository, tuple(patterns)
        self._root: Path | None = None
        self._entries: dict[str, list[Entry]] = {}
        self._serial = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Trees:
        self._root = Path(tempfile.mkdtemp(prefix="sm120-mla-trees-")).resolve()
        return self

    def __exit__(self, *_: object) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def entries(self, commit: Commit) -> list[Entry]:
        """The files, sorted by path."""
        if commit.sha not in self._entries:
            self._entries[commit.sha] = self.repository.files(commit, self.patterns)
        return self._entries[commit.sha]

    def content(self, commit: Commit) -> str:
        """A digest of the files' names and content: equal where the trees are."""
        lines = [f"{entry.mode} {entry.blob} {entry.path}\0" for entry in self.entries(commit)]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    @contextlib.contextmanager
    def written(self, commit: Commit) -> Iterator[Path]:
        """A folder of its own that holds the files, within the block.

        Raises ``UnavailableError`` for a file whose content the repository lacks.
        """
        if self._root is None:
            raise RuntimeError("trees are written within a with block")
        with self._lock:
            self._serial += 1
            folder = self._root / f"{commit.short}-{self._serial}"
        folder.mkdir()
        try:
            self.repository.write(self.entries(commit), folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP interrupt as Ctrl-C does, so that what lies aside is cleaned up.

    One that is ignored, as under nohup, stays so. Does nothing outside the main thread, which alone receives
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
