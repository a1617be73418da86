"""C128A metadata: one launch fills decode rows (global slots), their lengths, and prefill rows (local ids).

Nothing that changes from step to step is specialised on, widths and strides included, so a context that
crosses a power of two compiles nothing while a server runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .block_table import global_slots, tables, vector_unit
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

if TYPE_CHECKING:
    import torch

__all__ = ["ANY_ALIGNMENT", "NOT_SPECIALISED", "Tile", "arguments", "c128a_kernel", "compile_specs", "grid"]

NOT_SPECIALISED = (
    "tokens",
    "decode_tokens",
    "width",
    "decode_stride",
    "prefill_stride",
    "table_stride",
    "requests",
    "columns",
    "blocks",
)
ANY_ALIGNMENT = ("lens", "positions", "request_ids", "slots", "table")


@dataclass(frozen=True)
class Tile:
    """What one program writes: ``rows`` rows by ``block`` columns."""

    rows: int
    block: int
    num_warps: int


# The interpreter pays by the program, a GPU by the byte.
_COMPILED = Tile(rows=1, block=2048, num_warps=4)
TILE = Tile(rows=32, block=1024, num_warps=4) if INTERPRETED else _COMPILED


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def c128a_kernel(
    decode,  # int32 [>= decode_tokens, >= width * UNIT]
    lens,  # int32 [>= decode_tokens]
    prefill,  # int32 [>= tokens - decode_tokens, >= width * UNIT]
    positions,  # [tokens]
    request_ids,  # [tokens]
    slots,  # [tokens]; negative: padding
    table,  # [requests, columns]
    tokens,
    decode_tokens,
    width,  # UNITs
    decode_stride,  # UNITs
    prefill_stride,  # UNITs
    table_stride,  # elements
    requests,
    columns,
    blocks,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(tokens / ROWS), ceil(width / BLOCK))``. Columns at and past the width are not written."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_width = column < width * UNIT
    is_decode = row < decode_tokens
    live = row < tokens

    # Clamped before any arithmetic: the position of a padding row is whatever was left there.
    entries = width.to(tl.int64) * UNIT
    position = tl.load(positions + row, mask=live, other=-1).to(tl.int64)
    position = tl.minimum(tl.maximum(position, -1), entries * RATIO)
    count = tl.minimum((position + 1) // RATIO, entries).to(tl.int32)

    if first < decode_tokens:
        request = tl.load(request_ids + row, mask=is_decode, other=-1).to(tl.int64)
        slot = global_slots(
            table,
            table_stride,
            requests,
            columns,
            blocks,
            request,
            column,
            is_decode & (column < count),
            BLOCK_SIZE,
        )
        tl.store(decode + row * decode_stride * UNIT + column, slot, mask=is_decode & in_width)
        if tl.program_id(1) == 0:
            padding = tl.load(slots + row, mask=is_decode, other=-1) < 0
            tl.store(lens + row, tl.where(padding, 0, count), mask=is_decode)
    if first + ROWS > decode_tokens:
        local = tl.where(column < count, column, -1)
        target = prefill + (row - decode_tokens) * prefill_stride * UNIT + column
        tl.store(target, local, mask=(live & (is_decode == 0)) & in_width)


def grid(tokens: int, width: int) -> tuple[int, int]:
    """Programs of one launch; ``width`` in columns."""
    return triton.cdiv(tokens, TILE.rows), triton.cdiv(width, TILE.block)


def arguments(
    decode: torch.Tensor,
    lens: torch.Tensor,
    prefill: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    *,
    decode_tokens: int,
    width: int,
    ratio: int,
    block_size: int,
    num_blocks: int | None,
) -> dict[str, Any]:
    """Everything a launch is given, by name, ``num_warps`` included: the buffers whole, never a slice."""
    unit = vector_unit(
        width,
        decode.stride(0),
        prefill.stride(0),
        decode.data_ptr() // 4,
        prefill.data_ptr() // 4,
    )
    return {
        "decode": decode,
        "lens": lens,
        "prefill": prefill,
        "positions": positions,
        "request_ids": request_ids,
        "slots": slots,
        "table": table,
        "tokens": positions.shape[0],
        "decode_tokens": decode_tokens,
        "width": width // unit,
        "decode_stride": decode.stride(0) // unit,
        "prefill_stride": prefill.stride(0) // unit,
        "table_stride": table.stride(0),
        "requests": table.shape[0],
        "columns": table.shape[1],
        "blocks": tables(num_blocks, block_size),
        "RATIO": ratio,
        "BLOCK_SIZE": block_size,
        "UNIT": unit,
        "ROWS": TILE.rows,
        "BLOCK": TILE.block,
        "num_warps": TILE.num_warps,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """Both vector units, with the index types engines use, at ratio 128 and 2 entries a block."""
    specs = []
    for unit in (4, 1):
        for index in ("i64", "i32"):
            signature = dict.fromkeys(("decode", "lens", "prefill"), "*i32")
            signature |= {"positions": f"*{index}", "request_ids": "*i32", "slots": f"*{index}"}
            signature |= {"table": "*i32"} | dict.fromkeys(NOT_SPECIALISED, "i32")
            specs.append(
                CompileSpec(
                    name=f"c128a/unit{unit}/{index}",
                    module="kernels.c128a",
                    function="c128a_kernel",
                    signature=signature,
                    constexprs={
                        "RATIO": 128,
                        "BLOCK_SIZE": 2,
                        "UNIT": unit,
                        "ROWS": _COMPILED.rows,
                        "BLOCK": _COMPILED.block,
                    },
                    num_warps=_COMPILED.num_warps,
                    aligned=("decode", "prefill") if unit == 4 else (),
                    shared_bytes=4096,
                )
            )
    return tuple(specs)
