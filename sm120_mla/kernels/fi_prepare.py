"""Index rows as FlashInfer needs them, for both caches in one launch.

int32, contiguous, padded to a width that is served, -1 in every column that does not count; the length is one
past the last column that does, so 0 for a row without any (0.6 computes garbage for a length over nothing but
-1). Masked columns make 0.6 read slot 0: where the cache is a split copy, the first 64 tokens of the copy are
not the pool's, every index is moved up by them, and this launch writes zeros to slot 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..layout import DSV4, SUB_PAGE
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Rows", "arguments", "compile_specs", "grid", "prepare_kernel"]

_NUMBERS = ("tokens", "width", "stride", "length_stride", "tiles", "shift")
NOT_SPECIALISED = ("rows", *(f"{c}_{n}" for c in ("main", "extra") for n in _NUMBERS))
ANY_ALIGNMENT = ("main_in", "main_in_lens", "main_lens", "extra_in", "extra_in_lens", "extra_lens")

TILE = tl.constexpr(64)
TOKEN_BYTES = tl.constexpr(DSV4.token_bytes)
FOOTER_BYTES = tl.constexpr(DSV4.footer_bytes)
FOOTER_AT = tl.constexpr(SUB_PAGE * DSV4.token_bytes)

ROWS = 32 if INTERPRETED else 1
BLOCK = 512
NUM_WARPS = 4


@dataclass(frozen=True)
class Rows:
    """One cache's part of a launch.

    ``indices [T, k]`` and ``lengths [T]`` are int32 or int64 of any row stride; ``out`` int32
    ``[T, tiles * 64]`` and ``out_lengths`` int32 ``[T]`` are contiguous. Indices below ``tokens`` of the pool
    count; ``shift`` is added to every index; ``zero``, uint8 ``[bytes]``, is a page of 64 tokens whose slot 0
    is cleared.
    """

    indices: torch.Tensor
    lengths: torch.Tensor | None
    tokens: int
    out: torch.Tensor
    out_lengths: torch.Tensor
    shift: int = 0
    zero: torch.Tensor | None = None


@triton.jit
def _prepare(
    out,
    lens,
    indices,
    in_lens,
    pool,
    rows,
    tokens,
    width,
    stride,
    length_stride,
    tiles,
    shift,
    HAS_LENGTHS: tl.constexpr,
    ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    limit = tl.zeros((ROWS,), tl.int64) + width
    if HAS_LENGTHS:
        length = tl.load(in_lens + row * length_stride, mask=in_rows, other=0).to(tl.int64)
        limit = tl.minimum(limit, length)
    padded = tiles * TILE
    last = tl.zeros((ROWS,), tl.int32)
    for start in range(0, padded, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = in_rows[:, None] & (column[None, :] < limit[:, None])
        at = indices + row[:, None] * stride + column[None, :]
        index = tl.load(at, mask=inside, other=-1).to(tl.int64)
        counted = inside & (index >= 0) & (index < tokens)
        kept = tl.where(counted, index + shift, -1).to(tl.int32)
        to = out + row[:, None] * (tiles.to(tl.int64) * TILE) + column[None, :]
        tl.store(to, kept, mask=in_rows[:, None] & (column[None, :] < padded))
        last = tl.maximum(last, tl.max(tl.where(counted, column[None, :] + 1, 0), axis=1))
    tl.store(lens + row, last, mask=in_rows)
    if ZERO:  # noqa: SIM102 (a branch on a constexpr stands alone)
        if tl.program_id(0) == 0:
            byte = tl.arange(0, 1024)
            tl.store(pool + byte, tl.zeros((1024,), tl.uint8), mask=byte < TOKEN_BYTES)
            tl.store(pool + FOOTER_AT + byte, tl.zeros((1024,), tl.uint8), mask=byte < FOOTER_BYTES)


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def prepare_kernel(
    main_out,
    main_lens,
    main_in,
    main_in_lens,
    main_pool,
    extra_out,
    extra_lens,
    extra_in,
    extra_in_lens,
    extra_pool,
    rows,
    main_tokens,
    main_width,
    main_stride,  # elements
    main_length_stride,  # elements
    main_tiles,
    main_shift,
    extra_tokens,
    extra_width,
    extra_stride,
    extra_length_stride,
    extra_tiles,
    extra_shift,
    MAIN_LENGTHS: tl.constexpr,
    MAIN_ZERO: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    EXTRA_LENGTHS: tl.constexpr,
    EXTRA_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(rows / ROWS), 1 + HAS_EXTRA)``: the second index is the cache."""
    if tl.program_id(1) == 0:
        _prepare(
            main_out,
            main_lens,
            main_in,
            main_in_lens,
            main_pool,
            rows,
            main_tokens,
            main_width,
            main_stride,
            main_length_stride,
            main_tiles,
            main_shift,
            MAIN_LENGTHS,
            MAIN_ZERO,
            ROWS,
            BLOCK,
        )
    elif HAS_EXTRA:
        _prepare(
            extra_out,
            extra_lens,
            extra_in,
            extra_in_lens,
            extra_pool,
            rows,
            extra_tokens,
            extra_width,
            extra_stride,
            extra_length_stride,
            extra_tiles,
            extra_shift,
            EXTRA_LENGTHS,
            EXTRA_ZERO,
            ROWS,
            BLOCK,
        )


def grid(rows: int, has_extra: bool) -> tuple[int, int]:
    """Programs of one launch."""
    return triton.cdiv(rows, ROWS), 1 + has_extra


def arguments(main: Rows, extra: Rows | None) -> dict[str, Any]:
    """Everything a launch is given, by name."""
    second = main if extra is None else extra  # stands in, never read
    found: dict[str, Any] = {"rows": main.indices.shape[0]}
    for name, part in (("main", main), ("extra", second)):
        found |= {
            f"{name}_out": part.out,
            f"{name}_lens": part.out_lengths,
            f"{name}_in": part.indices,
            f"{name}_in_lens": part.indices if part.lengths is None else part.lengths,
            f"{name}_pool": part.out if part.zero is None else part.zero,
            f"{name}_tokens": part.tokens,
            f"{name}_width": part.indices.shape[1],
            f"{name}_stride": part.indices.stride(0),
            f"{name}_length_stride": 0 if part.lengths is None else part.lengths.stride(0),
            f"{name}_tiles": part.out.shape[1] // 64,
            f"{name}_shift": part.shift,
        }
    return found | {
        "MAIN_LENGTHS": main.lengths is not None,
        "MAIN_ZERO": main.zero is not None,
        "HAS_EXTRA": extra is not None,
        "EXTRA_LENGTHS": extra is not None and extra.lengths is not None,
        "EXTRA_ZERO": extra is not None and extra.zero is not None,
        "ROWS": ROWS,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """One and two caches, with and without lengths and a slot to clear, for both index types."""
    specs = []
    for extra, lengths, zero, index, length in (
        (True, True, False, "i32", "i32"),
        (True, True, True, "i32", "i32"),
        (True, False, False, "i32", "i32"),
        (True, True, False, "i64", "i64"),
        (True, True, True, "i64", "i32"),
        (False, True, False, "i32", "i32"),
        (False, True, True, "i32", "i32"),
        (False, False, True, "i64", "i32"),
        (False, True, False, "i64", "i64"),
    ):
        signature: dict[str, str] = {}
        for cache in ("main", "extra"):
            in_lens = length if lengths else index  # without lengths the indices stand in
            signature |= {f"{cache}_out": "*i32", f"{cache}_lens": "*i32", f"{cache}_in": f"*{index}"}
            signature |= {f"{cache}_in_lens": f"*{in_lens}", f"{cache}_pool": "*u8" if zero else "*i32"}
        signature |= dict.fromkeys(NOT_SPECIALISED, "i32")
        caches = "two" if extra else "one"
        specs.append(
            CompileSpec(
                name=f"fi_prepare/{caches}/{index}/lengths-{length if lengths else 'none'}/zero{int(zero)}",
                module="kernels.fi_prepare",
                function="prepare_kernel",
                signature=signature,
                constexprs={
                    "MAIN_LENGTHS": lengths,
                    "MAIN_ZERO": zero,
                    "HAS_EXTRA": extra,
                    "EXTRA_LENGTHS": extra and lengths,
                    "EXTRA_ZERO": extra and zero,
                    "ROWS": 1,
                    "BLOCK": BLOCK,
                },
                num_warps=NUM_WARPS,
                aligned=("main_out", "extra_out", "main_pool", "extra_pool"),
                shared_bytes=4096,
            )
        )
    return tuple(specs)
