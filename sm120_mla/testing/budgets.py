"""How far an attention result may lie from the fp64 reference, derived from a backend's arithmetic.

The model. A backend computes ``out = sum_j w_j (1 + d_j) v_j``: V is exact (fp8 times a power of two is a
bf16), and everything it rounds on the way (scores, exponentials, weights, the normaliser) is a relative
error ``d_j`` of the weight ``w_j`` of entry j, with a bound ``b_j`` and a root mean square ``r_j``. Three
measures are taken per row and head, and two of them again over the whole result:

- pointwise: ``|out - ref|``; at most ``sum_j w_j b_j |v_j|`` in each dimension;
- rms of the error over the 512 dimensions; its square is ``sum_ij w_i w_j d_i d_j <v_i, v_j> / 512``;
- slope ``<out, ref> / <ref, ref>``, 1 less ``sum_j w_j d_j <v_j, ref> / <ref, ref>``. Rounding moves it
  little, and a wrong factor moves it by as much as it is wrong: this is what sees a scale of 1.02.

For bf16 arithmetic the bounds hold for every input. For fp8 weights that would allow everything, so there the
errors of distinct tokens are taken as independent (``independent``), the bounds are ``_SIGMAS`` root mean
squares, and a token that occurs twice counts as one whose error is shared. Output rounding, and the sum in
fp32, are added in both. ``lse`` has a budget of its own, from the scores' errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import ArgumentError
from ..reference.attention import Entries, Slab, slabs

__all__ = [
    "ARITHMETIC",
    "FLASHINFER_BF16_QK",
    "FLASHINFER_FP8_QK",
    "REFERENCE",
    "TRITON",
    "TRITON_INTERPRETED",
    "Arithmetic",
    "Budget",
    "Judgement",
    "Miss",
    "arithmetic_for",
    "budget",
    "rounding",
]

_FP32 = 2.0**-24
_TENSOR_CORE = 2.0**-23
"""Accumulation in a tensor core may truncate: twice the unit of rounding."""

_HEAD_DIM = 512
_SIGMAS = 8.0
"""Root mean squares allowed where errors are independent, for one row and head; there are many of those."""
_SIGMAS_WHOLE = 6.0
_SIGMAS_RMS, _SIGMAS_RMS_WHOLE = 4.0, 2.0
"""A mean over 512 dimensions varies less than one value; one over every row and head less still."""

_BLIND = 0.125
"""Past this error of a row's weights the first-order model says nothing, and the row is not judged."""
_TINY = 2.0**-126
"""Smallest normal number of fp32 and bf16: what lies below may be flushed to zero."""


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
    ``out``: the store. ``lse``: the store, with the logarithm.
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


REFERENCE = Arithmetic(
    name="reference",
    weight=0.0,
    weight_rms=0.0,
    weight_floor=0.0,
    score=(_HEAD_DIM + 4) * 2.0**-52,
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
    weight_floor=_TINY,
    score=(_HEAD_DIM + 8) * _TENSOR_CORE,
    score_rms=0.0,
    sum=_TENSOR_CORE,
    exp=2.0**-20,
    partial=8 * _FP32,
    out=_BF16 * (1 + 2.0**-12),
    lse=8 * _FP32,
    independent=False,
    source="bf16 q, K and P, products in fp32, weights summed unrounded, splits merged in fp32, bf16 out",
)
TRITON_INTERPRETED = Arithmetic(
    name="triton (interpreter)",
    weight=2 * _BF16,
    weight_rms=2 * _BF16_RMS,
    weight_floor=_TINY,
    score=TRITON.score,
    score_rms=0.0,
    sum=TRITON.sum,
    exp=TRITON.exp,
    partial=TRITON.partial,
    out=2 * TRITON.out,
    lse=TRITON.lse,
    independent=False,
    source="as triton, with fp32 to bf16 by truncation (the interpreter's cast, Triton 3.9)",
)
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
    source="FlashInfer 0.6.14-0.7.4 prefill_kernel.cuh: P times V's scale to e4m3 by head, tile and 64 entries",
)
"""Prefill up to 256 columns, and with two caches (attention_plan.h 0.7.4, sparse_mla_sm120_prefill.cu 0.6.18)."""

FLASHINFER_FP8_QK = Arithmetic(
    name="flashinfer (fp8 QK)",
    weight=_E4M3,
    weight_rms=FLASHINFER_BF16_QK.weight_rms,
    weight_floor=FLASHINFER_BF16_QK.weight_floor,
    score=TRITON.score,
    score_rms=_E4M3_RMS,
    sum=_TENSOR_CORE,
    exp=FLASHINFER_BF16_QK.exp,
    partial=_BF16,
    out=FLASHINFER_BF16_QK.out,
    lse=FLASHINFER_BF16_QK.lse,
    independent=True,
    source="FlashInfer 0.6.14-0.7.4 decode_dsv4_kernel.cuh: q to e4m3 by head and tile as well",
)
"""Decode, and prefill of more than 256 columns of one cache."""

ARITHMETIC = (REFERENCE, TRITON, TRITON_INTERPRETED, FLASHINFER_BF16_QK, FLASHINFER_FP8_QK)


def arithmetic_for(backend: str, *, interpreted: bool = False, fp8_qk: bool = True) -> Arithmetic:
    """The row of a backend. ``fp8_qk`` tells FlashInfer's two apart; raises ``ArgumentError`` for a name."""
    rows = {
        "reference": REFERENCE,
        "triton": TRITON_INTERPRETED if interpreted else TRITON,
        "flashinfer": FLASHINFER_FP8_QK if fp8_qk else FLASHINFER_BF16_QK,
    }
    if backend not in rows:
        raise ArgumentError("backend", repr(backend), f"one of {', '.join(rows)}", "Correct the name.")
    return rows[backend]


@dataclass(frozen=True)
class Miss:
    """One measure out of its budget, at its worst place. -1 stands for all rows, heads or dimensions."""

    measure: str
    row: int
    head: int
    dim: int
    got: float
    want: float
    allowed: float
    count: int
    note: str = ""

    def __str__(self) -> str:
        at = [f"{n} {v}" for n, v in (("row", self.row), ("head", self.head), ("dim", self.dim)) if v >= 0]
        where = ", ".join(at) or "over the whole result"
        more = f"; {self.count:,} such" if self.count > 1 else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.measure}, {where}: got {self.got:.6g}, want {self.want:.6g} +- {self.allowed:.3g}{more}{note}"


@dataclass(frozen=True)
class Judgement:
    """``ratios``: the largest part of each budget that was used. ``unjudged``: rows and heads left out."""

    misses: tuple[Miss, ...]
    ratios: dict[str, float]
    unjudged: int

    @property
    def ok(self) -> bool:
        return not self.misses


@dataclass(frozen=True, eq=False)
class Budget:
    """The reference and what may differ from it. Tensors are fp64 on the device of q."""

    arithmetic: Arithmetic
    out: torch.Tensor
    """``[T, H, 512]``."""
    lse: torch.Tensor
    """``[T, H]``."""
    pointwise: torch.Tensor
    """``[T, H, 512]``."""
    rms: torch.Tensor
    """``[T, H]``."""
    slope: torch.Tensor
    """``[T, H]``, of ``|slope - 1|``."""
    lse_error: torch.Tensor
    """``[T, H]``."""
    blind: torch.Tensor
    """bool ``[T, H]``: rows whose scores the arithmetic cannot resolve; their values are not judged."""
    whole_rms: float
    whole_slope: float
    sink: torch.Tensor | None = field(default=None, repr=False)

    def surely_rejects(self, factor: float) -> bool:
        """Whether a result within budget, times ``factor``, must fall outside: by its slope alone."""
        return abs(factor - 1) > self.whole_slope * (1 + factor)

    def judge(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Judgement:
        """Compare ``out [T, H, 512]`` and ``lse [T, H]`` of any float dtype.

        A reference that is not finite wants the same of the result (a counted NaN). An empty row wants
        exactly 0 and -inf. Raises ``ArgumentError`` for another shape.
        """
        for name, got, want in (("out", out, self.out), ("lse", lse, self.lse)):
            if got is not None and got.shape != want.shape:
                raise ArgumentError(
                    f"{name}.shape", tuple(got.shape), f"{tuple(want.shape)}", "Pass rows of the reference."
                )
        judged = ~self.blind
        got = out.to(torch.float64)
        misses: list[Miss] = []
        ratios: dict[str, float] = {}
        _elements("out", got, self.out, self.pointwise, judged.unsqueeze(-1), misses, ratios)
        sound = judged & self.out.isfinite().all(-1) & got.isfinite().all(-1)
        _rms(self, got, sound, misses, ratios)
        _slope(self, got, sound, misses, ratios)
        if lse is not None:
            self._lse(lse.to(torch.float64), judged, misses, ratios)
        return Judgement(tuple(misses), ratios, int(self.blind.sum()))

    def _lse(
        self, got: torch.Tensor, judged: torch.Tensor, misses: list[Miss], ratios: dict[str, float]
    ) -> None:
        before = len(misses)
        _elements("lse", got, self.lse, self.lse_error, judged, misses, ratios)
        if len(misses) == before:
            return
        usual = self.lse.isfinite() & judged
        others = {"in base 2": self.lse / math.log(2)}
        if self.sink is not None:
            others["with the sink folded in"] = torch.logaddexp(self.lse, self.sink.to(torch.float64))
        for note, other in others.items():
            near = (got - other).abs() <= 2 * self.lse_error + 1e-5 * other.abs()
            if bool(usual.any()) and bool(near[usual].all()):
                miss = misses.pop()
                misses.append(Miss(**{**vars(miss), "note": f"equals the lse {note}"}))
                return


def _elements(
    measure: str,
    got: torch.Tensor,
    want: torch.Tensor,
    allowed: torch.Tensor,
    judged: torch.Tensor,
    misses: list[Miss],
    ratios: dict[str, float],
) -> None:
    """Element by element; the first axes are row and head, a third the dimension."""
    same = (got == want) | (got.isnan() & want.isnan()) | (~got.isfinite() & ~want.isfinite() & ~_empty(want))
    error = torch.where(same, 0.0, (got - want).abs())
    wrong = ~(error <= allowed) & ~same & judged
    finite = error.isfinite() & (allowed > 0) & judged
    ratio = torch.where(finite, error / allowed.clamp_min(1e-300), 0.0)
    ratios[measure] = float(ratio.max()) if ratio.numel() else 0.0
    if not bool(wrong.any()):
        return
    size = torch.where(
        wrong, torch.where(error.isfinite(), error / allowed.clamp_min(1e-300), torch.inf), -1.0
    )
    at = [int(n) for n in torch.unravel_index(size.argmax(), size.shape)]
    dim = at[2] if len(at) > 2 else -1
    place = tuple(at)
    misses.append(
        Miss(
            measure,
            at[0],
            at[1],
            dim,
            float(got[place]),
            float(want[place]),
            float(allowed[place]),
            int(wrong.sum()),
        )
    )


def _empty(want: torch.Tensor) -> torch.Tensor:
    return want == -torch.inf


def _rms(
    b: Budget, got: torch.Tensor, sound: torch.Tensor, misses: list[Miss], ratios: dict[str, float]
) -> None:
    error = torch.where(sound.unsqueeze(-1), got - b.out, 0.0)
    each = error.square().mean(-1).sqrt()
    _by_row("rms of the error", each, torch.zeros_like(each), b.rms, sound, misses, ratios)
    n = int(sound.sum())
    if n:
        whole = float((error.square().sum() / (n * error.shape[-1])).sqrt())
        _over_all("whole rms of the error", whole, 0.0, b.whole_rms, misses, ratios)


def _slope(
    b: Budget, got: torch.Tensor, sound: torch.Tensor, misses: list[Miss], ratios: dict[str, float]
) -> None:
    sound = sound & _has_slope(b.out)
    ref = torch.where(sound.unsqueeze(-1), b.out, 0.0)
    across, square = (torch.where(sound.unsqueeze(-1), got, 0.0) * ref).sum(-1), ref.square().sum(-1)
    each = torch.where(sound, across / torch.where(sound, square, 1.0), 1.0)
    _by_row("slope <out, ref>/<ref, ref>", each, torch.ones_like(each), b.slope, sound, misses, ratios)
    if bool(sound.any()):
        whole = float(across.sum() / square.sum())
        _over_all("whole slope <out, ref>/<ref, ref>", whole, 1.0, b.whole_slope, misses, ratios)


def _has_slope(out: torch.Tensor) -> torch.Tensor:
    """Rows that are not 0 and far from being flushed to 0; and where nothing overflows in a square."""
    size = out.abs().amax(-1)
    return (size > _TINY * 2.0**26) & (size < 2.0**500)


def _by_row(
    measure: str,
    got: torch.Tensor,
    want: torch.Tensor,
    allowed: torch.Tensor,
    judged: torch.Tensor,
    misses: list[Miss],
    ratios: dict[str, float],
) -> None:
    _elements(measure, torch.where(judged, got, want), want, allowed, judged, misses, ratios)


def _over_all(
    measure: str, got: float, want: float, allowed: float, misses: list[Miss], ratios: dict[str, float]
) -> None:
    error = abs(got - want)
    ratios[measure] = error / allowed if allowed else 0.0
    if not error <= allowed:
        misses.append(Miss(measure, -1, -1, -1, got, want, allowed, 1))


def budget(
    q: torch.Tensor,
    caches: Sequence[Entries],
    sink: torch.Tensor | None,
    scale: float,
    arithmetic: Arithmetic,
) -> Budget:
    """The fp64 reference of a call and its budget under ``arithmetic``.

    ``q`` is bf16 ``[T, H, 512]``, ``sink`` fp32 ``[H]`` or None. Costs some ten reference calls, and for
    bf16 arithmetic a ``[K, K]`` product of values per row.
    """
    parts = [_Part.of(slab, scale, arithmetic) for slab in slabs(q, caches, sink, scale)]
    if not parts:
        parts = [_Part.nothing(q)]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _Part.__dataclass_fields__}
    judged = ~joined["blind"] & joined["out"].isfinite().all(-1)
    sloped = judged & _has_slope(joined["out"])
    square = joined["out"].square().sum(-1)
    return Budget(
        arithmetic=arithmetic,
        out=joined["out"],
        lse=joined["lse"],
        pointwise=joined["pointwise"],
        rms=_together(joined["rms"], _SIGMAS_RMS, arithmetic) + joined["rms_out"],
        slope=_together(joined["slope"], _SIGMAS, arithmetic) / square.clamp_min(1e-300)
        + joined["slope_out"],
        lse_error=joined["lse_error"],
        blind=joined["blind"],
        whole_rms=_whole_rms(joined, judged, arithmetic),
        whole_slope=_whole_slope(joined, sloped, square, arithmetic),
        sink=sink,
    )


def _together(error: torch.Tensor, sigmas: float, arithmetic: Arithmetic) -> torch.Tensor:
    return error * sigmas if arithmetic.independent else error


def _whole_rms(joined: dict[str, torch.Tensor], judged: torch.Tensor, arithmetic: Arithmetic) -> float:
    if not bool(judged.any()):
        return math.inf
    each = _together(joined["rms"], _SIGMAS_RMS_WHOLE, arithmetic) + joined["rms_out"]
    if int(judged.sum()) == 1:  # nothing to average over
        each = _together(joined["rms"], _SIGMAS_RMS, arithmetic) + joined["rms_out"]
    return float(each[judged].square().mean().sqrt())


def _whole_slope(
    joined: dict[str, torch.Tensor], sloped: torch.Tensor, square: torch.Tensor, arithmetic: Arithmetic
) -> float:
    if not bool(sloped.any()):
        return math.inf
    moves, total = joined["slope"][sloped], float(square[sloped].sum())
    moved = (
        _SIGMAS_WHOLE * float(moves.square().sum().sqrt()) if arithmetic.independent else float(moves.sum())
    )
    return moved / total + float((joined["slope_out"] * square)[sloped].sum()) / total


@dataclass(frozen=True)
class _Part:
    """Budgets of a slab's rows; ``rms`` and ``slope`` as bounds, or as one root mean square."""

    out: torch.Tensor
    lse: torch.Tensor
    pointwise: torch.Tensor
    rms: torch.Tensor
    rms_out: torch.Tensor
    slope: torch.Tensor
    slope_out: torch.Tensor
    lse_error: torch.Tensor
    blind: torch.Tensor

    @classmethod
    def nothing(cls, q: torch.Tensor) -> _Part:
        wide = q.new_zeros((0, *q.shape[1:]), dtype=torch.float64)
        flat = wide[..., 0]
        return cls(wide, flat, wide, flat, flat, flat, flat, flat, flat.bool())

    @classmethod
    def of(cls, slab: Slab, scale: float, a: Arithmetic) -> _Part:
        soft, v, out = slab.softmax, slab.values, slab.out
        weight = soft * slab.share.unsqueeze(-1)
        columns = v.shape[1]
        reach = scale * torch.bmm(slab.q.abs(), v.abs().transpose(1, 2))
        score = a.score * reach
        spread = torch.zeros_like(score)
        if a.score_rms:
            spread = a.score_rms * scale * torch.bmm(slab.q.square(), v.square().transpose(1, 2)).sqrt()
        # log sum exp(s + e) lies within log sum p exp(|e|) of log sum exp(s).
        moved = torch.log1p((soft * torch.expm1(score)).sum(-1))
        fp32 = (columns + 8) * a.sum + a.exp
        normaliser = moved + fp32
        spread_lse = _spread_of_lse(slab, soft, scale, a)
        bound = torch.expm1(score + normaliser.unsqueeze(-1) + a.exp) + columns * a.sum + a.partial
        floor = a.weight_floor * _largest_term(weight, v) * 2 * columns
        stored = a.out * out.abs() + _TINY
        if a.independent:
            root = torch.sqrt(a.weight_rms**2 + a.partial**2 / 3 + spread.square())
            w = weight * root
            shared = torch.bmm(w, _same_token(slab)) * w
            noise = _SIGMAS * torch.bmm(shared, v.square()).sqrt()
            # Equal weights of distinct tokens round alike: their error goes with the result itself.
            pointwise = torch.bmm(weight * bound, v.abs()) + noise + a.weight * out.abs() + floor + stored
            rms = ((shared * v.square().sum(-1).unsqueeze(1)).sum(-1) / _HEAD_DIM).sqrt()
            along = torch.bmm(out, v.transpose(1, 2))
            slope = (shared * along.square()).sum(-1).sqrt()
            exact = weight * bound
        else:
            w = weight * (bound + a.weight)
            pointwise = torch.bmm(w, v.abs()) + floor + stored
            gram = torch.bmm(v, v.transpose(1, 2)).abs()
            rms = ((torch.bmm(w, gram) * w).sum(-1) / _HEAD_DIM).clamp_min(0).sqrt()
            along = torch.bmm(out, v.transpose(1, 2)).abs()
            slope = (w * along).sum(-1)
            exact = torch.zeros_like(w)
        square = out.square().sum(-1).clamp_min(1e-300)
        rms_exact = torch.bmm(exact, v.abs()).square().mean(-1).sqrt()
        rms_out = a.out * out.square().mean(-1).sqrt() + floor.square().mean(-1).sqrt() + rms_exact + _TINY
        slope_out = (
            a.out + (exact * along.abs()).sum(-1) / square + ((floor + _TINY) * out.abs()).sum(-1) / square
        )
        lse_error = normaliser + a.lse * _number(slab.lse).abs() + spread_lse
        lse_error = torch.where(slab.lse == -torch.inf, 0.0, lse_error)
        lost = (soft * (score + spread)).sum(-1)
        blind = (lost > _BLIND) & slab.lse.isfinite()
        # An empty row is 0, not about 0.
        nothing = (slab.token < 0).all(-1)
        pointwise = torch.where(nothing.view(-1, 1, 1), 0.0, pointwise)
        return cls(out, slab.lse, pointwise, rms, rms_out, slope, slope_out, lse_error, blind)


def _number(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _spread_of_lse(slab: Slab, soft: torch.Tensor, scale: float, a: Arithmetic) -> torch.Tensor:
    """What rounding of q does to the lse: ``scale * sum d_i q_i kbar_i``, and half the scores' variance."""
    if not a.score_rms:
        return torch.zeros_like(slab.lse)
    mean = torch.bmm(soft, slab.values)
    first = a.score_rms * scale * (slab.q.square() * mean.square()).sum(-1).sqrt()
    variance = (a.score_rms * scale) ** 2 * torch.bmm(slab.q.square(), slab.values.square().transpose(1, 2))
    return _SIGMAS * first + 2 * (soft * variance).sum(-1)


def _largest_term(weight: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[t, H, 512]``: in each 64-wide tile the largest weight times magnitude, which sets its P scale."""
    tiles = v.abs().unflatten(-1, (-1, 64)).amax(-1)
    if not tiles.shape[1]:
        return weight.new_zeros((*weight.shape[:2], v.shape[-1]))
    top = torch.stack([(weight * tiles[..., n].unsqueeze(1)).amax(-1) for n in range(tiles.shape[-1])], -1)
    return top.repeat_interleave(64, -1)


def _same_token(slab: Slab) -> torch.Tensor:
    """``[t, K, K]``: 1 where two columns read the same token."""
    token = slab.token
    return ((token.unsqueeze(1) == token.unsqueeze(2)) & (token >= 0).unsqueeze(1)).to(slab.values.dtype)
