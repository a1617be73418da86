"""ATTN where nothing may be said: unknown, and never held in silence."""

from __future__ import annotations

from dataclasses import replace

import flashinfer_target
import pytest
import torch

from sm120_mla.case import AttnCase, CacheSpec, IndexSpec
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.targets.base import AttentionInputs, Support
from sm120_mla.targets.own import OwnTarget
from sm120_mla.testing import budgets
from sm120_mla.testing.attn_inputs import call_of
from sm120_mla.testing.budget_measures import Judgement
from sm120_mla.testing.verdict import Verdict, by_id, judge

HOLES = CacheSpec(index=IndexSpec(rows=1, width=4, kinds=("minus_one", "valid"), seed=3))
SMALL = CacheSpec(page_size=2, pages=20, index=IndexSpec(rows=1, width=3, seed=4))
CASE = AttnCase(tokens=2, heads=8, main=HOLES, extra=SMALL)
BUDGETED = ("ATTN-VALUE", "ATTN-LSE", "ATTN-MERGE", "ATTN-ORDER")
stands_here = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")


def asked(id: str, target: OwnTarget, case: AttnCase = CASE) -> Verdict:
    return judge(by_id(id), target, case)


@pytest.mark.parametrize("id", BUDGETED)
def test_a_row_without_a_budget_is_unknown(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(id, OwnTarget(backend="reference")).holds
    blind = budgets.Complaints("", "", Judgement((), {}, 5, 3))
    monkeypatch.setattr(budgets, "judge", lambda *a: blind)

    found = asked(id, OwnTarget(backend="reference"))

    assert found.unknown
    assert "no budget for 3 of 8 rows and heads" in found.headline


@pytest.mark.parametrize("id", BUDGETED)
def test_a_complaint_goes_before_it(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = budgets.Complaints("out is wrong\nvery", "lse is wrong", Judgement((), {}, 5, 3))
    monkeypatch.setattr(budgets, "judge", lambda *a: wrong)
    assert asked(id, OwnTarget(backend="reference")).violated


# ---- slot 0


@stands_here
@pytest.mark.parametrize(("generation", "outcome"), [("A", "unknown"), ("B", "unknown"), ("C", "holds")])
def test_a_finite_slot_0_that_is_asked_for_is_never_held(generation: str, outcome: str) -> None:
    found = asked("ATTN-DONTCARE", getattr(flashinfer_target, generation)())

    assert found.outcome == outcome
    if outcome == "unknown":
        assert "a finite slot 0 of kv_cache and extra_kv_cache is a precondition" in found.headline


@stands_here
@pytest.mark.parametrize("generation", ["A", "B"])
def test_where_both_caches_are_split_nothing_is_asked(generation: str) -> None:
    split = AttnCase(tokens=2, heads=8, main=HOLES.model_copy(update={"page_size": 256}))
    assert asked("ATTN-DONTCARE", getattr(flashinfer_target, generation)(), split).holds


class Asks(OwnTarget):
    """Asks for a finite slot 0 of the main cache, and reads what it asks for, or more."""

    def __init__(self, reads: int) -> None:
        super().__init__(backend="reference")
        self.reads = reads

    def finite_slot_zero(self, inputs: AttentionInputs) -> tuple[str, ...]:
        return ("kv_cache",)

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().attend(inputs)
        rope = (
            inputs.kv_cache[0, self.reads * 576 + 448 : self.reads * 576 + 450].clone().view(torch.bfloat16)
        )
        return out + rope * 0, lse  # as a masked lane with weight 0


@pytest.mark.parametrize(("reads", "outcome"), [(0, "unknown"), (1, "violated")])
def test_what_is_not_asked_for_is_still_judged(reads: int, outcome: str) -> None:
    case = AttnCase(tokens=1, heads=2, main=CacheSpec(index=IndexSpec(rows=1, width=2, seed=5)))
    used = call_of(case).main.indices.tolist()
    assert not {0, 1} & set(used[0])  # neither is counted

    assert asked("ATTN-DONTCARE", Asks(reads), case).outcome == outcome


def test_slot_0_is_spared_in_the_caches_named_and_nowhere_else() -> None:
    main, extra = call_of(CASE, finite_slot_zero=("extra_kv_cache",)).caches
    plain = call_of(CASE)
    assert torch.equal(main.storage, plain.main.storage)
    assert plain.extra is not None
    assert not torch.equal(extra.pool[0, :576], plain.extra.pool[0, :576])
    assert torch.equal(extra.pool[0, 576:1152], plain.extra.pool[0, 576:1152])
    assert extra.pool[0, 448:576].clone().view(torch.bfloat16).isfinite().all()


# ---- what is not served


class Declines(OwnTarget):
    """Serves no call whose main pages are not of 64 tokens."""

    def __init__(self) -> None:
        super().__init__(backend="reference")

    def serves(self, inputs: AttentionInputs) -> Support:
        return Support(True) if inputs.page_size == 64 else Support.no("pages of 64 only")


def test_a_call_that_is_not_served_is_unknown() -> None:
    other = CASE.model_copy(update={"main": HOLES.model_copy(update={"page_size": 3})})
    for id in (*BUDGETED, "ATTN-DONTCARE", "ATTN-EMPTY"):
        found = asked(id, Declines(), other)
        assert found.unknown, id
        assert "pages of 64 only" in found.headline


def test_caches_that_may_not_be_exchanged_leave_the_merge_unknown() -> None:
    assert asked("ATTN-VALUE", Declines()).holds
    assert asked("ATTN-MERGE", Declines()).unknown
    assert asked("ATTN-MERGE", Declines(), CASE.model_copy(update={"extra": None})).holds


@stands_here
def test_a_shape_that_flashinfer_refuses_is_declined_and_not_violated() -> None:
    odd = replace_heads(7)
    assert "query heads = 7" in asked("ATTN-VALUE", flashinfer_target.B(), odd).headline
    assert asked("ATTN-VALUE", flashinfer_target.C(), odd).holds


def replace_heads(heads: int) -> AttnCase:
    return CASE.model_copy(update={"heads": heads})


def test_an_error_that_is_no_refusal_is_not_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = call_of(CASE).inputs()
    target = OwnTarget(backend="flashinfer")
    assert not target.serves(inputs)  # there is none here, or no GPU for it
    with pytest.raises(ValueError, match="softmax_scale"):
        target.serves(replace(inputs, softmax_scale=-1.0))
