"""Judge commits: in parallel, each content once, and never again what a run before has judged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import queue
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import settings
from ..errors import SuiteNotFoundError, UnavailableError
from ..testing import machine
from . import judge_tree
from .git import Commit
from .judge_tree import Judged
from .nursery import Nursery
from .subjects import Subject
from .worktrees import Trees, terminable

__all__ = ["CACHE", "Judge", "Verdicts", "judging", "suite_content"]

Verdicts = dict[str, Judged]
_PACKAGE = Path(__file__).resolve().parents[1]
_ROOT = _PACKAGE.parent
_STORED = _ROOT / "fixtures" / "faults"
CACHE = _ROOT / ".sm120" / "judged"
"""Verdicts reached before, a file for each content of a tree."""

_JUDGES = ("judge_child.py", "nursery_server.py")
"""Of the tools, those that decide a verdict."""


@dataclass
class Judge:
    """Verdicts of ``subject`` at any of its commits. Made by ``judging``.

    ``timeout``: seconds for all invariants of one tree. ``cases``: case files to judge by instead of the
    stored cases. ``cache``: folder of verdicts reached before, or None; ``fresh``: they are not read.
    """

    subject: Subject
    trees: Trees
    nursery: Nursery
    timeout: float
    cases: Sequence[Path] = ()
    cache: Path | None = None
    workers: int = 1
    fresh: bool = False
    judged: int = 0
    """Trees judged in a process: not found in the cache."""
    forgetful: str = ""
    """Why what is judged cannot be remembered."""
    slots: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def verdicts(self, commit: Commit, ids: Sequence[str], *, again: bool = False) -> Verdicts:
        """Verdicts of one commit; with ``again``, from a new process in any case."""
        known = {} if again or self.fresh else self._known(commit)
        missing = [id for id in ids if id not in known]
        if missing:
            with self.lock:
                self.judged += 1
            try:
                known |= self._new(commit, missing)
            except UnavailableError as error:  # of the repository, and not of what it holds: not remembered
                return known | {id: Judged("unknown", str(error), ended=True) for id in missing}
            self._remember(commit, known)
        return {id: known[id] for id in ids}

    def many(
        self, commits: Iterable[Commit], ids: Sequence[str], done: Callable[[Commit], None] = lambda _: None
    ) -> dict[str, Verdicts]:
        """Verdicts by commit hash, in parallel; commits of one content are judged once. ``done`` is called
        for each as it is judged, in this thread."""
        alike: dict[str, list[Commit]] = {}
        for commit in commits:
            alike.setdefault(self.trees.content(commit), []).append(commit)
        found: dict[str, Verdicts] = {}
        pool = ThreadPoolExecutor(self.workers)
        try:
            futures: dict[Future[Verdicts], list[Commit]] = {
                pool.submit(self.verdicts, same[0], ids): same for same in alike.values()
            }
            for future in as_completed(futures):
                for commit in futures[future]:
                    found[commit.sha] = future.result()
                    done(commit)
        except BaseException:
            self.nursery.end()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return found

    def _new(self, commit: Commit, ids: Sequence[str]) -> Verdicts:
        with self.trees.written(commit) as tree, self._slot() as environment:
            found = judge_tree.judge(
                self.nursery,
                self.subject.target(tree),
                ids,
                timeout=self.timeout,
                tree=tree,
                sys_path=self.subject.sys_path(tree),
                cases=self.cases,
                **environment,
            )
            gone = next(
                (e.path for e in self.trees.entries(commit) if not os.path.lexists(tree / e.path)), ""
            )
        if not gone:
            return found
        reason = f"its code removed {gone} from the tree while that was judged"
        return {id: v if v.outcome == "violated" else Judged("unknown", reason) for id, v in found.items()}

    @contextlib.contextmanager
    def _slot(self) -> Iterator[dict[str, str]]:
        """Variables of one of the ``workers``: its GPU."""
        gpu = self.slots.get()
        try:
            yield {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        finally:
            self.slots.put(gpu)

    # What runs before have found

    def _known(self, commit: Commit) -> Verdicts:
        if self.cache is None:
            return {}
        try:
            stored = json.loads(self._file(commit).read_text(encoding="utf-8"))
            found = {id: Judged(**entry) for id, entry in stored["verdicts"].items()}
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        longer = self.timeout > stored["timeout"]
        return {id: verdict for id, verdict in found.items() if not (verdict.ended and longer)}

    def _remember(self, commit: Commit, verdicts: Verdicts) -> None:
        if self.cache is None or self.nursery.closed:
            return
        document = {
            "timeout": self.timeout,
            "verdicts": {id: verdict.to_json() for id, verdict in verdicts.items()},
        }
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.cache, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(document, file)
                Path(name).replace(self._file(commit))  # whole or not at all, whoever else writes it
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self.forgetful = f"{self.cache}: {error.strerror}"

    def _file(self, commit: Commit) -> Path:
        assert self.cache is not None
        facts = [self.subject.kind, self.trees.content(commit), suite_content(), *_surroundings()]
        facts += [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.cases]
        return self.cache / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"


@contextlib.contextmanager
def judging(
    subject: Subject,
    *,
    timeout: float,
    cases: Sequence[Path] = (),
    workers: int | None = None,
    fresh: bool = False,
) -> Iterator[Judge]:
    """A ``Judge``, whose processes and trees are gone after the block, however it is left.

    ``workers``: trees judged at a time; by default as many as there are GPUs, or cores in reference mode.
    ``fresh``: do not read what was judged before. Raises ``SuiteNotFoundError`` without stored cases.
    """
    if not cases and not _STORED.is_dir():
        raise SuiteNotFoundError(
            "stored cases",
            _STORED,
            "the folder of a checkout of sm120_mla",
            "Install a checkout with pip install -e '.[test]', or judge by a case of your own.",
        )
    gpus = [gpu.id for gpu in machine.usable_gpus()] if machine.expected_mode() != "reference" else []
    workers = workers or len(gpus) or len(os.sched_getaffinity(0))
    threads = {} if gpus else {"OMP_NUM_THREADS": "1"}  # the interpreter has no use for more
    trees, nursery = Trees(subject.repository, subject.files.written), Nursery(**threads)
    with terminable(), trees, nursery:
        judge = Judge(subject, trees, nursery, timeout, cases, CACHE, workers, fresh)
        for n in range(workers):
            judge.slots.put(gpus[n % len(gpus)] if gpus else "")
        yield judge


def suite_content() -> str:
    """A digest of what decides a verdict besides the tree: the package that runs, and its cases."""
    global _suite
    if not _suite:
        files = [
            *(f for f in _PACKAGE.rglob("*.py") if f.parent.name != "tools" or f.name in _JUDGES),
            *_STORED.glob("*.json"),
        ]
        digest = hashlib.sha256()
        for file in sorted(files):
            digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes() + b"\0")
        _suite = digest.hexdigest()
    return _suite


_suite = ""


def _surroundings() -> list[str]:
    names = ("torch", "triton", "numpy", "flashinfer-python")
    variables = ("SM120_MLA_BACKEND", "SM120_MLA_VALIDATE", "TRITON_DEFAULT_FP_FUSION")
    found = [machine.expected_mode(), platform.python_version(), *(settings.get(v) for v in variables)]
    for name in names:
        try:
            found.append(version(name))
        except PackageNotFoundError:
            found.append("")
    return found
