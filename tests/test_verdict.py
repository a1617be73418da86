"""Verdict and Invariant: what judging makes of every kind of answer, and what the registry promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest

from sm120_mla import case as case_module
from sm120_mla import device
from sm120_mla.case import SplitCase, SubjectCase
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.targets.base import Support
from sm120_mla.testing import verdict
from sm120_mla.testing.verdict import (
    FAMILIES,
    HOLDS,
    Invariant,
    TargetRaised,
    Verdict,
    all_invariants,
    by_id,
    invariant,
    judge,
    unknown,
    violated,
)

ALL = all_invariants()
KINDS = [kind.model_fields["kind"].default for kind in get_args(get_args(case_module.Case)[0])]
PLACES = {"reference", "compile", "cuda", "sm120"}


class Stub:
    """A target that only says whether it serves a case."""

    name = "stub"

    def __init__(self, answer: Support = Support(True)) -> None:  # noqa: B008  frozen
        self.answer = answer
        self.asked: list[tuple[Any, Any]] = []

    def supports(self, case: Any, capability: Any) -> Support:
        self.asked.append((case, capability))
        return self.answer


def asking(check: Callable[..., Any], *kinds: str) -> Invariant:
    return Invariant("BUF-X", "nothing is lost", "a report", ("reference",), kinds or ("split",), check)


def raising(error: BaseException) -> Callable[..., Verdict]:
    def check(target: Any, case: Any) -> Verdict:
        raise error

    return check


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Invariant]:
    """A copy of the registry, so that what a test registers is gone afterwards."""
    copied = dict(verdict._registry)
    monkeypatch.setattr(verdict, "_registry", copied)
    return copied


# ---- judging


@pytest.mark.parametrize("answer", [HOLDS, violated("wrong bytes", "sub-page 3"), unknown("no GPU")])
def test_a_check_that_answers_is_believed(answer: Verdict) -> None:
    seen: list[Any] = []
    target, case = Stub(), SplitCase()

    def check(target: Any, case: Any) -> Verdict:
        seen.append((target, case))
        return answer

    assert judge(asking(check), target, case) is answer
    assert seen == [(target, case)]


def test_a_case_of_another_kind_is_unknown_and_nobody_is_asked() -> None:
    target = Stub()

    found = judge(asking(raising(AssertionError()), "order", "meta"), target, SplitCase())

    assert found.unknown
    assert found.headline == "BUF-X does not judge cases of kind 'split'"
    assert target.asked == []


def test_a_target_that_declines_is_unknown_with_its_reason() -> None:
    found = judge(asking(raising(AssertionError())), Stub(Support.no("4-D pools only")), SplitCase())

    assert found.unknown
    assert found.headline == "target stub does not serve this case: 4-D pools only"


def test_a_target_is_asked_with_the_capability_of_the_machine() -> None:
    target, case = Stub(), SplitCase()

    with device.pretend_device((12, 1)):
        judge(asking(lambda target, case: HOLDS), target, case)

    assert target.asked == [(case, (12, 1))]


@pytest.mark.parametrize(
    "error", [ValueError("bad\nshape"), RuntimeError("x"), AssertionError(), KeyError("k")]
)
def test_a_target_that_raises_violates_and_says_it_raised(error: Exception) -> None:
    found = judge(asking(raising(TargetRaised("split call 2", error))), Stub(), SplitCase())

    assert found.violated
    assert found.raised
    assert found.headline == f"split call 2 raised {type(error).__name__}"
    assert str(error) in found.details


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("triton", "it is missing", "Install it."),
        ImportError("no module named flashinfer"),
        ModuleNotFoundError("no module named flashinfer"),
    ],
)
def test_a_target_that_lacks_something_is_unknown(error: Exception) -> None:
    found = judge(asking(raising(TargetRaised("split", error))), Stub(), SplitCase())

    assert found.unknown
    assert not found.raised
    assert str(error) in found.headline


def test_a_check_that_lacks_something_is_unknown() -> None:
    error = UnavailableError("nvcc", "it is missing", "Install it.")

    found = judge(asking(raising(error)), Stub(), SplitCase())

    assert found == unknown("nvcc is not available: it is missing. Install it.")


@pytest.mark.parametrize("error", [AssertionError("in the check"), ZeroDivisionError(), KeyboardInterrupt()])
def test_a_check_that_fails_itself_is_no_verdict(error: BaseException) -> None:
    with pytest.raises(type(error)):
        judge(asking(raising(error)), Stub(), SplitCase())


# ---- verdicts


@pytest.mark.parametrize(
    ("found", "holds", "is_violated", "is_unknown"),
    [
        (HOLDS, True, False, False),
        (violated("x"), False, True, False),
        (violated("x", raised=True), False, True, False),
        (unknown("x"), False, False, True),
    ],
)
def test_a_verdict_is_one_of_three(found: Verdict, holds: bool, is_violated: bool, is_unknown: bool) -> None:
    assert (found.holds, found.violated, found.unknown) == (holds, is_violated, is_unknown)


def test_a_verdict_is_not_a_truth_value_by_accident() -> None:
    assert violated("a", "b") == Verdict("violated", "a", "b", False)
    assert violated("a", raised=True) != violated("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        HOLDS.outcome = "violated"  # type: ignore[misc]


# ---- the registry


def test_registering_an_id_twice_is_refused(registry: dict[str, Invariant]) -> None:
    before = dict(registry)

    with pytest.raises(ArgumentError, match="BUF-GUARD: expected an id used once"):
        invariant("BUF-GUARD", "s", origin="o", where=("reference",), cases=("order",))(lambda t, c: HOLDS)

    assert registry == before


@pytest.mark.parametrize("id", ["BUFFER-GUARD", "buf-guard", "GUARD", ""])
def test_an_id_of_no_family_is_refused(id: str, registry: dict[str, Invariant]) -> None:
    before = dict(registry)

    with pytest.raises(ArgumentError, match="Add the family to FAMILIES"):
        invariant(id, "s", origin="o", where=("reference",), cases=("order",))(lambda t, c: HOLDS)

    assert registry == before


def test_what_is_registered_is_listed_with_its_family(registry: dict[str, Invariant]) -> None:
    @invariant("BUF-NEW", "new", origin="here", where=("cuda",), cases=("order", "split"))
    def check(target: Any, case: Any) -> Verdict:
        return HOLDS

    found = by_id("BUF-NEW")

    assert (found.id, found.statement, found.origin, found.where) == ("BUF-NEW", "new", "here", ("cuda",))
    assert found.check is check
    assert (found.family, found.marker) == ("BUF", "BUF_NEW")
    assert found.applies(SplitCase())
    assert not found.applies(SubjectCase(subject="x"))
    ids = [inv.id for inv in all_invariants()]
    assert ids.index("SPLIT-BYTES") < ids.index("BUF-NEW") < ids.index("COMPILE-SM120")


@pytest.mark.parametrize(("id", "near"), [("BUF-GAURD", "BUF-GUARD"), ("SPLIT_BYTES", "SPLIT-BYTES")])
def test_an_unknown_id_is_refused_with_the_nearest(id: str, near: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        by_id(id)

    assert caught.value.argument == "invariant"
    assert near in caught.value.expected


def test_an_id_like_no_other_is_refused_with_names() -> None:
    with pytest.raises(ArgumentError, match="BUF-GUARD"):
        by_id("%%")


@pytest.mark.parametrize("inv", ALL, ids=lambda inv: inv.id)
def test_every_invariant_says_what_where_and_why(inv: Invariant) -> None:
    assert inv.family in FAMILIES
    assert len(inv.statement) > 30
    assert not inv.statement.endswith(".")
    assert len(inv.origin) > 10
    assert inv.where
    assert set(inv.where) <= PLACES
    assert "reference" in inv.where, "every invariant is decided on a machine without a GPU"
    assert inv.case_kinds
    assert set(inv.case_kinds) <= set(KINDS)
    assert inv.check.__doc__
    assert by_id(inv.id) is inv


def test_ids_and_statements_are_used_once() -> None:
    assert len({inv.id for inv in ALL}) == len(ALL)
    assert len({inv.marker for inv in ALL}) == len(ALL)
    assert len({inv.statement for inv in ALL}) == len(ALL)


def test_families_come_in_their_order() -> None:
    order = [FAMILIES.index(inv.family) for inv in ALL]

    assert order == sorted(order)


def test_the_invariants_of_the_main_job_are_there() -> None:
    wanted = {
        "SPLIT-BYTES", "SPLIT-FRAME", "SPLIT-INDEX", "SPLIT-TOUCHED", "SPLIT-OFFSET64", "BUF-GUARD",
        "BUF-WRITABLE", "BUF-ADDRESS", "BUF-CAPTURE", "BUF-KEY", "INTERP-FACT", "COMPILE-SM120",
    }  # fmt: skip

    assert wanted <= {inv.id for inv in ALL}
