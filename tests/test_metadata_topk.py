"""Global C4A slots and combined prefill rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sm120_mla import graphs, widths
from sm120_mla.errors import ArgumentError, IndexValueError
from sm120_mla.kernels import index_topk as kernels
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.metadata import build_c128a_topk_metadata, c4a_global_indices, combine_topk_swa
from sm120_mla.reference import metadata as reference

DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = -99


def on(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


def c4a_batch(
    tokens: int = 7, topk: int = 512, *, seed: int = 0, block_size: int = 64, dtype: torch.dtype = torch.int32
) -> dict[str, Any]:
    """Selections with holes anywhere; some rows are all holes."""
    g = torch.Generator().manual_seed(seed)
    columns = 9
    local = torch.randint(0, columns * block_size, (tokens, topk), generator=g).to(dtype)
    kept = torch.rand(tokens, topk, generator=g) < torch.rand(tokens, 1, generator=g)
    kept[:, topk // 2 :] &= torch.rand(tokens, 1, generator=g) < 0.5
    args = {
        "local_indices": torch.where(kept, local, -1),
        "token_to_req_indices": torch.randint(0, 3, (tokens,), generator=g, dtype=torch.int32),
        "block_table": torch.randint(0, 5000, (3, columns), generator=g, dtype=torch.int32),
        "block_size": block_size,
        "slot_mapping": torch.where(torch.rand(tokens, generator=g) < 0.2, -1, torch.arange(tokens)),
    }
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def prefill_batch(
    queries: tuple[int, ...] = (3, 1, 9, 0, 4),
    topk: int = 512,
    *,
    seed: int = 0,
    ratio: int = 4,
    base: int = 200,
    first: int = 11,
    dtype: torch.dtype = torch.int32,
) -> dict[str, Any]:
    """A chunk of requests with histories of any length, whose gathered tokens just reach every window."""
    g = torch.Generator().manual_seed(seed)
    query = torch.tensor(queries)
    tokens, requests = int(query.sum()), len(queries)
    seqs = query + torch.randint(0, 700, (requests,), generator=g)
    local = torch.randint(-20, base, (tokens, topk), generator=g).to(dtype)
    args = {
        "topk_indices": local,
        "query_start_loc": torch.cat([torch.zeros(1), query.cumsum(0)]).add(first).to(dtype),
        "seq_lens": seqs.to(dtype),
        "gather_lens": torch.minimum(seqs, query + 127).to(dtype),
        "window": 128,
        "compress_ratio": ratio,
        "topk": topk,
        "workspace_stride": base + max(150, 127 + max(queries)),
        "window_base": base,
    }
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


# ---- C4A


@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (1, {}),
        (2, {"tokens": 66, "topk": 128}),
        (3, {"topk": 2048}),  # more columns than one tile
        (4, {"topk": 37, "block_size": 3, "dtype": torch.int64}),
        (5, {"tokens": 1, "topk": 1}),
    ],
)
def test_global_slots_equal_the_reference(seed: int, shape: dict[str, Any]) -> None:
    args = c4a_batch(seed=seed, **shape)
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    topk = args["local_indices"].shape[1]

    indices, lens = c4a_global_indices(**args)

    expected = reference.c4a_global(**args, width=topk)
    assert torch.equal(indices, expected[0])
    assert torch.equal(lens, expected[1])
    assert indices.is_contiguous()
    for name, value in before.items():
        assert torch.equal(args[name], value), name


def test_holes_stay_in_place_and_no_slot_lies_past_the_length() -> None:
    local = on([[14, -1, -1, -1], [2, 3, -1, 5], [-1, -1, -1, -1], [-1, -1, 7, -1], [1, 2, 3, 4]])
    table = on([[4, 5, 6, 7]])

    indices, lens = c4a_global_indices(local, on([0] * 5), table, 4, on([0, 1, 2, 3, -1]))

    assert indices.tolist() == [
        [30, -1, -1, -1],
        [18, 19, -1, 21],
        [-1, -1, -1, -1],
        [-1, -1, 23, -1],
        [-1, -1, -1, -1],
    ]
    assert lens.tolist() == [1, 4, 0, 3, 0]


@pytest.mark.parametrize("rank", [2, 3])
def test_rows_of_any_stride_and_either_rank_give_contiguous_slots(rank: int) -> None:
    args = c4a_batch(topk=128)
    expected = c4a_global_indices(**args)
    wide = poison(7, 512)
    wide[:, :128] = args["local_indices"]
    view = wide[:, :128] if rank == 2 else wide[:, None, :128]

    indices, lens = c4a_global_indices(**(args | {"local_indices": view}))

    assert not view.is_contiguous()
    assert indices.is_contiguous()
    assert torch.equal(indices, expected[0])
    assert torch.equal(lens, expected[1])


def test_global_out_has_its_tail_cleared_and_no_further_row_written() -> None:
    args = c4a_batch(tokens=5, topk=100)
    out, lens = poison(8, 1408), poison(8)

    got, got_lens = c4a_global_indices(**args, out=out, lens_out=lens)

    assert got.data_ptr() == out.data_ptr()
    assert got_lens.data_ptr() == lens.data_ptr()
    assert torch.equal(got, reference.c4a_global(**args, width=1408)[0])
    assert (out[5:] == POISON).all()
    assert (lens[5:] == POISON).all()


def test_unchecked_global_garbage_is_a_hole() -> None:
    storage = torch.full((7, 40), 4321, dtype=torch.int32, device=DEVICE)
    table = storage[2:4, 10:12]
    table[:] = on([[3, -1], [2**25, 2**25 - 1]])
    args = {
        "local_indices": on(
            [[0, 64, 128, 2**62, -(2**63), 63], [0, 127, 128, 2**63 - 1, -2, 5]] * 2, torch.int64
        ),
        "token_to_req_indices": on([0, 1, 2, -1]),
        "block_table": table,
        "block_size": 64,
        "slot_mapping": on([0, 1, 2, 3]),
    }

    indices, lens = c4a_global_indices(**args, validate="metadata")

    assert indices.tolist()[:2] == [[192, -1, -1, -1, -1, 255], [-1, 2**31 - 1, -1, -1, -1, -1]]
    assert (indices[2:] == -1).all()
    assert lens.tolist() == [6, 2, 0, 0]
    assert torch.equal(indices, reference.c4a_global(**args, width=6)[0])


BAD_GLOBAL: dict[str, tuple[dict[str, Any], str]] = {
    "1-D": ({"local_indices": on([1])}, "local_indices.dim()"),
    "two heads": ({"local_indices": poison(7, 2, 4)}, "local_indices.shape"),
    "float": ({"local_indices": poison(7, 4).float()}, "local_indices.dtype"),
    "strided": ({"local_indices": poison(7, 8)[:, ::2]}, "local_indices.stride(-1)"),
    "requests": ({"token_to_req_indices": on([0] * 6)}, "token_to_req_indices.shape[0]"),
    "slots": ({"slot_mapping": on([0] * 6)}, "slot_mapping.shape[0]"),
    "table": ({"block_table": poison(9, 3).t()}, "block_table.stride(-1)"),
    "block size": ({"block_size": -64}, "block_size"),
    "out": ({"out": poison(7, 511)}, "out.shape[1]"),
    "out slice": ({"out": poison(7, 1024)[:, :512]}, "out.stride()"),
    "lens": ({"lens_out": poison(7).long()}, "lens_out.dtype"),
}


@pytest.mark.parametrize("case", BAD_GLOBAL)
def test_bad_global_metadata_is_refused_by_name(case: str) -> None:
    change, argument = BAD_GLOBAL[case]
    args = c4a_batch() | {"out": poison(7, 512)}
    kept = args["out"]

    with pytest.raises(ArgumentError) as caught:
        c4a_global_indices(**(args | change))

    assert caught.value.argument == argument
    assert (kept == POISON).all()


def test_remapping_in_place_is_refused() -> None:
    args = c4a_batch()

    with pytest.raises(ArgumentError) as caught:
        c4a_global_indices(**args, out=args["local_indices"])

    assert caught.value.argument == "out"


@pytest.mark.parametrize(
    ("name", "at", "value", "argument"),
    [
        ("local_indices", (3, 5), 9 * 64, "local_indices[3, 5]"),
        ("token_to_req_indices", 2, 3, "token_to_req_indices[2]"),
        ("token_to_req_indices", 2, -1, "token_to_req_indices[2]"),
        ("block_table", (slice(None), 0), -4, "block_table["),
        ("block_table", (slice(None), 0), 6000, "block_table["),
    ],
)
def test_bad_global_values_are_refused(name: str, at: Any, value: int, argument: str) -> None:
    args = c4a_batch() | {"slot_mapping": on(range(7))}
    args["local_indices"][:, 0] = 1
    args[name][at] = value
    out = poison(7, 512)

    with pytest.raises(IndexValueError) as caught:
        c4a_global_indices(**args, out=out, num_blocks=6000, validate="values")

    assert caught.value.argument.startswith(argument)
    assert (out == POISON).all()
    c4a_global_indices(**(args | {"slot_mapping": on([-1] * 7)}), validate="values")


# ---- combined prefill rows


@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (1, {}),
        (2, {"ratio": 128, "topk": 128}),
        (3, {"topk": 0}),
        (4, {"queries": (40,), "topk": 37, "dtype": torch.int64}),
        (5, {"queries": (0, 0, 2, 0, 0, 0, 1), "first": 0}),
        (6, {"topk": 1100, "base": 1100, "ratio": 1}),  # more columns than one tile
    ],
)
def test_combined_rows_equal_the_reference(seed: int, shape: dict[str, Any]) -> None:
    args = prefill_batch(seed=seed, **shape)
    before = args["topk_indices"].clone()
    width = widths.combined_width(args["topk"])

    indices, lens = combine_topk_swa(**args)

    expected = reference.combine(**args, width=width)
    assert indices.shape == (args["topk_indices"].shape[0], width)
    assert torch.equal(indices, expected[0])
    assert torch.equal(lens, expected[1])
    assert torch.equal(args["topk_indices"], before)


def test_a_combined_batch_by_hand() -> None:
    # Request 1 has 12 tokens, of which 2 are queries; its workspace rows start at 30.
    indices, lens = combine_topk_swa(
        on([[0, 1, 2], [2, -1, 1], [1, 0, 2]]), on([0, 1, 3]), on([1, 12]), on([1, 5]), 4, 4, 3, 30, 20
    )

    assert indices.shape == (3, 128)
    assert indices[0, :2].tolist() == [20, -1]  # position 0: no entry yet, and itself
    assert indices[1, :7].tolist() == [32, -1, 50, 51, 52, 53, -1]  # position 10: two entries, tokens 7..10
    assert indices[2, :8].tolist() == [31, 30, 32, 51, 52, 53, 54, -1]
    assert lens.tolist() == [1, 6, 7]


def test_a_reused_combined_buffer_keeps_nothing() -> None:
    out, lens = poison(40, 768), poison(40)
    combine_topk_swa(**prefill_batch((40,), seed=1), out=out, lens_out=lens)
    args = prefill_batch((2, 3), topk=64, seed=2)
    later = out[5:].clone()

    got, got_lens = combine_topk_swa(**args, out=out, lens_out=lens)

    expected = reference.combine(**args, width=768)
    assert got.is_contiguous()
    assert torch.equal(got, expected[0])
    assert torch.equal(got_lens, expected[1])
    assert torch.equal(out[5:], later)


def test_the_narrow_prefill_view_of_the_c128a_builder_is_taken_as_it_is() -> None:
    buffers = poison(1, 512), poison(1), poison(8, 512)
    positions = torch.arange(700, 705, device=DEVICE)
    zeros = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    _, _, prefill = build_c128a_topk_metadata(
        positions, 128, 0, zeros, on([[0]]), 2, zeros, *buffers, 128, validate="metadata"
    )
    args = prefill_batch((5,), ratio=128, base=8) | {
        "topk_indices": prefill,
        "seq_lens": on([705]),
        "gather_lens": on([132]),
        "topk": 8192,
    }

    indices, lens = combine_topk_swa(**args)

    assert not prefill.is_contiguous()
    assert indices.shape == (5, 8320)
    assert lens.tolist() == [133] * 5
    assert indices[0, :6].tolist() == [0, 1, 2, 3, 4, 8]
    assert torch.equal(indices, reference.combine(**args, width=8320)[0])


def test_unchecked_combined_garbage_stays_in_its_region() -> None:
    args = prefill_batch((2, 2, 2), topk=16, base=10) | {
        "query_start_loc": on([5, 7, 9, 10]),
        "seq_lens": on([2**63 - 1, -(2**63), 300], torch.int64),
        "gather_lens": on([2**63 - 1, 5, 9], torch.int64),
    }
    args["topk_indices"] = on([[-5, 10, 9, 2**62, 0, 2**31]] * 6, torch.int64)

    indices, lens = combine_topk_swa(**args, validate="metadata")

    assert lens[2:].tolist() == [0, 0, 134, 0]  # no history; no request for the last row
    assert indices[0, :6].tolist() == [-1, -1, 9, -1, 0, -1]
    assert indices[4, :6].tolist() == [-1, -1, 9 + 2 * 160, -1, 2 * 160, -1]
    assert (indices[4, 6:125] == -1).all()  # window tokens that were not gathered
    assert indices[4, 125:135].tolist() == [*range(330, 339), -1]
    assert (indices[[2, 3, 5]] == -1).all()


def test_window_tokens_past_the_workspace_of_their_request_are_no_tokens() -> None:
    # 200 tokens are said to be gathered into room for 150: the next request's rows are not theirs.
    args = prefill_batch((1, 1), topk=0, base=10) | {
        "seq_lens": on([200, 3]),
        "gather_lens": on([200, 3]),
    }

    indices, lens = combine_topk_swa(**args, validate="metadata")

    assert lens.tolist() == [128, 3]
    assert indices[0].tolist() == [*range(82, 160), *[-1] * 50]
    assert indices[1, :4].tolist() == [170, 171, 172, -1]


BAD_COMBINE: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": 0}, "window"),
    "ratio": ({"compress_ratio": 0}, "compress_ratio"),
    "topk": ({"topk": -1}, "topk"),
    "base": ({"window_base": 351}, "window_base"),
    "int32": ({"workspace_stride": 2**31 // 5 + 1}, "workspace_stride"),
    "rows": ({"topk_indices": on([1, 2])}, "topk_indices.dim()"),
    "starts": ({"query_start_loc": on([0] * 5)}, "query_start_loc.shape[0]"),
    "gathered": ({"gather_lens": on([0] * 4)}, "gather_lens.shape[0]"),
    "no request": (
        {"seq_lens": on([], torch.int32), "gather_lens": on([], torch.int32)},
        "seq_lens.shape[0]",
    ),
    "out": ({"out": poison(17, 639)}, "out.shape[1]"),
    "lens": ({"lens_out": poison(16)}, "lens_out.shape[0]"),
}


@pytest.mark.parametrize("case", BAD_COMBINE)
def test_bad_combine_metadata_is_refused_by_name(case: str) -> None:
    change, argument = BAD_COMBINE[case]

    with pytest.raises(ArgumentError) as caught:
        combine_topk_swa(**(prefill_batch() | change))

    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("name", "at", "value", "argument"),
    [
        ("query_start_loc", 1, 16, "query_start_loc[1]"),
        ("query_start_loc", 5, 29, "topk_indices.shape[0]"),
        ("seq_lens", 2, 8, "seq_lens[2]"),
        ("gather_lens", 2, 135, "gather_lens[2]"),
        ("gather_lens", 2, 151, "gather_lens[2]"),
        ("topk_indices", (4, 7), 200, "topk_indices[4, 7]"),
    ],
)
def test_bad_combine_values_are_refused(name: str, at: Any, value: int, argument: str) -> None:
    args = prefill_batch() | {"seq_lens": on([500] * 5), "gather_lens": on([136] * 5)}
    args[name][at] = value
    out = poison(17, 640)

    with pytest.raises(ArgumentError) as caught:
        combine_topk_swa(**args, out=out, validate="values")

    assert caught.value.argument == argument
    assert (out == POISON).all()


# ---- both


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "global_kernel", None)  # any launch would be a TypeError
    monkeypatch.setattr(kernels, "combine_kernel", None)

    slots, slot_lens = c4a_global_indices(**c4a_batch(tokens=0), validate="values")
    rows, row_lens = combine_topk_swa(**prefill_batch((0, 0)), validate="values")

    assert (slots.shape, slot_lens.shape) == ((0, 512), (0,))
    assert (rows.shape, row_lens.shape) == ((0, 640), (0,))
    for launch in (lambda: c4a_global_indices(**c4a_batch()), lambda: combine_topk_swa(**prefill_batch())):
        with pytest.raises(TypeError):
            launch()


@pytest.mark.parametrize("kind", ["global", "combine"])
def test_a_capture_reads_no_value_and_replays_on_new_inputs(kind: str) -> None:
    build: Any = c4a_global_indices if kind == "global" else combine_topk_swa
    make: Any = c4a_batch if kind == "global" else prefill_batch
    args, other = make(seed=1), make(seed=2)
    rows = next(iter(args.values())).shape[0]
    out, lens = poison(rows, 768), poison(rows)
    build(**args, out=out, lens_out=lens)
    graph = graphs.capture(lambda: build(**args, out=out, lens_out=lens, validate="values"))
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            value.copy_(other[name])

    graph.replay()

    if INTERPRETED:
        assert not [held for held in graph.addresses() or [] if held.inside]
    eager = build(**other, out=poison(rows, 768))
    assert torch.equal(out, eager[0])
    assert torch.equal(lens, eager[1])
