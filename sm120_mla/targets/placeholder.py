"""What stands where a tree's module imports something that is not loaded.

While a file of the tree is being run, a placeholder may be a base class, an annotation or a decorator, all
of which change nothing, and counts as false. Once it is used for anything else, ``UnavailableError`` says
whose place it took, so that a verdict is unknown rather than wrong.
"""

from __future__ import annotations

import importlib
from abc import ABCMeta
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from ..errors import UnavailableError

__all__ = ["is_placeholder", "placeholder", "placeholder_module"]


class Tree(Protocol):
    """What a placeholder asks of its tree."""

    @property
    def loading(self) -> bool:
        """Whether a file of the tree is being run right now."""

    def holds(self, name: str) -> bool:
        """Whether the tree has a module of that dotted name."""


class _Placeholder(ABCMeta):
    """The type of placeholders. They are classes, so that a class of the tree can derive from one."""

    _tree: Tree
    _path: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name}: {cls!r} is a stand-in")
        return placeholder(cls._tree, f"{cls._path}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._tree.loading:
            raise _used(cls)
        if len(args) == 1 and not kwargs and callable(args[0]) and not is_placeholder(args[0]):
            return args[0]  # a decorator
        return placeholder(cls._tree, f"{cls._path}(...)")

    def __getitem__(cls, item: object) -> Any:
        if not cls._tree.loading:
            raise _used(cls)
        return cls

    def __bool__(cls) -> bool:
        if not cls._tree.loading:
            raise _used(cls)
        return False

    def __eq__(cls, other: object) -> bool:
        if cls is other:
            return True
        if not cls._tree.loading:
            raise _used(cls)
        return False

    def __hash__(cls) -> int:
        return id(cls)

    def __repr__(cls) -> str:
        return f"<stand-in for {cls._path}>"


def _used(cls: _Placeholder) -> UnavailableError:
    return UnavailableError(
        cls._path, "only a stand-in for it is loaded", "The adapter needs to know this commit's use of it."
    )


def _refuse(name: str) -> None:
    def method(cls: _Placeholder, *_: object) -> Any:
        raise _used(cls)

    method.__name__ = name
    setattr(_Placeholder, name, method)


for _name in (
    *("__iter__", "__len__", "__contains__", "__int__", "__float__", "__index__", "__lt__", "__le__"),
    *("__gt__", "__ge__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__neg__"),
    *("__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__"),
    *("__enter__", "__exit__", "__and__", "__rand__", "__lshift__", "__rshift__"),
):
    _refuse(_name)


def placeholder(tree: Tree, path: str) -> Any:
    """Something that stands for ``path``, a dotted name of the tree."""
    name = path.rsplit(".", 1)[-1]
    return _Placeholder(name, (), {"_tree": tree, "_path": path, "__module__": path.rsplit(".", 1)[0]})


def is_placeholder(thing: object) -> bool:
    """Whether a thing is a placeholder. A class of the tree that derives from one is not."""
    return isinstance(thing, _Placeholder) and "_path" in vars(thing)


def placeholder_module(module: ModuleType, tree: Tree, attributes: Mapping[str, Any]) -> None:
    """Make ``module`` hold ``attributes``, its submodules that the tree has, and a placeholder otherwise."""
    name = module.__name__

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if tree.holds(f"{name}.{attribute}"):
            return importlib.import_module(f"{name}.{attribute}")
        found = placeholder(tree, f"{name}.{attribute}")
        setattr(module, attribute, found)
        return found

    vars(module).update(attributes)
    module.__getattr__ = missing  # type: ignore[method-assign]
