"""ATTN: out and lse against the yardstick, and what may and may not change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from ...case import AttnCase
from ...reference.attention import attention, counted
from ...targets.base import Target
from .. import budgets
from ..attn_inputs import Cache, Call, call_of, entries_of
from ..observe import last_only, run
from ..verdict import HOLDS, Verdict, invariant, violated

_ANYWHERE = ("reference", "cuda", "sm120")

Result = tuple[torch.Tensor, torch.Tensor]


def _attend(target: Target, call: Call, doing: str = "attention") -> Result:
    out, lse = run(doing, lambda: target.attend(call.inputs()))
    return out.cpu(), lse.cpu().float()


@last_only
def _first(target: Target, case: AttnCase) -> tuple[Call, Result, Result]:
    """The call, what the target answers, and what the yardstick does."""
    target.reset()
    call = call_of(case)
    answer = _attend(target, call)
    out, lse = attention(call.q, entries_of(call), call.sink, call.scale)
    return call, answer, (out.cpu(), lse.cpu())


def _empty_rows(call: Call) -> torch.Tensor:
    """bool ``[T]``: rows with no counted entry in any cache."""
    some = torch.zeros(call.q.shape[0], dtype=torch.bool, device=call.q.device)
    for cache in call.caches:
        some |= counted(cache.entries).any(dim=1)
    return ~some.cpu()


def _judge(target: Target, call: Call, answer: Result, what: str) -> Verdict:
    """Out or lse of an answer against the yardstick within the target's budget."""
    found = budgets.judge(target.error_budget(), call.q, entries_of(call), call.sink, call.scale, *answer)
    complaint = getattr(found, what)
    return violated(complaint.split("\n")[0], "\n".join(complaint.split("\n")[1:])) if complaint else HOLDS


@invariant(
    "ATTN-VALUE",
    "out against an fp64 reference over the dequantised cache, within a budget derived from the arithmetic, "
    "which a zeroed, a permuted and a scaled output all fail",
    origin="UPSTREAM section 6 gaps 14, 16, 18-22, 27; allclose(5e-2) passes an all-zero output",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_value(target: Target, case: AttnCase) -> Verdict:
    """Pointwise, RMS and slope."""
    call, answer, _ = _first(target, case)
    return _judge(target, call, answer, "value")


@invariant(
    "ATTN-LSE",
    "lse is the natural log-sum-exp over the counted entries of both caches, without the sink, within a "
    "budget derived from the arithmetic",
    origin="UPSTREAM section 4: four conventions, and no test looks at any; gap 15",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_lse(target: Target, case: AttnCase) -> Verdict:
    """Absolute, in natural units."""
    call, answer, _ = _first(target, case)
    return _judge(target, call, answer, "lse")


@invariant(
    "ATTN-DONTCARE",
    "NaN, inf or any bytes in uncounted slots (slot 0 included), tails, pads and scratch change no output "
    "bit",
    origin="UPSTREAM section 2.3: masked lanes gather slot 0, and 0 * NaN is NaN",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_dontcare(target: Target, case: AttnCase) -> Verdict:
    """The same call over three kinds of poison."""
    _, answer, _ = _first(target, case)
    for n, kind in enumerate(("nan", "inf", "noise")):
        other = case.model_copy(update={"poison": kind})
        call = call_of(other, poison_seed=n + 1)
        for name, tensor in target.persistent().items():
            if "partial" in name and tensor.is_floating_point():
                tensor.fill_(float("nan"))  # scratch: whatever it held must not matter
        again = _attend(target, call, f"attention over {kind}")
        complaint = _same_bits(answer, again)
        if complaint:
            return violated(f"bytes of uncounted entries matter ({kind})", complaint)
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
    origin="UPSTREAM section 2.4: 'length 1, index -1' is routine; gap 17",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_empty(target: Target, case: AttnCase) -> Verdict:
    """Exact, bit by bit."""
    call, (out, lse), _ = _first(target, case)
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
    origin="UPSTREAM section 4: two launches merged by lse, with bf16 in between",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_merge(target: Target, case: AttnCase) -> Verdict:
    """Every other entry by itself, merged in fp64; and the caches the other way round."""
    call, _, _ = _first(target, case)
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
    verdict = _judge(target, call, (merged.to(torch.bfloat16), total.float()), "value")
    if verdict.violated:
        return violated(
            "two halves merged by lse are not the whole", f"{verdict.headline}\n{verdict.details}"
        )
    if call.extra is None:
        return HOLDS
    swapped = dataclasses.replace(call, main=call.extra, extra=call.main)
    verdict = _judge(target, call, _attend(target, swapped, "attention with the caches exchanged"), "value")
    if verdict.violated:
        return violated("exchanging the caches changes the result", f"{verdict.headline}\n{verdict.details}")
    return HOLDS


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
    origin="UPSTREAM section 6 gap 22",
    where=_ANYWHERE,
    cases=("attn",),
)
def attn_order(target: Target, case: AttnCase) -> Verdict:
    """Counted entries reversed within their length, then the first call again."""
    call, answer, _ = _first(target, case)
    reversed_ = _mapped(dataclasses.replace(call), lambda rows: rows)
    caches = [_reversed_cache(cache) for cache in reversed_.caches]
    turned = dataclasses.replace(call, main=caches[0], extra=caches[1] if len(caches) > 1 else None)
    verdict = _judge(target, call, _attend(target, turned, "attention over permuted entries"), "value")
    if verdict.violated:
        return violated("the order of entries matters", f"{verdict.headline}\n{verdict.details}")
    complaint = _same_bits(answer, _attend(target, call, "the same call again"))
    return violated("repeating the call changes bits", complaint) if complaint else HOLDS


def _reversed_cache(cache: Cache) -> Cache:
    """Uncounted entries become -1, then each row is reversed, under no length."""
    rows = torch.where(counted(cache.entries), cache.indices, -1).flip(1)
    return dataclasses.replace(cache, indices=rows.contiguous(), lengths=None)


def rows_independent(target: Target, case: AttnCase) -> Verdict:
    """The last row is given NaN queries and no entries at all."""
    if case.tokens < 2:
        return HOLDS
    call, answer, _ = _first(target, case)
    q = call.q.clone()
    q[-1] = float("nan")
    changed = _mapped(
        dataclasses.replace(call, q=q), lambda rows: torch.cat([rows[:-1], torch.full_like(rows[-1:], -1)])
    )
    again = _attend(target, changed, "attention with another last row")
    complaint = _same_bits((answer[0][:-1], answer[1][:-1]), (again[0][:-1], again[1][:-1]))
    return violated("a row depends on another row", complaint) if complaint else HOLDS
