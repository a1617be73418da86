"""META, GRAPH, ROUTE, ATTN: the C128A builder's rows, views and strides, and who reads them."""

from __future__ import annotations

import pytest
from hypothesis import given

from sm120_mla.testing import strategies as st
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled


@pytest.mark.META_VALUES
@scaled(3)
@given(case=st.meta_cases())
def test_rows_and_lengths_equal_the_reference(target, case):
    hold("META-VALUES", target, case)


@pytest.mark.META_VIEW
@scaled(2)
@given(case=st.meta_cases())
def test_the_view_is_what_the_capability_needs(target, case):
    hold("META-VIEW", target, case)


@pytest.mark.META_STRIDE
@scaled(2)
@given(case=st.meta_cases())
def test_a_captured_consumer_reads_right_rows_after_a_build_at_another_width(target, case):
    hold("META-STRIDE", target, case)


@pytest.mark.META_STALE
@scaled(1)
@given(case=st.meta_cases(most_rows=3, most_tokens=65_536))
def test_no_consumer_reads_past_the_length(target, case):
    hold("META-STALE", target, case)


@pytest.mark.GRAPH_REPLAY
@scaled(2)
@given(case=st.meta_cases())
def test_the_replay_of_a_captured_build_equals_an_eager_one(target, case):
    hold("GRAPH-REPLAY", target, case)


@pytest.mark.ATTN_ROWS
@scaled(2)
@given(case=st.meta_cases())
def test_padding_rows_change_no_real_row(target, case):
    hold("ATTN-ROWS", target, case)


@pytest.mark.ROUTE_CONTRACT
@scaled(2)
@given(case=st.meta_cases(capabilities=((12, 0), (12, 1))))
def test_index_tensors_satisfy_flashinfer_on_both_sides_of_64_rows(target, case):
    hold("ROUTE-CONTRACT", target, case)
