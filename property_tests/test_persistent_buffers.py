"""BUF: what outlives a call survives any order of first touches, captures, replays and growth."""

from __future__ import annotations

import pytest
from hypothesis import given

from sm120_mla.testing import strategies as st
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled


@pytest.mark.BUF_GUARD
@scaled(1)
@given(case=st.orders())
def test_no_buffer_is_an_inference_tensor(target, case):
    hold("BUF-GUARD", target, case)


@pytest.mark.BUF_WRITABLE
@scaled(1)
@given(case=st.orders())
def test_torch_may_write_every_buffer(target, case):
    hold("BUF-WRITABLE", target, case)


@pytest.mark.BUF_ADDRESS
@scaled(1)
@given(case=st.orders())
def test_what_a_graph_recorded_stays_owned(target, case):
    hold("BUF-ADDRESS", target, case)


@pytest.mark.BUF_CAPTURE
@scaled(1)
@given(case=st.orders())
def test_nothing_is_allocated_during_capture(target, case):
    hold("BUF-CAPTURE", target, case)


@pytest.mark.BUF_KEY
@scaled(1)
@given(case=st.orders())
def test_buffers_are_shared_and_kept_apart_by_key(target, case):
    hold("BUF-KEY", target, case)
