"""The Target protocol and how a target is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..device import Capability
from ..errors import ArgumentError, UnavailableError
from ..graphs import Graph
from ..kernels.spec import CompileSpec
from ..layout import PageLayout

__all__ = [
    "CHECKOUTS",
    "AbsentError",
    "AttentionInputs",
    "C128AInputs",
    "Support",
    "Target",
    "is_checkout",
    "resolve",
]

ENTRY_POINTS = "sm120_mla.targets"

CHECKOUTS = {
    "own": (f"{__package__}.own_checkout", "OwnCheckout"),
    "sglang": (f"{__package__}.sglang", "SglangTarget"),
    "vllm": (f"{__package__}.vllm", "VllmTarget"),
}
"""Kinds of checkout a target may be of, ``KIND:PATH``: the module and the class that take the path."""


class AbsentError(UnavailableError):
    """The target does not have the thing asked for: a commit from before it was written, or after."""


@dataclass(frozen=True)
class Support:
    """Yes, or no with a reason. A target that says no is judged unknown, or absent; never held."""

    yes: bool
    reason: str = ""
    missing: bool = False
    """The target has no such operation at all, rather than declines this case of it."""

    @classmethod
    def no(cls, reason: str) -> Support:
        """A refusal."""
        return cls(False, reason)

    @classmethod
    def absent(cls, reason: str) -> Support:
        """The target has no such operation."""
        return cls(False, reason, True)

    def __bool__(self) -> bool:
        return self.yes


@dataclass(frozen=True)
class C128AInputs:
    """Arguments of the C128A builder, named as vLLM's (docs/design.md, section 6)."""

    positions: torch.Tensor
    compress_ratio: int
    num_decode_tokens: int
    token_to_req_indices: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    slot_mapping: torch.Tensor
    global_decode_buffer: torch.Tensor
    decode_lens_buffer: torch.Tensor
    prefill_buffer: torch.Tensor
    max_compressed_tokens: int


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of one attention call, as ``attention.sparse_mla`` names them. Cache views are 2-D uint8."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    page_size: int
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    softmax_scale: float | None
    extra_kv_cache: torch.Tensor | None = None
    extra_page_size: int | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None


@runtime_checkable
class Target(Protocol):
    """One implementation. Methods raise whatever the implementation raises."""

    name: str

    def supports(self, case: Any, capability: Capability | None) -> Support:
        """Whether the case is one this target claims to serve."""

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
        """The split pool, ``[sub_pages, 64, 1, bytes_per_token]``; its storage is the whole destination."""

    def reserve_split(
        self, pool: torch.Tensor, page_size: int, *, layout: PageLayout, scope: str = ""
    ) -> bool:
        """Allocate ahead of a capture what ``split`` will need; False where the target has no such call."""

    def build_c128a(self, inputs: C128AInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(decode rows, decode lengths, prefill rows): views of the buffers, as the consumer gets them."""

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [T, H, 512]`` and ``lse [T, H]``: fp32, natural, without the sink, -inf for an empty row.

        An engine with another convention is converted here, at the edge.
        """

    def error_budget(self) -> str:
        """Whose arithmetic the budget is derived from: a row of ``testing.arithmetic``."""

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
        """Quantise rows of K into their slots of a 2-D uint8 cache."""

    def pretend_device(self, capability: Capability | None) -> AbstractContextManager[None]:
        """Within it, the target believes to run on a GPU of that capability."""

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """Every tensor that outlives a call, by name."""

    def reset(self) -> None:
        """As a new process: forget every persistent tensor."""

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """Capture ``fn`` as the target's engine would."""

    def second_device(self) -> AbstractContextManager[None] | None:
        """Within it, tensors count as being on another device; None where that cannot be pretended."""

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        """Launch configurations to be compiled for sm_120 and sm_121; empty where there are none."""

    def compile_origin(self) -> tuple[str, str | None]:
        """Package that ``compile_specs`` names modules of, and a folder to find it in (None: installed)."""


def is_checkout(name: str) -> bool:
    """Whether the target called ``name`` is a checkout, ``KIND:PATH``, whose code is best run in a process of
    its own. None of it is run. Raises ``ArgumentError`` for a path that is no such checkout.
    """
    kind, _, rest = name.partition(":")
    if name == "own" or kind not in CHECKOUTS:
        return False
    if not Path(rest).expanduser().is_dir() or not rest:
        raise ArgumentError(
            "target", repr(name), f"{kind}:PATH, a folder that holds a checkout", "Correct the path."
        )
    if kind == "own":
        _load(CHECKOUTS[kind][0], "package_of")(rest)
    return True


def resolve(name: str) -> Target:
    """The target called ``name``: ``own``, ``own:PATH``, ``sglang:PATH``, ``vllm:PATH`` (a checkout),
    an entry point of ``sm120_mla.targets``, or ``module:attr``.

    Raises ``ArgumentError`` for an unknown name, or a path that is no such checkout, and
    ``UnavailableError`` for a target that does not load.
    """
    kind, _, rest = name.partition(":")
    if name == "own":
        return _load(f"{__package__}.own", "OwnTarget")()
    if is_checkout(name):
        return _load(*CHECKOUTS[kind])(rest)
    known = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    names = ", ".join(["own", *(f"{kind}:PATH" for kind in CHECKOUTS), *known, "module:attr"])
    if kind not in known and not rest:
        raise ArgumentError("target", repr(name), f"one of {names}", "Correct --target.")
    try:
        if kind in known:
            return known[kind].load()(rest)
        return getattr(importlib.import_module(kind), rest)()
    except (ArgumentError, UnavailableError):
        raise
    except (Exception, SystemExit) as error:
        raise UnavailableError(
            f"target {name}", f"{type(error).__name__}: {error}", f"Check the name (one of {names})."
        ) from error


def _load(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(module), attribute)
