"""What is judged over a history: which repository, which of its files, and how a tree of it is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .git import Repository

__all__ = ["FILES", "Files", "Subject", "subject"]


@dataclass(frozen=True)
class Files:
    """Files of a tree, as git's glob patterns. No others are written out, so no others decide a verdict.

    ``code`` is under test; ``paths`` are imported by it and have a part in what it does; ``support`` is
    imported too, and changes often without one (an engine's table of settings): it is not followed.
    """

    code: tuple[str, ...]
    paths: tuple[str, ...] = ()
    support: tuple[str, ...] = ()

    @property
    def followed(self) -> tuple[str, ...]:
        """Those whose commits are looked at."""
        return (*self.code, *self.paths)

    @property
    def written(self) -> tuple[str, ...]:
        """All."""
        return (*self.code, *self.paths, *self.support)


FILES = {
    "own": Files(
        code=(
            "sm120_mla/*.py",
            *(f"sm120_mla/{folder}/**" for folder in ("kernels", "metadata", "backends", "codec")),
        ),
        support=("sm120_mla/reference/**",),
    ),
    "sglang": Files(
        code=("python/sglang/**/*flash_mla*sm120*.py", "python/sglang/**/flashinfer_cutedsl.py"),
        paths=("python/sglang/srt/runtime_context.py",),
        support=("python/sglang/srt/environ.py", "python/sglang/**/dsv4/quant_k_cache.py"),
    ),
    "vllm": Files(
        code=(
            "vllm/**/sparse_mla.py",
            "vllm/**/flashmla_sparse.py",
            *(f"vllm/**/{folder}/**/cache_utils.py" for folder in ("deepseek_v4", "deepseek_v4_ops")),
        ),
        support=("vllm/envs.py", "vllm/utils/math_utils.py", "vllm/model_executor/warmup/jit_warmup*.py"),
    ),
}
"""Kinds of checkout. A target of an entry point says the same by attributes ``CODE``, ``PATHS``, ``SUPPORT``
of its factory, and where it says nothing, every Python file counts."""

_EVERY_FILE = Files(("**/*.py",))


@dataclass(frozen=True)
class Subject:
    """A target over commits."""

    name: str
    kind: str
    repository: Repository
    files: Files

    @property
    def place(self) -> str:
        """The repository, as the user may name it again."""
        return str(self.repository.path)

    def target(self, tree: Path | str) -> str:
        """The name of the target that a tree holds."""
        return f"{self.kind}:{tree}" if self._takes_a_path else self.name

    def sys_path(self, tree: Path | str) -> list[str]:
        """Folders to import the target from."""
        return [] if self._takes_a_path else [str(tree)]

    @property
    def _takes_a_path(self) -> bool:
        return self.kind != self.name or self.kind == "own"


def subject(name: str, paths: Sequence[str] = ()) -> Subject:
    """What ``--target`` names: ``own`` (the repository around the current folder), ``own:PATH``,
    ``sglang:PATH``, ``vllm:PATH``, an entry point with a path, or ``module:attr`` of the repository in the
    current folder. ``paths`` replace the patterns that the target declares.

    Call after ``suite.prepare``. Raises ``ArgumentError`` for a name that is none of these or takes a path
    and has none, ``RepositoryError`` where there is no repository.
    """
    from ..targets import base

    kind, _, rest = name.partition(":")
    known = {point.name: point for point in base.entry_points(group=base.ENTRY_POINTS)}
    given = Files(tuple(paths)) if paths else None
    if name == "own":
        rest = str(_around(Path.cwd()))
    elif kind not in base.CHECKOUTS and kind not in known:
        if not kind or not rest:
            names = ", ".join(["own", *(f"{k}:PATH" for k in (*base.CHECKOUTS, *known)), "module:attr"])
            raise ArgumentError("target", repr(name), f"one of {names}", "Correct --target.")
        return Subject(name, name, Repository(Path.cwd()), given or _EVERY_FILE)
    if not rest:
        raise ArgumentError("target", repr(name), f"{kind}:PATH, PATH a repository", "Name its path.")
    repository = Repository(rest)
    files = given or (FILES[kind] if kind in FILES else _declared(known[kind].load()))
    return Subject(name, kind, repository, files)


def _declared(factory: Any) -> Files:
    code, paths, support = (tuple(getattr(factory, name, ())) for name in ("CODE", "PATHS", "SUPPORT"))
    return Files(code, paths, support) if code or paths else _EVERY_FILE


def _around(folder: Path) -> Path:
    """The nearest folder that is a repository's top, or the folder itself."""
    return next((f for f in (folder, *folder.parents) if (f / ".git").exists()), folder)
