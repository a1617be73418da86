"""Budgets of attention results: right results are within them, and each kind of wrong one is outside."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import flashinfer_emulation as emulation
import pytest
import torch

from sm120_mla.case import AttnCase, CacheSpec, IndexSpec
from sm120_mla.codec import pack_pages, view_field
from sm120_mla.errors import ArgumentError
from sm120_mla.layout import DSV4
from sm120_mla.pages import pool_geometry
from sm120_mla.reference.attention import Entries, attention, faithful, slabs
from sm120_mla.testing.arithmetic import (
    ARITHMETIC,
    FLASHINFER_BF16_QK,
    FLASHINFER_FP8_QK,
    REFERENCE,
    SGLANG,
    TRITON,
    TRITON_TRUNCATING,
    Arithmetic,
    arithmetic_for,
    rounding,
)
from sm120_mla.testing.attn_inputs import Call, call_of, entries_of
from sm120_mla.testing.budgets import Budget, budget, judge

Result = tuple[torch.Tensor, torch.Tensor]
Wrong = Callable[[Call, Result], Result]
KINDS = (("valid",), ("valid", "minus_one"), ("valid", "duplicate"), ("duplicate",))
BY_NAME = {a.name: a for a in ARITHMETIC}


def drawn(seed: int, spreads: tuple[str, ...] = ("small", "wide", "huge")) -> Call:
    """A random call; everything about it from ``seed``."""
    pick = random.Random(seed)

    def cache(width: int) -> CacheSpec:
        return CacheSpec(
            page_size=pick.choice((64, 3, 2)),
            pages=pick.randint(1, 3),
            index=IndexSpec(
                rows=1,
                width=width,
                kinds=pick.choice(KINDS),
                lengths=pick.choice(("none", "random")),
                seed=seed,
            ),
        )

    call = call_of(
        AttnCase(
            tokens=pick.randint(1, 4),
            heads=pick.choice((1, 3, 8, 16)),
            main=cache(pick.choice((1, 5, 64, 130))),
            extra=cache(pick.choice((2, 40))) if pick.random() < 0.5 else None,
            sink=pick.choice(("none", "random", "random", "neg_inf", "pos_inf", "mixed")),
            scale=pick.choice((None, None, 0.2)),
            spread=pick.choice(spreads),
            seed=seed,
        )
    )
    if seed % 2:
        return call
    q = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(seed)).to(call.q)
    return replace(call, q=q)


@functools.cache
def typical(seed: int, tokens: int = 6, heads: int = 16, width: int = 256) -> Call:
    """What serving looks like, of a size at which every measure has its power."""
    case = AttnCase(
        tokens=tokens,
        heads=heads,
        main=CacheSpec(pages=8, index=IndexSpec(rows=1, width=width, kinds=("valid",), seed=seed)),
        extra=CacheSpec(
            pages=40, page_size=2, index=IndexSpec(rows=1, width=64, lengths="random", seed=seed)
        ),
        sink="random",
        seed=seed,
    )
    call = call_of(case)
    q = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(seed + 999)).to(call.q)
    return replace(call, q=q, sink=call.sink.clamp(2.0, 4.0))  # beside an lse of about 6


def arguments(call: Call) -> tuple[torch.Tensor, list[Entries], torch.Tensor | None, float]:
    return call.q, entries_of(call), call.sink, call.scale


def budget_of(call: Call, arithmetic: Arithmetic) -> Budget:
    return budget(*arguments(call), arithmetic)


def truncated(values: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16 as the interpreter's cast does it."""
    return (values.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def as_truncated(call: Call) -> Result:
    """Weights and result truncated to bf16."""
    out, lse = torch.zeros(call.q.shape, device=call.q.device), []
    for slab in slabs(*arguments(call), torch.float32):
        p = truncated(slab.softmax).float()
        out[slab.begin : slab.end] = torch.bmm(p, slab.values) * slab.share.unsqueeze(-1)
        lse.append(slab.lse)
    return truncated(out), torch.cat(lse) if lse else out[..., 0]


def as_flashinfer(call: Call, fp8_qk: bool) -> Result:
    """Newest generation, decode with fp8 q or prefill with bf16 q; lse in this project's convention."""
    sections = []
    for cache in call.caches:
        geometry = cache.geometry
        view = cache.pool.as_strided(
            (geometry.pages, geometry.page_size, 1, 584), (geometry.page_stride, 584, 584, 1)
        )
        sections.append(emulation.Section(view, geometry.page_size, cache.indices, cache.lengths))
    how = {"rules": emulation.NEW, "prefill": not fp8_qk, "fp8": True, "bf16_qk": not fp8_qk}
    out, _ = emulation.attend(call.q, sections, call.scale, call.sink, **how)
    _, lse = emulation.attend(call.q, sections, call.scale, None, **how)
    return out, lse * math.log(2)


def right(call: Call, arithmetic: Arithmetic) -> Result:
    """A result as the arithmetic computes it."""
    if arithmetic is REFERENCE:
        out, lse = attention(*arguments(call))
        return out.to(torch.bfloat16), lse.float()
    if arithmetic in (TRITON, SGLANG):
        return faithful(*arguments(call), splits=3)
    if arithmetic is TRITON_TRUNCATING:
        return as_truncated(call)
    return as_flashinfer(call, arithmetic is FLASHINFER_FP8_QK)


# ---- what is right passes


@pytest.mark.parametrize("block", range(8))
def test_bf16_arithmetic_is_within_its_budget_on_random_calls(block: int) -> None:
    used = []
    for seed in range(30 * block, 30 * block + 30):
        call = drawn(seed)
        limits = budget_of(call, TRITON)
        for splits in (1, 4):
            found = limits.judge(*faithful(*arguments(call), splits=splits))
            assert found.ok, (seed, splits, [str(miss) for miss in found.misses])
            assert not found.unjudged
            used.append(found.ratios["out"])
    assert max(used) > 0.25, "a budget this wide bounds something else"


@pytest.mark.parametrize("arithmetic", [REFERENCE, TRITON_TRUNCATING], ids=lambda a: a.name)
def test_other_arithmetics_are_within_theirs(arithmetic: Arithmetic) -> None:
    for seed in range(60):
        call = drawn(seed)
        limits = budget_of(call, arithmetic)
        # Where a cast truncates, a kernel's own rounding is right as well.
        for result in (right(call, arithmetic), right(call, REFERENCE)):
            found = limits.judge(*result)
            assert found.ok, (seed, [str(miss) for miss in found.misses])


@pytest.mark.parametrize("arithmetic", [FLASHINFER_BF16_QK, FLASHINFER_FP8_QK], ids=lambda a: a.name)
def test_fp8_weights_are_within_their_budget(arithmetic: Arithmetic) -> None:
    used = []
    for seed in range(90):
        call = drawn(seed, spreads=("small", "wide"))
        if not all(cache.geometry.page_size % 2 == 0 for cache in call.caches):
            continue
        found = budget_of(call, arithmetic).judge(*right(call, arithmetic))
        assert found.ok, (seed, [str(miss) for miss in found.misses])
        used.append(found.ratios["out"])
    assert max(used) > 0.25


def test_adversarial_weights_of_bf16_are_within_its_budget() -> None:
    """Two groups of entries, equal within a group and opposite: their rounding errors do not cancel."""
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 512, generator=gen)
    tokens = torch.cat([k.expand(1, 32, 512), -k.expand(1, 32, 512)], dim=1)
    pool = pack_pages(tokens, DSV4).to(typical(0).q.device)
    q = torch.zeros(1, 2, 512, dtype=torch.bfloat16, device=pool.device)
    q[0, :, 5] = 0.37
    index = torch.arange(64, dtype=torch.int32, device=pool.device)[None]
    caches = [Entries(pool, pool_geometry(pool, 64, DSV4), index)]

    found = budget(q, caches, None, 0.5, TRITON).judge(*faithful(q, caches, None, 0.5))

    assert found.ok, [str(miss) for miss in found.misses]


def test_what_all_keys_have_in_common_moves_no_weight() -> None:
    """Rounding q to fp8 shifts every score alike there: the budget knows, and the arithmetic obeys."""
    call = typical(3, heads=8)
    gen = torch.Generator().manual_seed(0)
    main = call.main
    tokens = torch.randn(512, generator=gen) * 4 + torch.randn(8, 64, 512, generator=gen) / 4
    pool = pack_pages(tokens).to(call.q.device)
    main = replace(main, pool=pool, geometry=pool_geometry(pool, 64, DSV4))
    call = replace(call, main=main, extra=None, sink=None, q=call.q / 4)
    limits = budget_of(call, FLASHINFER_FP8_QK)

    found = limits.judge(*right(call, FLASHINFER_FP8_QK))

    assert found.ok, [str(miss) for miss in found.misses]
    assert limits.whole_slope < 0.01
    assert float((limits.rms / limits.out.square().mean(-1).sqrt()).max()) < 0.03


def test_the_score_of_a_lone_entry_moves_nothing() -> None:
    call = typical(1, tokens=2, heads=3, width=1)
    call = replace(call, extra=None, sink=None)
    exact, rounded = (budget_of(call, a) for a in (FLASHINFER_BF16_QK, FLASHINFER_FP8_QK))

    for name in ("pointwise", "rms", "slope"):
        assert torch.allclose(getattr(rounded, name), getattr(exact, name), rtol=1e-6), name
    assert bool((rounded.lse_error > 100 * exact.lse_error).all())


# ---- what is wrong does not


def _other_scales(call: Call, result: Result) -> Result:
    """Each tile of the main cache with the scale of its neighbour."""
    main = call.main
    pool = main.pool.clone()
    scales = view_field(pool, DSV4, "scales", main.geometry.page_size)
    scales.copy_(scales.roll(1, dims=-1))
    geometry = pool_geometry(pool, main.geometry.page_size, DSV4)
    changed = replace(call, main=replace(main, pool=pool, geometry=geometry))
    out, lse = faithful(*arguments(changed))
    return out, lse


def _next_token_scales(call: Call, result: Result) -> Result:
    main = call.main
    pool = main.pool.clone()
    scales = view_field(pool, DSV4, "scales", main.geometry.page_size)
    scales.copy_(scales.roll(1, dims=1))
    geometry = pool_geometry(pool, main.geometry.page_size, DSV4)
    return faithful(*arguments(replace(call, main=replace(main, pool=pool, geometry=geometry))))


def _without_sink(call: Call, result: Result) -> Result:
    return faithful(*arguments(replace(call, sink=None)))


def _last_entry_lost(call: Call, result: Result) -> Result:
    rows = call.main.indices.clone()
    rows[:, :16] = -1
    return faithful(*arguments(replace(call, main=replace(call.main, indices=rows))))


WRONG_OUT: dict[str, Wrong] = {
    "zeroed": lambda c, r: (torch.zeros_like(r[0]), r[1]),
    "rows permuted": lambda c, r: (r[0].roll(1, 0), r[1]),
    "heads permuted": lambda c, r: (r[0].roll(1, 1), r[1]),
    "two heads exchanged": lambda c, r: (r[0][:, [1, 0, *range(2, r[0].shape[1])]], r[1]),
    "dimensions permuted": lambda c, r: (r[0].roll(1, 2), r[1]),
    "sign flipped": lambda c, r: (-r[0], r[1]),
    "scaled up": lambda c, r: ((r[0].float() * 1.02).to(r[0].dtype), r[1]),
    "scaled down": lambda c, r: ((r[0].float() / 1.02).to(r[0].dtype), r[1]),
    "one row zeroed": lambda c, r: (torch.cat([r[0][:1] * 0, r[0][1:]]), r[1]),
    "one value NaN": lambda c, r: (r[0].index_fill(2, torch.tensor(7, device=r[0].device), math.nan), r[1]),
    "neighbour's scale": _other_scales,
    "next token's scale": _next_token_scales,
    "sink ignored": _without_sink,
    "entries lost": _last_entry_lost,
}
WRONG_LSE: dict[str, Wrong] = {
    "sink in the lse": lambda c, r: (r[0], torch.logaddexp(r[1], c.sink)),
    "base 2": lambda c, r: (r[0], r[1] / math.log(2)),
    "zeroed": lambda c, r: (r[0], r[1] * 0),
    "heads permuted": lambda c, r: (r[0], r[1].roll(1, 1)),
    "+inf": lambda c, r: (r[0], torch.full_like(r[1], math.inf)),
    "NaN": lambda c, r: (r[0], torch.full_like(r[1], math.nan)),
}


@functools.cache
def limits_and_result(name: str, seed: int) -> tuple[Budget, Result]:
    call, arithmetic = typical(seed), BY_NAME[name]
    return budget_of(call, arithmetic), right(call, arithmetic)


@pytest.mark.parametrize("wrong", WRONG_OUT)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_out_is_outside_the_budget(name: str, wrong: str) -> None:
    for seed in (1, 2):
        limits, result = limits_and_result(name, seed)
        assert limits.judge(*result).ok

        found = limits.judge(*WRONG_OUT[wrong](typical(seed), result))

        assert found.complaint(*(m for m in found.ratios if m != "lse")), (seed, found.ratios)


@pytest.mark.parametrize("wrong", WRONG_LSE)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_lse_is_outside_the_budget(name: str, wrong: str) -> None:
    for seed in (1, 2):
        limits, result = limits_and_result(name, seed)

        found = limits.judge(*WRONG_LSE[wrong](typical(seed), result))

        assert [miss.measure for miss in found.misses] == ["lse"]


def test_a_wrong_factor_is_seen_on_random_calls_too() -> None:
    """Wherever the derived slope says so, and that is nearly everywhere."""
    sure = 0
    for seed in range(60):
        call = drawn(seed)
        limits = budget_of(call, TRITON)
        out, _ = faithful(*arguments(call))
        if not bool(out.any()):
            continue
        if limits.surely_rejects(1.02):
            sure += 1
            assert not limits.judge(out.float() * 1.02).ok
    assert sure >= 40


@pytest.mark.parametrize("wrong", ["zeroed", "sign flipped", "one row zeroed"])
def test_gross_errors_are_seen_in_every_random_call(wrong: str) -> None:
    for seed in range(60):
        call = drawn(seed)
        result = faithful(*arguments(call))
        broken = WRONG_OUT[wrong](call, result)
        if torch.equal(broken[0].float(), result[0].float()):
            continue  # nothing counts in it
        assert not budget_of(call, TRITON).judge(*broken).ok, seed


def test_the_tolerance_in_use_elsewhere_passes_zeros() -> None:
    """Why there are budgets: FlashInfer's own allclose(5e-2, 5e-2), on its own kind of data."""
    gen = torch.Generator().manual_seed(0)
    pool = pack_pages((torch.randn(8, 64, 512, generator=gen) / 10).clamp(-1, 1), DSV4)
    q = (torch.randn(4, 16, 512, generator=gen) / 10).clamp(-1, 1).to(torch.bfloat16)
    index = torch.randint(0, 512, (4, 128), generator=gen, dtype=torch.int32)
    caches = [Entries(pool, pool_geometry(pool, 64, DSV4), index)]
    out, lse = attention(q, caches, None, 512**-0.5)
    zeros = torch.zeros_like(out)

    torch.testing.assert_close(zeros, out, atol=5e-2, rtol=5e-2)

    for arithmetic in ARITHMETIC:
        assert not budget(q, caches, None, 512**-0.5, arithmetic).judge(zeros, lse).ok


# ---- each measure sees what the others do not


def test_an_error_everywhere_just_below_the_pointwise_bound_is_seen_by_its_rms() -> None:
    limits, (out, lse) = limits_and_result("triton", 1)
    sign = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).sign().to(limits.out)

    found = limits.judge(limits.out + 0.95 * limits.pointwise * sign, lse)

    assert {miss.measure for miss in found.misses} == {"rms of the error", "whole rms of the error"}


def test_one_head_with_a_wrong_factor_is_seen_by_its_slope() -> None:
    limits, (_, lse) = limits_and_result("triton", 1)
    scaled = limits.out.clone()
    scaled[2, 3] *= 1.011

    (miss,) = limits.judge(scaled, lse).misses

    assert (miss.measure, miss.row, miss.head) == ("slope <out, ref>/<ref, ref>", 2, 3)
    assert miss.got == pytest.approx(1.011)


def test_fp8_noise_of_every_row_at_its_limit_is_seen_by_the_whole() -> None:
    limits, (_, lse) = limits_and_result("flashinfer (bf16 QK)", 1)
    sign = torch.randn(limits.out.shape, generator=torch.Generator().manual_seed(0)).sign().to(limits.out)
    noise = sign * 0.7 * limits.rms.unsqueeze(-1)

    found = limits.judge(limits.out + noise, lse)

    assert [miss.measure for miss in found.misses] == ["whole rms of the error"]


def test_a_factor_that_every_row_would_pass_is_seen_by_the_whole() -> None:
    limits, (_, lse) = limits_and_result("flashinfer (bf16 QK)", 1)

    found = limits.judge(limits.out * 1.02, lse)

    assert [miss.measure for miss in found.misses] == ["whole slope <out, ref>/<ref, ref>"]


# ---- edges


@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=lambda a: a.name)
def test_an_empty_row_is_exact(arithmetic: Arithmetic) -> None:
    case = AttnCase(
        tokens=2, heads=3, main=CacheSpec(index=IndexSpec(rows=1, width=4, kinds=())), sink="mixed", seed=1
    )
    call = call_of(case)
    limits = budget_of(call, arithmetic)
    out, lse = right(call, REFERENCE)
    tiny = out.float()
    tiny[1, 2, 3] = 1e-38

    assert not limits.pointwise.any()
    assert not limits.lse_error.any()
    assert limits.judge(out, lse).ok
    assert not limits.judge(tiny, lse).ok
    for other in (math.inf, -1e30, 0.0, math.nan):
        assert not limits.judge(out, torch.full_like(lse, other)).ok


@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=lambda a: a.name)
def test_no_rows_and_no_columns(arithmetic: Arithmetic) -> None:
    for tokens, width in ((0, 4), (2, 0), (0, 0)):
        call = call_of(
            AttnCase(tokens=tokens, heads=2, main=CacheSpec(index=IndexSpec(rows=1, width=width)), seed=1)
        )
        found = budget_of(call, arithmetic).judge(*right(call, REFERENCE))

        assert found.ok
        assert found.judged == 2 * tokens


def test_a_counted_nan_is_wanted_back() -> None:
    call = call_of(AttnCase(tokens=2, heads=2, main=CacheSpec(index=IndexSpec(rows=1, width=4)), seed=1))
    q = call.q.clone()
    q[0, 1, 0] = math.nan
    call = replace(call, q=q)
    limits = budget_of(call, TRITON)
    out, lse = faithful(*arguments(call))

    assert bool(out[0, 1].isnan().all())
    assert limits.judge(out, lse).ok
    assert not limits.judge(out.nan_to_num(), lse).ok
    assert not limits.judge(out, lse.nan_to_num()).ok


def test_a_sink_far_above_leaves_what_may_be_flushed_to_zero() -> None:
    call = call_of(AttnCase(tokens=1, heads=2, main=CacheSpec(index=IndexSpec(rows=1, width=4)), seed=1))
    call = replace(call, sink=torch.tensor([120.0, 20.0], device=call.q.device))
    limits = budget_of(call, TRITON)
    out, lse = faithful(*arguments(call))
    flushed = out.clone()
    flushed[:, 0] = 0

    assert limits.judge(out, lse).ok
    assert limits.judge(flushed, lse).ok
    assert not limits.judge(torch.zeros_like(out), lse).ok


def test_the_slope_alone_tells_what_it_surely_rejects() -> None:
    limits = budget_of(typical(1), TRITON)

    assert 0 < limits.whole_slope < 0.0099
    assert limits.surely_rejects(1.02)
    assert not limits.surely_rejects(1.001)
    assert not replace(limits, whole_slope=math.inf).surely_rejects(2.0)


def test_more_scales_need_more_rows_where_weights_are_fp8() -> None:
    few = budget_of(typical(1, tokens=1, heads=2), FLASHINFER_FP8_QK)
    many = budget_of(typical(1), FLASHINFER_FP8_QK)

    assert many.whole_slope < 0.02 < few.whole_slope


def test_a_shape_that_is_not_the_references_is_refused() -> None:
    limits = budget_of(typical(1), TRITON)

    with pytest.raises(ArgumentError, match=r"out\.shape"):
        limits.judge(limits.out[1:])
    with pytest.raises(ArgumentError, match=r"lse\.shape"):
        limits.judge(limits.out, limits.lse[:, 1:])


# ---- what a failure says


def test_a_miss_tells_measure_place_and_values() -> None:
    limits, (out, lse) = limits_and_result("triton", 1)
    broken = out.clone()
    broken[2, 3, 4] += 1

    miss = limits.judge(broken, lse).misses[0]

    assert (miss.measure, miss.row, miss.head, miss.dim, miss.count) == ("out", 2, 3, 4, 1)
    assert str(miss).startswith("out, row 2, head 3, dim 4: got ")
    assert f"want {float(limits.out[2, 3, 4]):.6g} +- " in str(miss)


@pytest.mark.parametrize(
    ("wrong", "note"),
    [("base 2", "in base 2"), ("sink in the lse", "with the sink folded in"), ("zeroed", "")],
)
def test_a_known_lse_convention_is_named(wrong: str, note: str) -> None:
    limits, result = limits_and_result("triton", 1)

    (miss,) = limits.judge(*WRONG_LSE[wrong](typical(1), result)).misses

    assert miss.note == (f"equals the lse {note}" if note else "")
    assert str(miss).endswith(f"({miss.note})" if note else "such")


def test_judge_separates_value_and_lse() -> None:
    call = typical(1)
    out, lse = faithful(*arguments(call))

    assert judge(TRITON, *arguments(call), out, lse).value == ""
    value = judge(TRITON, *arguments(call), -out, lse)
    assert value.value.startswith("out is outside the budget of triton\nout, row ")
    assert "\nwhole slope <out, ref>/<ref, ref>, over the whole result: got -" in value.value
    assert value.lse == ""
    both = judge(TRITON, *arguments(call), out, lse + 1)
    assert both.value == ""
    assert both.lse.startswith("lse is outside the budget of triton\nlse, row ")


# ---- the table


def test_rows_are_found_by_backend_and_by_name() -> None:
    assert arithmetic_for("reference") is REFERENCE
    assert arithmetic_for("triton") is TRITON
    assert arithmetic_for("flashinfer") is FLASHINFER_FP8_QK
    assert [arithmetic_for(row.name) for row in ARITHMETIC] == list(ARITHMETIC)
    with pytest.raises(ArgumentError, match="flashinfer, reference, triton"):
        arithmetic_for("cutlass")


def test_judge_takes_a_name() -> None:
    call = typical(1)
    out, lse = right(call, FLASHINFER_BF16_QK)

    assert judge("flashinfer", *arguments(call), out, lse).value == ""
    assert judge("triton", *arguments(call), out, lse).value.startswith(
        "out is outside the budget of triton\n"
    )


@pytest.mark.parametrize(("dtype", "significand"), [(torch.bfloat16, 8), (torch.float8_e4m3fn, 4)])
def test_units_of_rounding_are_those_of_the_formats(dtype: torch.dtype, significand: int) -> None:
    bound, rms = rounding(significand)
    values = torch.exp2(torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    error = (values.float().to(dtype).double() - values) / values

    assert bound / 1.1 < float(error.abs().max()) <= bound
    assert float(error.square().mean().sqrt()) == pytest.approx(rms, rel=0.02)
