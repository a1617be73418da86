"""ROUTE: the way of an attention call, on every GPU and beside every FlashInfer."""

from __future__ import annotations

import pytest
from hypothesis import given

from sm120_mla.testing import strategies as st
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled


@pytest.mark.ROUTE_TOTAL
@scaled(4)
@given(case=st.route_cases())
def test_every_call_is_served_or_refused_before_the_first_launch(target, case):
    hold("ROUTE-TOTAL", target, case)


@pytest.mark.ROUTE_CONTRACT
@scaled(0.3)
@given(case=st.handed_over_cases())
def test_what_flashinfer_is_handed_keeps_its_contract(target, case):
    hold("ROUTE-CONTRACT", target, case)
