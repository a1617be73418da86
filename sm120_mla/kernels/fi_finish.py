"""What is left to do after FlashInfer: the sink's share, natural units, results that lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

if TYPE_CHECKING:
    import torch

__all__ = ["arguments", "compile_specs", "finish_kernel", "grid"]

NOT_SPECIALISED = (
    "rows",
    "heads",
    "out_row_stride",
    "out_head_stride",
    "lse_row_stride",
    "lse_head_stride",
)
ANY_ALIGNMENT = ("out", "lse", "sink", "main_lens", "extra_lens")

PAIRS = 256 if INTERPRETED else 4
NUM_WARPS = 4


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def finish_kernel(
    raw_out,  # int16 (bf16 bits) [rows, heads, DIM], contiguous
    raw_lse,  # fp32 [rows, heads], contiguous
    out,  # int16, any strides; may be raw_out
    lse,  # fp32, any strides; may be raw_lse
    sink,  # fp32 [heads]
    main_lens,  # int32 [rows]; 0: nothing counts
    extra_lens,  # int32 [rows]
    rows,
    heads,
    out_row_stride,
    out_head_stride,
    lse_row_stride,
    lse_head_stride,
    WRITE_OUT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    LSE_UNIT: tl.constexpr,  # what the raw LSE is multiplied by to be natural
    OUT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Grid ``(ceil(rows * heads / PAIRS),)``: ``out = raw * sigmoid(lse - sink)``, ``lse`` natural, -inf."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row, head = pair // heads, pair % heads
    inside = row < rows
    counted = tl.load(main_lens + row, mask=inside, other=0)
    if HAS_EXTRA:
        counted += tl.load(extra_lens + row, mask=inside, other=0)
    empty = counted <= 0
    natural = tl.load(raw_lse + pair, mask=inside, other=0.0) * LSE_UNIT
    natural = tl.where(empty, float("-inf"), natural)
    if WRITE_LSE:
        tl.store(lse + row * lse_row_stride + head * lse_head_stride, natural, mask=inside)
    if WRITE_OUT:
        dim = tl.arange(0, DIM)
        bits = tl.load(raw_out + pair[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0)
        if HAS_SINK:
            at_sink = tl.load(sink + head, mask=inside, other=0.0)
            share = 1.0 / (1.0 + tl.exp(at_sink - tl.where(empty, 0.0, natural)))
            share = tl.where(empty, 0.0, share)
            value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True) * share[:, None]
            # Round to nearest even by integers: a cast truncates in the interpreter.
            wide = value.to(tl.int32, bitcast=True)
            rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
            bits = tl.where(value == value, rounded, 0x7FC0).to(tl.int16)
        to = out + row[:, None] * out_row_stride + head[:, None] * out_head_stride + dim[None, :] * OUT_STRIDE
        tl.store(to, bits, mask=inside[:, None])


def grid(rows: int, heads: int) -> tuple[int]:
    """Programs of one launch."""
    return (triton.cdiv(rows * heads, PAIRS),)


def arguments(
    raw_out: torch.Tensor,
    raw_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sink: torch.Tensor | None,
    main_lens: torch.Tensor,
    extra_lens: torch.Tensor | None,
    *,
    lse_unit: float,
) -> dict[str, Any]:
    """Everything a launch is given, by name. ``out`` and ``raw_out`` as int16; ``sink`` None: no share."""
    same_out = raw_out.data_ptr() == out.data_ptr()
    same_lse = lse is None or raw_lse.data_ptr() == lse.data_ptr()
    to_lse = raw_lse if lse is None else lse
    return {
        "raw_out": raw_out,
        "raw_lse": raw_lse,
        "out": out,
        "lse": to_lse,
        "sink": raw_lse if sink is None else sink,
        "main_lens": main_lens,
        "extra_lens": main_lens if extra_lens is None else extra_lens,
        "rows": out.shape[0],
        "heads": out.shape[1],
        "out_row_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "lse_row_stride": to_lse.stride(0),
        "lse_head_stride": to_lse.stride(1),
        "WRITE_OUT": sink is not None or not same_out,
        "WRITE_LSE": lse is not None and (not same_lse or lse_unit != 1.0),
        "HAS_SINK": sink is not None,
        "HAS_EXTRA": extra_lens is not None,
        "LSE_UNIT": lse_unit,
        "OUT_STRIDE": out.stride(2),
        "DIM": out.shape[2],
        "PAIRS": PAIRS,
        "num_warps": NUM_WARPS,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """Sink or copy of the output, LSE in base 2 or natural, one cache or two."""
    pointers = {"raw_out": "*i16", "raw_lse": "*fp32", "out": "*i16", "lse": "*fp32", "sink": "*fp32"}
    pointers |= {"main_lens": "*i32", "extra_lens": "*i32"}
    specs = []
    for out, lse, sink, extra, unit in (
        (True, True, True, True, 0.6931471805599453),
        (True, True, True, False, 0.6931471805599453),
        (False, True, False, True, 0.6931471805599453),
        (True, True, False, True, 0.6931471805599453),
        (True, False, True, True, 1.0),
        (True, True, True, True, 1.0),
        (True, False, False, True, 1.0),
        (False, True, False, False, 1.0),
    ):
        specs.append(
            CompileSpec(
                name=f"fi_finish/out{int(out)}/lse{int(lse)}/sink{int(sink)}/two{int(extra)}/unit{unit:.2f}",
                module="kernels.fi_finish",
                function="finish_kernel",
                signature=pointers | dict.fromkeys(NOT_SPECIALISED, "i32"),
                constexprs={
                    "WRITE_OUT": out,
                    "WRITE_LSE": lse,
                    "HAS_SINK": sink,
                    "HAS_EXTRA": extra,
                    "LSE_UNIT": unit,
                    "OUT_STRIDE": 1,
                    "DIM": 512,
                    "PAIRS": 4,
                },
                num_warps=NUM_WARPS,
                aligned=("raw_out", "raw_lse"),
                shared_bytes=4096,
            )
        )
    return tuple(specs)
