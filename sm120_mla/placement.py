"""Where tensors lie: pages in a pool, devices, and which memory is whose. Nothing looks at a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .errors import ArgumentError
from .layout import PageGeometry, PageLayout

__all__ = ["disjoint", "own_elements", "pool_geometry", "same_device", "share_memory"]


def pool_geometry(
    pool: torch.Tensor,
    page_size: int | None,
    layout: PageLayout,
    argument: str = "pool",
    multiple_of: int = 1,
) -> PageGeometry:
    """Geometry of a cache view of any page size; raises ``LayoutError`` where it cannot be addressed."""
    return layout.resolve(
        shape=pool.shape,
        stride=pool.stride(),
        storage_offset=int(pool.storage_offset()),
        dtype=str(pool.dtype).removeprefix("torch."),
        storage_bytes=pool.untyped_storage().nbytes(),
        page_size=page_size,
        argument=argument,
        multiple_of=multiple_of,
    )


def same_device(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse, with ``ArgumentError``, tensors that are not all on one device that kernels can reach."""
    from .kernels.runtime import require_device  # imports triton

    (first, reference), *rest = tensors.items()
    require_device(first, reference)
    for name, tensor in rest:
        if tensor.device != reference.device:
            raise ArgumentError(
                f"{name}.device", tensor.device, f"{reference.device}, as {first}", "Move it there."
            )


def disjoint(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse, with ``ArgumentError``, an output that shares memory with an input or another output."""
    given = {**outputs, **inputs}
    for position, (name, output) in enumerate(outputs.items()):
        for other, memory in list(given.items())[position + 1 :]:
            if share_memory(output, memory):
                raise ArgumentError(
                    name, f"memory shared with {other}", f"memory of its own, apart from {other}", "Copy one."
                )


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
