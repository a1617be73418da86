"""Another checkout of this repository as a target, at whatever commit it is.

Its package is copied aside under a name of its own, as a fault's is, and judged by the suite that runs, so
that commits are compared by one measure. A commit from before a module was written has nothing to judge; one
whose functions take other arguments than this adapter knows cannot be judged. Neither is a violation.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ..errors import ArgumentError, UnavailableError
from ..kernels.spec import CompileSpec
from . import own, own_route
from .base import AbsentError

__all__ = ["OwnCheckout", "package_of"]

_ADAPTERS = {own.__file__, own_route.__file__}


class OwnCheckout(own.OwnTarget):
    """The kernel stack of the checkout at ``path``. The copy lives as long as the target.

    Raises ``ArgumentError`` where there is no checkout of this repository, ``AbsentError`` for a commit
    without persistent buffers, ``UnavailableError`` for one that does not import.
    """

    def __init__(self, path: str | Path) -> None:
        package = package_of(path)
        self._scratch = tempfile.TemporaryDirectory(prefix="sm120-mla-")
        alias = own.copy_product(package, Path(self._scratch.name))
        sys.path.insert(0, self._scratch.name)
        importlib.invalidate_caches()
        weakref.finalize(self, _forget, alias, self._scratch.name)
        super().__init__(alias, f"own:{path}", self._scratch.name)

    def _module(self, name: str) -> ModuleType:
        full = f"{self._package}.{name}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name and f"{full}.".startswith(f"{error.name}."):
                raise AbsentError(name, "this commit has no such module", "Choose another commit.") from error
            raise _does_not_load(name, error) from error
        except (Exception, SystemExit) as error:
            raise _does_not_load(name, error) from error

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        """Every launch configuration of the kernel modules this commit has."""
        specs: list[CompileSpec] = []
        for name in own.KERNEL_MODULES:
            try:
                specs += self._module(name).compile_specs()
            except AbsentError:
                continue
        return tuple(specs)


def package_of(path: str | Path) -> Path:
    """The package's folder in a checkout, of which nothing is run; raises as ``OwnCheckout`` does."""
    package = Path(path).expanduser().resolve() / own.PACKAGE
    if not (package / "__init__.py").is_file():
        raise ArgumentError(
            "target",
            f"'own:{path}'",
            f"a checkout of this repository, which holds {own.PACKAGE}/__init__.py",
            "Correct the path.",
        )
    return package


def _forget(package: str, folder: str) -> None:
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _does_not_load(name: str, error: BaseException) -> UnavailableError:
    why = f"loading it raised {type(error).__name__}: {error}"
    return UnavailableError(name, why, "Choose another commit.")


def _at_the_edge(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with an error of the adapter's own line told from one of the commit's code, and what the
    commit says it lacks passed on."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            if _raised_in(error.__traceback__) not in _ADAPTERS:
                raise
            raise UnavailableError(
                method.__name__, f"this commit's takes another call: {error}", "Choose another commit."
            ) from error
        except RuntimeError as error:
            said = [getattr(error, name, None) for name in ("what", "why", "remedy")]
            if isinstance(error, UnavailableError) or None in said:
                raise
            raise UnavailableError(*map(str, said)) from error  # the commit's own class of that name

    return call


def _raised_in(trace: TracebackType | None) -> str:
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return name


for _name, _method in list(vars(own.OwnTarget).items()):
    if callable(_method) and not _name.startswith("_") and _name not in vars(OwnCheckout):
        setattr(OwnCheckout, _name, _at_the_edge(_method))
