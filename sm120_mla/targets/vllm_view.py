"""What a builder's views are, by shape and stride: the designs of docs/design.md, section 6."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..device import Capability
from ..kernels.runtime import INTERPRETED
from ..widths import C128A_RATIO
from .base import C128AInputs

__all__ = ["designs"]

_ROWS, _CAPACITY, _WIDTH, _BLOCK = 3, 512, 128, 2
_GPUS: tuple[tuple[str, Capability | None], ...] = (("9.0", (9, 0)), ("12.0", (12, 0)), ("no GPU", None))


class _Building(Protocol):
    def build_c128a(self, inputs: C128AInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The target's."""

    def pretend_device(self, capability: Capability | None) -> AbstractContextManager[None]:
        """The target's."""


def designs(target: _Building) -> list[str]:
    """One line each for the decode and the prefill view: which design on which GPU.

    From a build of three decode and three prefill rows at width 128 of 512. Raises what the build raises.
    """
    seen: dict[str, dict[str, list[str]]] = {"decode": {}, "prefill": {}}
    for gpu, capability in _GPUS:
        inputs = _inputs()
        with target.pretend_device(capability):
            decode, _, prefill = target.build_c128a(inputs)
        for name, view in (("decode", decode), ("prefill", prefill)):
            seen[name].setdefault(_design(view), []).append(gpu)
    return [
        f"{name} view: " + "; ".join(f"{design} on {', '.join(gpus)}" for design, gpus in found.items())
        for name, found in seen.items()
    ]


def _design(view: torch.Tensor) -> str:
    columns, stride = view.shape[1], view.stride(0)
    if columns == _CAPACITY and stride == _CAPACITY:
        return "full width"
    if columns < _CAPACITY and stride == columns:
        return "packed"
    if columns < _CAPACITY and stride == _CAPACITY:
        return "narrow slice"
    return f"{columns} columns at a stride of {stride}"


def _inputs() -> C128AInputs:
    tokens, columns = 2 * _ROWS, _CAPACITY // _BLOCK
    where = torch.device("cpu" if INTERPRETED else "cuda")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=where)

    return C128AInputs(
        positions=zeros(tokens, dtype=torch.int64) + 1000,
        compress_ratio=C128A_RATIO,
        num_decode_tokens=_ROWS,
        token_to_req_indices=zeros(tokens),
        block_table=zeros(2, columns),
        block_size=_BLOCK,
        slot_mapping=zeros(tokens, dtype=torch.int64),
        global_decode_buffer=zeros(tokens, _CAPACITY),
        decode_lens_buffer=zeros(tokens),
        prefill_buffer=zeros(tokens, _CAPACITY),
        max_compressed_tokens=_WIDTH,
    )
