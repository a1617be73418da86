"""Widths and the decode/prefill split: pure functions, and what engines trip over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sm120_mla import widths
from sm120_mla.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("max_model_len", "expected"),
    [(1, 128), (16384, 128), (16385, 256), (300_000, 2432), (1_000_000, 7936), (1 << 20, 8192)],
)
def test_capacity_holds_every_entry_in_whole_units(max_model_len: int, expected: int) -> None:
    assert widths.capacity(max_model_len) == expected
    assert expected * 128 >= max_model_len


@pytest.mark.parametrize(
    ("max_seq_len", "capacity", "expected"),
    [
        (0, 8192, 128),
        (127, 8192, 128),
        (128 * 128, 8192, 128),
        (128 * 128 + 127, 8192, 128),
        (129 * 128, 8192, 256),
        (257 * 128, 8192, 512),
        (300_000, 2432, 2432),  # the next power of two is past a capacity that is none
        (1_000_000, 7936, 7936),
        ((1 << 20) + 256, 8192, 8192),  # a dummy run of max_model_len + block
    ],
)
def test_active_width_is_a_power_of_two_up_to_capacity(
    max_seq_len: int, capacity: int, expected: int
) -> None:
    assert widths.active_width(max_seq_len, capacity) == expected


def test_active_width_holds_every_entry_of_any_length_the_model_allows() -> None:
    for max_model_len in (1, 2136, 300_000, 1_000_000, 1 << 20):
        capacity = widths.capacity(max_model_len)
        for seq_len in {1, 127, 128, 129, max_model_len // 2 + 1, max_model_len - 1, max_model_len}:
            if seq_len <= max_model_len:
                width = widths.active_width(seq_len, capacity)
                assert seq_len // 128 <= width <= capacity
                assert width % 128 == 0


def test_active_width_takes_few_values_over_a_growing_context() -> None:
    seen = {widths.active_width(n, 8192) for n in range(0, (1 << 20) + 1, 4096)}

    assert seen == {128, 256, 512, 1024, 2048, 4096, 8192}


@pytest.mark.parametrize(("k", "expected"), [(0, 192), (1, 192), (5, 192), (63, 192), (64, 256)])
def test_verify_width_holds_the_window_and_the_whole_block(k: int, expected: int) -> None:
    assert widths.verify_width(k) == expected
    assert expected >= 128 + 1 + k


@pytest.mark.parametrize(("topk", "expected"), [(0, 128), (1, 256), (512, 640), (1024, 1152), (8192, 8320)])
def test_combined_width_is_whole_tiles_of_128(topk: int, expected: int) -> None:
    assert widths.combined_width(topk) == expected


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: widths.capacity(0), "max_model_len"),
        (lambda: widths.capacity(1.5), "max_model_len"),  # type: ignore[arg-type]
        (lambda: widths.capacity(10, 0), "compress_ratio"),
        (lambda: widths.active_width(-1, 128), "max_seq_len"),
        (lambda: widths.active_width(True, 128), "max_seq_len"),
        (lambda: widths.active_width(1, 0), "capacity"),
        (lambda: widths.active_width(1, 200), "capacity"),
        (lambda: widths.verify_width(-1), "num_speculative_tokens"),
        (lambda: widths.verify_width(1, 0), "window"),
        (lambda: widths.combined_width(-1), "topk"),
        (lambda: widths.decode_split([1], 0), "threshold"),
        (lambda: widths.decode_split([1, -1], 1), "query_lens[1]"),
        (lambda: widths.decode_split([9, 1], 1), "query_lens[1]"),
    ],
)
def test_bad_input_is_refused_by_name(call: object, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()  # type: ignore[operator]

    assert caught.value.argument == argument


def test_decode_split_counts_requests_and_tokens() -> None:
    assert widths.decode_split([6, 6, 1, 7, 40], 6) == widths.DecodeSplit(3, 13, 2, 47)
    assert widths.decode_split([], 1) == widths.DecodeSplit(0, 0, 0, 0)
    assert widths.decode_split([0, 1, 1], 1) == widths.DecodeSplit(3, 2, 0, 0)
    assert widths.decode_split([2, 0, 2], 1) == widths.DecodeSplit(0, 0, 3, 4)


def test_two_thresholds_divide_one_batch_differently() -> None:
    # 1 + N against 1 + 2N: why builders of one step must share one split.
    assert widths.decode_split([3, 5], 3) != widths.decode_split([3, 5], 5)


def test_widths_need_no_torch() -> None:
    code = "import sm120_mla.widths, sys; assert 'torch' not in sys.modules and 'triton' not in sys.modules"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
