"""The two published failures, found and shrunk by Hypothesis to their few steps, as the README shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st

from sm120_mla import contract
from sm120_mla.case import MetaBatch, MetaCase, OrderCase, Step
from sm120_mla.testing.boots import judged
from sm120_mla.testing.faults import FAULTS
from sm120_mla.testing.meta_batch import inputs_of, make_buffers
from sm120_mla.testing.orderings import run_order
from sm120_mla.widths import capacity

README = Path(__file__).parents[1] / "README.md"
SEARCH = settings(
    max_examples=400,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def with_fault(id):
    return next(fault for fault in FAULTS if fault.id == id).target()


def refused(target, case):
    """What FlashInfer's checks say of the decode view, at the batch's own row count."""
    batch = case.builds[0]
    buffers = make_buffers(batch.decode + 1, capacity(case.max_model_len), case.seed)
    with target.pretend_device(case.capability):
        inputs = inputs_of(batch, buffers, requests=case.requests, block_size=case.block_size)
        decode, _, _ = target.build_c128a(inputs)
    given = contract.IndexTensor("eidx", tuple(decode.shape), decode.stride(), "int32")
    return contract.refusal(given, batch.decode)


def meta_case(rows):
    return MetaCase(builds=(MetaBatch(decode=rows, max_seq_len=1024),))


def test_the_narrow_view_is_refused_from_65_rows_on():
    with with_fault("narrow-on-12") as target:
        found = find(
            st.integers(0, 130).map(meta_case),
            lambda case: refused(target, case) is not None,
            settings=SEARCH,
        )
        assert found.builds[0].decode == 65
        assert refused(target, meta_case(66)) == "eidx must be contiguous"
        assert refused(target, meta_case(64)) is None
    text = "build(batch=66, seq=1024) -> eidx must be contiguous; build(batch=64, seq=1024) -> passes"
    assert text in README.read_text(encoding="utf-8")


STEP = st.one_of(
    st.builds(
        Step,
        do=st.sampled_from(("capture_step", "serve", "build")),
        batch=st.integers(1, 4),
        seq=st.sampled_from((1, 16_384, 16_512, 33_000)),
    )
)


def programs(batch=None):
    steps = STEP if batch is None else STEP.map(lambda step: step.model_copy(update={"batch": batch}))
    return st.lists(steps, min_size=1, max_size=6).map(lambda s: OrderCase(steps=tuple(s)))


def wrong_row(target, case):
    """Whether a replay reads another row's entries, in columns its view does have."""
    return any(" reads " in note.replayed for note in run_order(target, case).notes)


def test_the_packed_view_fails_with_two_rows_after_a_build_at_another_width():
    with with_fault("packed-view") as target:
        found = find(programs(), lambda case: wrong_row(target, case), settings=SEARCH)
        assert [step.do for step in found.steps] == ["capture_step", "serve"]
        assert found.steps[0].batch == 2
        one_row = OrderCase(steps=tuple(s.model_copy(update={"batch": 1}) for s in found.steps))
        assert not wrong_row(target, one_row)
        assert judged("GRAPH-REPLAY", run_order(target, found)).violated
    readme = README.read_text(encoding="utf-8")
    for step in found.steps:
        assert str(step) in readme


def test_the_shipped_view_survives_the_same_programs():
    with with_fault("packed-view") as target:
        found = find(programs(), lambda case: wrong_row(target, case), settings=SEARCH)
    from sm120_mla.targets.own import OwnTarget

    assert not wrong_row(OwnTarget(), found)


@pytest.mark.parametrize("rows", [64, 65, 66])
def test_the_shipped_view_is_never_refused(rows):
    from sm120_mla.targets.own import OwnTarget

    assert refused(OwnTarget(), meta_case(rows)) is None
