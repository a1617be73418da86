"""Case files: what is written is what is read, and what cannot be read says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sm120_mla import case as case_module
from sm120_mla import settings
from sm120_mla.case import (
    CaseFile,
    IndexSpec,
    Offset64Case,
    OrderCase,
    SplitCase,
    Step,
    StepKind,
    SubjectCase,
    load,
    save,
)
from sm120_mla.errors import CaseFileError
from sm120_mla.testing import strategies
from sm120_mla.testing.profiles import scaled

KINDS = {kind.model_fields["kind"].default: kind for kind in get_args(get_args(case_module.Case)[0])}
"""Every kind of case there is, by name."""


def strategy_of(kind: str) -> st.SearchStrategy[Any]:
    """What draws cases of a kind: called after it."""
    if kind == "subject":
        return st.builds(SubjectCase, subject=st.text(max_size=20))
    return getattr(strategies, "orders" if kind == "order" else f"{kind}_cases")()


EXAMPLE = CaseFile(invariant="INTERP-FACT", note="a fact", case=SubjectCase(subject="bf16-dot"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


# ---- round trip


def test_the_kinds_of_the_main_job_are_there() -> None:
    assert {"split", "offset64", "order", "subject"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_is_loaded(kind: str, folder: Path) -> None:
    @scaled(1)
    @given(drawn=strategy_of(kind), note=st.text(max_size=30))
    def round_trip(drawn: Any, note: str) -> None:
        file = CaseFile(invariant="BUF-KEY", note=note, case=drawn)

        path = save(file, folder / "new" / "folders")
        found = load(path)

        assert path.name == file.name
        assert type(found.case) is KINDS[kind]
        assert found == file
        assert hash(found) == hash(file)
        assert found.model_dump_json() == file.model_dump_json()
        assert load(str(path)).name == file.name

    round_trip()


def test_a_file_is_json_for_people(folder: Path) -> None:
    text = save(EXAMPLE, folder).read_text(encoding="utf-8")

    assert text.endswith("}\n")
    assert text.count("\n") > 5
    assert json.loads(text) == {
        "schema_version": 1,
        "invariant": "INTERP-FACT",
        "note": "a fact",
        "case": {"kind": "subject", "subject": "bf16-dot"},
    }


def test_numbers_beyond_64_bits_survive(folder: Path) -> None:
    file = CaseFile(invariant="SPLIT-BYTES", case=SplitCase(seed=1 << 90))

    assert load(save(file, folder)).case.seed == 1 << 90


# ---- names


def test_a_name_is_the_invariant_and_four_digits_of_the_case() -> None:
    assert EXAMPLE.name == "INTERP-FACT-001c.json"


def test_a_name_says_nothing_of_the_note_and_something_of_every_field() -> None:
    case = SplitCase()
    names = {
        CaseFile(invariant="SPLIT-BYTES", note=note, case=case).name for note in ("", "fixed", "x" * 999)
    }
    others = {
        CaseFile(invariant="SPLIT-BYTES", case=case.model_copy(update=change)).name
        for change in (
            {"seed": 1},
            {"pages": 3},
            {"page_size": 512},
            {"view": "hnd"},
            {"dtype": "float8_e4m3fn"},
            {"calls": (None, None)},
            {"calls": (IndexSpec(rows=1, width=1),)},
            {"calls": (IndexSpec(rows=1, width=1, seed=1),)},
        )
    }

    assert len(names) == 1
    assert len(others) == 8
    assert not names & others
    assert CaseFile(invariant="SPLIT-FRAME", case=case).name.split("-")[2] == names.pop().split("-")[2]


def test_a_name_is_the_same_in_every_process() -> None:
    code = (
        "from sm120_mla.case import *\n"
        "print(CaseFile(invariant='SPLIT-BYTES', case=SplitCase(calls=(IndexSpec(rows=2, width=3),))).name)"
    )
    here = CaseFile(invariant="SPLIT-BYTES", case=SplitCase(calls=(IndexSpec(rows=2, width=3),))).name

    there = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=settings.environment(PYTHONHASHSEED=seed),
        ).stdout.strip()
        for seed in ("1", "2")
    ]

    assert there == [here, here]


# ---- what a case refuses


def test_cases_cannot_be_changed() -> None:
    for case in (SplitCase(), IndexSpec(rows=1, width=1), OrderCase(), Step(do="load"), EXAMPLE):
        with pytest.raises(ValidationError, match="frozen"):
            case.seed = 3  # type: ignore[union-attr]


def test_wide_entries_need_64_bits() -> None:
    with pytest.raises(ValidationError, match="'wide' need dtype 'int64'"):
        IndexSpec(rows=1, width=1, kinds=("valid", "wide"))

    assert IndexSpec(rows=1, width=1, kinds=("wide",), dtype="int64").kinds == ("wide",)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (SplitCase, {"page_size": 100}, "a positive multiple of 64 tokens"),
        (SplitCase, {"layout": "dsv5"}, "one of dsv4"),
        (SplitCase, {"pages": -1}, "greater than or equal to 0"),
        (SplitCase, {"stride_gap": -1}, "greater than or equal to 0"),
        (SplitCase, {"view": "5d"}, "'2d', '3d', 'nhd' or 'hnd'"),
        (SplitCase, {"dtype": "int8"}, "'uint8' or 'float8_e4m3fn'"),
        (SplitCase, {"colour": "red"}, "Extra inputs are not permitted"),
        (IndexSpec, {"rows": -1, "width": 1}, "greater than or equal to 0"),
        (IndexSpec, {"rows": 1, "width": 8193}, "less than or equal to 8192"),
        (IndexSpec, {"rows": 1, "width": 1, "rank": 4}, "2 or 3"),
        (IndexSpec, {"rows": 1, "width": 1, "kinds": ("odd",)}, "'valid'"),
        (Offset64Case, {"boundary_bits": 33}, "31 or 32"),
        (OrderCase, {"rows": 0}, "greater than or equal to 1"),
        (Step, {"do": "reboot"}, "'load'"),
        (SubjectCase, {}, "Field required"),
    ],
)
def test_a_field_out_of_its_range_is_refused(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind(**fields)


# ---- what a file refuses

GOOD = json.loads(EXAMPLE.model_dump_json())
SPLIT = json.loads(CaseFile(invariant="SPLIT-BYTES", case=SplitCase()).model_dump_json())


def with_case(**fields: Any) -> str:
    return json.dumps(SPLIT | {"case": SPLIT["case"] | fields})


BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "the file"),
    "not JSON": ("page_size: 256", "the file"),
    "cut short": (EXAMPLE.model_dump_json()[:-5], "the file"),
    "not UTF-8": (b"\xff\xfe{}", "a readable JSON file"),
    "a list": ("[]", "the file"),
    "null": ("null", "the file"),
    "another version": (json.dumps(GOOD | {"schema_version": 2}), "schema_version: Input should be 1"),
    "no case": (json.dumps({"schema_version": 1, "invariant": "X"}), "case: Field required"),
    "no invariant": (json.dumps({"case": GOOD["case"]}), "invariant: Field required"),
    "no kind": (json.dumps(GOOD | {"case": {"subject": "x"}}), "case: Unable to extract tag"),
    "an unknown kind": (json.dumps(GOOD | {"case": {"kind": "merge"}}), "case: Input tag 'merge'"),
    "an unknown field": (json.dumps(GOOD | {"author": "x"}), "author: Extra inputs"),
    "an unknown field of the case": (with_case(colour=1), "case.split.colour: Extra inputs"),
    "a page size of 100": (with_case(page_size=100), "case.split: Value error, page_size = 100"),
    "an unknown layout": (with_case(layout="dsv5"), "case.split: Value error, layout = 'dsv5'"),
    "a word for a number": (with_case(pages="many"), "case.split.pages: Input should be a valid integer"),
    "a fraction of a page": (with_case(pages=1.5), "case.split.pages: Input should be a valid integer"),
    "wide in 32 bits": (
        with_case(calls=[{"rows": 1, "width": 1, "kinds": ["wide"]}]),
        "case.split.calls.0: Value error, entries of kind 'wide'",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_corrupt_file_says_where_and_why(name: str, tmp_path: Path) -> None:
    content, why = BAD_FILES[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(CaseFileError) as caught:
        load(path)

    assert caught.value.argument == "case"
    assert caught.value.value == "bad.json"
    assert why in caught.value.expected
    assert "sm120-mla verify" in caught.value.remedy
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("name", ["missing.json", "folder", "."])
def test_a_file_that_is_none_says_so(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    with pytest.raises(CaseFileError, match="a readable JSON file"):
        load(tmp_path / name)


# ---- derived


@pytest.mark.parametrize(
    ("case", "stride", "sub_pages"),
    [
        (SplitCase(), 149_504, 8),
        (SplitCase(stride_gap=256), 149_760, 8),
        (SplitCase(layout="dsv32", page_size=64, pages=3), 41_984, 3),
        (SplitCase(layout="dsv41", page_size=192, pages=0), 101_376, 0),
    ],
)
def test_strides_and_counts_follow_from_the_fields(case: SplitCase, stride: int, sub_pages: int) -> None:
    assert (case.page_stride, case.sub_pages) == (stride, sub_pages)
    assert case.page_layout.name == case.layout


def test_an_order_reads_as_a_program() -> None:
    order = OrderCase(steps=(Step(do="load", arg=2), Step(do="warm_up", inference=True, arg=3)))

    assert str(order) == "load(arg=2)\nwarm_up(arg=3) under inference_mode"


def test_every_step_can_be_a_case_by_itself() -> None:
    for do in get_args(StepKind):
        assert OrderCase(steps=(Step(do=do),)).steps[0].do == do
