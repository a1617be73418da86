"""Padding rows of a captured batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sm120_mla import graphs
from sm120_mla.errors import ArgumentError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.metadata import bind_padding, build_c128a_topk_metadata, swa_window_indices

DEVICE = "cpu" if INTERPRETED else "cuda"


def full(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("rows", [0, 3, 8])
def test_rows_from_num_rows_on_become_neutral(rows: int) -> None:
    slots, positions, requests = full(8, dtype=torch.int64), full(8, dtype=torch.int64), full(8)
    lengths, indices = [full(8), full(8, 1)], [full(8, 4), full(8, 1, 6)]

    bind_padding(
        rows,
        slots,
        positions=positions,
        token_to_req_indices=requests,
        lengths=lengths,
        indices=indices,
    )

    for tensor, value in [(slots, -1), (positions, 0), (requests, 0)]:
        assert tensor.tolist() == [77] * rows + [value] * (8 - rows)
    for tensors, value in ((lengths, 0), (indices, -1)):
        for tensor in tensors:
            assert (tensor[:rows] == 77).all()
            assert (tensor[rows:] == value).all()


def test_a_replay_with_fewer_rows_sees_nothing_of_a_larger_batch() -> None:
    table = torch.arange(40, 56, dtype=torch.int32, device=DEVICE).view(2, 8)
    positions = torch.tensor([300, 301, 302, 303], device=DEVICE)
    requests = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    slots = torch.arange(4, device=DEVICE)
    rows, lens = full(4, 128), full(4)
    c128a = full(4, 128), full(4), full(4, 128)

    def build() -> None:
        swa_window_indices(positions, requests, table, 64, slots, out=rows, lens_out=lens)
        build_c128a_topk_metadata(positions, 128, 4, requests, table, 2, slots, *c128a, 128)

    build()
    graph = graphs.capture(build)
    bind_padding(1, slots, positions=positions, token_to_req_indices=requests)

    graph.replay()

    assert lens.tolist() == [128, 0, 0, 0]
    assert (rows[1:] == -1).all()
    assert c128a[1].tolist() == [2, 0, 0, 0]
    assert (c128a[0][1:] == -1).all()


def test_binding_can_be_captured() -> None:
    slots = full(4)
    graph = graphs.capture(lambda: bind_padding(2, slots))
    slots.fill_(5)

    graph.replay()

    assert slots.tolist() == [5, 5, -1, -1]


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return full(4)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rows past": ({"num_rows": 5}, "num_rows"),
    "rows negative": ({"num_rows": -1}, "num_rows"),
    "slots 2-D": ({"slot_mapping": full(4, 1)}, "slot_mapping.dim()"),
    "positions shorter": ({"positions": full(3)}, "positions.shape"),
    "requests float": ({"token_to_req_indices": full(4).float()}, "token_to_req_indices.dtype"),
    "length scalar": ({"lengths": [full(4), full()]}, "lengths[1].shape"),
    "length a list": ({"lengths": [[1, 2, 3, 4]]}, "lengths[0]"),
    "index rows": ({"indices": [full(5, 2)]}, "indices[0].shape"),
    "inference tensor": ({"indices": [inference()]}, "indices[0]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_changes(case: str) -> None:
    change, argument = BAD[case]
    args = {"num_rows": 1, "slot_mapping": full(4), "positions": full(4)}
    kept = args["slot_mapping"]

    with pytest.raises(ArgumentError) as caught:
        bind_padding(**(args | change))

    assert caught.value.argument == argument
    assert (kept == 77).all()


def test_inference_tensors_are_taken_in_inference_mode() -> None:
    with torch.inference_mode():
        slots = full(4)
        bind_padding(3, slots)

    assert slots.tolist() == [77, 77, 77, -1]
