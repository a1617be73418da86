"""FlashInfer's rule on index tensors, on both sides of 64/65 rows, against torch's own idea of contiguity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm120_mla import contract
from sm120_mla.errors import ArgumentError


def of(tensor: torch.Tensor, name: str = "eidx") -> contract.IndexTensor:
    return contract.IndexTensor(
        name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch.")
    )


@given(
    rows=st.integers(0, 4),
    columns=st.integers(0, 4),
    base=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    step=st.integers(1, 3),
    rank=st.sampled_from((1, 2, 3)),
)
def test_contiguity_is_torchs(rows, columns, base, step, rank):
    tensor = torch.zeros((max(rows, base[0]), max(columns * step, base[1])), dtype=torch.int32)
    view = tensor[:rows, : columns * step : step]
    view = view[:, None] if rank == 3 else view[0] if rank == 1 and rows else view
    assert contract.is_contiguous(view.shape, view.stride()) == view.is_contiguous()


NARROW = torch.zeros((66, 512), dtype=torch.int32)[:, :128]
FULL = torch.zeros((66, 512), dtype=torch.int32)


@pytest.mark.parametrize(
    ("rows", "said"), [(64, None), (65, "eidx must be contiguous"), (66, "eidx must be contiguous")]
)
def test_a_narrow_view_is_refused_above_64_rows_only(rows, said):
    assert contract.refusal(of(NARROW[:rows]), rows) == said


@pytest.mark.parametrize("rows", [2, 64, 65, 66])
def test_a_narrow_view_is_never_what_the_kernel_needs(rows):
    assert contract.needs(of(NARROW[:rows]), rows) is not None


@pytest.mark.parametrize("rows", [1, 64, 65, 66])
def test_a_full_view_passes_on_both_sides(rows):
    assert contract.refusal(of(FULL[:rows]), rows) is None
    assert contract.needs(of(FULL[:rows]), rows) is None


def test_int64_indices_pass_the_decode_checks_and_are_misread():
    wide = torch.zeros((3, 128), dtype=torch.int64)
    assert contract.refusal(of(wide), 3) is None
    assert "read as int32" in str(contract.needs(of(wide), 3))
    assert contract.refusal(of(torch.zeros((65, 128), dtype=torch.int64)), 65) is not None


def test_the_rewritten_generation_takes_row_strides_in_decode_only():
    assert contract.refusal(of(NARROW[:64]), 64, "C/D") is None
    assert contract.refusal(of(NARROW), 66, "C/D") == "prefill extra indices must be dense"
    main = contract.refusal(contract.IndexTensor("indices", (66, 128), (512, 1), "int32"), 66, "C/D")
    assert main == "invalid sparse-MLA prefill variant/topk/indices"
    assert contract.refusal(of(FULL[:, ::2]), 66, "C/D") == "eidx shape/stride mismatch"
    assert contract.refusal(of(FULL.long()), 66, "C/D") == "Inconsistency of Tensor type: eidx"


def test_an_unknown_generation_is_named():
    with pytest.raises(ArgumentError, match="generation = 'E'"):
        contract.refusal(of(FULL), 1, "E")
