"""Which memory tensors occupy: whether the elements of an output are its own, and none are an input's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .errors import ArgumentError

__all__ = ["own_elements", "share_memory"]


def own_elements(name: str, tensor: torch.Tensor) -> None:
    """Refuse, with ``ArgumentError``, a tensor two of whose elements may have a byte in common."""
    reach = 0
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1:
            if stride <= reach:
                raise ArgumentError(
                    f"{name}.stride()", tensor.stride(), "elements apart from each other", "Do not expand it."
                )
            reach += (size - 1) * stride


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views may have a byte in common. By address: imported memory has storages of its own.

    Views whose ranges cross are told apart where they repeat at a common step and occupy different parts of
    it (two slices of one fused row, layers interleaved in one pool); else they count as sharing.
    """
    if not a.numel() or not b.numel():
        return False
    if a.data_ptr() + _reach(a) <= b.data_ptr() or b.data_ptr() + _reach(b) <= a.data_ptr():
        return False
    distance = b.data_ptr() - a.data_ptr()
    return not any(
        distance % step >= _reach(a, step) and -distance % step >= _reach(b, step)
        for step in {*_steps(a), *_steps(b)}
    )


def _axes(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Size and stride in bytes of the axes along which there is a second element elsewhere."""
    item = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride:
            yield size, stride * item


def _steps(tensor: torch.Tensor) -> Iterator[int]:
    return (stride for _, stride in _axes(tensor))


def _reach(tensor: torch.Tensor, step: int = 0) -> int:
    """Bytes from the first to past the last, not counting axes that move by multiples of ``step``."""
    moves = ((size - 1) * stride for size, stride in _axes(tensor) if not step or stride % step)
    return sum(moves) + tensor.element_size()
