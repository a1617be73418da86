"""COMPILE and INTERP: what SM120 will be given, and what the interpreter is trusted with."""

from __future__ import annotations

import pytest

from sm120_mla.testing import invariants
from sm120_mla.testing.check import hold


@pytest.mark.COMPILE_SM120
def test_every_launch_configuration_compiles_for_sm120_and_sm121(target):
    subjects = invariants.meta.compile_subjects(target)
    if not subjects:
        pytest.skip(f"target {target.name} names no launch configurations to compile")
    for case in subjects:
        hold("COMPILE-SM120", target, case)


@pytest.mark.INTERP_FACT
@pytest.mark.reference
@pytest.mark.parametrize("case", invariants.meta.fact_subjects(), ids=lambda case: case.subject)
def test_the_interpreter_does_what_reference_mode_relies_on(target, case):
    hold("INTERP-FACT", target, case)
