"""Device function shared by the index kernels: what slot a block table gives for an index of a request."""

from __future__ import annotations

from .runtime import tl, triton

__all__ = ["MAX_SLOT", "global_slots", "tables", "vector_unit"]

MAX_SLOT = 2**31 - 1
"""Slots are int32; a block whose last slot would be larger counts as out of range."""


@triton.jit
def global_slots(
    table,  # [requests, columns], last dimension dense
    table_stride,  # elements
    requests,
    columns,
    blocks,  # block ids at or above this are out of range
    request,  # int64, one per row
    index,  # index within the request, >= 0 where wanted
    wanted,
    BLOCK_SIZE: tl.constexpr,
):
    """``table[request, index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE`` as int32, or -1.

    -1 wherever it is not wanted and wherever request, column or block id is out of range, compared in the
    width they come in and before any address is formed from them.
    """
    known = (request >= 0) & (request < requests)
    row = table + tl.where(known, request, 0) * table_stride
    column = index // BLOCK_SIZE
    inside = wanted & known & (column < columns)
    block = tl.load(row + column, mask=inside, other=-1)
    inside = inside & (block >= 0) & (block < blocks)
    # Below ``blocks`` the slot fits int32, so the block's own type is wide enough.
    slot = tl.where(inside, block, 0) * BLOCK_SIZE + (index % BLOCK_SIZE).to(tl.int32)
    return tl.where(inside, slot, -1).to(tl.int32)


def vector_unit(*sizes: int) -> int:
    """4 where every width, row stride (elements) and address // 4 given is divisible by 4, else 1.

    Kernels get widths and strides in this unit, so that 16-byte stores are provable although no value is
    specialised on: a new width makes no new kernel.
    """
    return 1 if any(size % 4 for size in sizes) else 4


def tables(num_blocks: int | None, block_size: int) -> int:
    """Block ids below this are in range: ``num_blocks``, or as many as an int32 slot can name."""
    most = (MAX_SLOT + 1) // block_size
    return most if num_blocks is None else min(num_blocks, most)
