"""Sliding-window index rows: causal ones for decode, whole-block ones for a DSpark verify batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .block_table import global_slots, tables, vector_unit
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

if TYPE_CHECKING:
    import torch

__all__ = ["ANY_ALIGNMENT", "NOT_SPECIALISED", "arguments", "compile_specs", "grid", "window_kernel"]

NOT_SPECIALISED = ("rows", "width", "out_stride", "table_stride", "requests", "columns", "blocks")
ANY_ALIGNMENT = ("lens", "extents", "owners", "slots", "table")

ROWS = 32 if INTERPRETED else 1
BLOCK = 256
NUM_WARPS = 2


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def window_kernel(
    out,  # int32 [>= rows, width * UNIT]
    lens,  # int32 [>= rows]
    extents,  # position of each row; DRAFT: sequence length of each request
    owners,  # request of each row; DRAFT: tokens of each request's block
    slots,  # [rows]; negative: padding
    table,  # [requests, columns]
    rows,
    width,  # UNITs
    out_stride,  # UNITs
    table_stride,  # elements
    requests,
    columns,
    blocks,
    DRAFT: tl.constexpr,  # rows per request of a verify batch, or 0
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(rows / ROWS), ceil(width / BLOCK))``: positions ``[start, end)``, ascending."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_rows = row < rows
    used = in_rows & (tl.load(slots + row, mask=in_rows, other=-1) >= 0)
    far = tl.full((), 1 << 62, tl.int64)  # what a garbage position is cut to, so that nothing overflows
    if DRAFT > 0:
        request = row // DRAFT
        end = tl.load(extents + request, mask=used, other=0).to(tl.int64)
        block = tl.load(owners + request, mask=used, other=0).to(tl.int64)
        block = tl.minimum(tl.maximum(block, 0), DRAFT)
        used = used & (row % DRAFT < block)
        end = tl.minimum(tl.maximum(end, 0), far)
        start = tl.maximum(end - block - WINDOW, 0)
    else:
        request = tl.load(owners + row, mask=used, other=-1).to(tl.int64)
        position = tl.load(extents + row, mask=used, other=-1).to(tl.int64)
        end = tl.minimum(tl.maximum(position, -1), far) + 1
        start = tl.maximum(end - WINDOW, 0)
    length = tl.where(used, end - start, 0)

    wanted = used & (column < length)
    slot = global_slots(
        table, table_stride, requests, columns, blocks, request, start + column, wanted, BLOCK_SIZE
    )
    tl.store(out + row * out_stride * UNIT + column, slot, mask=in_rows & (column < width * UNIT))
    if tl.program_id(1) == 0:
        tl.store(lens + row, length.to(tl.int32), mask=in_rows)


def grid(rows: int, width: int) -> tuple[int, int]:
    """Programs of one launch; ``width`` in columns."""
    return triton.cdiv(rows, ROWS), triton.cdiv(width, BLOCK)


def arguments(
    out: torch.Tensor,
    lens: torch.Tensor,
    extents: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    *,
    rows: int,
    draft: int,
    window: int,
    block_size: int,
    num_blocks: int | None,
) -> dict[str, Any]:
    """Everything a launch is given, by name; ``draft`` is rows per request, 0 for causal rows."""
    width, stride = out.shape[1], out.stride(0)
    unit = vector_unit(width, stride, out.data_ptr() // 4)
    return {
        "out": out,
        "lens": lens,
        "extents": extents,
        "owners": owners,
        "slots": slots,
        "table": table,
        "rows": rows,
        "width": width // unit,
        "out_stride": stride // unit,
        "table_stride": table.stride(0),
        "requests": table.shape[0],
        "columns": table.shape[1],
        "blocks": tables(num_blocks, block_size),
        "DRAFT": draft,
        "WINDOW": window,
        "BLOCK_SIZE": block_size,
        "UNIT": unit,
        "ROWS": ROWS,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """Causal rows and verify blocks of K = 0, 1, 5 and 7 at the window of 128, pages of 64 and 256."""
    specs = []
    for draft, block_size, unit, index in (
        (0, 64, 4, "i64"),
        (0, 64, 4, "i32"),
        (0, 64, 1, "i64"),
        (0, 256, 4, "i64"),
        (1, 64, 4, "i64"),
        (2, 64, 4, "i64"),
        (6, 64, 4, "i64"),
        (6, 64, 4, "i32"),
        (6, 256, 4, "i64"),
        (8, 64, 4, "i64"),
    ):
        extents = "*i32" if draft else f"*{index}"
        signature = {"out": "*i32", "lens": "*i32", "extents": extents, "owners": "*i32"}
        signature |= {"slots": f"*{index}", "table": "*i32"} | dict.fromkeys(NOT_SPECIALISED, "i32")
        specs.append(
            CompileSpec(
                name=f"index_windows/draft{draft}/block{block_size}/unit{unit}/{index}",
                module="kernels.index_windows",
                function="window_kernel",
                signature=signature,
                constexprs={
                    "DRAFT": draft,
                    "WINDOW": 128,
                    "BLOCK_SIZE": block_size,
                    "UNIT": unit,
                    "ROWS": 1,
                    "BLOCK": BLOCK,
                },
                num_warps=NUM_WARPS,
                aligned=("out",) if unit == 4 else (),
                shared_bytes=4096,
            )
        )
    return tuple(specs)
