"""ATTN: out and lse against the yardstick, and what may and may not change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...case import AttnCase
from ...errors import UnavailableError
from ...reference.attention import counted
from ...targets.base import Support, Target
from ...targets.routes import HasServes
from .. import budgets
from ..arithmetic import arithmetic_for
from ..attn_inputs import Cache, Call, call_of, entries_of
from ..observe import last_only, run
from ..verdict import HOLDS, Verdict, invariant, unknown, violated

_ANYWHERE = ("reference", "cuda", "sm120")
_SCRATCH = ("mla-", "flashinfer-")
"""Persistent tensors by the start of their names of which whatever they held must not matter."""

Result = tuple[torch.Tensor, torch.Tensor]


def _attend(target: Target, call: Call, doing: str = "attention") -> Result:
    out, lse = run(doing, lambda: target.attend(call.inputs()))
    return out.cpu(), lse.cpu().float()


@dataclass(frozen=True)
class _First:
    """A call and what the target answers. ``spared`` are the caches whose slot 0 it wants finite."""

    call: Call
    answer: Result
    spared: tuple[str, ...]


@last_only
def _first(target: Target, case: AttnCase) -> _First:
    """Raises ``UnavailableError``, which is unknown, for a call that the target says it does not serve."""
    target.reset()
    call = call_of(case)
    spared: tuple[str, ...] = ()
    if isinstance(target, HasServes):
        _require(target, call)
        spared = target.finite_slot_zero(call.inputs())
        call = call_of(case, finite_slot_zero=spared) if spared else call
    return _First(call, _attend(target, call), spared)


def _require(target: Target, call: Call) -> None:
    support = target.serves(call.inputs()) if isinstance(target, HasServes) else Support(True)
    if not support:
        raise UnavailableError(
            f"this call of target {target.name}", support.reason.rstrip("."), "Judge another case."
        )


def _empty_rows(call: Call) -> torch.Tensor:
    """bool ``[T]``: rows with no counted entry in any cache."""
    some = torch.zeros(call.q.shape[0], dtype=torch.bool, device=call.q.device)
    for cache in call.caches:
        some |= counted(cache.entries).any(dim=1)
    return ~some.cpu()


def _judge(target: Target, call: Call, answer: Result, what: str, *, merged: bool = False) -> Verdict:
    """Out or lse of an answer against the yardstick within the target's budget.

    ``merged``: the answer was put together from parts, each of them stored. Unknown where some row and head
    has no budget: nothing was said of it.
    """
    arithmetic = arithmetic_for(target.error_budget())
    if merged:
        arithmetic = dataclasses.replace(arithmetic, partial=arithmetic.partial + arithmetic.out)
    found = budgets.judge(arithmetic, call.q, entries_of(call), call.sink, call.scale, *answer)
    complaint = getattr(found, what)
    if complaint:
        return violated(complaint.split("\n")[0], "\n".join(complaint.split("\n")[1:]))
    blind, total = found.judgement.unjudged, found.judgement.unjudged + found.judgement.judged
    if blind:
        return unknown(f"no budget for {blind} of {total} rows and heads: a score may be off without bound")
    return HOLDS


@invariant(
    "ATTN-VALUE",
    "out against an fp64 reference over the dequantised cache, within a budget derived from the arithmetic, "
    "which a zeroed, a permuted and a scaled output all fail",
    origin="allclose(5e-2) passes an all-zero output; gaps 14, 16, 18-22, 27 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_value(target: Target, case: AttnCase) -> Verdict:
    """Pointwise, RMS and slope."""
    first = _first(target, case)
    return _judge(target, first.call, first.answer, "value")


@invariant(
    "ATTN-LSE",
    "lse is the natural log-sum-exp over the counted entries of both caches, without the sink, within a "
    "budget derived from the arithmetic",
    origin="four conventions in the field, and no test looks at any; gap 15 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_lse(target: Target, case: AttnCase) -> Verdict:
    """Absolute, in natural units."""
    first = _first(target, case)
    return _judge(target, first.call, first.answer, "lse")


@invariant(
    "ATTN-DONTCARE",
    "NaN, inf or any bytes in uncounted slots (slot 0 included), tails, pads and scratch change no output "
    "bit",
    origin="FlashInfer #5095, sglang #39288: masked lanes gather slot 0, and 0 * NaN is NaN",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_dontcare(target: Target, case: AttnCase) -> Verdict:
    """The same call over three kinds of poison.

    Unknown at best for a target that reads slot 0 of a cache whatever counts: that slot is then spared.
    """
    first = _first(target, case)
    answer = first.answer
    for n, kind in enumerate(("nan", "inf", "noise")):
        other = case.model_copy(update={"poison": kind})
        call = call_of(other, poison_seed=n + 1, finite_slot_zero=first.spared)
        for name, tensor in target.persistent().items():
            if name.startswith(_SCRATCH):
                floats = tensor.is_floating_point()
                tensor.fill_(float("nan") if floats else torch.iinfo(tensor.dtype).max)
        again = _attend(target, call, f"attention over {kind}")
        complaint = _same_bits(answer, again)
        if complaint:
            return violated(f"bytes of uncounted entries matter ({kind})", complaint)
    if first.spared:
        return unknown(f"a finite slot 0 of {' and '.join(first.spared)} is a precondition of {target.name}")
    return HOLDS


def _same_bits(a: Result, b: Result) -> str:
    for name, x, y in (("out", a[0], b[0]), ("lse", a[1], b[1])):
        raw = [t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32) for t in (x, y)]
        wrong = (raw[0] != raw[1]).nonzero()
        if wrong.numel():
            at = tuple(int(n) for n in wrong[0])
            return (
                f"{name}{list(at)}: {float(x[at]):g} became {float(y[at]):g}; {wrong.shape[0]} values differ"
            )
    return ""


@invariant(
    "ATTN-EMPTY",
    "a row with no counted entry gives out 0 and lse -inf, with and without sink, and disturbs no other row",
    origin="in sglang 'length 1, index -1' is routine; gap 17 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_empty(target: Target, case: AttnCase) -> Verdict:
    """Exact, bit by bit."""
    first = _first(target, case)
    call, (out, lse) = first.call, first.answer
    empty = _empty_rows(call)
    rows = empty.nonzero().flatten().tolist()
    for row in rows:
        if bool((out[row] != 0).any()) or bool(out[row].isnan().any()):
            return violated(f"row {row} has no counted entry, and its out is not 0")
        if not bool((lse[row] == float("-inf")).all()):
            return violated(f"row {row} has no counted entry, and its lse is {float(lse[row, 0])}")
    finite = out[~empty]
    if bool(finite.isnan().any()) or bool(lse[~empty].isnan().any()):
        return violated("a row with counted entries gives NaN")
    return HOLDS


@invariant(
    "ATTN-MERGE",
    "attention over a partition of the entries, merged by lse, equals the whole; main and extra may be "
    "exchanged",
    origin="sglang: a launch for each cache, merged by lse, with bf16 in between",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_merge(target: Target, case: AttnCase) -> Verdict:
    """Every other entry by itself, merged in fp64; and the caches the other way round."""
    call = _first(target, case).call
    parts = [_half(target, call, parity) for parity in (0, 1)]
    lse = torch.stack([part[1].double() for part in parts])
    total = torch.logsumexp(lse, dim=0)
    safe = torch.where(total == float("-inf"), 0.0, total)
    weights = torch.exp(lse - safe)
    merged = torch.zeros(parts[0][0].shape, dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        merged += part[0].double() * torch.where(weight > 0, weight, 0.0)[..., None]
    if call.sink is not None:
        merged = merged * torch.sigmoid(safe - call.sink.cpu().double())[..., None]
    verdict = _judge(target, call, (merged.to(torch.bfloat16), total.float()), "value", merged=True)
    if not verdict.holds or call.extra is None:
        return _under(verdict, "two halves merged by lse are not the whole")
    swapped = dataclasses.replace(call, main=call.extra, extra=call.main)
    _require(target, swapped)
    verdict = _judge(target, call, _attend(target, swapped, "attention with the caches exchanged"), "value")
    return _under(verdict, "exchanging the caches changes the result")


def _under(verdict: Verdict, headline: str) -> Verdict:
    """A violation under another headline; any other verdict as it is."""
    return violated(headline, f"{verdict.headline}\n{verdict.details}") if verdict.violated else verdict


def _half(target: Target, call: Call, parity: int) -> Result:
    half = _mapped(call, functools.partial(_every_other, parity=parity))
    return _attend(target, dataclasses.replace(half, sink=None), f"attention over half {parity}")


def _every_other(rows: torch.Tensor, parity: int) -> torch.Tensor:
    column = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(column % 2 == parity, rows, -1)


def _mapped(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    def of(cache: Cache) -> Cache:
        return dataclasses.replace(cache, indices=change(cache.indices))

    extra = None if call.extra is None else of(call.extra)
    return dataclasses.replace(call, main=of(call.main), extra=extra)


@invariant(
    "ATTN-ORDER",
    "permuting entries changes the result only within the budget; repeating a run changes no bit",
    origin="aiter #4415, sglang #24654: the order of a top-k varies; gap 22 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_order(target: Target, case: AttnCase) -> Verdict:
    """Counted entries reversed within their length, then the first call again."""
    first = _first(target, case)
    call, answer = first.call, first.answer
    reversed_ = _mapped(dataclasses.replace(call), lambda rows: rows)
    caches = [_reversed_cache(cache) for cache in reversed_.caches]
    turned = dataclasses.replace(call, main=caches[0], extra=caches[1] if len(caches) > 1 else None)
    verdict = _judge(target, call, _attend(target, turned, "attention over permuted entries"), "value")
    if verdict.violated:
        return _under(verdict, "the order of entries matters")
    complaint = _same_bits(answer, _attend(target, call, "the same call again"))
    return violated("repeating the call changes bits", complaint) if complaint else verdict


def _reversed_cache(cache: Cache) -> Cache:
    """Uncounted entries become -1, then each row is reversed, under no length."""
    rows = torch.where(counted(cache.entries), cache.indices, -1).flip(1)
    return dataclasses.replace(cache, indices=rows.contiguous(), lengths=None)


def rows_independent(target: Target, case: AttnCase) -> Verdict:
    """The last row is given NaN queries and no entries at all."""
    first = _first(target, case)
    if case.tokens < 2:
        return unknown("there is no other row that a row could depend on")
    call, answer = first.call, first.answer
    q = call.q.clone()
    q[-1] = float("nan")
    changed = _mapped(
        dataclasses.replace(call, q=q), lambda rows: torch.cat([rows[:-1], torch.full_like(rows[-1:], -1)])
    )
    again = _attend(target, changed, "attention with another last row")
    complaint = _same_bits((answer[0][:-1], answer[1][:-1]), (again[0][:-1], again[1][:-1]))
    return violated("a row depends on another row", complaint) if complaint else HOLDS
