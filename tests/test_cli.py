"""The command line: what each command prints, and every exit code of the contract."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import sm120_mla.testing
from sm120_mla import case, device
from sm120_mla.case import CaseFile, SubjectCase
from sm120_mla.errors import SuiteNotFoundError, UnavailableError
from sm120_mla.targets import Support
from sm120_mla.testing import machine, verdict
from sm120_mla.testing.verdict import HOLDS, Invariant, unknown, violated
from sm120_mla.tools import catalogue, cli, doctor, exits, suite
from sm120_mla.tools.verify import exit_code

TOUCHED = (
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_DEFAULT_FP_FUSION",
    "OMP_NUM_THREADS",
    "SM120_MLA_TARGET",
    "SM120_MLA_BACKEND",
)

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def reference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command settles in this process is taken back."""
    for name in TOUCHED:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SM120_MLA_MODE", "reference")
    monkeypatch.setenv("COLUMNS", "120")


def say(target: Any, case: SubjectCase) -> verdict.Verdict:
    if case.subject == "raise":
        raise ZeroDivisionError("inside the check")
    return {"good": HOLDS, "bad": violated("it is bad", "got 1\nwant 0")}.get(
        case.subject, unknown("nobody knows")
    )


class StandIn:
    """A target that refuses one case."""

    name = "test_cli:StandIn"

    def supports(self, case: SubjectCase, capability: object) -> Support:
        return Support.no("not that one") if case.subject == "refused" else Support(True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> str:
    """One invariant that says what its case says; returns the name of a target."""
    one = Invariant("SPLIT-ONE", "one is one", "made up", ("reference",), ("subject",), say)
    monkeypatch.setattr(verdict, "_registry", {"SPLIT-ONE": one})
    monkeypatch.setitem(sys.modules, "stand_in_cli", SimpleNamespace(StandIn=StandIn))  # type: ignore[arg-type]
    return "stand_in_cli:StandIn"


def stored(folder: Path, subject: str, invariant: str = "SPLIT-ONE") -> str:
    return str(case.save(CaseFile(invariant=invariant, case=SubjectCase(subject=subject)), folder))


# replay


@pytest.mark.parametrize(
    ("subject", "code", "line"),
    [
        ("good", exits.HELD, "SPLIT-ONE holds: one is one"),
        ("bad", exits.VIOLATED, "SPLIT-ONE violated: one is one"),
        ("other", exits.NOTHING_JUDGED, "  nobody knows"),
        ("refused", exits.NOTHING_JUDGED, "  target test_cli:StandIn does not serve this case: not that one"),
        ("raise", exits.INTERNAL, None),
    ],
)
def test_replay(
    subject: str,
    code: int,
    line: str | None,
    stand_in: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["replay", stored(tmp_path, subject), "--target", stand_in]) == code

    said = capsys.readouterr()
    if line is None:
        assert "ZeroDivisionError: inside the check" in said.err
    else:
        assert line in said.out.splitlines()


def test_replay_takes_the_target_of_the_environment(
    stand_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SM120_MLA_TARGET", stand_in)

    assert cli.run(["replay", stored(tmp_path, "good")]) == exits.HELD
    assert "target test_cli:StandIn (interpreter)      subject good" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\nos._exit(7)\n", "the process ended with exit code 7 while judging SPLIT-BYTES"),
        ("raise SystemExit(1)\n", "loading it raised SystemExit: 1"),
    ],
)
def test_what_a_checkout_does_to_its_process_is_no_verdict(
    source: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "tree" / "python" / "sglang" / "srt" / "layers" / "attention" / "flash_mla_sm120.py"
    kept.parent.mkdir(parents=True)
    kept.write_text(f"{source}def split_kv_pages(cache):\n    return cache\n")
    file = CaseFile(invariant="SPLIT-BYTES", case=case.SplitCase(pages=1, page_size=256))

    code = cli.run(["replay", str(case.save(file, tmp_path)), "--target", f"sglang:{tmp_path / 'tree'}"])

    assert code == exits.NOTHING_JUDGED
    assert says in capsys.readouterr().out


def test_replay_of_a_real_case_on_the_own_target(tmp_path: Path) -> None:
    file = CaseFile(invariant="SPLIT-BYTES", case=case.SplitCase(pages=1, page_size=128))

    assert cli.run(["replay", str(case.save(file, tmp_path))]) == exits.HELD


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_replay_through_a_backend_says_which(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = CaseFile(invariant="ATTN-VALUE", case=case.AttnCase(tokens=1, heads=1))

    code = cli.run(["replay", str(case.save(file, tmp_path)), "--target", "own", "--backend", backend])

    assert code == exits.HELD
    assert f"target own/{backend} (" in capsys.readouterr().out


def wrong_uses(tmp_path: Path) -> Iterator[tuple[str, list[str], str]]:
    corrupt = tmp_path / "corrupt.json"
    corrupt.write_text('{"schema_version": 1, "case"', encoding="utf-8")
    good = stored(tmp_path, "good")
    yield "nothing", [], "no command given"
    yield "command", ["verfy"], "verfy"
    yield "option", ["verify", "--frobnicate"], "--frobnicate"
    yield "mode", ["verify", "--mode", "fast"], "'fast'"
    yield "backend", ["replay", good, "--backend", "torch"], "'torch'"
    yield "examples", ["verify", "--examples", "0"], "--examples"
    yield "workers", ["verify", "-n", "many"], "a number of processes, or auto"
    yield "invariant", ["verify", "--invariant", "SPLIT-OEN"], "SPLIT-ONE"
    yield "target of verify", ["verify", "--target", "nobody"], "'nobody'"
    yield "no file", ["replay"], "Missing argument"
    yield "absent file", ["replay", str(tmp_path / "absent.json")], "absent.json"
    yield "corrupt file", ["replay", str(corrupt)], "corrupt.json"
    yield "unknown invariant", ["replay", stored(tmp_path, "good", "SPLIT-TWO")], "SPLIT-TWO"
    yield "target of replay", ["replay", good, "--target", "nobody"], "'nobody'"
    yield "fault", ["faults", "no-such-fault"], "no-such-fault"


def test_wrong_use_is_129_and_names_what_is_wrong(
    stand_in: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, arguments, said in wrong_uses(tmp_path):
        assert cli.run(arguments) == exits.WRONG_USE, name
        assert said in capsys.readouterr().err, name


def test_verify_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "__file__", str(tmp_path / "a" / "b" / "c" / "suite.py"))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SuiteNotFoundError, match="property_tests"):
        suite.find_suite(tmp_path)
    assert cli.run(["verify"]) == exits.WRONG_USE
    assert "Change into a checkout" in capsys.readouterr().err


def test_a_checkout_is_found_from_below_and_before_the_installed_one(tmp_path: Path) -> None:
    for folder in ("property_tests/deeper", "sm120_mla/testing"):
        (tmp_path / folder).mkdir(parents=True)

    assert suite.find_suite(tmp_path / "property_tests" / "deeper") == tmp_path
    assert suite.find_suite(Path("/")) == Path(suite.__file__).resolve().parents[2]


# what leaves as 125, 130 and 131


@pytest.mark.parametrize(
    ("arguments", "package"),
    [(["invariants"], "triton"), (["verify"], "hypothesis"), (["faults"], "torch")],
)
def test_a_missing_package_is_125(
    arguments: list[str],
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = suite.importlib.util.find_spec
    gone = SimpleNamespace(find_spec=lambda name: None if name == package else there(name))
    monkeypatch.setattr(suite, "importlib", SimpleNamespace(util=gone))

    assert cli.run(arguments) == exits.NOTHING_JUDGED
    assert f"{package} is not available: it is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "replay"])
def test_a_target_that_cannot_be_imported_is_125(command: str, stand_in: str, tmp_path: Path) -> None:
    more = [stored(tmp_path, "good")] if command == "replay" else []

    assert cli.run([command, *more, "--target", "no_such_module_anywhere:Target"]) == exits.NOTHING_JUDGED


@pytest.mark.parametrize("command", ["verify", "replay"])
def test_a_mode_the_machine_lacks_is_125(
    command: str, stand_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: ())
    more = [stored(tmp_path, "good")] if command == "replay" else []

    assert cli.run([command, *more, "--mode", "cuda"]) == exits.NOTHING_JUDGED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), exits.INTERRUPTED),
        (typer.Abort(), exits.INTERRUPTED),
        (RuntimeError("boom"), exits.INTERNAL),
        (AssertionError("boom"), exits.INTERNAL),
        (BrokenPipeError(32, "nobody listens"), exits.INTERNAL),
        (SystemExit(1), exits.INTERNAL),
        (UnavailableError("it", "why", "what"), exits.NOTHING_JUDGED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_exception_leaves_as_1(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(as_json: bool) -> int:
        raise error

    out, err = sys.stdout, sys.stderr
    monkeypatch.setattr(catalogue, "show_invariants", fail)
    try:
        assert cli.run(["invariants"]) == code
    finally:
        sys.stdout, sys.stderr = out, err  # typer replaces both on a broken pipe


# verify


def document(**changes: Any) -> dict[str, Any]:
    one = {"id": "SPLIT-ONE", "held": 3, "violated": 0, "unknown": 0, "tests": 1, "reasons": {}}
    return {"failures": [], "errors": [], "invariants": [one | changes.pop("row", {})]} | changes


@pytest.mark.parametrize(
    ("found", "pytest_code", "code"),
    [
        (document(), 0, exits.HELD),
        (document(failures=[{}]), 1, exits.VIOLATED),
        (document(failures=[{}], errors=[{}]), 1, exits.VIOLATED),
        (document(failures=[{}]), 2, exits.VIOLATED),
        (document(errors=[{}]), 1, exits.INTERNAL),
        (document(errors=[{}]), 2, exits.INTERNAL),
        (document(), 2, exits.INTERRUPTED),
        (document(), 3, exits.INTERNAL),
        (document(row={"held": 0, "unknown": 7}), 0, exits.NOTHING_JUDGED),
        (document(row={"held": 0}), 0, exits.NOTHING_JUDGED),
        (document(invariants=[]), 5, exits.NOTHING_JUDGED),
    ],
)
def test_the_code_of_a_run(found: dict[str, Any], pytest_code: int, code: int) -> None:
    assert exit_code(found, pytest_code) == code


SUITE = """
import pytest
from sm120_mla.case import SubjectCase
from sm120_mla.testing.check import hold
from sm120_mla.testing import verdict
from sm120_mla.testing.verdict import HOLDS, Invariant, violated

def say(target, case):
    return HOLDS if case.subject == "good" else violated("it is bad")

verdict.all_invariants()
for id in ("SPLIT-BYTES", "SPLIT-MADE-UP"):
    verdict._registry[id] = Invariant(id, "made up", "here", ("reference",), ("subject",), say)

@pytest.mark.SPLIT_BYTES
def test_good(target): hold("SPLIT-BYTES", target, SubjectCase(subject="good"))

def test_bad(target): hold("SPLIT-MADE-UP", target, SubjectCase(subject="bad"))

@pytest.mark.SPLIT_FRAME
def test_slow(): open("started", "w").close(); __import__("time").sleep(60)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Path:
    """A checkout with a suite of three tests, where this process stands."""
    root = pytestconfig.rootpath
    (tmp_path / "property_tests").mkdir()
    (tmp_path / "property_tests" / "test_it.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "sm120_mla" / "testing").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nsm120_mla_suite = true\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["sm120_mla_pytest"]\n', encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verify_that_holds_writes_its_reports(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-n0", "--invariant", "SPLIT-BYTES", "--json", "out/found.json", "--junit", "junit.xml"]

    assert cli.run(["verify", *options, "--examples", "3", "--profile", "ci"]) == exits.HELD

    found = json.loads((checkout / "out" / "found.json").read_text(encoding="utf-8"))
    assert found["tests"] == {"passed": 1}
    assert found["profile"] == "ci"
    assert 'name="sm120_mla"' in (checkout / "junit.xml").read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert [word for word in ("SPLIT-BYTES", "holds", "not run:") if word not in said] == []


def test_verify_of_one_invariant_is_about_no_other(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where one test asks several: the code is that of the one named."""
    (checkout / "property_tests" / "test_it.py").write_text(
        SUITE.replace("def test_bad", "@pytest.mark.SPLIT_BYTES\n@pytest.mark.SPLIT_INDEX\ndef test_bad"),
        encoding="utf-8",
    )

    assert cli.run(["verify", "-n0", "--invariant", "SPLIT-BYTES"]) == exits.HELD

    table = capsys.readouterr().out.partition("not run")[0]
    assert "SPLIT-BYTES" in table
    assert "SPLIT-MADE-UP" not in table
    assert "SPLIT-INDEX" not in table


def test_verify_of_a_violation_shows_its_text(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "property_tests" / "test_it.py").write_text(
        SUITE.replace("@pytest.mark.SPLIT_FRAME", "@pytest.mark.skip(reason='slow')"), encoding="utf-8"
    )
    assert cli.run(["verify", "-n0"]) == exits.VIOLATED

    said = capsys.readouterr().out.splitlines()
    start = said.index("SPLIT-MADE-UP violated: made up")
    assert said[start + 2] == "  it is bad"
    (saved,) = (checkout / ".sm120" / "cases").iterdir()
    assert said[start + 3] == f"  replay: sm120-mla replay .sm120/cases/{saved.name} --target own"
    assert said[start + 4] == "  test: property_tests/test_it.py::test_bad"
    assert "not run: 1 x skipped: slow" in said


def test_verify_through_a_backend_says_which(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "property_tests" / "test_it.py").write_text(
        SUITE.replace("test_good(target): ", 'test_good(target): assert target.backend == "reference"; '),
        encoding="utf-8",
    )

    code = cli.run(["verify", "-n0", "--invariant", "SPLIT-BYTES", "--backend", "reference"])

    assert code == exits.HELD
    assert "target own/reference" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_verify_is_130_and_leaves_nothing_running(name: str, checkout: Path) -> None:
    command = [sys.executable, "-m", "sm120_mla.tools.cli", "verify", "-n0", "--invariant", "SPLIT-FRAME"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (checkout / "started").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)

    child.send_signal(getattr(signal, name))
    _, said = child.communicate(timeout=60)

    assert child.returncode == exits.INTERRUPTED, said
    assert [line for line in said.splitlines() if "Traceback" in line] == []


# the other commands


def test_invariants_as_json(stand_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["invariants", "--json"]) == exits.HELD

    assert json.loads(capsys.readouterr().out) == [
        {"id": "SPLIT-ONE", "statement": "one is one", "origin": "made up", "where": ["reference"]}
    ]


def test_invariants_as_a_table(stand_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["invariants"]) == exits.HELD

    said = capsys.readouterr().out
    assert [word for word in ("SPLIT-ONE", "one is one", "made up", "reference") if word not in said] == []


def result(id: str, *problems: str) -> SimpleNamespace:
    fault = SimpleNamespace(id=id, sentence=f"{id} goes wrong", violates=("SPLIT-ONE",), keeps=("SPLIT-TWO",))
    verdicts = {"SPLIT-ONE": HOLDS if problems else violated("seen"), "SPLIT-TWO": HOLDS}
    return SimpleNamespace(fault=fault, verdicts=verdicts, problems=problems)


@pytest.fixture
def made_up_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two faults, one of which nobody notices."""
    results = {"caught": result("caught"), "missed": result("missed", "SPLIT-ONE does not catch it")}
    faults = SimpleNamespace(
        FAULTS=tuple(r.fault for r in results.values()), run_fault=lambda fault: results[fault.id]
    )
    monkeypatch.setattr(sm120_mla.testing, "faults", faults, raising=False)
    monkeypatch.setitem(sys.modules, "sm120_mla.testing.faults", faults)  # type: ignore[arg-type]


@pytest.mark.usefixtures("made_up_faults")
def test_a_fault_that_nobody_notices_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["faults"]) == exits.VIOLATED

    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["caught", "X", ".", "0.0"] in lines
    assert ["missed", "!", ".", "0.0"] in lines
    assert "missed: missed goes wrong\n  SPLIT-ONE does not catch it\n1 of 2 faults" in said


@pytest.mark.usefixtures("made_up_faults")
def test_one_fault_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["faults", "caught", "--json"]) == exits.HELD

    (row,) = json.loads(capsys.readouterr().out)
    assert row["outcomes"] == {"SPLIT-ONE": "violated", "SPLIT-TWO": "holds"}
    assert row["headlines"] == {"SPLIT-ONE": "seen"}


def test_no_faults_at_all_is_125(monkeypatch: pytest.MonkeyPatch) -> None:
    none = SimpleNamespace(FAULTS=(), run_fault=None)
    monkeypatch.setattr(sm120_mla.testing, "faults", none, raising=False)

    assert cli.run(["faults"]) == exits.NOTHING_JUDGED


def test_doctor_says_why_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: ())
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "flashinfer-python" else "9.9.9")

    assert cli.run(["doctor", "--json"]) == exits.HELD

    rows = {(row["topic"], row["subject"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["mode", "reference"]["state"] == "yes"
    assert rows["mode", "sm120"]["detail"] == "no CUDA GPU is visible"
    assert rows["backend", "flashinfer"]["state"] == "no"
    assert rows["kernel", "page_split"]["detail"].endswith("launch configurations")
    assert rows["setting", "SM120_MLA_MODE"]["detail"] == "'reference'"


@pytest.mark.parametrize(
    ("number", "capable", "state", "said"),
    [
        ("0.6.13", True, "no", "no SM120 kernels"),
        ("0.6.18", False, "no", "capability 12.x"),
        ("0.7.0", True, "yes", "0.7.0"),
    ],
)
def test_doctor_on_flashinfer(
    number: str, capable: bool, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: number)

    with device.pretend_device((12, 0) if capable else (9, 0)):
        found = next(f for f in doctor._backends() if f.subject == "flashinfer")

    assert found.state == state
    assert said in found.detail


def test_doctor_survives_what_it_looks_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise OSError("libcuda is torn")

    monkeypatch.setattr(machine, "expected_mode", broken)
    monkeypatch.setattr(device, "interpreting", broken)
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    monkeypatch.setattr(doctor, "_version", lambda name: None)

    assert cli.run(["doctor"]) == exits.HELD

    said = capsys.readouterr().out
    assert said.count("libcuda is torn") > 3
    assert "needs torch and triton" in said


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from sm120_mla.tools import cli
assert cli.run(["--help"]) == 0
assert cli.run(["verify", "--help"]) == 0
assert cli.run(["--version"]) == 0
heavy = {"torch", "triton", "numpy", "hypothesis", "pytest"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_every_code_of_the_contract_has_a_meaning_and_no_other_is_used() -> None:
    assert sorted(exits.MEANING) == [0, 1, 125, 129, 130, 131]
    assert [exits.verdict_code(v) for v in (HOLDS, violated("x"), unknown("y"))] == [0, 1, 125]
