"""Merge of the parts of a split attention: weighted by their log-sum-exp, in fp32, in fixed order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .mla_tiles import bf16
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

__all__ = ["MAX_SPLITS", "NOT_SPECIALISED", "MergeConfig", "compile_specs", "merge_config", "merge_kernel"]

MAX_SPLITS = 32
"""Most parts a row may be split into."""

NOT_SPECIALISED = ("rows", "heads", "splits", "lse_t", "lse_h", "sink_h")
ANY_ALIGNMENT = ("part_lse", "lse", "sink")

_NEVER = tl.constexpr(float("-inf"))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))


@dataclass(frozen=True)
class MergeConfig:
    """``rows`` outputs (a row and a head) by ``block`` elements, of ``splits`` parts (a power of two)."""

    rows: int
    splits: int
    block: int
    num_warps: int


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def merge_kernel(
    part_out,  # fp32 [T, splits, heads, DIM], each normalised by its own sum
    part_lse,  # fp32 [T, splits, heads], base 2, -inf: nothing counted, and the part not written
    out,  # bf16 [T, heads, DIM]
    lse,  # fp32 [T, heads], natural
    sink,  # fp32 [heads]
    rows,  # T * heads
    heads,
    splits,
    out_t,  # elements
    out_h,
    lse_t,
    lse_h,
    sink_h,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(ceil(rows / ROWS), DIM / BLOCK)``."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = pair < rows
    row = pair // heads
    head = pair % heads
    split = tl.arange(0, SPLITS)
    part = (row[:, None] * splits + split[None, :]) * heads + head[:, None]
    live = inside[:, None] & (split < splits)[None, :]
    logs = tl.load(part_lse + part, mask=live, other=_NEVER)
    counted = logs != _NEVER  # a NaN is something counted
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = part_out + part[:, :, None] * DIM + column[None, None, :]
    parts = tl.load(at, mask=counted[:, :, None], other=0.0)

    peak = tl.max(logs, axis=1)
    base = tl.where(peak == _NEVER, 0.0, peak)
    weights = tl.exp2(logs - base[:, None])
    total = tl.sum(weights, axis=1)
    result = tl.sum(parts * weights[:, :, None], axis=1)
    nothing = total == 0
    if HAS_LSE:  # noqa: SIM102 - a compile-time condition, then one at run time
        if tl.program_id(1) == 0:
            natural = (peak + tl.log2(tl.where(nothing, 1.0, total))) * _LN_2
            tl.store(lse + row * lse_t + head * lse_h, natural, mask=inside)
    if HAS_SINK:
        share = tl.load(sink + head * sink_h, mask=inside, other=_NEVER)
        total += tl.exp2(share * _LOG2_E - base)
    inverse = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))
    out_at = out + row * out_t + head * out_h
    tl.store(out_at[:, None] + column[None, :], bf16(result * inverse[:, None]), mask=inside[:, None])


def merge_config(splits: int, interpreted: bool = INTERPRETED) -> MergeConfig:
    """Launch configuration for ``splits`` parts, at most ``MAX_SPLITS``."""
    padded = triton.next_power_of_2(max(splits, 2))  # over an axis of one, Triton 3.6 gives NaN on a GPU
    if interpreted:  # one program costs milliseconds there, however little it does
        return MergeConfig(rows=64, splits=padded, block=512, num_warps=4)
    warps = 2 if padded <= 8 else 4
    return MergeConfig(rows=1, splits=padded, block=max(128, 1024 // padded), num_warps=warps)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Two parts with everything, and the most parts with nothing."""
    specs = []
    for splits, full in ((2, True), (MAX_SPLITS, False)):
        config = merge_config(splits, interpreted=False)
        names = ("part_out", "part_lse", "lse", "sink")
        numbers = dict.fromkeys((*NOT_SPECIALISED, "out_t", "out_h"), "i32")
        specs.append(
            CompileSpec(
                name=f"merge/{splits}{'/sink/lse' if full else ''}",
                module="kernels.merge",
                function="merge_kernel",
                signature=dict.fromkeys(names, "*fp32") | {"out": "*bf16"} | numbers,
                constexprs={
                    "HAS_SINK": full,
                    "HAS_LSE": full,
                    "DIM": 512,
                    "ROWS": config.rows,
                    "SPLITS": config.splits,
                    "BLOCK": config.block,
                },
                num_warps=config.num_warps,
                aligned=("part_out", "out", "out_t", "out_h"),
                shared_bytes=16_384,
            )
        )
    return tuple(specs)
