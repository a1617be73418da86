"""Index rows made from top-k selections: global C4A slots for decode, combined rows for prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .block_table import global_slots, tables, vector_unit
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMBINE_ANY_ALIGNMENT",
    "COMBINE_NOT_SPECIALISED",
    "GLOBAL_ANY_ALIGNMENT",
    "GLOBAL_NOT_SPECIALISED",
    "combine_arguments",
    "combine_grid",
    "combine_kernel",
    "compile_specs",
    "global_arguments",
    "global_grid",
    "global_kernel",
]

GLOBAL_NOT_SPECIALISED = (
    "rows",
    "topk",
    "width",
    "local_stride",
    "out_stride",
    "table_stride",
    "requests",
    "columns",
    "blocks",
)
GLOBAL_ANY_ALIGNMENT = ("lens", "local", "request_ids", "slots", "table")
COMBINE_NOT_SPECIALISED = (
    "rows",
    "requests",
    "steps",
    "topk",
    "width",
    "local_stride",
    "out_stride",
    "workspace_stride",
    "window_base",
)
COMBINE_ANY_ALIGNMENT = ("lens", "local", "starts", "seq_lens", "gather_lens")

ROWS = 32 if INTERPRETED else 1
BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=GLOBAL_NOT_SPECIALISED, do_not_specialize_on_alignment=GLOBAL_ANY_ALIGNMENT)
def global_kernel(
    out,  # int32 [>= rows, width * UNIT]
    lens,  # int32 [>= rows]
    local,  # int32 or int64 [rows, topk]: indices within the request, negative: none
    request_ids,  # [rows]
    slots,  # [rows]; negative: padding
    table,  # [requests, columns]
    rows,
    topk,
    width,  # UNITs
    local_stride,  # elements
    out_stride,  # UNITs
    table_stride,  # elements
    requests,
    columns,
    blocks,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(rows / ROWS),)``: a program maps its whole rows, as the length needs all of one."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    in_rows = row < rows
    used = in_rows & (tl.load(slots + row, mask=in_rows, other=-1) >= 0)
    request = tl.load(request_ids + row, mask=used, other=-1).to(tl.int64)
    length = tl.zeros((ROWS, 1), tl.int32)
    for first in range(0, width * UNIT, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        given = used & (column < topk)
        index = tl.load(local + row * local_stride + column, mask=given, other=-1).to(tl.int64)
        slot = global_slots(
            table, table_stride, requests, columns, blocks, request, index, given & (index >= 0), BLOCK_SIZE
        )
        tl.store(out + row * out_stride * UNIT + column, slot, mask=in_rows & (column < width * UNIT))
        last = tl.max(tl.where(slot >= 0, column + 1, 0), axis=1)[:, None]
        length = tl.maximum(length, last)
    tl.store(lens + row, length, mask=in_rows)


@triton.jit(do_not_specialize=COMBINE_NOT_SPECIALISED, do_not_specialize_on_alignment=COMBINE_ANY_ALIGNMENT)
def combine_kernel(
    out,  # int32 [>= rows, width * UNIT]
    lens,  # int32 [>= rows]
    local,  # int32 or int64 [rows, >= topk]: entries of the request's compressed region, negative: none
    starts,  # [requests + 1]: first row of each request, any constant offset
    seq_lens,  # [requests]
    gather_lens,  # [requests]: last tokens of each sequence that the workspace holds
    rows,
    requests,
    steps,  # ceil(log2(requests))
    topk,
    width,  # UNITs
    local_stride,  # elements
    out_stride,  # UNITs
    workspace_stride,  # workspace rows per request
    window_base,  # workspace rows of the compressed region
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(rows / ROWS), ceil(width / BLOCK))``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_rows = row < rows
    far = tl.full((), 1 << 60, tl.int64)

    # The last request that starts at or before the row.
    token = row + tl.load(starts).to(tl.int64)
    low = tl.zeros((ROWS, 1), tl.int64)
    high = low + requests - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        before = tl.load(starts + middle, mask=in_rows, other=0).to(tl.int64) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    request = low
    begin = tl.load(starts + request, mask=in_rows, other=0).to(tl.int64)
    finish = tl.load(starts + request + 1, mask=in_rows, other=0).to(tl.int64)
    used = in_rows & (begin <= token) & (token < finish)

    seq_len = tl.load(seq_lens + request, mask=used, other=0).to(tl.int64)
    gather_len = tl.load(gather_lens + request, mask=used, other=0).to(tl.int64)
    seq_len = tl.minimum(tl.maximum(seq_len, -far), far)
    gather_len = tl.minimum(tl.maximum(gather_len, -far), far)
    position = tl.maximum(seq_len - finish + token, -1)
    entries = tl.where(used, tl.minimum((position + 1) // RATIO, topk), 0)
    window = tl.where(used, tl.minimum(position + 1, WINDOW), 0)

    at = tl.load(local + row * local_stride + column, mask=column < entries, other=-1).to(tl.int64)
    selected = tl.where(at < window_base, at, -1)
    seen = position - window + 1 + (column - entries) - (seq_len - gather_len)
    held = (seen >= 0) & (seen < workspace_stride - window_base)
    recent = tl.where((column < entries + window) & held, window_base + seen, -1)
    value = tl.where(column < entries, selected, recent)
    value = tl.where(value >= 0, value + request * workspace_stride, -1)
    tl.store(
        out + row * out_stride * UNIT + column,
        value.to(tl.int32),
        mask=in_rows & (column < width * UNIT),
    )
    if tl.program_id(1) == 0:
        tl.store(lens + row, (entries + window).to(tl.int32), mask=in_rows)


def global_grid(rows: int) -> tuple[int]:
    """Programs of one launch of ``global_kernel``."""
    return (triton.cdiv(rows, ROWS),)


def combine_grid(rows: int, width: int) -> tuple[int, int]:
    """Programs of one launch of ``combine_kernel``; ``width`` in columns."""
    return triton.cdiv(rows, ROWS), triton.cdiv(width, BLOCK)


def global_arguments(
    out: torch.Tensor,
    lens: torch.Tensor,
    local: torch.Tensor,
    request_ids: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    *,
    block_size: int,
    num_blocks: int | None,
) -> dict[str, Any]:
    """Everything a launch of ``global_kernel`` is given, by name; ``local`` is 2-D."""
    width, stride = out.shape[1], out.stride(0)
    unit = vector_unit(width, stride, out.data_ptr() // 4)
    return {
        "out": out,
        "lens": lens,
        "local": local,
        "request_ids": request_ids,
        "slots": slots,
        "table": table,
        "rows": local.shape[0],
        "topk": local.shape[1],
        "width": width // unit,
        "local_stride": local.stride(0),
        "out_stride": stride // unit,
        "table_stride": table.stride(0),
        "requests": table.shape[0],
        "columns": table.shape[1],
        "blocks": tables(num_blocks, block_size),
        "BLOCK_SIZE": block_size,
        "UNIT": unit,
        "ROWS": ROWS,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }


def combine_arguments(
    out: torch.Tensor,
    lens: torch.Tensor,
    local: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    *,
    topk: int,
    window: int,
    ratio: int,
    workspace_stride: int,
    window_base: int,
) -> dict[str, Any]:
    """Everything a launch of ``combine_kernel`` is given, by name; ``local`` is 2-D."""
    width, stride = out.shape[1], out.stride(0)
    unit = vector_unit(width, stride, out.data_ptr() // 4)
    requests = seq_lens.shape[0]
    return {
        "out": out,
        "lens": lens,
        "local": local,
        "starts": starts,
        "seq_lens": seq_lens,
        "gather_lens": gather_lens,
        "rows": local.shape[0],
        "requests": requests,
        "steps": (requests - 1).bit_length(),
        "topk": topk,
        "width": width // unit,
        "local_stride": local.stride(0),
        "out_stride": stride // unit,
        "workspace_stride": workspace_stride,
        "window_base": window_base,
        "RATIO": ratio,
        "WINDOW": window,
        "UNIT": unit,
        "ROWS": ROWS,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """Global slots for pages of 64 and 2 entries; combined rows at ratios 1, 4 and 128."""
    specs = []
    for block_size, unit, index in ((64, 4, "i32"), (64, 1, "i32"), (64, 4, "i64"), (2, 4, "i32")):
        signature = {"out": "*i32", "lens": "*i32", "local": f"*{index}", "request_ids": "*i32"}
        signature |= {"slots": "*i64", "table": "*i32"} | dict.fromkeys(GLOBAL_NOT_SPECIALISED, "i32")
        specs.append(
            _spec(
                f"index_topk.global/block{block_size}/unit{unit}/{index}",
                "global_kernel",
                signature,
                {"BLOCK_SIZE": block_size, "UNIT": unit},
            )
        )
    for ratio, unit in ((4, 4), (128, 4), (1, 4), (4, 1)):
        signature = dict.fromkeys(("out", "lens", "local", "starts", "seq_lens", "gather_lens"), "*i32")
        signature |= dict.fromkeys(COMBINE_NOT_SPECIALISED, "i32")
        specs.append(
            _spec(
                f"index_topk.combine/ratio{ratio}/unit{unit}",
                "combine_kernel",
                signature,
                {"RATIO": ratio, "WINDOW": 128, "UNIT": unit},
            )
        )
    return tuple(specs)


def _spec(name: str, function: str, signature: dict[str, str], constexprs: dict[str, object]) -> CompileSpec:
    return CompileSpec(
        name=name,
        module="kernels.index_topk",
        function=function,
        signature=signature,
        constexprs=constexprs | {"ROWS": 1, "BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        aligned=("out",) if constexprs["UNIT"] == 4 else (),
        shared_bytes=16_384,  # Triton 3.6 exchanges a tile between layouts; 3.9 does not
    )
