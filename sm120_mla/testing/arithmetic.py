"""What attention backends round, as data: the rows that ``budgets`` derives bounds from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import ArgumentError

__all__ = [
    "ARITHMETIC",
    "FLASHINFER_BF16_QK",
    "FLASHINFER_FP8_QK",
    "HEAD_DIM",
    "REFERENCE",
    "SGLANG",
    "TINY",
    "TRITON",
    "TRITON_TRUNCATING",
    "Arithmetic",
    "arithmetic_for",
    "rounding",
]

HEAD_DIM = 512
TINY = 2.0**-126
"""Smallest normal number of fp32 and bf16: what lies below may be flushed to zero."""

_FP32 = 2.0**-24
_TENSOR_CORE = 2.0**-23
"""Accumulation in a tensor core may truncate: twice the unit of rounding."""
_DOT = 128 * _TENSOR_CORE
"""Error of a 512-long fp32 dot product as a part of ``sum |q k|``: 32 steps of 16 in a tensor core, each of
which truncates the sum and its products; or 512 roundings to nearest, within 8 sigma."""


def rounding(significand: int) -> tuple[float, float]:
    """Bound and rms of the relative error of rounding to nearest with ``significand`` bits.

    The rms is over mantissas spread as those of products are (evenly in the logarithm): the error is even
    in half a step either side, so its square is ``u^2 / 3`` times the mean of ``1 / m^2`` over [1, 2),
    which is ``3 / (8 ln 2)``.
    """
    unit = 2.0**-significand
    return unit, unit * math.sqrt(1 / (8 * math.log(2)))


_BF16, _BF16_RMS = rounding(8)
_E4M3, _E4M3_RMS = rounding(4)


@dataclass(frozen=True)
class Arithmetic:
    """What one backend rounds. Bounds are relative unless they say otherwise; 0 is exact.

    ``weight`` and ``weight_rms``: the softmax weight as it enters the second product. ``weight_floor``:
    what a weight may be off absolutely, as a part of the largest in its row (subnormal codes). ``score``:
    part of ``scale * sum |q k|`` by which a score may be off; ``score_rms``: part of
    ``scale * sqrt(sum q^2 k^2)``, for rounding of q. ``sum``: one addition of a sum over entries. ``exp``: an
    exponential with its argument. ``partial``: rounding of a partial result before the merge.
    ``out``: the store. ``lse``: the store, with the logarithm. ``centre``: what the result is multiplied by
    in the middle of these bounds, where a rounding has a direction.
    """

    name: str
    weight: float
    weight_rms: float
    weight_floor: float
    score: float
    score_rms: float
    sum: float
    exp: float
    partial: float
    out: float
    lse: float
    independent: bool
    source: str
    centre: float = 1.0


REFERENCE = Arithmetic(
    name="reference",
    weight=0.0,
    weight_rms=0.0,
    weight_floor=0.0,
    score=(HEAD_DIM + 4) * 2.0**-52,
    score_rms=0.0,
    sum=2.0**-52,
    exp=2.0**-48,
    partial=0.0,
    out=_BF16 * (1 + 2.0**-14),  # to fp32 first
    lse=2 * _FP32,
    independent=False,
    source="reference/attention.py: fp64 throughout, rounded once",
)
TRITON = Arithmetic(
    name="triton",
    weight=_BF16,
    weight_rms=_BF16_RMS,
    weight_floor=TINY,
    score=_DOT,
    score_rms=0.0,
    sum=_TENSOR_CORE,
    exp=2.0**-20,
    partial=8 * _FP32,
    out=_BF16 * (1 + 2.0**-12),
    lse=8 * _FP32,
    independent=False,
    source="bf16 q, K and P, products in fp32, weights summed unrounded, splits merged in fp32, bf16 out",
)
TRITON_TRUNCATING = replace(
    TRITON,
    name="triton (truncating)",
    weight=1.5 * _BF16,
    weight_rms=1.5 * _BF16_RMS,
    out=1.5 * TRITON.out,
    source="as triton, with fp32 to bf16 to nearest or by truncation (the interpreter's cast, Triton 3.9)",
    centre=(1 - _BF16 / 2) ** 2,
)
"""Truncation is off by -2 to 0 units and rounding by -1 to 1, of the weights and of the store each."""

SGLANG = replace(
    TRITON,
    name="sglang",
    partial=2 * _BF16,
    source="sglang flash_mla_sm120_triton.py: the result of a cache in bf16, merged to bf16, then the sink",
)
"""Its weights are fp32 or bf16, as the commit has it; its torch fallback rounds less."""

FLASHINFER_BF16_QK = Arithmetic(
    name="flashinfer (bf16 QK)",
    weight=_E4M3,
    weight_rms=math.hypot(_E4M3_RMS, _BF16_RMS),
    weight_floor=2.0**-10 / 448,
    score=TRITON.score,
    score_rms=0.0,
    sum=_TENSOR_CORE,
    exp=2.0**-18,
    partial=_BF16,
    out=_BF16 * (1 + 2.0**-12),
    lse=16 * _FP32,
    independent=True,
    source="FlashInfer 0.6.14-0.7.4 prefill_kernel.cuh: P times V's scale to e4m3, by head, tile and 64 rows",
)
"""Prefill of up to 256 columns, and of two caches; versions differ below that (attention_plan.h, 0.7.4)."""

FLASHINFER_FP8_QK = replace(
    FLASHINFER_BF16_QK,
    name="flashinfer (fp8 QK)",
    score_rms=_E4M3_RMS,
    source="FlashInfer 0.6.14-0.7.4 decode_dsv4_kernel.cuh: q to e4m3 by head and tile as well",
)
"""Decode, and prefill of more than 256 columns of one cache."""

ARITHMETIC = (REFERENCE, TRITON, TRITON_TRUNCATING, SGLANG, FLASHINFER_BF16_QK, FLASHINFER_FP8_QK)


def arithmetic_for(name: str) -> Arithmetic:
    """The row of a backend or of that name; raises ``ArgumentError`` with the names there are.

    ``flashinfer`` is the wider of its rows. ``triton`` rounds to nearest in the interpreter too: our own
    kernels do so by integer arithmetic there.
    """
    rows = {"flashinfer": FLASHINFER_FP8_QK, **{row.name: row for row in ARITHMETIC}}
    if name not in rows:
        raise ArgumentError("arithmetic", repr(name), f"one of {', '.join(rows)}", "Correct the name.")
    return rows[name]
