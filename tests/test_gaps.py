"""Every test and fault that docs/upstream-gaps.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sm120_mla.testing.faults import FAULTS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "upstream-gaps.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"([PT])`(test_\w+\.py)(?:::(test_\w+))?`", TEXT)))
FOLDERS = {"P": "property_tests", "T": "tests"}


@pytest.mark.parametrize(("folder", "file", "test"), NAMED, ids="/".join)
def test_a_named_test_exists(folder, file, test):
    path = ROOT / FOLDERS[folder] / file
    assert path.is_file()
    if test:
        assert re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_named_faults_exist():
    cells = [line.rsplit("|", 2)[1] for line in TEXT.splitlines() if re.match(r"\| \d", line)]
    named = set(re.findall(r"`([\w.-]+)`", " ".join(cells)))
    assert named
    assert named <= {fault.id for fault in FAULTS}


def test_the_table_covers_the_gaps_it_should():
    numbers = {int(n) for n in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)}
    assert numbers == set(range(1, 42))


def test_every_gap_is_decided_by_a_test():
    rows = re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|", TEXT, re.MULTILINE)
    assert [
        number for number, tests in rows if not re.search(r"[PT]`test_\w+\.py(?:::test_\w+)?`", tests)
    ] == []
