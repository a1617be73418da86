"""Load single modules out of somebody else's tree, without installing it and without leaving a trace.

``Checkout.module`` runs a file of the tree; what that file imports of its own package is either a file of
the tree too (``own``), a few named attributes (``stand_ins``), or a placeholder. The names of the package
stand in ``sys.modules`` only within ``Checkout.active()``, so that two trees, or a tree and an installed
engine of the same name, are never mixed up. Sources are compiled here: no bytecode is read or written.

What a tree does not have raises ``AbsentError``; what cannot be loaded, or was only a placeholder,
``UnavailableError`` with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, UnavailableError
from ..kernels.runtime import INTERPRETED, triton
from .base import AbsentError
from .placeholder import placeholder_module

__all__ = ["Checkout"]

_SKIPPED = {"__pycache__", ".git", "node_modules", "test", "tests"}


class Checkout:
    """A tree on disk that holds ``package``, of which single modules can be loaded.

    ``root``: the checkout. ``folders``: where below it the package may lie, first found first taken.
    ``own``: patterns (``fnmatch``, dotted) of modules that are loaded from the tree where others import
    them; one that fails to load becomes a placeholder, which ``notes`` tells. ``stand_ins``: attributes by
    dotted module name, taken where the tree's own is not; any other attribute is a placeholder. They may be
    of modules outside the package, and then count only where that package is not installed, as do the
    packages named in ``optional``, which become placeholders whole.

    Raises ``ArgumentError`` for a root that is no folder.
    """

    def __init__(
        self,
        root: str | Path,
        package: str,
        *,
        folders: Iterable[str] = ("",),
        own: Iterable[str] = (),
        stand_ins: Mapping[str, Mapping[str, Any]] | None = None,
        optional: Iterable[str] = (),
    ) -> None:
        self.root = Path(root).expanduser().resolve()
        if not self.root.is_dir():
            raise ArgumentError("target", str(root), "a folder: a checkout", "Correct the path.")
        self.package = package
        self.folder: Path | None = next(
            (self.root / folder for folder in folders if (self.root / folder / package).is_dir()), None
        )
        self.notes: list[str] = []
        """What was replaced by a placeholder, and why."""
        self._own = tuple(own)
        self._stand_ins = dict(stand_ins or {})
        self._optional = {
            *optional,
            *(name.split(".", 1)[0] for name in self._stand_ins if name.split(".", 1)[0] != package),
        }
        self._answers: dict[str, bool] = {}  # optional package -> whether names of it are ours
        self.files: dict[Path, None] = {}
        """Files of the tree that were run, ever, in order."""
        self._modules: dict[str, ModuleType] = {}
        self._required: set[str] = set()
        self._loading = 0
        self._depth = 0
        self._finder = _Finder(self)

    # Where things are

    def find(self, filename: str, known: Iterable[str] = (), *, defines: str | None = None) -> Path | None:
        """The file of that name: at one of the ``known`` folders (relative to the package), or anywhere.

        ``filename`` may be a pattern of ``glob``. ``defines``, a pattern of ``re``, names a function or class
        that the file must define at its top level: one left behind that only re-exports is passed over. None
        where the tree has none.
        """
        return next(iter(self.find_all(filename, known, defines=defines)), None)

    def find_all(
        self, filename: str, known: Iterable[str] = (), *, defines: str | None = None
    ) -> Iterator[Path]:
        """Every such file, those of ``find`` first."""
        if self.folder is not None:
            for path in _candidates(self.folder / self.package, filename, tuple(known)):
                if defines is None or defines_name(path, defines):
                    yield path

    def name_of(self, path: Path) -> str:
        """The dotted name of a file of the tree."""
        assert self.folder is not None
        parts = path.relative_to(self.folder).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def source_of(self, name: str) -> Path | None:
        """The file of a dotted name, or None where the tree has none (or only a folder)."""
        if self.folder is None:
            return None
        path = self.folder.joinpath(*name.split("."))
        if path.is_dir():
            path = path / "__init__.py"
            return path if path.is_file() else None
        path = path.with_suffix(".py")
        return path if path.is_file() else None

    def holds(self, name: str) -> bool:
        """Whether the tree has a file or a folder of that dotted name."""
        if self.folder is None:
            return False
        path = self.folder.joinpath(*name.split("."))
        return path.is_dir() or path.with_suffix(".py").is_file()

    # Loading

    def module(self, name: str | Path) -> ModuleType:
        """The module of a dotted name or a path of the tree, run if it was not yet.

        Raises ``AbsentError`` where the tree has no such file, ``UnavailableError`` where it does not load.
        """
        if isinstance(name, Path):
            name = self.name_of(name)
        if self.source_of(name) is None:
            raise AbsentError(f"{name}", "this tree has no such file", "Choose another commit.")
        self._required.add(name)
        try:
            with self.active():
                return importlib.import_module(name)
        except UnavailableError:
            raise
        except (Exception, SystemExit) as error:
            raise UnavailableError(
                name,
                f"loading it raised {type(error).__name__}: {error}",
                "See whether the commit needs a stand-in.",
            ) from error

    def optional_module(self, name: str) -> ModuleType | None:
        """A module as the tree's own code gets it, stand-ins included; None where importing it fails."""
        with self.active(), contextlib.suppress(Exception):
            return importlib.import_module(name)
        return None

    @contextlib.contextmanager
    def standing_in(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        """Within it, ``import name`` of an outside package gives these attributes, installed or not."""
        module = ModuleType(name)
        placeholder_module(module, self, attributes)
        before = sys.modules.get(name)
        sys.modules[name] = module
        try:
            yield
        finally:
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before

    def attribute(self, name: str | Path, attribute: str) -> Any:
        """An attribute of a module; raises ``AbsentError`` where it has none of that name."""
        module = self.module(name)
        if attribute not in vars(module):
            raise AbsentError(f"{attribute}", f"{module.__name__} has none", "Choose another commit.")
        return vars(module)[attribute]

    def modules(self) -> dict[str, ModuleType]:
        """The modules run from the tree so far, by dotted name: no stand-ins, no placeholders."""
        return {name: m for name, m in self._modules.items() if getattr(m, "__file__", None)}

    def forget(self) -> None:
        """Drop every module, as a new process would: the next ``module`` runs its file again."""
        self._modules.clear()
        self.notes.clear()

    @property
    def loading(self) -> bool:
        """Whether a file of the tree is being run right now."""
        return self._loading > 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it, imports of the package's name reach this tree: also those that functions do when called.

        Every call into the tree belongs inside. Afterwards ``sys.modules`` is as it was.
        """
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        aside = {name: sys.modules.pop(name) for name in list(sys.modules) if self._ours(name)}
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)
        self._depth = 1
        try:
            with self._own_cache():
                yield
        finally:
            self._depth = 0
            sys.meta_path.remove(self._finder)
            mine = {name: sys.modules.pop(name) for name in list(sys.modules) if self._ours(name)}
            self._modules = {name: m for name, m in mine.items() if m is not None}
            sys.modules.update(aside)

    def calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called within ``active``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.active():
                return function(*args, **kwargs)

        return call

    def _ours(self, name: str) -> bool:
        top = name.split(".", 1)[0]
        if top in self._optional and top not in self._answers:
            self._answers[top] = not _installed(top)
        return top == self.package or self._answers.get(top, False)

    @contextlib.contextmanager
    def _own_cache(self) -> Iterator[None]:
        """Compiled kernels of a tree go into a folder of its own. The interpreter compiles nothing."""
        if INTERPRETED:
            yield
            return
        with triton.knobs.cache.scope():
            tag = hashlib.sha256(str(self.root).encode()).hexdigest()[:12]
            triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / f"sm120-mla-{tag}")
            yield


class _Finder:
    """The import hook of one tree: it answers for the package's names, and for nothing else."""

    def __init__(self, tree: Checkout) -> None:
        self.tree = tree

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not self.tree._ours(name):
            return None
        source = self.tree.source_of(name)
        folder = source is None or source.name == "__init__.py"
        return ModuleSpec(name, _Loader(self.tree, source), is_package=folder)


class _Loader(Loader):
    """Runs a file of the tree, or makes the module that stands in for it."""

    def __init__(self, tree: Checkout, source: Path | None) -> None:
        self.tree, self.source = tree, source

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        tree, name = self.tree, module.__name__
        required = name in tree._required
        if self.source is not None and (required or any(fnmatchcase(name, p) for p in tree._own)):
            before = dict(vars(module))
            try:
                self._run(module)
                return
            except Exception as error:
                if required:
                    raise
                tree.notes.append(f"{name} is a stand-in: {type(error).__name__}: {error}")
                vars(module).clear()
                vars(module).update(before)
        module.__dict__.pop("__file__", None)
        placeholder_module(module, tree, tree._stand_ins.get(name, {}))

    def _run(self, module: ModuleType) -> None:
        assert self.source is not None
        path = str(self.source)
        code = compile(self.source.read_bytes(), path, "exec", dont_inherit=True)
        module.__file__ = path
        self.tree.files[self.source] = None
        self.tree._loading += 1
        try:
            exec(code, vars(module))
        finally:
            self.tree._loading -= 1


def defines_name(path: Path, name: str) -> bool:
    """Whether a file defines a function or class at its top level whose name matches the pattern."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"^(?:async\s+)?(?:def|class)\s+(?:{name})\b", text, re.MULTILINE) is not None


def _candidates(base: Path, filename: str, known: tuple[str, ...]) -> Iterator[Path]:
    seen = set()
    for folder in known:
        for path in sorted((base / folder).glob(filename)):
            seen.add(path)
            yield path
    for path in sorted(base.rglob(filename), key=lambda p: (len(p.parts), str(p))):
        if path not in seen and not _SKIPPED & set(path.relative_to(base).parts[:-1]):
            yield path


def _installed(package: str) -> bool:
    module = sys.modules.get(package)
    if module is not None:
        return not isinstance(getattr(module.__spec__, "loader", None), _Loader)
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            continue
        with contextlib.suppress(Exception):
            if finder.find_spec(package, None) is not None:
                return True
    return False
