"""The sparse decode of an sglang tree: its Triton module, or the torch fallback beside the entry point."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import UnavailableError
from ..kernels.runtime import INTERPRETED
from ..layout import DSV4
from .base import AbsentError, AttentionInputs
from .checkout import Checkout
from .interpreter_fixes import corrected

__all__ = ["Decode", "decode_of"]

_TRITON = "flash_mla_sparse_decode_triton"
_TORCH = "_sm120_sparse_decode_fwd"


class Decode:
    """One decode function of the tree. ``kind`` is ``triton`` or ``torch``."""

    def __init__(self, kind: str, function: Callable[..., Any]) -> None:
        self.kind, self._function = kind, function
        self._parameters = tuple(inspect.signature(function).parameters.values())

    def __call__(
        self, inputs: AttentionInputs, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [T, H, 512]`` and ``lse [T, H]`` as the tree returns them, only reshaped.

        Raises ``UnavailableError`` for a parameter that is unknown here and has no default.
        """
        given = _arguments(inputs, sink)
        named = {}
        for parameter in self._parameters:
            if parameter.name in given:
                named[parameter.name] = given[parameter.name]
            elif parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD:
                raise UnavailableError(
                    self._function.__name__,
                    f"it wants {parameter.name!r}, unknown here",
                    "Teach the adapter.",
                )
        with corrected():
            out, lse = self._function(**named)
        rows, heads = inputs.q.shape[:2]
        return out.reshape(rows, heads, -1), lse.reshape(rows, heads)

    def natural(self, lse: torch.Tensor) -> torch.Tensor:
        """An lse without sink, with -inf for an empty row: FlashMLA's own says +inf there."""
        return torch.where(lse == torch.inf, -torch.inf, lse.float())


def decode_of(tree: Checkout, file: str, known: tuple[str, ...]) -> Decode:
    """The tree's decode: Triton's, or torch's where it has no other.

    Raises ``AbsentError`` where it has neither, ``UnavailableError`` where the file does not load.
    """
    for kind, function in (("triton", _TRITON), ("torch", _TORCH)):
        path = tree.find(file, known, defines=function)
        if path is not None:
            return Decode(kind, _loaded(tree, path, function))
    raise AbsentError("sparse decode", "this tree has none for SM120", "Choose a later commit.")


def _loaded(tree: Checkout, path: Path, name: str) -> Callable[..., Any]:
    module = tree.module(path)
    if INTERPRETED:
        for value in vars(module).values():
            configs = getattr(value, "configs", None)
            if isinstance(configs, list) and len(configs) > 1 and hasattr(value, "fn"):
                value.configs = [max(configs, key=_tile)]  # autotuning asks for a driver; one needs none
    function: Callable[..., Any] = tree.attribute(path, name)
    return function


def _tile(config: Any) -> int:
    """Entries of the largest tile of a configuration: it takes the fewest steps, which is what costs here."""
    return math.prod(v for v in config.kwargs.values() if isinstance(v, int) and v > 0)


def _arguments(inputs: AttentionInputs, sink: torch.Tensor | None) -> dict[str, Any]:
    """Under the names of the tree's parameters, in the shapes of its own caller."""
    extra = inputs.extra_kv_cache
    return {
        "q": inputs.q.unsqueeze(1),
        "k_cache": _cache(inputs.kv_cache, inputs.page_size),
        "indices": inputs.indices.unsqueeze(1),
        "topk_length": inputs.topk_length,
        "attn_sink": sink,
        "head_dim_v": DSV4.head_dim,
        "softmax_scale": DSV4.head_dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale,
        "extra_k_cache": None if extra is None else _cache(extra, inputs.extra_page_size),
        "extra_indices": None if inputs.extra_indices is None else inputs.extra_indices.unsqueeze(1),
        "extra_topk_length": inputs.extra_topk_length,
    }


def _cache(pool: torch.Tensor, page_size: int | None) -> torch.Tensor:
    """fp8 ``[pages, page_size, 1, 584]`` with the page stride kept: nominal rows, as sglang hands it on."""
    assert page_size is not None
    token = DSV4.bytes_per_token
    shape, stride = (pool.shape[0], page_size, 1, token), (pool.stride(0), token, token, 1)
    return torch.as_strided(pool.view(torch.float8_e4m3fn), shape, stride, pool.storage_offset())
