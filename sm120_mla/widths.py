"""Widths of index rows and the decode/prefill split of a batch, as pure functions. Imports no torch.

Widths are in columns: one column of an index row is one int32 entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ArgumentError

__all__ = [
    "C128A_RATIO",
    "C128A_WIDTH_UNIT",
    "SWA_WINDOW",
    "DecodeSplit",
    "active_width",
    "align",
    "capacity",
    "combined_width",
    "decode_split",
    "verify_width",
]

SWA_WINDOW = 128
"""Tokens of the sliding window of DeepSeek-V4."""

C128A_RATIO = 128
"""Tokens that one entry of the C128A cache stands for."""

C128A_WIDTH_UNIT = 128
"""A C128A width is a multiple of this many columns.

FlashMLA's decode asserts ``extra_topk % B_TOPK == 0`` with B_TOPK up to 128 (vLLM
models/deepseek_v4/sparse_mla.py as vendored by QuixiAI/SlimServe, commit 424e023).
"""

_VERIFY_UNIT = 64
_COMBINED_UNIT = 128


def positive(argument: str, value: object, minimum: int = 1) -> int:
    """``value`` if it is an int of at least ``minimum``; raises ``ArgumentError`` naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ArgumentError(argument, repr(value), f"an int >= {minimum}", "Pass a plain Python int.")
    return value


def align(value: int, unit: int) -> int:
    """``value`` rounded up to a multiple of ``unit``."""
    return -(-value // unit) * unit


def capacity(max_model_len: int, compress_ratio: int = C128A_RATIO) -> int:
    """Columns a C128A buffer needs for contexts of up to ``max_model_len`` tokens, never 0."""
    groups = -(-positive("max_model_len", max_model_len) // positive("compress_ratio", compress_ratio))
    return align(groups, C128A_WIDTH_UNIT)


def active_width(max_seq_len: int, capacity: int, compress_ratio: int = C128A_RATIO) -> int:
    """Columns to build for a batch whose longest sequence has ``max_seq_len`` tokens.

    The next power of two of ``max_seq_len // compress_ratio``, at least 128, at most ``capacity``; a power
    of two keeps the number of distinct widths small. 0 is allowed (a dummy batch).

    A capture or profiling run may describe sequences of ``max_model_len`` plus a block, which is more than
    ``capacity`` stands for; an upstream assertion trips there at a ``max_model_len`` of 1M. Here the width
    stops at ``capacity``, and ``build_c128a_topk_metadata`` stops each row at the width.
    Raises ``ArgumentError`` where ``capacity`` is not a positive multiple of 128.
    """
    positive("max_seq_len", max_seq_len, 0)
    positive("compress_ratio", compress_ratio)
    if positive("capacity", capacity) % C128A_WIDTH_UNIT:
        raise ArgumentError(
            "capacity",
            capacity,
            f"a multiple of {C128A_WIDTH_UNIT} columns",
            "Take it from capacity(max_model_len).",
        )
    groups = max(max_seq_len // compress_ratio, 1)
    return min(max(1 << (groups - 1).bit_length(), C128A_WIDTH_UNIT), capacity)


def verify_width(num_speculative_tokens: int, window: int = SWA_WINDOW) -> int:
    """Columns of a DSpark verify row: the window and the block of ``1 + K`` tokens, rounded up to 64.

    Engines round ``window + K`` up instead (vLLM, sglang: 192 for K = 1..64), which is one column short
    of the longest row at K = 64, 128, ...; for every other K both agree.
    """
    block = 1 + positive("num_speculative_tokens", num_speculative_tokens, 0)
    return align(positive("window", window) + block, _VERIFY_UNIT)


def combined_width(topk: int, window: int = SWA_WINDOW) -> int:
    """Columns of a combined prefill row: top-k entries, then the window, rounded up to 128."""
    return align(positive("topk", topk, 0) + positive("window", window), _COMBINED_UNIT)


@dataclass(frozen=True)
class DecodeSplit:
    """How a batch divides: requests and tokens that decode come first, then those that prefill."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def decode_split(query_lens: Sequence[int], threshold: int) -> DecodeSplit:
    """Divide a batch by query length: at most ``threshold`` tokens is a decode (``1 + K`` when verifying).

    Every builder of one step must be given the same split: an index table for 12 rows beside a window for
    10 gathers another request's tokens. Raises ``ArgumentError`` where decodes do not come first.
    """
    positive("threshold", threshold)
    decodes = decode_tokens = prefills = prefill_tokens = 0
    for request, length in enumerate(query_lens):
        positive(f"query_lens[{request}]", length, 0)
        if length > threshold:
            prefills, prefill_tokens = prefills + 1, prefill_tokens + length
        elif prefills and length:
            raise ArgumentError(
                f"query_lens[{request}]",
                length,
                f"more than {threshold} tokens, as a prefill comes before it",
                "Order the batch decodes first.",
            )
        elif prefills:  # an empty request between prefills belongs to them
            prefills += 1
        else:
            decodes, decode_tokens = decodes + 1, decode_tokens + length
    return DecodeSplit(decodes, decode_tokens, prefills, prefill_tokens)
