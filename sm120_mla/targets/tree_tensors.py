"""Every tensor a tree's modules keep: found by walking what they hold, not by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from .placeholder import is_placeholder

__all__ = ["tensors_of", "tensors_of_modules"]

_DEEPEST = 8
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def tensors_of_modules(modules: Mapping[str, ModuleType], package: str) -> dict[str, torch.Tensor]:
    """The tensors reachable from the globals of ``modules``, each once, under a name that says where.

    Followed are dicts, sequences and sets, attributes of functions and of classes that a module defines,
    and attributes of objects whose class is of ``package``.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, module in modules.items():
        short = name.rsplit(".", 1)[-1]
        for attribute, value in list(vars(module).items()):
            if not attribute.startswith("__"):
                for path, tensor in _walk(value, f"{short}.{attribute}", package, seen, 0):
                    found.setdefault(path, tensor)
    return found


def tensors_of(value: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors held by one object, whatever its class."""
    return dict(_walk(value, name, "", set(), 0))


def _walk(
    value: Any, path: str, package: str, seen: set[int], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, _ATOMS) or depth > _DEEPEST or id(value) in seen or is_placeholder(value):
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        yield path, value
        return
    for name, inner in _parts(value, package, depth):
        seen.add(id(value))
        yield from _walk(inner, f"{path}{name}", package, seen, depth + 1)


def _parts(value: Any, package: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from (
            (f"[{key!r}]" if isinstance(key, str) else f"[{key}]", v) for key, v in list(value.items())
        )
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{n}]", v) for n, v in enumerate(list(value)))
    elif isinstance(value, ModuleType):
        return
    elif isinstance(value, FunctionType):
        yield from ((f".{name}", v) for name, v in list(vars(value).items()) if not callable(v))
    elif isinstance(value, type):
        if _inside(value.__module__, package):
            yield from ((f".{n}", v) for n, v in list(vars(value).items()) if not n.startswith("__"))
    elif _inside(type(value).__module__, package):
        slots = [s for c in type(value).__mro__ for s in getattr(c, "__slots__", ()) if isinstance(s, str)]
        yield from ((f".{name}", v) for name, v in list(getattr(value, "__dict__", {}).items()))
        yield from ((f".{name}", getattr(value, name)) for name in slots if hasattr(value, name))


def _inside(module: str, package: str) -> bool:
    return not package or module == package or module.startswith(f"{package}.")
