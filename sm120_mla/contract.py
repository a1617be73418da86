"""What FlashInfer's SM120 sparse MLA demands of index tensors, as pure functions over numbers. No torch.

Generations: ``A/B`` is 0.6.14 to 0.6.18, ``C/D`` 0.7.x. Read in their sources: the A/B prefill orchestrator
(csrc/sparse_mla_sm120.cu, lines 158-277 at 0.6.18), the A/B decode binding
(csrc/sparse_mla_sm120_jit_binding.cu, lines 95-157), attention_validation.h of 0.7.4, lines 152-235, and its
attention_resolve.cu, lines 186-191.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ArgumentError

__all__ = ["DECODE_MAX_ROWS", "GENERATIONS", "IndexTensor", "is_contiguous", "needs", "refusal"]

DECODE_MAX_ROWS = 64
"""Up to here generation A/B decodes, which checks nothing; from the next row on it prefills, and checks."""

GENERATIONS = ("A/B", "C/D")


@dataclass(frozen=True)
class IndexTensor:
    """An index or length tensor by its metadata. ``name`` is FlashInfer's: ``indices``, ``eidx``, ``etl``."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Row-major without gaps; as torch counts, a size of 1 may have any stride, and nothing is contiguous."""
    if 0 in shape:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def refusal(tensor: IndexTensor, rows: int, generation: str = "A/B") -> str | None:
    """What that generation's own checks say of the tensor in a call of ``rows`` tokens; None if they pass.

    None is not safety: A/B checks nothing up to 64 rows, and reads a strided view as if it were dense.
    """
    _known(generation)
    if generation == "A/B":
        if rows <= DECODE_MAX_ROWS:
            return None
        if not is_contiguous(tensor.shape, tensor.stride):
            return f"{tensor.name} must be contiguous"
        if tensor.dtype != "int32":
            return f"Inconsistency of Tensor type: {tensor.name}"
        return None
    if tensor.dtype != "int32":
        return f"Inconsistency of Tensor type: {tensor.name}"
    dense = tensor.stride[-1] == 1 or tensor.shape[-1] <= 1
    apart = len(tensor.shape) < 2 or tensor.shape[0] <= 1 or tensor.stride[0] >= tensor.shape[-1]
    if not (dense and apart):
        return f"{tensor.name} shape/stride mismatch"
    if rows > DECODE_MAX_ROWS and not is_contiguous(tensor.shape, tensor.stride):
        # Decode takes rows that lie apart, prefill does not.
        if tensor.name == "eidx":
            return "prefill extra indices must be dense"
        return "invalid sparse-MLA prefill variant/topk/indices"
    return None


def needs(tensor: IndexTensor, rows: int, generation: str = "A/B") -> str | None:
    """What the kernel needs and the tensor lacks, whether or not it is checked; None if nothing."""
    said = refusal(tensor, rows, generation)
    if said is not None or generation != "A/B":
        return said
    if not is_contiguous(tensor.shape, tensor.stride):
        return (
            f"{tensor.name} is read as dense rows of {tensor.shape[-1]} although its row stride is "
            f"{tensor.stride[0]}; up to {DECODE_MAX_ROWS} rows nothing checks that"
        )
    if tensor.dtype != "int32":
        return f"{tensor.name} is read as int32 although it is {tensor.dtype}"
    return None


def _known(generation: str) -> None:
    if generation not in GENERATIONS:
        raise ArgumentError("generation", repr(generation), f"one of {', '.join(GENERATIONS)}", "Correct it.")
