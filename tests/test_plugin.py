"""The pytest plugin, run by itself on small suites: what is counted, saved, skipped and shown."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from sm120_mla import case
from sm120_mla.testing import (
    check,  # noqa: F401  imported here once, not by each inner run
    machine,
    profiles,
    verdict,
)

pytest_plugins = ["pytester"]

STAND_IN = '''
"""Three invariants that say what the subject of their case says, and a target that does nothing."""
from sm120_mla.targets.base import Support
from sm120_mla.testing.verdict import HOLDS, Invariant, unknown, violated

def say(target, case):
    word, _, number = case.subject.partition(":")
    if word == "unknown":
        return unknown("there is no such thing here")
    if word == "at-least" and int(number) >= 3 or word == "bad":
        return violated(f"{number or word} is too much", "got 1\\nwant 0")
    return HOLDS

INVARIANTS = [
    Invariant(id, f"{id} is as it should be", "made up", where, ("subject",), say)
    for id, where in [
        ("SPLIT-ONE", ("reference", "cuda", "sm120")), ("BUF-TWO", ("reference",)), ("BUF-THREE", ("cuda",)),
    ]
]

class Target:
    name = "stand-in"

    def supports(self, case, capability):
        return Support.no("not that one") if case.subject == "refused" else Support(True)
'''

CONFTEST = """
from sm120_mla.testing import verdict
import stand_in
verdict._registry = {i.id: i for i in stand_in.INVARIANTS}
"""

HEADER = """
import pytest
from hypothesis import given, strategies as st
from sm120_mla.case import SubjectCase
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled

def case(subject): return SubjectCase(subject=subject)
"""

HELD = """
@pytest.mark.SPLIT_ONE
@given(st.integers(0, 99))
def test_held(target, n):
    hold("SPLIT-ONE", target, case(f"fine:{n}"))
"""

VIOLATED = """
@pytest.mark.SPLIT_ONE
@given(st.integers(0, 999))
def test_violated(target, n):
    hold("SPLIT-ONE", target, case(f"at-least:{n}"))
"""

UNKNOWN = """
@pytest.mark.BUF_TWO
@given(st.integers(0, 9))
def test_all_unknown(target, n):
    hold("BUF-TWO", target, case("unknown"))

@pytest.mark.BUF_TWO
def test_one_known(target):
    hold("BUF-TWO", target, case("refused"))
    hold("BUF-TWO", target, case("fine"))
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def suite(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[Run]:
    """Runs pytest on a test file in this process; what it changes for good in Hypothesis is put back."""
    monkeypatch.setattr(verdict, "_registry", dict(verdict._registry))
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "TRITON_DEFAULT_FP_FUSION", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what a run sets is taken back
        monkeypatch.delenv(name)
    for name in ("SM120_MLA_PROFILE", "CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SM120_MLA_MODE", "reference")
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.syspathinsert()
    pytester.makeini("[pytest]\nsm120_mla_suite = true\naddopts = --strict-markers\n")
    pytester.makepyfile(stand_in=STAND_IN)
    pytester.makeconftest(CONFTEST)
    before = hypothesis.settings.get_current_profile_name()

    def run(body: str, *options: str, subprocess: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_inner=HEADER + body)
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        common = ("-p", "sm120_mla_pytest", "-p", "no:randomly", "-p", "no:cacheprovider")
        return start(*common, "--sm120-target", "stand_in:Target", "--sm120-json", "found.json", *options)

    yield run
    profiles.register(pytestconfig.rootpath)
    profiles.load(before)


def found(pytester: pytest.Pytester) -> dict[str, Any]:
    return json.loads((pytester.path / "found.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def row(document: dict[str, Any], id: str) -> dict[str, Any]:
    return next(r for r in document["invariants"] if r["id"] == id)


def test_held_examples_are_counted_and_shown(suite: Run, pytester: pytest.Pytester) -> None:
    result = suite(HELD, "--sm120-examples", "20")

    result.assert_outcomes(passed=1)
    assert row(found(pytester), "SPLIT-ONE") == {
        "id": "SPLIT-ONE",
        "held": 20,
        "violated": 0,
        "unknown": 0,
        "tests": 1,
        "reasons": {},
    }
    result.stdout.fnmatch_lines(
        [
            "sm120_mla: mode reference, target stand_in:Target, profile dev",
            "SPLIT-ONE * 20 * 0 * 0 * 1  reference",
            "20 examples judged or asked, target stand_in:Target",
            "not run:",
            "*2 x no test selected: BUF-TWO, BUF-THREE",
            "*1 x cuda mode: can be decided there too; this run: reference",
        ]
    )
    result.stdout.no_fnmatch_line("sm120_mla: no invariant was judged*")


def test_a_violation_saves_the_shrunk_case_only(suite: Run, pytester: pytest.Pytester) -> None:
    result = suite(VIOLATED, "--tb=short")

    result.assert_outcomes(failed=1)
    (path,) = (pytester.path / check.CASES).iterdir()
    file = case.load(path)
    assert (file.invariant, file.case.subject) == ("SPLIT-ONE", "at-least:3")
    document = found(pytester)
    (failure,) = document["failures"]
    assert failure["case"] == f".sm120/cases/{path.name}"
    assert failure["invariant"] == "SPLIT-ONE"
    assert failure["text"].splitlines() == [
        "SPLIT-ONE violated: SPLIT-ONE is as it should be",
        "  target stand-in (interpreter)      subject at-least:3",
        "  3 is too much",
        "  got 1",
        "  want 0",
        f"  replay: sm120-mla replay .sm120/cases/{path.name} --target stand-in",
    ]
    assert row(document, "SPLIT-ONE")["violated"] == 1
    assert document["errors"] == []
    result.stdout.fnmatch_lines(["*SPLIT_ONE: SPLIT-ONE violated: SPLIT-ONE is as it should be"])
    result.stdout.no_fnmatch_line("*def hold*")


def test_two_invariants_violated_in_one_test_are_told_apart(suite: Run, pytester: pytest.Pytester) -> None:
    body = """
@given(st.integers(0, 99))
def test_both(target, n):
    hold("SPLIT-ONE" if n % 2 else "BUF-TWO", target, case(f"at-least:{n}"))
"""
    suite(body, "--sm120-examples", "200").assert_outcomes(failed=1)

    subjects = {f["invariant"]: f["text"].splitlines()[2] for f in found(pytester)["failures"]}
    assert subjects == {"SPLIT-ONE": "  3 is too much", "BUF-TWO": "  4 is too much"}


def test_nothing_but_unknown_is_a_skip_with_the_reason(suite: Run, pytester: pytest.Pytester) -> None:
    result = suite(UNKNOWN, "-rs", "--sm120-examples", "5")

    result.assert_outcomes(passed=1, skipped=1)
    document = found(pytester)
    two = row(document, "BUF-TWO")
    assert (two["held"], two["tests"]) == (1, 2)
    assert two["reasons"]["there is no such thing here"] == two["unknown"] - 1
    assert "not that one" in next(reason for reason in two["reasons"] if "serve" in reason)
    result.stdout.fnmatch_lines(
        [
            "*1 x skipped: nothing was judged: there is no such thing here (BUF-TWO)",
            "*5 x BUF-TWO unknown: there is no such thing here",
            "SKIPPED * nothing was judged: there is no such thing here",
        ]
    )


def test_a_run_that_judged_nothing_says_so_last(suite: Run, pytester: pytest.Pytester) -> None:
    result = suite('@pytest.mark.BUF_TWO\ndef test_asks_nothing(): pytest.skip("no second GPU")\n')

    assert result.outlines[-1] == "sm120_mla: no invariant was judged in this run"
    assert found(pytester)["not_run"][0] == {"what": "skipped", "count": 1, "why": "no second GPU (BUF-TWO)"}


def test_failures_that_name_no_invariant_are_errors(suite: Run, pytester: pytest.Pytester) -> None:
    body = """
def test_broken(): raise RuntimeError("not a verdict")

def test_expected(target):
    with pytest.raises(AssertionError):
        hold("SPLIT-ONE", target, case("bad"))

def test_no_such(target): hold("SPLIT-NONE", target, case("fine"))

@pytest.fixture
def torn():
    yield
    raise RuntimeError("in teardown")

def test_teardown(torn): pass
"""
    suite(body).assert_outcomes(failed=2, passed=2, errors=1)

    document = found(pytester)
    texts = [e["text"] for e in document["errors"]]
    assert [any(word in text for text in texts) for word in ("not a verdict", "SPLIT-NONE", "in teardown")] == [
        True
    ] * 3
    assert document["failures"] == []
    assert not (pytester.path / check.CASES).exists()


def test_what_cannot_be_collected_is_an_error(suite: Run, pytester: pytest.Pytester) -> None:
    assert suite("import no_such_module_anywhere\n").ret == pytest.ExitCode.INTERRUPTED

    (error,) = found(pytester)["errors"]
    assert "no_such_module_anywhere" in error["text"]


def test_an_unknown_marker_is_refused(suite: Run) -> None:
    assert suite("@pytest.mark.SPLIT_OEN\ndef test_typo(): pass\n").ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("nobody", pytest.ExitCode.USAGE_ERROR, "*target = 'nobody': expected one of own*"),
        ("stand_in:Missing", pytest.ExitCode.OK, "*1 x skipped: target stand_in:Missing is not available*"),
    ],
)
def test_a_target_that_is_not_there(suite: Run, name: str, code: int, line: str) -> None:
    result = suite(HELD, "--sm120-target", name)

    assert result.ret == code
    result.stdout.fnmatch_lines([line])


def test_a_test_of_another_mode_is_skipped(suite: Run, pytester: pytest.Pytester) -> None:
    body = "\n".join(
        f"@pytest.mark.BUF_TWO\n@pytest.mark.{mode}\ndef test_{mode}(mode): assert mode == '{mode}'"
        for mode in ("reference", "cuda", "sm120")
    )
    suite(body).assert_outcomes(passed=1, skipped=2)

    assert [entry["why"] for entry in found(pytester)["not_run"][:2]] == [
        "runs in cuda mode; this run: reference (BUF-TWO)",
        "runs in sm120 mode; this run: reference (BUF-TWO)",
    ]


def test_scaled_follows_the_profile(suite: Run, pytester: pytest.Pytester) -> None:
    suite(HELD.replace("@given", "@scaled(0.2)\n@given"), "--sm120-examples", "40").assert_outcomes(passed=1)

    assert row(found(pytester), "SPLIT-ONE")["held"] == 8


def test_a_profile_can_be_named(suite: Run, pytester: pytest.Pytester) -> None:
    suite("def test_nothing(): pass\n", "--hypothesis-profile", "text").assert_outcomes(passed=1)

    assert found(pytester)["profile"] == "text"


def test_workers_add_up(suite: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_other=HEADER + HELD)
    done = suite(
        HELD + UNKNOWN + VIOLATED,
        "-n2",
        "--sm120-examples=10",
        "--junitxml=junit.xml",
        "--sm120-progress=progress",
        subprocess=True,
    )

    done.assert_outcomes(passed=3, skipped=1, failed=1)
    document = found(pytester)
    assert document["mode"] == "reference"
    assert row(document, "SPLIT-ONE")["tests"] == 3
    assert row(document, "SPLIT-ONE")["held"] >= 20
    assert row(document, "BUF-TWO")["held"] == 1
    assert document["not_run"][-1]["what"] == "sm120 mode"
    assert len(document["failures"]) == 1
    names = [p.get("name") for p in ET.parse(pytester.path / "junit.xml").iter("property")]
    assert names.count("sm120_mla") == 5
    lines = (pytester.path / "progress").read_text(encoding="utf-8").splitlines()
    assert lines.count("done") == 5
    assert "total 5" in lines


def test_other_projects_are_left_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prepared() -> str:
        raise AssertionError("not asked for")

    monkeypatch.setattr(machine, "prepare_process", prepared)
    pytester.makepyfile("def test_nothing(request): assert not request.config.pluginmanager.has_plugin('suite')")
    result = pytester.runpytest_inprocess(
        "-p", "sm120_mla_pytest", "-p", "no:randomly", "--sm120-json", "x.json"
    )

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*sm120_mla*")
    assert not (pytester.path / "x.json").exists()


@pytest.mark.parametrize(
    ("gpus", "workers"), [((), None), ((machine.Gpu("0"), machine.Gpu("1")), 2)]
)
def test_auto_is_a_worker_per_gpu(
    gpus: tuple[machine.Gpu, ...],
    workers: int | None,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sm120_mla_pytest

    monkeypatch.setenv("SM120_MLA_MODE", "auto")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(machine, "usable_gpus", lambda: gpus)
    pytester.makeini("[pytest]\nsm120_mla_suite = true\n")
    monkeypatch.setattr(machine, "prepare_process", lambda: "reference")
    monkeypatch.setattr(profiles, "register", lambda root: None)
    config = pytester.parseconfig("-p", "sm120_mla_pytest")

    assert sm120_mla_pytest.pytest_xdist_auto_num_workers(config) == workers


def test_a_mode_the_machine_lacks_is_refused_before_anything_runs(
    suite: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_MLA_MODE", "sm120")
    monkeypatch.setattr(machine, "installed_gpus", lambda: ())
    result = suite(HELD)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: mode sm120 is not available: *"])
