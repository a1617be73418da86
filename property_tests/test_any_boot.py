"""Boots: recorded ones first, then any order a state machine can think of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from sm120_mla.case import load
from sm120_mla.testing.boots import ASKED, boot_machine
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled

BOOTS = sorted((Path(__file__).parents[1] / "fixtures" / "boots").glob("*.json"))
EVERY = [getattr(pytest.mark, id.replace("-", "_")) for id in ASKED]


def carries_every_marker(test):
    for mark in EVERY:
        test = mark(test)
    return test


@carries_every_marker
@pytest.mark.parametrize("path", BOOTS, ids=lambda path: path.stem)
def test_a_recorded_boot_keeps_every_invariant(target, path):
    case = load(path).case
    for id in ASKED:
        hold(id, target, case)


@carries_every_marker
def test_every_invariant_holds_after_every_step_of_any_boot(target):
    run_state_machine_as_test(boot_machine(target), settings=scaled(1, stateful_step_count=15))
