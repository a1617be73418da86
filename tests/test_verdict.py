"""Verdict and Invariant: what judging makes of every kind of answer, and what the registry promises."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, get_args

import pytest
from rich.console import Console

from sm120_mla import case as case_module
from sm120_mla import device
from sm120_mla.case import SplitCase, SubjectCase
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.targets.base import AbsentError, Support
from sm120_mla.targets.own import patched
from sm120_mla.testing import check, report, verdict
from sm120_mla.testing.verdict import (
    FAMILIES,
    HOLDS,
    Invariant,
    TargetRaised,
    Verdict,
    absent,
    all_invariants,
    by_id,
    invariant,
    judge,
    unknown,
    violated,
)
from sm120_mla.tools import exits, verify

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


def test_a_target_that_has_no_such_operation_is_absent_with_its_reason() -> None:
    found = judge(asking(raising(AssertionError())), Stub(Support.absent("no page split yet")), SplitCase())

    assert found.absent
    assert found.headline == "target stub has nothing of the kind: no page split yet"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_thing_that_turns_out_to_be_missing_is_absent_and_not_unknown(wrapped: bool) -> None:
    error = AbsentError("the page split", "this tree has none", "Choose a later commit.")

    found = judge(asking(raising(TargetRaised("split", error) if wrapped else error)), Stub(), SplitCase())

    assert found.absent
    assert not found.unknown
    assert str(error) in found.headline


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


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_a_copy_of_the_package_lacks_is_unknown_too(wrapped: bool) -> None:
    case = SplitCase()

    with patched([], "own copy") as target:
        errors = importlib.import_module(f"{target.compile_origin()[0]}.errors")
        error = errors.UnavailableError("triton", "it is missing", "Install it.")
        found = judge(asking(raising(TargetRaised("split", error) if wrapped else error)), target, case)

    assert not isinstance(error, UnavailableError)
    assert found.unknown
    assert not found.raised
    assert str(error) in found.headline


def test_another_projects_error_of_that_name_is_a_violation() -> None:
    error = type("UnavailableError", (RuntimeError,), {"__module__": "vllm.errors"})("busy")

    found = judge(asking(raising(TargetRaised("split", error))), Stub(), SplitCase())

    assert found.violated
    assert found.raised


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
    ("found", "word"),
    [
        (HOLDS, "holds"),
        (violated("x"), "violated"),
        (violated("x", raised=True), "violated"),
        (unknown("x"), "unknown"),
        (absent("x"), "absent"),
    ],
)
def test_a_verdict_is_one_of_four(found: Verdict, word: str) -> None:
    words = ("holds", "violated", "unknown", "absent")

    assert found.outcome == word
    assert [getattr(found, name) for name in words] == [name == word for name in words]


def test_absent_is_no_pass_and_has_a_column_of_its_own() -> None:
    inv, record = asking(lambda target, case: HOLDS), check.Record()
    record.note(inv, absent("no page split"))
    assert record.nothing_judged
    record.note(inv, unknown("no GPU"))
    summary = report.Summary(mode="reference", catalogue=[("BUF-X", "nothing is lost", ["reference"])])
    text = report.encode(record.tallies, [], 0)

    summary.add("test", "passed", [(report.PROPERTY, text), (report.MARKS, "BUF-X")], "")

    row = summary.row("BUF-X")
    assert (row.held, row.unknown, row.absent, summary.judged) == (0, 1, 1, 0)
    assert summary.lines()[0].split() == [
        "invariant", "held", "violated", "unknown", "absent", "tests", "mode",
    ]  # fmt: skip
    assert summary.lines()[1].split() == ["BUF-X", "0", "0", "1", "1", "1", "reference"]
    document = summary.document()
    assert document["invariants"][0]["absent"] == 1
    assert verify.exit_code(document, 0) == exits.NOTHING_JUDGED == exits.verdict_code(absent("x"))


def test_a_run_in_which_all_was_absent_says_absent(capsys: pytest.CaptureFixture[str]) -> None:
    row = report.Row("BUF-X", absent=3, tests=1)
    row.reasons["no page split"] = 3
    summary = report.Summary(mode="reference", rows={"BUF-X": row})

    verify.show(summary.document(), Console(width=120))

    shown = capsys.readouterr().out
    assert "3 x BUF-X absent: no page split" in shown
    assert [word for word in shown.split() if word == "absent"] == ["absent", "absent"]


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
