"""How far an attention result may lie from the fp64 reference, derived from a backend's arithmetic.

The model. A backend computes ``out = sum_j w_j (1 + d_j) v_j``: V is exact (fp8 times a power of two is a
bf16), and everything it rounds on the way (scores, exponentials, weights, the normaliser) is a relative
error ``d_j`` of the weight ``w_j`` of entry j. Three measures are taken for each row and head, and two of
them again over the whole result:

- pointwise: ``|out - ref|``, at most ``sum_j w_j |d_j| |v_j|`` in each dimension;
- rms of the error over the 512 dimensions, whose square is ``sum_ij w_i w_j d_i d_j <v_i, v_j> / 512``;
- slope ``<out, ref> / <ref, ref>``, which is 1 and ``sum_j w_j d_j <v_j, ref> / <ref, ref>``. Rounding moves
  it little, and a wrong factor by as much as it is wrong: this is what sees a scale of 1.02.

A score that is off by at most ``e_j`` moves its weight by a factor between
``1 / sum_i w_i exp(+-(e_i + e_j))``, the sum without j's own error and with the sink as an entry without one:
a bound for errors of any size, and none where one entry takes all. To it the rounding of the weight is added.
For bf16 these bounds hold for every input.

For fp8 weights they would allow everything. There (``Arithmetic.independent``) the errors of distinct tokens
are taken as independent, with a root mean square each, and ``_SIGMAS`` of it are allowed; a token that occurs
twice shares its error. Rows whose scores fp8 does not resolve have the bounds that hold for every input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..errors import ArgumentError
from ..reference.attention import Entries, Slab, slabs
from .arithmetic import HEAD_DIM, TINY, Arithmetic, arithmetic_for
from .budget_measures import Judgement, Measures

__all__ = ["Budget", "Complaints", "budget", "judge"]

_SIGMAS = 8.0
"""Root mean squares allowed for one value of one row and head: there are many of those."""
_SIGMAS_WHOLE = 6.0
_SIGMAS_RMS, _SIGMAS_RMS_WHOLE = 4.0, 2.0
"""A mean over 512 dimensions varies less than one value; one over every row and head less still."""
_RESOLVED = 0.2
"""Up to this mean error of a row's scores their effect is linear, and errors may be added as noise."""
_LARGEST_ERROR = 30.0
"""In natural units; a weight is past any bound there, and its exponential still a number."""

_OUT, _RMS, _SLOPE, _LSE = "out", "rms of the error", "slope <out, ref>/<ref, ref>", "lse"
_WHOLE = "whole "


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
    """``[T, H]``, of ``|slope - arithmetic.centre|``."""
    lse_error: torch.Tensor
    """``[T, H]``."""
    blind: torch.Tensor
    """bool ``[T, H]``: rows with an entry whose score is -inf; nothing is said of them."""
    whole_rms: float
    whole_slope: float
    sink: torch.Tensor | None = field(default=None, repr=False)

    def surely_rejects(self, factor: float) -> bool:
        """Whether a result within budget, times ``factor``, must fall outside: by its slope alone."""
        return abs(factor - 1) * self.arithmetic.centre > self.whole_slope * (1 + factor)

    def judge(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Judgement:
        """Hold ``out [T, H, 512]`` and ``lse [T, H]``, of any float dtype, against this budget.

        A reference that is not finite wants the same of the result (a counted NaN). An empty row wants
        exactly 0 and -inf. Raises ``ArgumentError`` for another shape.
        """
        for name, given, want in (("out", out, self.out), ("lse", lse, self.lse)):
            if given is not None and given.shape != want.shape:
                raise ArgumentError(
                    f"{name}.shape", tuple(given.shape), f"{tuple(want.shape)}", "Pass rows of the reference."
                )
        measures, judged = Measures(), ~self.blind
        got = out.to(self.out)
        measures.elements(_OUT, got, self.out * self.arithmetic.centre, self.pointwise, judged.unsqueeze(-1))
        sound = judged & self.out.isfinite().all(-1) & got.isfinite().all(-1)
        self._rms(measures, got, sound)
        self._slope(measures, got, sound & _has_slope(self.out))
        if lse is not None:
            self._lse(measures, lse.to(self.lse), judged)
        return Judgement(tuple(measures.misses), measures.ratios, int(judged.sum()), int(self.blind.sum()))

    def _rms(self, measures: Measures, got: torch.Tensor, sound: torch.Tensor) -> None:
        error = got - self.out * self.arithmetic.centre
        square = torch.where(sound.unsqueeze(-1), error, 0.0).square().mean(-1)
        measures.rows(_RMS, square.sqrt(), 0.0, self.rms, sound)
        if bool(sound.any()):
            measures.whole(_WHOLE + _RMS, math.sqrt(float(square[sound].mean())), 0.0, self.whole_rms)

    def _slope(self, measures: Measures, got: torch.Tensor, sound: torch.Tensor) -> None:
        ref = torch.where(sound.unsqueeze(-1), self.out, 0.0)
        across = (torch.where(sound.unsqueeze(-1), got, 0.0) * ref).sum(-1)
        square = ref.square().sum(-1)
        centre = self.arithmetic.centre
        measures.rows(_SLOPE, across / torch.where(sound, square, 1.0), centre, self.slope, sound)
        if bool(sound.any()):
            measures.whole(_WHOLE + _SLOPE, float(across.sum() / square.sum()), centre, self.whole_slope)

    def _lse(self, measures: Measures, got: torch.Tensor, judged: torch.Tensor) -> None:
        before = len(measures.misses)
        measures.elements(_LSE, got, self.lse, self.lse_error, judged, empty_is_exact=True)
        if len(measures.misses) == before:
            return
        usual = self.lse.isfinite() & judged
        others = {"in base 2": self.lse / math.log(2)}
        if self.sink is not None:
            others["with the sink folded in"] = torch.logaddexp(self.lse, self.sink.to(self.lse))
        for convention, other in others.items():
            near = (got - other).abs() <= 2 * self.lse_error + 1e-5 * other.abs()
            if bool(usual.any()) and bool(near[usual].all()):
                note = f"equals the lse {convention}"
                measures.misses[-1] = replace(measures.misses[-1], note=note)
                return


@dataclass(frozen=True)
class Complaints:
    """What is wrong with a result, a headline and more lines; "" where nothing is."""

    value: str
    lse: str
    judgement: Judgement


def judge(
    arithmetic: str | Arithmetic,
    q: torch.Tensor,
    caches: Sequence[Entries],
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> Complaints:
    """Judge a result by an arithmetic or the name of one; other arguments as ``budget`` has them."""
    if isinstance(arithmetic, str):
        arithmetic = arithmetic_for(arithmetic)
    found = budget(q, caches, sink, scale, arithmetic).judge(out, lse)
    complaints = {}
    for name, parts in (("out", (_OUT, _RMS, _WHOLE + _RMS, _SLOPE, _WHOLE + _SLOPE)), ("lse", (_LSE,))):
        text = found.complaint(*parts)
        complaints[name] = f"{name} is outside the budget of {arithmetic.name}\n{text}" if text else ""
    return Complaints(complaints["out"], complaints["lse"], found)


def budget(
    q: torch.Tensor,
    caches: Sequence[Entries],
    sink: torch.Tensor | None,
    scale: float,
    arithmetic: Arithmetic,
) -> Budget:
    """The fp64 reference of a call and its budget under ``arithmetic``.

    ``q`` is bf16 ``[T, H, 512]``, ``sink`` fp32 ``[H]`` or None. Costs some ten reference calls and a
    ``[K, K]`` product of values per row.
    """
    parts = [_derive(slab, sink, scale, arithmetic) for slab in slabs(q, caches, sink, scale)]
    if not parts:
        wide = q.new_zeros(q.shape, dtype=torch.float64)
        flat = wide[..., 0]
        parts = [_Part(wide, flat, wide, _Error(flat, flat), _Error(flat, flat), flat, flat.bool())]
    part = _Part.joined(parts)
    square = part.out.square().sum(-1)
    judged = ~part.blind & part.out.isfinite().all(-1)
    sloped = judged & _has_slope(part.out)
    whole_rms = whole_slope = math.inf
    if bool(judged.any()):
        spare = (_SIGMAS_RMS**2 - _SIGMAS_RMS_WHOLE**2) / int(judged.sum())
        sigmas = math.sqrt(_SIGMAS_RMS_WHOLE**2 + spare)
        whole_rms = math.sqrt(float(part.rms.at(sigmas)[judged].square().mean()))
    if bool(sloped.any()):
        bound, noise = part.slope.bound[sloped].sum(), part.slope.noise[sloped].square().sum().sqrt()
        whole_slope = float((bound + _SIGMAS_WHOLE * noise) / square[sloped].sum())
    return Budget(
        arithmetic=arithmetic,
        out=part.out,
        lse=part.lse,
        pointwise=part.pointwise,
        rms=part.rms.at(_SIGMAS_RMS),
        slope=part.slope.at(_SIGMAS) / square.clamp_min(1e-300),
        lse_error=part.lse_error,
        blind=part.blind,
        whole_rms=whole_rms,
        whole_slope=whole_slope,
        sink=sink,
    )


def _has_slope(out: torch.Tensor) -> torch.Tensor:
    """Rows that are not 0 and far from being flushed to 0; and where nothing overflows in a square."""
    size = out.abs().amax(-1)
    return (size > TINY * 2.0**26) & (size < 2.0**500)


@dataclass(frozen=True)
class _Error:
    """``[T, H]``: what may be off for certain, and one root mean square of what is off by chance."""

    bound: torch.Tensor
    noise: torch.Tensor

    def at(self, sigmas: float) -> torch.Tensor:
        return self.bound + sigmas * self.noise


@dataclass(frozen=True)
class _Part:
    """Reference and errors of some rows; ``slope`` is still to be divided by ``<ref, ref>``."""

    out: torch.Tensor
    lse: torch.Tensor
    pointwise: torch.Tensor
    rms: _Error
    slope: _Error
    lse_error: torch.Tensor
    blind: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[_Part]) -> _Part:
        def join(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if isinstance(values[0], _Error):
                return _Error(torch.cat([v.bound for v in values]), torch.cat([v.noise for v in values]))
            return torch.cat(values)

        return _Part(**{f.name: join(f.name) for f in fields(_Part)})


def _derive(slab: Slab, sink: torch.Tensor | None, scale: float, a: Arithmetic) -> _Part:
    soft, v, out = slab.softmax, slab.values, slab.out
    weight = soft * slab.share.unsqueeze(-1)
    columns = v.shape[1]
    score = a.score * scale * torch.bmm(slab.q.abs(), v.abs().transpose(1, 2))
    spread = torch.zeros_like(score)
    if a.score_rms:
        spread = a.score_rms * scale * torch.bmm(slab.q.square(), v.square().transpose(1, 2)).sqrt()
    # Sum, exponential and sink in fp32.
    fp32 = (columns + 8) * a.sum + 2 * a.exp + _sink_error(slab, sink, a)
    floor = a.weight_floor * _largest_term(weight, v) * 2 * columns
    flushed = TINY * (1 + v.abs().sum(1, keepdim=True))
    stored = a.out * out.abs() + floor + flushed
    along = torch.bmm(out, v.transpose(1, 2))
    same = _same_token(slab)

    worst = score + _SIGMAS * spread
    w = _moved(weight, slab.share, worst, same) + weight * (fp32.unsqueeze(-1) + a.partial + a.weight)
    pointwise = torch.bmm(w, v.abs())
    gram = torch.bmm(v, v.transpose(1, 2)).abs()
    rms = _Error(((torch.bmm(w, gram) * w).sum(-1) / HEAD_DIM).sqrt(), torch.zeros_like(slab.lse))
    slope = _Error((w * along.abs()).sum(-1), torch.zeros_like(slab.lse))
    spread_lse = torch.logsumexp(slab.scores + worst, -1) - slab.lse
    if a.independent:
        resolved = (soft * spread).sum(-1) <= _RESOLVED
        certain = _moved(weight, slab.share, score, same) + weight * fp32.unsqueeze(-1)
        rounded = torch.hypot(weight * math.hypot(a.weight_rms, a.partial / math.sqrt(3)), certain)
        scored = weight * torch.expm1(3 * spread) / 3  # an exponential grows faster than its slope
        likely, noise, along_noise = _likely(rounded, scored, same, v, out, along)
        # Equal weights of distinct tokens round alike: that error goes with the result itself.
        likely = _SIGMAS * likely + a.weight * out.abs()
        pointwise = torch.where(resolved.unsqueeze(-1), torch.minimum(likely, pointwise), pointwise)
        rms = _either(resolved, noise, rms.bound)
        slope = _either(resolved, along_noise, slope.bound)
        spread_lse = torch.where(resolved, _noise_of_lse(slab, soft, spread, scale, a), spread_lse)
    rms = replace(rms, bound=rms.bound + stored.square().mean(-1).sqrt())
    slope = replace(slope, bound=slope.bound + (stored * out.abs()).sum(-1))
    lse_error = spread_lse + (columns + 8) * a.sum + a.exp + a.lse * _number(slab.lse).abs()
    lse_error = torch.where(slab.lse == -torch.inf, 0.0, lse_error)
    blind = ~pointwise.isfinite().all(-1) & slab.lse.isfinite()
    # An empty row is 0, not about 0.
    nothing = (slab.token < 0).all(-1).view(-1, 1, 1)
    return _Part(out, slab.lse, torch.where(nothing, 0.0, pointwise + stored), rms, slope, lse_error, blind)


def _likely(
    rounded: torch.Tensor,
    scored: torch.Tensor,
    same: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    along: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One root mean square of out, of its mean over dimensions, and of ``<out, ref>``.

    ``rounded`` and ``scored`` are those of the weights: a rounding moves ``out`` by the entry's value, a
    score, which all the weights share in, by its distance from ``out``.
    """
    alone, joint = (torch.bmm(w, same) * w for w in (rounded, scored))
    variance = torch.bmm(alone + joint, v.square()) - 2 * out * torch.bmm(joint, v)
    variance = (variance + out.square() * joint.sum(-1, keepdim=True)).clamp_min(0)
    apart = along - out.square().sum(-1, keepdim=True)
    along_variance = (alone * along.square() + joint * apart.square()).sum(-1)
    return variance.sqrt(), variance.mean(-1).sqrt(), along_variance.sqrt()


def _either(resolved: torch.Tensor, noise: torch.Tensor, bound: torch.Tensor) -> _Error:
    return _Error(torch.where(resolved, 0.0, bound), torch.where(resolved, noise, 0.0))


def _moved(
    weight: torch.Tensor, share: torch.Tensor, score: torch.Tensor, same: torch.Tensor
) -> torch.Tensor:
    """``[t, H, K]``: by how much each weight may be off where each score is off by at most ``score``.

    Entry j's weight becomes ``w_j / sum_i w_i exp(d_i - d_j)``; entries of one token are off alike, and the
    sink is an entry that is not off.
    """
    rest = 1 - share.unsqueeze(-1)
    up = _others(weight, rest, -score, same).clamp_max(0)
    down = _others(weight, rest, score, same).clamp_min(0)
    # 1/(1+x) - 1 = -x/(1+x): exact where x, the change of the sum, is far below 1.
    return (weight * torch.maximum(-up / (1 + up).clamp_min(1e-300), down / (1 + down))).clamp_max(1)


def _others(
    weight: torch.Tensor, rest: torch.Tensor, score: torch.Tensor, same: torch.Tensor
) -> torch.Tensor:
    """``sum_i w_i (exp(s_i + s_j) - 1)`` over entries i of other tokens than j, the sink's s being 0."""
    own = torch.expm1(score.clamp(-_LARGEST_ERROR, _LARGEST_ERROR))
    other = 1 - same
    return torch.bmm(weight * own, other) * (1 + own) + (torch.bmm(weight, other) + rest) * own


def _sink_error(slab: Slab, sink: torch.Tensor | None, a: Arithmetic) -> torch.Tensor:
    """``[t, H]``: what the fp32 difference of lse and sink does to the share."""
    if sink is None:
        return torch.zeros_like(slab.lse)
    size = torch.where(sink.isfinite(), sink, 0.0).to(slab.lse).abs()
    return a.lse * (_number(slab.lse).abs() + size) * (1 - slab.share)


def _number(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _noise_of_lse(
    slab: Slab, soft: torch.Tensor, spread: torch.Tensor, scale: float, a: Arithmetic
) -> torch.Tensor:
    """What rounding of q does to the lse: ``scale * sum d_i q_i kbar_i``, and half the scores' variance."""
    mean = torch.bmm(soft, slab.values)
    first = a.score_rms * scale * (slab.q.square() * mean.square()).sum(-1).sqrt()
    score = a.score * scale * torch.bmm(slab.q.abs(), slab.values.abs().transpose(1, 2))
    return _SIGMAS * first + 2 * (soft * spread.square()).sum(-1) + (soft * score).sum(-1)


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
