"""Faults: each is caught by exactly what it names, on stored cases that the healthy package passes."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sm120_mla
from sm120_mla.case import CaseFile, SubjectCase, load
from sm120_mla.errors import CaseFileError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.targets import Target
from sm120_mla.targets.own import OwnTarget, Patch, patched
from sm120_mla.testing.faults import FAULTS, Fault, base, case_names, load_case, run_fault
from sm120_mla.testing.verdict import (
    HOLDS,
    Invariant,
    TargetRaised,
    Verdict,
    all_invariants,
    by_id,
    judge,
    unknown,
    violated,
)

PACKAGE = Path(sm120_mla.__file__).parent
FILES = sorted((PACKAGE.parent / "fixtures" / "faults").glob("*.json"), key=lambda path: path.stem)
INVARIANTS = {inv.id: inv for inv in all_invariants()}

every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
every_case = pytest.mark.parametrize("name", [path.stem for path in FILES])
judged_here = pytest.mark.skipif(
    not INTERPRETED, reason="faults are judged in reference mode: on a GPU, stray writes would do harm"
)


# ---- the kill matrix


@judged_here
@every_fault
def test_a_fault_is_caught_by_what_it_names_and_by_nothing_it_keeps(fault: Fault) -> None:
    assert run_fault(fault, everything=False).problems == ()


@judged_here
@every_case
def test_the_healthy_package_passes_every_stored_case(name: str) -> None:
    case = load_case(name)
    with contextlib.ExitStack() as stack:
        target: Target = OwnTarget()
        if isinstance(case, SubjectCase):  # of a copy, only what the case names is compiled
            target = stack.enter_context(patched([], "own copy"))
        about = load(base._CASES / f"{name}.json").invariant
        # Attention costs seconds an invariant in the interpreter: property_tests/ asks it the others.
        asked = [by_id(about)] if case.kind == "attn" else all_invariants()
        verdicts = {inv.id: judge(inv, target, case) for inv in asked if inv.applies(case)}

    assert {id: v.headline for id, v in verdicts.items() if v.violated} == {}
    assert verdicts[about].holds, verdicts[about].headline


@pytest.mark.parametrize("id", INVARIANTS)
def test_every_invariant_has_a_fault(id: str) -> None:
    assert [fault.id for fault in FAULTS if id in fault.violates]


# ---- the catalogue


def test_there_are_at_least_twenty_faults_of_the_main_job_under_ids_of_their_own() -> None:
    families = {"SPLIT", "BUF", "COMPILE", "INTERP"}
    main = [f for f in FAULTS if {INVARIANTS[id].family for id in f.violates} & families]

    assert len(main) >= 20
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert len({fault.sentence for fault in FAULTS}) == len(FAULTS)


@every_fault
def test_a_fault_is_declared_in_full(fault: Fault) -> None:
    assert len(fault.sentence) > 20
    assert fault.violates
    assert fault.cases
    assert bool(fault.patches) != (fault.make is not None)
    assert set(fault.violates) | set(fault.keeps) <= set(INVARIANTS)
    assert not set(fault.violates) & set(fault.keeps)
    assert len({*fault.violates, *fault.keeps}) == len(fault.violates) + len(fault.keeps)
    for id in fault.violates:
        assert any(INVARIANTS[id].applies(load_case(name)) for name in fault.cases), id


@every_fault
def test_patches_match_the_source_and_leave_it_python(fault: Fault) -> None:
    texts: dict[str, str] = {}
    for patch in fault.patches:
        text = texts.get(patch.file) or (PACKAGE / patch.file).read_text(encoding="utf-8")
        assert text.count(patch.old) == 1, f"{patch.file}: {patch.old}"
        assert patch.new != patch.old
        texts[patch.file] = text.replace(patch.old, patch.new)
    for text in texts.values():
        ast.parse(text)


@every_case
def test_a_stored_case_is_used_and_judged_by_what_it_names(name: str) -> None:
    file = load(base._CASES / f"{name}.json")

    assert [fault.id for fault in FAULTS if name in fault.cases]
    assert INVARIANTS[file.invariant].applies(file.case)


def test_stored_cases_are_found_by_name() -> None:
    assert case_names() == [path.stem for path in FILES]
    with pytest.raises(CaseFileError, match=r"case = no-such-case: .*boot-a.*Run in a checkout"):
        load_case("no-such-case")


# ---- how a fault is judged


@contextlib.contextmanager
def healthy() -> Iterator[Target]:
    yield OwnTarget()


def made_up(**fields: Any) -> Fault:
    whole: dict[str, Any] = {
        "id": "made-up",
        "sentence": "nothing is wrong at all",
        "violates": ("SPLIT-BYTES",),
        "cases": ("split-64",),
        "make": healthy,
    }
    return Fault(**(whole | fields))


def answering(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Callable[[Any], Verdict]], *names: str
) -> None:
    """Invariants that answer as told, about cases called ``names``."""
    invs = [
        Invariant(
            id, "s", "o", ("reference",), ("subject",), lambda target, case, answer=answer: answer(case)
        )
        for id, answer in answers.items()
    ]
    monkeypatch.setattr(base, "all_invariants", lambda: invs)
    monkeypatch.setattr(base, "load_case", lambda name: SubjectCase(subject=name))


def raising(case: Any) -> Verdict:
    raise TargetRaised("split", ValueError("no"))


@judged_here
def test_a_fault_that_nothing_catches_is_a_problem() -> None:
    result = run_fault(made_up())

    assert result.problems == ("SPLIT-BYTES does not catch it: holds",)
    assert not result.killed
    assert result.verdicts["SPLIT-FRAME"].holds


@judged_here
def test_a_fault_judged_on_no_case_of_its_invariant_is_a_problem() -> None:
    (problem,) = run_fault(made_up(violates=("BUF-KEY",))).problems

    assert problem == "BUF-KEY does not catch it: unknown no case of this fault is judged by it"


@pytest.mark.parametrize(
    ("answers", "fields", "problems"),
    [
        ({"A": lambda c: violated("wrong")}, {}, ()),
        ({"A": lambda c: HOLDS}, {}, ("A does not catch it: holds",)),
        ({"A": lambda c: unknown("no GPU")}, {}, ("A does not catch it: unknown no GPU",)),
        ({"A": raising}, {}, ("A catches it by an exception only: split raised ValueError",)),
        (
            {"A": lambda c: violated("wrong"), "B": lambda c: violated("too much")},
            {"keeps": ("B",)},
            ("B is violated too: too much",),
        ),
        ({"A": lambda c: violated("wrong"), "B": lambda c: violated("recorded")}, {}, ()),
        ({"A": lambda c: violated("wrong"), "B": lambda c: unknown("?")}, {"keeps": ("B",)}, ()),
        ({"A": lambda c: violated("wrong") if c.subject == "two" else HOLDS}, {}, ()),
        ({"A": lambda c: violated("wrong") if c.subject == "one" else HOLDS}, {}, ()),
        ({"A": lambda c: raising(c) if c.subject == "one" else violated("wrong")}, {}, ()),
        ({"A": lambda c: raising(c) if c.subject == "two" else violated("wrong")}, {}, ()),
        (
            {"A": lambda c: raising(c) if c.subject == "two" else HOLDS},
            {},
            ("A catches it by an exception only: split raised ValueError",),
        ),
        (
            {"A": lambda c: violated("w"), "B": lambda c: violated("w") if c.subject == "two" else HOLDS},
            {"keeps": ("B",)},
            ("B is violated too: w",),
        ),
    ],
)
def test_verdicts_are_compared_with_the_declaration(
    answers: dict[str, Callable[[Any], Verdict]],
    fields: dict[str, Any],
    problems: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, answers)
    fault = made_up(violates=("A",), cases=("one", "two"), **fields)

    result = run_fault(fault)

    assert result.problems == problems
    assert result.killed is (problems == ())
    assert set(result.verdicts) == set(answers)


def test_a_fault_out_of_step_with_the_source_is_an_error_not_a_kill() -> None:
    fault = made_up(make=None, patches=(Patch("pages.py", "no such text", ""),))

    with pytest.raises(ValueError, match="in step with the source"):
        run_fault(fault)


def test_what_a_fault_patches_is_a_copy() -> None:
    fault = next(f for f in FAULTS if f.patches)

    with fault.target() as target:
        assert target.name == f"own with fault {fault.id}"
        assert target.compile_origin()[0] != "sm120_mla"


def test_a_stored_case_survives_being_read_and_written() -> None:
    for path in FILES:
        file = load(path)
        assert CaseFile.model_validate_json(file.model_dump_json()) == file
        assert by_id(file.invariant)
