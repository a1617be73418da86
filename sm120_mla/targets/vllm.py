"""A checkout of vLLM as a target: its C128A metadata builder and its Triton cache writer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from .. import device, graphs
from ..codec import ENGINES
from ..device import Capability
from ..errors import UnavailableError
from ..graphs import Graph
from ..kernels.runtime import INTERPRETED
from ..kernels.spec import CompileSpec
from ..layout import DSV4, PageLayout
from . import vllm_casts
from .base import AbsentError, AttentionInputs, C128AInputs, Support
from .checkout import Checkout
from .own import OwnTarget
from .vllm_builder import FUNCTION, Builder, Views, find_function
from .vllm_stand_ins import OWN, as_gpu, stand_ins
from .vllm_view import designs

__all__ = ["CODE", "PATHS", "VllmTarget"]

CODE = (
    "**/sparse_mla.py",
    "**/mla/flashmla_sparse.py",
    "**/deepseek_v4*/**/cache_utils.py",
)
"""Files under test, as git's patterns: where the builder and the writer have been kept."""

PATHS = (
    *CODE,
    "**/vllm/models/deepseek_v4/**/*.py",
    "**/vllm/v1/attention/**/*.py",
    "**/vllm/model_executor/warmup/**/*.py",
    "**/vllm/utils/**/*.py",
    "**/vllm/envs.py",
)
"""Files that are read."""

WRITER = "quantize_and_insert_k_cache"
_WRITER_FILE = "cache_utils.py"
_WRITER_FOLDERS = ("models/deepseek_v4/common/ops", "v1/attention/ops/deepseek_v4_ops")
_ABOVE_EVERY_FLOOR = {"normal", "negative", "huge"}
"""Kinds of tiles for which every recipe gives the same bytes."""
_NO_SPLIT = "vLLM's pages have 64 tokens from the start: it splits none"
_NO_BOOT = "vLLM splits no pages, and its metadata buffers are made with the engine: no first touch to order"
_NO_ATTENTION = "its attention is FlashInfer's and FlashMLA's compiled kernels, not the tree's"


class VllmTarget:
    """``path``: a checkout, or a worktree, of vLLM or of a fork. Nothing of it is installed or changed.

    Its modules are loaded once for each capability they are asked under, as a process would see one GPU
    only. Padding rows are presented as vLLM's engine presents them (``vllm_builder.settle_padding``). As
    vLLM has no consumer that runs without a GPU, META-STALE's consumer is this package's page split, which
    reads as many columns as the lengths say.

    Raises ``ArgumentError`` for a path that is no folder.
    """

    def __init__(self, path: str) -> None:
        self.name = f"vllm:{path}"
        self._path = path
        self._first = self._checkout()
        self._sources: dict[str, Path | None] = {}
        self._builders: dict[Capability | None, Builder | UnavailableError] = {}
        self._writers: dict[Capability | None, tuple[Checkout, Callable[..., Any]]] = {}
        self._consumer = OwnTarget()

    def _checkout(self) -> Checkout:
        return Checkout(self._path, "vllm", folders=("", "src"), own=OWN, stand_ins=stand_ins())

    # What the tree has

    def _source(self, name: str) -> Path | None:
        if name not in self._sources:
            if name == FUNCTION:
                self._sources[name] = find_function(self._first)
            else:
                self._sources[name] = self._first.find(_WRITER_FILE, _WRITER_FOLDERS, defines=WRITER)
        return self._sources[name]

    def _builder(self) -> Builder:
        capability = device.capability()
        if capability not in self._builders:
            source = self._source(FUNCTION)
            if source is None:
                raise AbsentError(FUNCTION, "no file of the tree defines it", "Choose another commit.")
            try:
                self._builders[capability] = Builder(self._checkout(), source)
            except UnavailableError as error:
                self._builders[capability] = error
        found = self._builders[capability]
        if isinstance(found, UnavailableError):
            raise found
        return found

    def _writer(self) -> tuple[Checkout, Callable[..., Any]]:
        capability = device.capability()
        if capability not in self._writers:
            source = self._source(WRITER)
            if source is None:
                raise AbsentError(WRITER, "no file of the tree defines it", "Choose another commit.")
            tree = self._checkout()
            with as_gpu():
                self._writers[capability] = tree, tree.attribute(source, WRITER)
        return self._writers[capability]

    def supports(self, case: Any, capability: Capability | None) -> Support:
        """C128A metadata, and the cache writer's bytes where they can be trusted."""
        if case.kind == "meta":
            return self._loads(FUNCTION, case.capability)
        if case.kind == "order":
            return Support.absent(_NO_BOOT)
        if case.kind == "write":
            return self._writes(case)
        if case.kind in ("split", "offset64"):
            return Support.absent(_NO_SPLIT)
        if case.kind == "attn":
            return Support.absent(_NO_ATTENTION)
        return Support.absent(f"cases of kind {case.kind!r} are not asked of a checkout of vLLM")

    def _loads(self, name: str, capability: Capability | None) -> Support:
        if self._source(name) is None:
            return Support.absent(f"no file of the tree defines {name}")
        try:
            with device.pretend_device(capability):
                self._builder() if name == FUNCTION else self._writer()
        except UnavailableError as error:
            return Support.no(str(error))
        return Support(True)

    def _writes(self, case: Any) -> Support:
        if self._source(WRITER) is None:
            return Support.absent(f"no file of the tree defines {WRITER}")
        if case.layout != DSV4.name:
            return Support.absent(f"its writer writes {DSV4.name} pages")
        if case.recipe != ENGINES.name and not set(case.tiles) <= _ABOVE_EVERY_FLOOR:
            return Support.no(f"its writer stands for the recipe {ENGINES.name}, the case for {case.recipe}")
        if case.slots == "past_end":
            return Support.no("its writer checks no slot: the store would leave the cache")
        if case.offset % 2 or case.stride_gap % 2:
            return Support.no("it writes RoPE as bf16: an odd address would fault on a GPU, and not here")
        if INTERPRETED and vllm_casts.reason():
            return Support.no(vllm_casts.reason())
        return self._loads(WRITER, device.capability())

    def notes(self) -> tuple[str, ...]:
        """What the view is on which GPU, whether a builder or the bare function was asked, and stand-ins."""
        said = []
        try:
            said += designs(self)
            built = [b for b in self._builders.values() if isinstance(b, Builder)]
            said += [b.note for b in built[:1]]
            said += [note for b in built for note in b.tree.notes]
        except Exception as error:
            said.append(f"the view was not classified: {type(error).__name__}: {error}")
        return tuple(dict.fromkeys(note for note in said if note))

    def files(self) -> tuple[Path, ...]:
        """The files of the tree that verdicts depend on."""
        trees = [b.tree for b in self._builders.values() if isinstance(b, Builder)]
        trees += [tree for tree, _ in self._writers.values()]
        found = [Path(str(m.__file__)) for tree in trees for m in tree.modules().values()]
        found += [path for path in self._sources.values() if path is not None]
        return tuple(dict.fromkeys(found))

    # What it does

    def build_c128a(self, inputs: C128AInputs) -> Views:
        """The tree's metadata builder, or its function where there is no builder or in a capture."""
        return self._builder().build(inputs)

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
        """``quantize_and_insert_k_cache``; in the interpreter with its float casts corrected."""
        tree, write = self._writer()
        known = {"k": k, "k_cache": cache, "slot_mapping": slots, "block_size": page_size}
        parameters = inspect.signature(write).parameters
        if not set(known) <= set(parameters):
            raise UnavailableError(
                WRITER, f"its parameters are {', '.join(parameters)}", "Teach targets/vllm.py this commit."
            )
        if not slots.numel():
            return
        with as_gpu(), tree.active(), vllm_casts.truthful():
            write(**known)

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
        """This package's split: the consumer of META-STALE. Cases of splits are declined."""
        return self._consumer.split(pool, page_size, indices, lengths, layout=layout, scope=scope)

    def reserve_split(
        self, pool: torch.Tensor, page_size: int, *, layout: PageLayout, scope: str = ""
    ) -> bool:
        """There is nothing to reserve."""
        return False

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Declined."""
        raise AbsentError("attention", _NO_ATTENTION, "Judge the installed kernels instead.")

    def error_budget(self) -> str:
        """None applies."""
        return "triton"

    def pretend_device(self, capability: Capability | None) -> AbstractContextManager[None]:
        """``device.pretend_device``: the tree's ``current_platform`` answers from it."""
        return device.pretend_device(capability)

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """None: the engine's buffers are given to the builder by the case."""
        return {}

    def reset(self) -> None:
        """Forget every builder."""
        for found in self._builders.values():
            if isinstance(found, Builder):
                found.reset()
        self._consumer.reset()

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """``graphs.capture``."""
        return graphs.capture(fn)

    def second_device(self) -> AbstractContextManager[None] | None:
        """Not pretended."""
        return None

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        """None."""
        return ()

    def compile_origin(self) -> tuple[str, str | None]:
        """This package: nothing is compiled."""
        return __name__.split(".", 1)[0], None
