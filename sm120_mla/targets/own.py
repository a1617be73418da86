"""This package as a target, whole or with a fault put into a copy of it."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import settings
from ..device import Capability
from ..errors import ArgumentError
from ..graphs import Graph
from ..kernels.spec import CompileSpec
from ..layout import PageLayout
from . import own_route
from .base import AttentionInputs, C128AInputs, Support
from .routes import Routed, Way

__all__ = ["KERNEL_MODULES", "PACKAGE", "PRODUCT_FILES", "OwnTarget", "Patch", "copy_product", "patched"]

PACKAGE = __name__.split(".", 1)[0]
PRODUCT_FILES = ("*.py", "kernels", "metadata", "backends", "codec", "reference")
KERNEL_MODULES = (
    "kernels.page_split",
    "kernels.c128a",
    "kernels.index_windows",
    "kernels.index_topk",
    "kernels.cache_write",
    "kernels.sparse_mla",
    "kernels.merge",
    "kernels.fi_prepare",
    "kernels.fi_finish",
)


class OwnTarget:
    """The kernel stack of this package, through its public functions.

    Attention goes through ``backend``: by default the one ``SM120_MLA_BACKEND`` names, and Triton's where
    that is ``auto``, so that a run does not depend on what else is installed.
    """

    def __init__(
        self,
        package: str = PACKAGE,
        name: str = "own",
        folder: str | None = None,
        backend: str | None = None,
    ) -> None:
        chosen = str(settings.get("SM120_MLA_BACKEND"))
        self.name = name
        self.backend = backend or ("triton" if chosen == "auto" else chosen)
        self._package, self._folder = package, folder
        self._buffers = self._module("buffers").PersistentBuffers()

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self._package}.{name}")

    def _layout(self, layout: PageLayout) -> Any:
        return self._module("layout").by_name(layout.name)

    def supports(self, case: Any, capability: Capability | None) -> Support:
        """Everything the frame can draw."""
        return Support(True)

    def split(
        self,
        pool: torch.Tensor,
        page_size: int,
        indices: torch.Tensor | None,
        lengths: torch.Tensor | None,
        *,
        layout: PageLayout,
        scope: str = "",
    ) -> torch.Tensor:
        """``split_pages`` with values unchecked: the defined result of any value is what is judged."""
        split = self._module("pages").split_pages(
            pool,
            page_size,
            indices,
            topk_length=lengths,
            layout=self._layout(layout),
            buffers=self._buffers,
            scope=scope,
            validate="metadata",
        )
        return split.tensor

    def reserve_split(
        self, pool: torch.Tensor, page_size: int, *, layout: PageLayout, scope: str = ""
    ) -> bool:
        """``reserve_split``."""
        self._module("pages").reserve_split(
            pool, page_size, layout=self._layout(layout), buffers=self._buffers, scope=scope
        )
        return True

    def build_c128a(self, inputs: C128AInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``build_c128a_topk_metadata`` with values unchecked."""
        build = self._module("metadata").build_c128a_topk_metadata
        return build(**vars(inputs), validate="metadata")

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """``sparse_mla`` through the target's backend, values unchecked."""
        attend = self._module("attention").sparse_mla
        out, lse = attend(
            **vars(inputs),
            backend=self.backend,
            buffers=self._buffers,
            return_lse=True,
            validate="metadata",
        )
        return out, lse

    def error_budget(self) -> str:
        """The backend's."""
        return self.backend

    def serves(self, inputs: AttentionInputs) -> Support:
        """Everything, by Triton and the reference; FlashInfer by what it says beforehand."""
        return own_route.serves(self._module, inputs, self.backend)

    def finite_slot_zero(self, inputs: AttentionInputs) -> tuple[str, ...]:
        """What the FlashInfer backend states as preconditions."""
        return own_route.finite_slot_zero(self._module, inputs, self.backend)

    def route(self, inputs: AttentionInputs, way: Way) -> Routed:
        """``explain`` and ``sparse_mla``, whatever the target's own backend."""
        return own_route.route(self._module, self.pretend_device, inputs, way)

    def write_cache(
        self,
        k: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        page_size: int,
        *,
        layout: PageLayout,
        recipe: str,
    ) -> None:
        """``write_cache`` with values unchecked."""
        self._module("cache").write_cache(
            k,
            slots,
            cache,
            page_size=page_size,
            layout=self._layout(layout),
            recipe=self._module("codec").recipe_by_name(recipe),
            validate="metadata",
        )

    def pretend_device(self, capability: Capability | None) -> AbstractContextManager[None]:
        """``device.pretend_device``."""
        return self._module("device").pretend_device(capability)

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """The registry's tensors."""
        return self._buffers.tensors()

    def reset(self) -> None:
        """A new registry, as in a new process."""
        self._buffers = self._module("buffers").PersistentBuffers()

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """``graphs.capture``."""
        return self._module("graphs").capture(fn)

    def second_device(self) -> AbstractContextManager[None]:
        """Pretends another device key."""
        return self._module("device").pretend_device_key("pretended:1")

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        """Every launch configuration of every kernel module."""
        return tuple(spec for name in KERNEL_MODULES for spec in self._module(name).compile_specs())

    def compile_origin(self) -> tuple[str, str | None]:
        """This package, or the folder of the patched copy."""
        return self._package, self._folder


@dataclass(frozen=True)
class Patch:
    """Replace ``old`` by ``new`` in ``file`` (relative to the package); ``old`` must occur exactly once."""

    file: str
    old: str
    new: str


_serial = 0


def copy_product(source: Path, folder: Path) -> str:
    """Copy what the package at ``source`` is without suite and tools into ``folder``; returns the name it is
    imported by there, which is no other copy's. Bytecode stays behind."""
    global _serial
    _serial += 1
    package = f"{PACKAGE}_copy_{_serial}"
    copy = folder / package
    copy.mkdir()
    for pattern in PRODUCT_FILES:
        for found in source.glob(pattern):
            if found.is_dir():
                shutil.copytree(found, copy / found.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(found, copy / found.name)
    return package


@contextlib.contextmanager
def patched(patches: Sequence[Patch], name: str) -> Iterator[OwnTarget]:
    """A target made from a copy of this package with ``patches`` applied: where faults are put.

    The copy lives in a temporary folder under a package name of its own, so both can run in one process.
    Raises ``ArgumentError`` where a patch does not match exactly once.
    """
    with tempfile.TemporaryDirectory(prefix="sm120-mla-") as folder:
        package = copy_product(Path(__file__).resolve().parents[1], Path(folder))
        copy = Path(folder) / package
        for patch in patches:
            _apply(copy / patch.file, patch)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield OwnTarget(package, name, folder)
        finally:
            sys.path.remove(folder)
            for module in [m for m in sys.modules if m == package or m.startswith(package + ".")]:
                del sys.modules[module]


def _apply(path: Path, patch: Patch) -> None:
    text = path.read_text(encoding="utf-8")
    found = text.count(patch.old)
    if found != 1:
        raise ArgumentError(
            "patch",
            f"{patch.file}: {patch.old.strip().splitlines()[0]!r} found {found} times",
            "exactly one occurrence",
            "Bring the fault in step with the source.",
        )
    path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
