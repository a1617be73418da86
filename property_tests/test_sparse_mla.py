"""ATTN and CACHE: attention against the yardstick, what must not matter to it, and the bytes it reads."""

from __future__ import annotations

import pytest
from hypothesis import given

from sm120_mla.testing import strategies as st
from sm120_mla.testing.check import hold
from sm120_mla.testing.profiles import scaled


@pytest.mark.ATTN_VALUE
@scaled(0.8)
@given(case=st.attn_cases())
def test_out_is_within_the_budget(target, case):
    hold("ATTN-VALUE", target, case)


@pytest.mark.ATTN_LSE
@scaled(0.8)
@given(case=st.attn_cases())
def test_lse_is_natural_and_without_the_sink(target, case):
    hold("ATTN-LSE", target, case)


@pytest.mark.ATTN_DONTCARE
@scaled(0.2)
@given(case=st.attn_cases())
def test_bytes_of_uncounted_entries_never_matter(target, case):
    hold("ATTN-DONTCARE", target, case)


@pytest.mark.ATTN_EMPTY
@scaled(0.3)
@given(case=st.attn_cases())
def test_a_row_with_nothing_counted_is_zero(target, case):
    hold("ATTN-EMPTY", target, case)


@pytest.mark.ATTN_MERGE
@scaled(0.2)
@given(case=st.attn_cases())
def test_parts_merged_by_lse_are_the_whole(target, case):
    hold("ATTN-MERGE", target, case)


@pytest.mark.ATTN_ORDER
@scaled(0.2)
@given(case=st.attn_cases())
def test_order_matters_within_the_budget_only(target, case):
    hold("ATTN-ORDER", target, case)


@pytest.mark.ATTN_ROWS
@scaled(0.3)
@given(case=st.attn_cases(least_tokens=2))
def test_a_row_depends_on_no_other_row(target, case):
    hold("ATTN-ROWS", target, case)


@pytest.mark.CACHE_BYTES
@scaled(2)
@given(case=st.write_cases())
def test_the_writer_leaves_the_quantisers_bytes(target, case):
    hold("CACHE-BYTES", target, case)
