"""SPLIT: a page split moves every byte right, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given

from sm120_mla.case import Offset64Case
from sm120_mla.testing import strategies as st
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled


@pytest.mark.SPLIT_BYTES
@scaled(3)
@given(case=st.split_cases())
def test_every_payload_byte_lands_where_the_reference_puts_it(target, case):
    hold("SPLIT-BYTES", target, case)


@pytest.mark.SPLIT_FRAME
@scaled(2)
@given(case=st.split_cases())
def test_nothing_else_changes(target, case):
    hold("SPLIT-FRAME", target, case)


@pytest.mark.SPLIT_INDEX
@scaled(2)
@given(case=st.split_cases())
def test_a_token_index_addresses_the_same_token(target, case):
    hold("SPLIT-INDEX", target, case)


@pytest.mark.SPLIT_TOUCHED
@scaled(3)
@given(case=st.split_cases(with_indices=True))
def test_exactly_what_counted_indices_touch_is_split(target, case):
    hold("SPLIT-TOUCHED", target, case)


@pytest.mark.SPLIT_OFFSET64
@pytest.mark.parametrize("bits", [31, 32])
@pytest.mark.parametrize("stride", [149_760, 1_308_672])
def test_offsets_are_exact_past_the_boundary(target, bits, stride):
    hold("SPLIT-OFFSET64", target, Offset64Case(boundary_bits=bits, page_stride=stride))


@pytest.mark.SPLIT_OFFSET64
@scaled(0.1)
@given(case=st.offset64_cases())
def test_offsets_are_exact_at_any_stride(target, case):
    hold("SPLIT-OFFSET64", target, case)
