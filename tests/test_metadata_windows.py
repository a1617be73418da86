"""Sliding-window rows for decode and for a DSpark verify batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sm120_mla import graphs, widths
from sm120_mla.errors import ArgumentError, IndexValueError
from sm120_mla.kernels import index_windows as kernels
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.metadata import swa_window_indices, verify_window_indices
from sm120_mla.reference import metadata as reference

DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = -99


def on(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


def decode_batch(
    tokens: int = 9,
    *,
    seed: int = 0,
    block_size: int = 64,
    longest: int = 700,
    dtype: torch.dtype = torch.int64,
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    slots = torch.where(torch.rand(tokens, generator=g) < 0.2, -1, torch.arange(tokens))
    args = {
        "positions": torch.randint(0, longest, (tokens,), generator=g).to(dtype),
        "token_to_req_indices": torch.randint(0, 4, (tokens,), generator=g, dtype=torch.int32),
        "block_table": torch.randint(0, 5000, (4, -(-longest // block_size)), generator=g, dtype=torch.int32),
        "block_size": block_size,
        "slot_mapping": slots.to(dtype),
    }
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def verify_batch(
    requests: int = 4, k: int = 5, *, seed: int = 0, longest: int = 700, dtype: torch.dtype = torch.int32
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    rows = requests * (1 + k)
    queries = torch.randint(0, k + 2, (requests,), generator=g)
    seqs = torch.maximum(torch.randint(1, longest, (requests,), generator=g), queries)
    slots = torch.where(torch.rand(rows, generator=g) < 0.1, -1, torch.arange(rows))
    args = {
        "seq_lens": seqs.to(dtype),
        "query_lens": queries.to(dtype),
        "num_speculative_tokens": k,
        "block_table": torch.randint(0, 5000, (requests, 11 + k // 64), generator=g, dtype=torch.int32),
        "block_size": 64,
        "slot_mapping": slots,
    }
    return {k_: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k_, v in args.items()}


# ---- decode


@pytest.mark.parametrize(
    ("seed", "shape", "window"),
    [
        (1, {}, 128),
        (2, {"tokens": 66, "dtype": torch.int32}, 128),
        (3, {"block_size": 256}, 128),
        (4, {"longest": 40}, 128),
        (5, {"block_size": 3, "longest": 60}, 7),
        (6, {"longest": 900}, 300),  # more columns than one tile
        (7, {}, 1),
    ],
)
def test_decode_rows_equal_the_reference(seed: int, shape: dict[str, Any], window: int) -> None:
    args = decode_batch(seed=seed, **shape)
    table = args["block_table"].clone()

    indices, lens = swa_window_indices(**args, window=window)

    expected = reference.swa_window(**args, window=window, width=widths.align(window, 64))
    assert torch.equal(indices, expected[0])
    assert torch.equal(lens, expected[1])
    assert indices.is_contiguous()
    assert torch.equal(args["block_table"], table)


def test_a_decode_window_by_hand() -> None:
    indices, lens = swa_window_indices(
        on([0, 130, 127, 128]), on([0, 1, 0, 0]), on([[5, 6, 7], [2, 3, 4]]), 64, on([1, 2, 3, -1])
    )

    assert indices.shape == (4, 128)
    assert indices[0, :2].tolist() == [320, -1]
    assert indices[1, [0, 60, 61, 127]].tolist() == [131, 191, 192, 258]  # positions 3..130
    assert indices[2, [0, 63, 64, 127]].tolist() == [320, 383, 384, 447]
    assert (indices[3] == -1).all()
    assert lens.tolist() == [1, 128, 128, 0]


def test_decode_out_is_written_to_its_full_width_and_no_further_row() -> None:
    args = decode_batch(tokens=5, seed=3)
    out, lens = poison(7, 192), poison(7)

    got, got_lens = swa_window_indices(**args, out=out, lens_out=lens)

    assert got.data_ptr() == out.data_ptr()
    assert got_lens.data_ptr() == lens.data_ptr()
    assert torch.equal(got, reference.swa_window(**args, window=128, width=192)[0])
    assert (out[5:] == POISON).all()
    assert (lens[5:] == POISON).all()


def test_a_padding_row_reads_neither_position_nor_request() -> None:
    args = decode_batch(tokens=3) | {"slot_mapping": on([-1, 4, -(2**31)])}
    args["positions"] = on([2**63 - 1, 10, -(2**63)], torch.int64)
    args["token_to_req_indices"] = on([2**31 - 1, 0, -5])

    indices, lens = swa_window_indices(**args, validate="values")

    assert lens.tolist() == [0, 11, 0]
    assert (indices[[0, 2]] == -1).all()


def test_unchecked_decode_garbage_gives_no_token() -> None:
    storage = torch.full((7, 40), 4321, dtype=torch.int32, device=DEVICE)
    table = storage[2:4, 10:13]
    table[:] = on([[3, -1, 2**25], [4, 2**25 - 1, 5]])
    args = {
        "positions": on([191, 191, 200, 2**63 - 1, -1, 5, 5, -(2**63)], torch.int64),
        "token_to_req_indices": on([0, 1, 0, 0, 0, -1, 2, 0]),
        "block_table": table,
        "block_size": 64,
        "slot_mapping": on(range(8)),
    }

    indices, lens = swa_window_indices(**args, validate="metadata")

    assert torch.equal(indices, reference.swa_window(**args, window=128, width=128)[0])
    assert (indices[0] == -1).all()  # blocks -1 and 2**25: the latter's slots do not fit int32
    assert indices[1, 63] == 2**31 - 1
    assert lens.tolist() == [128, 128, 128, 128, 0, 6, 6, 0]
    assert (indices[3:] == -1).all()


def test_num_blocks_bounds_decode_windows() -> None:
    args = decode_batch(seed=5)

    indices, _ = swa_window_indices(**args, num_blocks=2500, validate="metadata")

    assert torch.equal(indices, reference.swa_window(**args, window=128, width=128, num_blocks=2500)[0])
    assert (indices < 2500 * 64).all()


# ---- verify


@pytest.mark.parametrize(
    ("seed", "requests", "k", "dtype"),
    [
        (1, 4, 5, torch.int32),
        (2, 11, 5, torch.int64),  # 66 rows
        (3, 3, 0, torch.int32),
        (4, 2, 64, torch.int32),  # 193 columns are needed
        (5, 1, 7, torch.int32),
    ],
)
def test_verify_rows_equal_the_reference(seed: int, requests: int, k: int, dtype: torch.dtype) -> None:
    args = verify_batch(requests, k, seed=seed, dtype=dtype)
    width = widths.verify_width(k)

    indices, lens = verify_window_indices(**args)

    expected = reference.verify_window(**args, window=128, width=width)
    assert indices.shape == (requests * (1 + k), width)
    assert indices.is_contiguous()
    assert torch.equal(indices, expected[0])
    assert torch.equal(lens, expected[1])


def test_a_verify_batch_by_hand() -> None:
    # Request 0: 130 tokens, 3 of them the block; request 1: its first 2 tokens, both the block.
    table = on([[5, 6, 7], [2, 3, 4]])
    slots = on([450, 449, 448, -1, 128, 129, 1, 1])

    indices, lens = verify_window_indices(on([130, 2]), on([3, 2]), 3, table, 64, slots)

    assert lens.tolist() == [130, 130, 130, 0, 2, 2, 0, 0]
    assert indices[0, [0, 63, 64, 127, 128, 129, 130]].tolist() == [320, 383, 384, 447, 448, 449, -1]
    assert torch.equal(indices[0], indices[2])
    assert indices[4, :3].tolist() == [128, 129, -1]
    assert (indices[[3, 6, 7]] == -1).all()


def test_the_window_starts_window_tokens_before_the_block() -> None:
    table = on([list(range(10))])

    indices, lens = verify_window_indices(on([500]), on([6]), 5, table, 64, on(range(6)))

    assert lens.tolist() == [134] * 6
    assert indices[5, 0] == 500 - 6 - 128
    assert indices[0, 133] == 499


def test_a_verify_batch_after_acceptance_follows_the_new_prefix() -> None:
    table, slots = on([list(range(10, 20))]), on(range(6))
    out, lens = poison(6, 192), poison(6)
    verify_window_indices(on([300]), on([6]), 5, table, 64, slots, out=out, lens_out=lens)

    args = {
        "seq_lens": on([302]),  # 2 of 5 drafts accepted, and a shorter block proposed
        "query_lens": on([4]),
        "num_speculative_tokens": 5,
        "block_table": table,
        "block_size": 64,
        "slot_mapping": slots,
    }
    got, got_lens = verify_window_indices(**args, out=out, lens_out=lens)

    assert torch.equal(got, reference.verify_window(**args, window=128, width=192)[0])
    assert got_lens.tolist() == [132] * 4 + [0, 0]


@pytest.mark.parametrize("requests", [10, 11])
def test_a_verify_batch_is_contiguous_on_both_sides_of_64_rows(requests: int) -> None:
    out, lens = poison(70, 192), poison(70)

    indices, _ = verify_window_indices(**verify_batch(requests, 5), out=out, lens_out=lens)

    assert indices.shape[0] == requests * 6
    assert indices.is_contiguous()
    assert (out[requests * 6 :] == POISON).all()


def test_unchecked_verify_garbage_gives_no_token() -> None:
    storage = torch.full((7, 40), 4321, dtype=torch.int32, device=DEVICE)
    table = storage[2:4, 10:13]
    table[:] = on([[3, 1, 2], [4, -6, 5]])
    args = {
        "seq_lens": on([2**63 - 1, 192, 100, -(2**63), 2], torch.int64),
        "query_lens": on([2, 2**63 - 1, 2, 2, -4], torch.int64),
        "num_speculative_tokens": 1,
        "block_table": table,
        "block_size": 64,
        "slot_mapping": on(range(10)),
    }

    indices, lens = verify_window_indices(**args, validate="metadata")

    expected = reference.verify_window(**args, window=128, width=192)
    assert torch.equal(indices, expected[0])
    assert torch.equal(lens, expected[1])
    assert lens.tolist() == [130, 130, 130, 130, 100, 100, 0, 0, 0, 0]
    assert (indices[4:] == -1).all()
    assert indices[2].max() < 6 * 64


# ---- both


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "window_kernel", None)  # any launch would be a TypeError

    decode, decode_lens = swa_window_indices(**decode_batch(tokens=0))
    verify, verify_lens = verify_window_indices(**verify_batch(requests=0), out=poison(4, 256))

    assert (decode.shape, decode_lens.shape) == ((0, 128), (0,))
    assert (verify.shape, verify_lens.shape) == ((0, 256), (0,))
    with pytest.raises(TypeError):
        swa_window_indices(**decode_batch(tokens=1))


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_a_capture_reads_no_value_and_replays_on_new_inputs(kind: str) -> None:
    build: Callable[..., Any] = swa_window_indices if kind == "decode" else verify_window_indices
    make: Callable[..., dict[str, Any]] = decode_batch if kind == "decode" else verify_batch
    args, other = make(seed=1), make(seed=2)
    rows = args["slot_mapping"].shape[0]
    out, lens = poison(rows, 192), poison(rows)
    build(**args, out=out, lens_out=lens)
    graph = graphs.capture(lambda: build(**args, out=out, lens_out=lens, validate="values"))
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            value.copy_(other[name])

    graph.replay()

    if INTERPRETED:
        assert not [held for held in graph.addresses() or [] if held.inside]
    eager = build(**other, out=poison(rows, 192))
    assert torch.equal(out, eager[0])
    assert torch.equal(lens, eager[1])


BAD_DECODE: dict[str, tuple[dict[str, Any], str]] = {
    "block size": ({"block_size": 0}, "block_size"),
    "window": ({"window": 0}, "window"),
    "num_blocks": ({"num_blocks": -1}, "num_blocks"),
    "positions": ({"positions": on([1.0], torch.float32)}, "positions.dtype"),
    "requests": ({"token_to_req_indices": on([0] * 8)}, "token_to_req_indices.shape[0]"),
    "slots": ({"slot_mapping": on([0] * 8)}, "slot_mapping.shape[0]"),
    "table": ({"block_table": on([1, 2])}, "block_table.dim()"),
    "out narrow": ({"out": poison(9, 127)}, "out.shape[1]"),
    "out rows": ({"out": poison(8, 128)}, "out.shape[0]"),
    "out slice": ({"out": poison(9, 256)[:, :128]}, "out.stride()"),
    "out dtype": ({"out": poison(9, 128).long()}, "out.dtype"),
    "lens rows": ({"lens_out": poison(8)}, "lens_out.shape[0]"),
    "lens 2-D": ({"lens_out": poison(9, 1)}, "lens_out.dim()"),
}


@pytest.mark.parametrize("case", BAD_DECODE)
def test_bad_decode_metadata_is_refused_by_name(case: str) -> None:
    change, argument = BAD_DECODE[case]
    args = decode_batch() | {"out": poison(9, 128), "lens_out": poison(9)}
    kept = args["out"], args["lens_out"]

    with pytest.raises(ArgumentError) as caught:
        swa_window_indices(**(args | change))

    assert caught.value.argument == argument
    assert all((tensor == POISON).all() for tensor in kept)


def test_an_output_over_an_input_is_refused() -> None:
    args = decode_batch(dtype=torch.int32)

    with pytest.raises(ArgumentError) as caught:
        swa_window_indices(**args, lens_out=args["positions"])

    assert caught.value.argument == "lens_out"


BAD_VERIFY: dict[str, tuple[dict[str, Any], str]] = {
    "K": ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    "block size": ({"block_size": 0.5}, "block_size"),
    "queries": ({"query_lens": on([1, 1, 1])}, "query_lens.shape[0]"),
    "slots": ({"slot_mapping": on([0] * 23)}, "slot_mapping.shape[0]"),
    "out": ({"out": poison(24, 133)}, "out.shape[1]"),
    "out rows": ({"out": poison(23, 192)}, "out.shape[0]"),
}


@pytest.mark.parametrize("case", BAD_VERIFY)
def test_bad_verify_metadata_is_refused_by_name(case: str) -> None:
    change, argument = BAD_VERIFY[case]

    with pytest.raises(ArgumentError) as caught:
        verify_window_indices(**(verify_batch() | change))

    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("name", "at", "value", "argument"),
    [
        ("positions", 4, -1, "positions[4]"),
        ("positions", 4, 704, "block_table.shape[1]"),
        ("token_to_req_indices", 2, 4, "token_to_req_indices[2]"),
        ("block_table", (slice(None), 9), -1, "block_table["),
        ("block_table", (slice(None), 9), 6000, "block_table["),
    ],
)
def test_bad_decode_values_are_refused(name: str, at: Any, value: int, argument: str) -> None:
    args = decode_batch(seed=1) | {"slot_mapping": on(range(9))}
    args["positions"].fill_(620)
    args[name][at] = value
    out = poison(9, 128)

    with pytest.raises(IndexValueError) as caught:
        swa_window_indices(**args, out=out, num_blocks=6000, validate="values")

    assert caught.value.argument.startswith(argument)
    assert (out == POISON).all()


def test_blocks_before_the_window_may_be_gone() -> None:
    args = decode_batch(seed=1) | {"slot_mapping": on(range(9))}
    args["positions"].fill_(620)
    args["block_table"][:, :7] = -1  # the window starts at position 493, in column 7

    indices, lens = swa_window_indices(**args, validate="values")

    assert (indices >= 0).all()
    assert lens.tolist() == [128] * 9


@pytest.mark.parametrize(
    ("name", "at", "value", "argument"),
    [
        ("query_lens", 1, 7, "query_lens[1]"),
        ("query_lens", 1, -1, "query_lens[1]"),
        ("seq_lens", 2, 3, "seq_lens[2]"),
        ("seq_lens", 2, 705, "block_table.shape[1]"),
        ("block_table", (3, 4), -1, "block_table[3, 4]"),
    ],
)
def test_bad_verify_values_are_refused(name: str, at: Any, value: int, argument: str) -> None:
    args = verify_batch() | {
        "slot_mapping": on(range(24)),
        "query_lens": on([6] * 4),
        "seq_lens": on([300] * 4),
    }
    args[name][at] = value

    with pytest.raises(IndexValueError) as caught:
        verify_window_indices(**args, validate="values")

    assert caught.value.argument == argument


def test_a_verify_table_with_too_few_rows_is_refused() -> None:
    args = verify_batch() | {"query_lens": on([6] * 4), "seq_lens": on([300] * 4)}
    args["block_table"] = args["block_table"][:3]

    with pytest.raises(IndexValueError) as caught:
        verify_window_indices(**args, validate="values")

    assert caught.value.argument == "block_table.shape[0]"


def test_decode_windows_and_c128a_rows_of_one_split_belong_to_the_same_tokens() -> None:
    from sm120_mla.metadata import build_c128a_topk_metadata

    split = widths.decode_split([6, 6, 3, 40], threshold=6)
    total = split.num_decode_tokens + split.num_prefill_tokens
    args = decode_batch(tokens=total, longest=700)
    buffers = poison(total, 128), poison(total), poison(total, 128)

    decode, lens, prefill = build_c128a_topk_metadata(
        args["positions"],
        128,
        split.num_decode_tokens,
        args["token_to_req_indices"],
        args["block_table"],
        2,
        args["slot_mapping"],
        *buffers,
        128,
    )
    rows = slice(0, split.num_decode_tokens)
    window, window_lens = swa_window_indices(
        args["positions"][rows],
        args["token_to_req_indices"][rows],
        args["block_table"],
        64,
        args["slot_mapping"][rows],
    )

    assert decode.shape[0] == window.shape[0] == 15
    assert prefill.shape[0] == 40
    assert torch.equal(lens == 0, (window_lens == 0) | (args["positions"][rows] < 127))
