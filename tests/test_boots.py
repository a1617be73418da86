"""Recorded boots whose expected verdict differs by target, and the machine's own power to find faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120_mla.case import load
from sm120_mla.targets.own import OwnTarget
from sm120_mla.testing.boots import ASKED, judged
from sm120_mla.testing.field_model import FieldTarget
from sm120_mla.testing.orderings import run_order

BOOTS = Path(__file__).parents[1] / "fixtures" / "boots"


def boot(name):
    return load(BOOTS / f"boot-{name}.json").case


def test_first_touch_in_capture_is_refused_by_own_and_the_advice_works():
    log = run_order(OwnTarget(), boot("c"))
    refused = [note for note in log.notes if note.refused]
    assert [note.step.do for note in refused] == ["capture"]
    assert "reserve_split(pool, page_size=256)" in refused[0].refused
    assert log.notes[-1].step.do == "replay"
    assert not log.notes[-1].replayed
    assert log.error is None
    assert all(judged(id, log).holds for id in ASKED)


def test_first_touch_in_capture_is_served_by_the_field_with_a_violation():
    log = run_order(FieldTarget(), boot("c"))
    assert not any(note.refused for note in log.notes)
    assert log.error is None
    verdict = judged("BUF-CAPTURE", log)
    assert verdict.violated
    assert "allocated during the capture" in verdict.headline


@pytest.mark.parametrize("path", sorted(BOOTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_boot_reaches_its_last_step(path):
    case = load(path).case
    log = run_order(OwnTarget(), case)
    assert len(log.notes) == len(case.steps)
    assert any(note.step.do in ("replay", "serve") for note in log.notes)
