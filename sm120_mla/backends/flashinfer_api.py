"""The installed FlashInfer: which generation it is, by its own objects, and the one call made into it.

Nothing here imports flashinfer until ``probe`` is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch

from .. import device
from ..contract import DECODE_MAX_ROWS
from ..envelopes import ENVELOPES, NOT_SERVED, VERSIONS, Envelope, by_name
from ..layout import DSV4
from .base import Support

__all__ = ["Installed", "KernelCall", "probe", "reachable"]

_INSTALL = "Run: pip install 'sm120-mla[flashinfer]'."
_UPGRADE = f"Install one of {', '.join(VERSIONS)}, or use the triton backend."
_WRAPPER_ARGUMENTS = frozenset(
    {
        *("topk_length", "attn_sink", "extra_kv_cache", "extra_indices", "extra_topk_length"),
        *("out_lse", "mid_out", "mid_lse", "lse_scale"),
    }
)
_FUNCTION_ARGUMENTS = _WRAPPER_ARGUMENTS - {"lse_scale"}


@dataclass(frozen=True)
class KernelCall:
    """What FlashInfer is given. Everything is contiguous but the caches, whose page stride is free.

    Shapes: ``q``, ``out`` ``[T, H, 512]`` bf16; caches uint8 ``[pages, P, 1, 584]``; indices int32
    ``[T, k]``; lengths int32 ``[T]``; ``sink`` fp32 ``[H]``; ``lse`` fp32 ``[T, H]``; ``mid_out`` bf16
    ``[T, heads, splits, 512]`` and ``mid_lse`` fp32 ``[T, heads, splits]``.
    """

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mid_out: torch.Tensor
    mid_lse: torch.Tensor
    scale: float
    sink: torch.Tensor | None = None
    extra_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_lengths: torch.Tensor | None = None

    @property
    def signature(self) -> tuple[object, ...]:
        """Shapes and strides: what a plan of 0.7 is kept under."""
        return tuple(
            (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value is None
            for value in (getattr(self, field.name) for field in fields(self))
        )


@dataclass(frozen=True)
class Installed:
    """A FlashInfer that is served. ``attend`` runs one call on the current stream of its device, which
    ``needs_gpu`` unless something stands in for the compiled module.
    """

    version: str
    envelope: Envelope
    attend: Callable[[KernelCall], None]
    needs_gpu: bool = True


def reachable() -> bool:
    """Whether this process can run FlashInfer's compiled module: it sees a GPU."""
    return device.cuda_available()


def probe() -> Installed | Support:
    """Import FlashInfer and tell its generation by what it offers; or why it cannot be used."""
    if importlib.util.find_spec("flashinfer") is None:
        return Support(False, "flashinfer-python is not installed", _INSTALL)
    version = _version()
    try:
        mla = importlib.import_module("flashinfer.mla")
        private = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
    except ModuleNotFoundError as error:
        if error.name == "flashinfer.mla._sparse_mla_sm120":
            why = NOT_SERVED.get(version, "has no SM120 kernels for sparse MLA")
            return Support(False, f"flashinfer {version} {why}", _UPGRADE)
        return Support(False, f"flashinfer {version} cannot be imported: {error}", _INSTALL)
    except Exception as error:  # its import asks CUDA and optional packages, and fails in many ways
        why = f"flashinfer {version} cannot be imported: {error!r}"
        return Support(False, why, "Repair its installation, or use the triton backend.")
    try:
        return _newer(version, mla) or _older(version, private) or _unknown(version)
    except Exception as error:
        return _unknown(version, f": asking it raised {error!r}")


def _version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _unknown(version: str, detail: str = "") -> Support:
    why = NOT_SERVED.get(
        version.split("+")[0], "offers neither the kernels of 0.6.14-0.6.18 nor those of 0.7.1"
    )
    return Support(False, f"flashinfer {version} {why}{detail}", _UPGRADE)


def _newer(version: str, mla: Any) -> Installed | None:
    """0.7.1 on: page size and width are runtime arguments, and the wrapper scales the LSE."""
    query = getattr(mla, "supported_sparse_mla_sm120_configs", None)
    wrapper = getattr(mla, "SparseMLASm120Wrapper", None)
    if query is None or wrapper is None:
        return None
    config = query()["dsv4"]
    alike = (
        getattr(config, "page_block_size_is_runtime", False)
        and getattr(config, "topk_is_runtime", False)
        and config.head_counts is None
        and (config.d_qk, config.bytes_per_token) == (DSV4.head_dim, DSV4.bytes_per_token)
        and config.max_num_tokens == DECODE_MAX_ROWS
        and inspect.signature(wrapper.run).parameters.keys() >= _WRAPPER_ARGUMENTS
    )
    return Installed(version, by_name("C"), _Wrapped(wrapper)) if alike else None


def _older(version: str, private: Any) -> Installed | None:
    """0.6.14 to 0.6.18: a set of (heads, width) pairs, and one function that decodes and prefills."""
    pairs = getattr(private, "_DECODE_DSV4_DISPATCH", None)
    function = getattr(private, "_sparse_mla_sm120_paged_attention", None)
    if not isinstance(pairs, frozenset) or function is None:
        return None
    if private._DECODE_MAX_TOKENS != DECODE_MAX_ROWS:
        return None
    if not inspect.signature(function).parameters.keys() >= _FUNCTION_ARGUMENTS:
        return None
    for envelope in ENVELOPES:
        if envelope.decode_heads is None or envelope.decode_widths is None:
            continue
        known = {(h, k) for h in envelope.decode_heads for k in envelope.decode_widths}
        if pairs == known and envelope.main_page == private._DECODE_DSV4_PAGE_BLOCK_SIZE:
            return Installed(version, envelope, _Function(function))
    return None


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    # 0.6 launches on the current device, whatever the tensors say.
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def _named(call: KernelCall) -> dict[str, torch.Tensor | None]:
    """What both generations take by the same names."""
    return {
        "topk_length": call.lengths,
        "attn_sink": call.sink,
        "extra_kv_cache": call.extra_cache,
        "extra_indices": call.extra_indices,
        "extra_topk_length": call.extra_lengths,
        "mid_out": call.mid_out,
        "mid_lse": call.mid_lse,
    }


class _Wrapped:
    """Calls the wrapper of 0.7; one per device, as it keeps its plans."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._wrappers: dict[torch.device, Any] = {}

    def __call__(self, call: KernelCall) -> None:
        wrapper = self._wrappers.get(call.q.device)
        if wrapper is None:
            wrapper = self._wrappers[call.q.device] = self._make(device=call.q.device)
        with _on(call.q):
            wrapper.run(
                call.q,
                call.cache,
                call.indices,
                call.out,
                call.scale,
                out_lse=call.lse,
                lse_scale=math.log(2.0),
                **_named(call),
            )


class _Function:
    """Calls the function of 0.6 that takes its results and scratch from the caller."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, call: KernelCall) -> None:
        with _on(call.q):
            self._function(
                call.q,
                call.cache,
                call.indices,
                call.out,
                call.lse,
                call.scale,
                **_named(call),
            )
