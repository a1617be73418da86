"""Tensors that a tree's source caches lazily, and allocates in whatever mode it is called: by its syntax.

A hint, not a verdict: nothing is run. What is looked for is an allocation that is kept (in a subscript, an
attribute, a global) on a path taken only while that is not there yet (``if x is None``, ``if k not in d``,
``if not hasattr``, after an early return, a caching decorator), outside ``with torch.inference_mode(False)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Hint", "hints", "scan_unguarded"]

_FACTORIES = {
    *("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full"),
    *("full_like", "arange", "tensor", "rand", "randn", "as_tensor", "eye", "linspace"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"),
}
_HOLDERS = ("Wrapper", "Workspace", "Buffer", "Buffers")
"""How classes are called that hold tensors from their constructor on."""
_CACHES = {"cache", "lru_cache", "cached_property"}
_SKIPPED = {"__pycache__", ".git", "test", "tests", "benchmark", "benchmarks"}


@dataclass(frozen=True, order=True)
class Hint:
    """One place: ``file`` (relative to what was scanned), ``line``, ``kept`` (where it is kept, as source),
    ``made`` (the call that makes it), ``function`` it lies in."""

    file: str
    line: int
    kept: str
    made: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kept} = {self.made} in {self.function}"


def scan_unguarded(path: str | Path) -> list[Hint]:
    """The hints of one file, or of every Python file below a folder, in order.

    A file that cannot be read or parsed gives none.
    """
    path = Path(path)
    if path.is_file():
        return sorted(_of_file(path, path.name))
    found: list[Hint] = []
    for file in path.rglob("*.py"):
        if not _SKIPPED & set(file.relative_to(path).parts[:-1]):
            found += _of_file(file, file.relative_to(path).as_posix())
    return sorted(found)


def hints(target: Any) -> list[Hint]:
    """The hints of the files a target's verdicts depend on; none for a target that names no files."""
    files: Iterable[Path] = getattr(target, "files", tuple)()
    root: Path | None = getattr(target, "root", None)
    found: list[Hint] = []
    for file in files:
        name = file.relative_to(root).as_posix() if root and file.is_relative_to(root) else file.name
        found += _of_file(file, name)
    return sorted(found)


def _of_file(path: Path, name: str) -> list[Hint]:
    try:
        text = path.read_text(encoding="utf-8")
        if "torch" not in text:
            return []
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += [Hint(name, *rest, node.name) for rest in _Function(node).found()]
    return found


class _Function:
    """One function: its statements in order, with whether each runs lazily and whether it is guarded."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.node = node
        self.globals: set[str] = set()
        self.sources: dict[str, frozenset[str]] = {}  # local name -> what the expression it came from names
        self.made: dict[str, ast.Call] = {}  # local name -> the unguarded, lazy allocation it holds
        self.out: list[tuple[int, str, str]] = []

    def found(self) -> list[tuple[int, str, str]]:
        """(line, where it is kept, what makes it) of each place."""
        decorators = [_last(d.func if isinstance(d, ast.Call) else d) for d in self.node.decorator_list]
        if any(_off(d) for d in self.node.decorator_list):
            return []
        if _CACHES & set(decorators):
            self._returns(self.node.body, False)
        if self.node.name != "__init__" and not self.node.name.startswith("test"):
            self._block(self.node.body, frozenset(), guarded=False)
        return self.out

    def _returns(self, body: list[ast.stmt], guarded: bool) -> None:
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                continue
            inner = guarded or _guards(statement)
            if isinstance(statement, ast.Return) and statement.value is not None and not inner:
                for call in _allocations(statement.value):
                    self.out.append((call.lineno, "what the cache keeps", _call(call)))
            for nested in _blocks(statement):
                self._returns(nested, inner)

    def _block(self, body: list[ast.stmt], lazy: frozenset[str], guarded: bool) -> None:
        """``lazy``: what the conditions ask about that are true until something is there."""
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue  # functions are looked at one by one
            if isinstance(statement, ast.Global):
                self.globals |= set(statement.names)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                self._assignment(statement, lazy, guarded)
            if isinstance(statement, ast.If):
                missing = self._named(t for t in _terms(statement.test) if _missing(t))
                present = self._named(t for t in _terms(statement.test) if _present(t))
                self._block(statement.body, lazy | missing, guarded)
                self._block(statement.orelse, lazy | present, guarded)
                if statement.body and isinstance(statement.body[-1], ast.Return):
                    lazy |= present
            elif isinstance(statement, ast.Try):
                self._block(statement.body, lazy, guarded)
                for handler in statement.handlers:
                    tried = self._named(statement.body) if _last(handler.type) == "KeyError" else frozenset()
                    self._block(handler.body, lazy | tried, guarded)
                self._block([*statement.orelse, *statement.finalbody], lazy, guarded)
            else:
                for nested in _blocks(statement):
                    self._block(nested, lazy, guarded or _guards(statement))

    def _named(self, nodes: Iterable[ast.AST]) -> frozenset[str]:
        """Every dotted name and string in some nodes, and in what their local names came from."""
        found = frozenset(name for node in nodes for name in _names(node))
        return found.union(*(self.sources.get(name, frozenset()) for name in found))

    def _assignment(self, statement: ast.Assign | ast.AnnAssign, lazy: frozenset[str], guarded: bool) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if statement.value is None:
            return
        calls = [] if guarded or not lazy else list(_allocations(statement.value))
        held = [
            self.made[n.id]
            for n in ast.walk(statement.value)
            if isinstance(n, ast.Name) and n.id in self.made
        ]
        for target in targets:
            if isinstance(target, ast.Name) and target.id not in self.globals:
                self.sources[target.id] = self._named([statement.value])
            if self._kept(target, lazy):
                for call in [*calls, *held]:
                    entry = (call.lineno, ast.unparse(target), _call(call))
                    if entry not in self.out:
                        self.out.append(entry)
            elif isinstance(target, ast.Name):
                self.made.pop(target.id, None)
                if calls:
                    self.made[target.id] = calls[0]

    def _kept(self, target: ast.expr, lazy: frozenset[str]) -> bool:
        """Whether a target outlives the call, and is what the conditions ask about."""
        if isinstance(target, ast.Subscript):
            return not isinstance(target.slice, ast.Slice) and ast.unparse(target.value) in lazy
        if isinstance(target, ast.Attribute):
            return ast.unparse(target) in lazy or target.attr in lazy
        return isinstance(target, ast.Name) and target.id in self.globals and target.id in lazy


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block:
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body


def _guards(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.With, ast.AsyncWith)) and any(
        _off(item.context_expr) for item in statement.items
    )


def _off(node: ast.expr) -> bool:
    """``torch.inference_mode(False)``, or with ``mode=False``."""
    if not isinstance(node, ast.Call) or _last(node.func) != "inference_mode":
        return False
    given = [*node.args, *(k.value for k in node.keywords if k.arg == "mode")]
    return any(isinstance(value, ast.Constant) and value.value is False for value in given)


def _allocations(value: ast.expr) -> Iterator[ast.Call]:
    """Calls in an expression that make a tensor, or an object of a class that may hold some."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = _last(node.func)
            holder = isinstance(node.func, ast.Attribute) and _last(node.func.value)
            made = name in _FACTORIES and (holder == "torch" or (bool(holder) and name.startswith("new_")))
            if made or (name.endswith(_HOLDERS) and name[:1].isupper()):
                yield node


def _names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Name, ast.Attribute)):
            yield ast.unparse(inner)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _terms(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _terms(value)
    else:
        yield test


def _missing(node: ast.expr) -> bool:
    """Whether a condition is true while something is not there yet."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        return (isinstance(node.ops[0], ast.Is) and none) or isinstance(node.ops[0], ast.NotIn)
    return (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _present(node.operand, name=True)
    )


def _present(node: ast.expr, name: bool = False) -> bool:
    """Whether a condition is true once something is there; ``name``: a bare one counts."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        return (isinstance(node.ops[0], ast.IsNot) and none) or isinstance(node.ops[0], ast.In)
    if isinstance(node, ast.Call):
        return _last(node.func) == "hasattr"
    return name and isinstance(node, (ast.Attribute, ast.Subscript))


def _last(node: ast.expr | None) -> str:
    """The last part of a dotted name, or ""."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _call(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}(...)"
