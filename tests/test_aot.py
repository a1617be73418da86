"""The compile report: what it shows, what it compares, and how it ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sm120_mla import device
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.kernels.spec import CompileSpec
from sm120_mla.testing import compile_check, machine
from sm120_mla.testing.compile_check import CompileResult
from sm120_mla.tools import aot, aot_child, aot_report, cli, exits
from sm120_mla.tools.aot import Wanted, choose
from sm120_mla.tools.aot_report import Report, Row, load_baseline, markdown, resident_blocks

VERSIONS = {"triton": "3.9.0", "ptxas-blackwell": "13.4.59"}
SPEC = CompileSpec(
    name="copy/a",
    module="kernels.copy",
    function="copy_kernel",
    signature={"src": "*u8"},
    constexprs={},
    num_warps=4,
    shared_bytes=2048,
)
OTHER = dataclasses.replace(SPEC, name="merge/2", module="kernels.merge", function="merge_kernel")
RESULT = CompileResult("copy/a", "sm_120", True, False, None, "sm_120a", 1024, 40, 0, 0, 0.5)


def row(spec: CompileSpec = SPEC, target: str = "sm_120", **change: Any) -> Row:
    result = dataclasses.replace(RESULT, name=spec.name, target=target, ptx_target=f"{target}a")
    result = dataclasses.replace(result, **change)
    return Row(spec, result, () if result.unknown else tuple(compile_check.judge(result, spec)))


def report(*rows: Row, **change: Any) -> Report:
    return dataclasses.replace(Report("own", VERSIONS, rows, 2.0), **change)


# ---- what is compiled


def test_all_is_chosen_by_default_sorted_by_kernel() -> None:
    chosen = choose([OTHER, SPEC], Wanted())

    assert [spec.name for spec in chosen] == ["copy/a", "merge/2"]
    assert all(spec.capabilities == (120, 121) for spec in chosen)


@pytest.mark.parametrize("name", ["copy", "copy_kernel", "copy/a"])
def test_a_kernel_is_chosen_by_module_function_or_configuration(name: str) -> None:
    assert [spec.name for spec in choose([SPEC, OTHER], Wanted(kernels=(name,)))] == ["copy/a"]


@pytest.mark.parametrize("arch", ["sm_121", "121", "sm121a", "12.1", "sm_121f"])
def test_a_target_is_chosen_in_any_spelling(arch: str) -> None:
    assert [spec.capabilities for spec in choose([SPEC], Wanted(archs=(arch,)))] == [(121,)]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (Wanted(kernels=("copy", "nope")), "kernel"),
        (Wanted(kernels=("cop",)), "kernel"),
        (Wanted(archs=("sm_90",)), "arch"),
        (Wanted(archs=("blackwell",)), "arch"),
    ],
)
def test_what_matches_nothing_is_named(wanted: Wanted, named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        choose([SPEC, OTHER], wanted)

    assert caught.value.argument == named


# ---- how it ends


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row()], exits.HELD),
        ([row(), row(shared_bytes=4096)], exits.VIOLATED),
        ([row(spill_bytes=8)], exits.VIOLATED),
        ([row(ok=False, error="no such instruction")], exits.VIOLATED),
        ([row(), row(ok=False, unknown=True, error="time ran out")], exits.NOTHING_JUDGED),
        ([row(spill_bytes=8), row(ok=False, unknown=True, error="time ran out")], exits.VIOLATED),
        ([], exits.NOTHING_JUDGED),
    ],
)
def test_the_code_is_that_of_the_worst(rows: list[Row], code: int) -> None:
    assert aot.judge_report(report(*rows)) == code


def test_broken_budgets_name_the_invariant_and_the_figures() -> None:
    lines = list(
        aot_report.closing(report(row(shared_bytes=4096), row(ok=False, unknown=True, error="lost")))
    )

    assert lines[0] == (
        "COMPILE-SM120 violated: copy/a for sm_120: 4,096 bytes of shared memory, budget 2,048"
    )
    assert lines[1] == "unknown: copy/a for sm_120: lost"
    assert lines[-1] == "0 of 2 hold, 1 broken, 1 unknown, in 2 s"


# ---- the figures


@pytest.mark.parametrize(
    ("shared", "registers", "warps", "blocks"),
    [
        (0, 16, 1, 24),  # as many as there may be
        (0, 32, 8, 6),  # 48 warps
        (101_376, 32, 4, 1),  # exactly one, with what a block reserves
        (50_176, 32, 4, 2),
        (50_177, 32, 4, 1),
        (0, 255, 8, 1),  # 256 registers a lane
        (0, 128, 8, 2),
        (0, 41, 4, 10),  # rounded up to 48 a lane
    ],
)
def test_resident_blocks(shared: int, registers: int, warps: int, blocks: int) -> None:
    assert resident_blocks(shared, registers, warps) == blocks


def test_targets_share_a_line_where_they_agree() -> None:
    together = report(row(), row(target="sm_121"))
    apart = report(row(), row(target="sm_121", registers=48))

    assert "| copy/a | 4 | 1,024 | 2,048 | 40 | 0 | 12 | sm_120, sm_121 |" in markdown(together)
    assert "| copy/a | 4 | 1,024 | 2,048 | 48 | 0 | 10 | sm_121 |" in markdown(apart)


def test_markdown_sums_up_by_kernel_and_lists_every_configuration() -> None:
    text = markdown(report(row(), row(OTHER, shared_bytes=2048, spill_bytes=16)))

    assert "shared memory limit 101,376 bytes; triton 3.9.0, ptxas-blackwell 13.4.59" in text
    assert "| copy | 1 | 1,024 (1 %) | 40 | 0 | none |" in text
    assert "| merge | 1 | 2,048 (2 %) | 40 | 16 | 1 |" in text
    assert "| merge/2 | 4 | 2,048 | 2,048 | 40 | 16 of 0 | 12 | sm_120 |" in text
    assert "- COMPILE-SM120 violated: merge/2 for sm_120: 16 bytes of local memory" in text


def test_what_did_not_compile_has_no_figures() -> None:
    text = markdown(report(row(ok=False, error="x"), row(OTHER, ok=False, unknown=True, error="y")))

    assert "| copy/a | 4 | does not compile | 2,048 |  |  |  | sm_120 |" in text
    assert "| merge/2 | 4 | unknown | 2,048 |  |  |  | sm_120 |" in text


def test_json_is_what_a_baseline_takes(tmp_path: Path) -> None:
    first = report(row(), row(target="sm_121"), row(OTHER))
    file = tmp_path / "before.json"
    file.write_text(json.dumps(first.as_dict()))

    before = load_baseline(file)

    same = aot_report.gap(before, VERSIONS, first.rows, aot.wanted_rows(Wanted()))
    assert list(same.sentences()) == ["against before.json: no number differs, 0 added, 0 removed, 0 changed"]
    data = json.loads(file.read_text())
    assert data["shared_limit"] == device.SM120_SHARED_MEMORY
    assert data["rows"][0]["shared_budget"] == 2048
    assert data["rows"][0]["kernel"] == "copy"


def test_the_gap_names_added_removed_and_changed_and_the_tools(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    old = dataclasses.replace(SPEC, name="copy/old")
    file.write_text(json.dumps(report(row(), row(old)).as_dict()))
    now = (row(registers=168, seconds=9.0, shared_bytes=2048), row(OTHER))
    versions = VERSIONS | {"triton": "3.10.0"}

    found = aot_report.gap(load_baseline(file), versions, now, aot.wanted_rows(Wanted()))

    assert list(found.sentences()) == [
        "against before.json: 1 added, 1 removed, 1 changed",
        "  toolchain: triton 3.9.0 -> 3.10.0",
        "  added: merge/2 sm_120",
        "  removed: copy/old sm_120",
        "  changed: copy/a sm_120: shared_bytes 1,024 -> 2,048, registers 40 -> 168",
    ]


def test_what_was_not_asked_for_is_not_missing(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    file.write_text(json.dumps(report(row(), row(target="sm_121"), row(OTHER)).as_dict()))
    wanted = Wanted(kernels=("copy",), archs=("sm_120",))

    found = aot_report.gap(load_baseline(file), VERSIONS, [row()], aot.wanted_rows(wanted))

    assert found.removed == ()


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        '{"schema": 1, "rows": [], "versions": 3}',
        '{"schema": 1, "rows": [{"name": "a"}], "versions": {}}',
        '{"schema": 2, "rows": [], "versions": {}}',
        '{"rows": [], "versions": {}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_baseline_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)

    with pytest.raises(ArgumentError, match="JSON of an earlier run"):
        load_baseline(file)
    with pytest.raises(ArgumentError, match="can be read"):
        load_baseline(tmp_path / "nowhere.json")


# ---- the toolchain


def test_the_toolchain_of_triton_is_found() -> None:
    found = aot.toolchain()

    assert set(found) == {"triton", "ptxas-blackwell", "cuobjdump"}
    assert all(number[0].isdigit() for number in found.values())


@pytest.mark.parametrize("lost", ["ptxas-blackwell", "cuobjdump"])
def test_a_missing_tool_is_named_or_done_without(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    real = aot_child.tool_path
    monkeypatch.setattr(
        aot_child, "tool_path", lambda name: f"/no/such/{name}" if name == lost else real(name)
    )

    if lost == "cuobjdump":
        assert aot.toolchain()["cuobjdump"] == "none"
    else:
        with pytest.raises(UnavailableError, match="TRITON_PTXAS_BLACKWELL_PATH"):
            aot.toolchain()


def test_a_tool_that_fails_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_child, "tool_path", lambda name: "false")

    with pytest.raises(UnavailableError, match="ptxas is not available"):
        aot.toolchain()


# ---- the command


class StandIn:
    """A target with two configurations."""

    name = "stand-in"

    def __init__(self, specs: Sequence[CompileSpec] = (SPEC, OTHER)) -> None:
        self.specs = tuple(specs)

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        return self.specs

    def compile_origin(self) -> tuple[str, str | None]:
        return "some_package", "/some/where"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The command on a stand-in target, its kernels compiled by nobody."""
    from sm120_mla import targets

    seen: list[dict[str, Any]] = []

    def compile_all(specs: Sequence[CompileSpec], **options: Any) -> list[CompileResult]:
        seen.append(options | {"specs": specs})
        found = [row(s, f"sm_{c}").result for s in specs for c in s.capabilities]
        for result in found:
            options["on_result"](result)
        return found

    monkeypatch.setattr(compile_check, "compile_all", compile_all)
    monkeypatch.setattr(targets, "resolve", lambda name: StandIn())
    monkeypatch.setattr(aot, "prepare", lambda mode: "reference")
    monkeypatch.setattr(aot, "toolchain", lambda: VERSIONS)
    monkeypatch.setenv("COLUMNS", "140")
    return seen


def test_the_command_compiles_judges_and_prints(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["aot", "-n", "3"]) == exits.HELD

    [call] = calls
    assert (call["package"], call["path"], call["workers"]) == ("some_package", "/some/where", 3)
    said = capsys.readouterr().out
    assert "copy/a" in said
    assert "stand-in: shared memory limit 101,376 bytes" in said
    assert "4 of 4 hold" in said


def test_the_command_shows_the_gap_to_its_own_json(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.run(["aot", "--json"]) == exits.HELD
    file = tmp_path / "before.json"
    file.write_text(capsys.readouterr().out)

    assert cli.run(["aot", "--kernel", "merge", "--arch", "sm_121", "--baseline", str(file)]) == exits.HELD

    said = capsys.readouterr().out
    assert "no number differs, 0 added, 0 removed, 0 changed" in said
    assert [s.name for s in calls[1]["specs"]] == ["merge/2"]


def test_a_broken_budget_is_one(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_check, "judge", lambda result, spec: ["too much of everything"])

    assert cli.run(["aot", "--markdown"]) == exits.VIOLATED
    assert "- COMPILE-SM120 violated: copy/a for sm_120: too much of everything" in capsys.readouterr().out


def test_a_target_with_nothing_to_compile_is_125(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sm120_mla import targets

    monkeypatch.setattr(targets, "resolve", lambda name: StandIn(()))

    assert cli.run(["aot"]) == exits.NOTHING_JUDGED
    assert calls == []


def test_one_real_kernel_from_end_to_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "prepare_process", lambda: "reference")

    code = cli.run(["aot", "--kernel", "merge/32", "--json"])

    data = json.loads(capsys.readouterr().out)
    assert code == exits.HELD, data["rows"]
    assert [r["target"] for r in data["rows"]] == ["sm_120", "sm_121"]
    assert [r["ptx_target"] for r in data["rows"]] == ["sm_120a", "sm_121a"]
    assert all(r["ok"] and r["registers"] > 8 and r["problems"] == [] for r in data["rows"])
