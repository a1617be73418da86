"""Faults of the cache writer."""

from __future__ import annotations

from ...targets.own import Patch
from .base import Fault

__all__ = ["CACHE_FAULTS"]

_KERNEL = "kernels/cache_write.py"
_BYTES = ("CACHE-BYTES",)
_LIVE = "live = (slot >= 0) & (slot < tokens)"


def _kernel(id: str, sentence: str, cases: tuple[str, ...], old: str, new: str) -> Fault:
    return Fault(id, sentence, _BYTES, cases, (Patch(_KERNEL, old, new),))


CACHE_FAULTS = (
    _kernel(
        "scale-rounded-down",
        "the scale's exponent is rounded down: the largest element saturates",
        ("write-edge", "write-edge-engines"),
        "byte = (largest >> 7) - 8 + ((largest & 0x7F) > 0x60).to(tl.int32)",
        "byte = (largest >> 7) - 8",
    ),
    _kernel(
        "scale-edge-missed",
        "a tile whose amax is exactly 448 times a power of two gets the next scale",
        ("write-edge", "write-edge-engines"),
        "((largest & 0x7F) > 0x60)",
        "((largest & 0x7F) >= 0x60)",
    ),
    _kernel(
        "floor-of-another-recipe",
        "the floor is that of another engine: small tiles get a smaller scale",
        ("write-tiny", "write-tiny-engines"),
        "byte = tl.maximum(byte, min_byte)",
        "byte = tl.maximum(byte, tl.minimum(min_byte, 92))",
    ),
    _kernel(
        "rounded-half-up",
        "a tie rounds away from zero instead of to even",
        ("write-normal",),
        "half_less + ((significand >> shift) & 1)",
        "half_less + 1",
    ),
    _kernel(
        "truncated",
        "codes are truncated instead of rounded",
        ("write-normal",),
        "quanta = (significand + half_less + ((significand >> shift) & 1)) >> shift",
        "quanta = significand >> shift",
    ),
    _kernel(
        "sign-lost",
        "negative elements lose their sign",
        ("write-normal",),
        "code = ((bits >> 8) & 0x80) | (",
        "code = (",
    ),
    _kernel(
        "pad-not-written",
        "the pad byte behind the scales keeps what it held",
        ("write-normal",),
        "(tile[None, :] < SCALE_SLOTS)",
        "(tile[None, :] < TILES)",
    ),
    _kernel(
        "rope-half-written",
        "half of the RoPE part is left out",
        ("write-normal",),
        "tl.store(rope[:, None] + at, moved, mask=live[:, None])",
        "tl.store(rope[:, None] + at, moved, mask=live[:, None] & (at < ROPE_BYTES // 2))",
    ),
    _kernel(
        "skipped-slot-written",
        "a row with slot -1 is written to slot 0",
        ("write-skipped", "write-skipped-engines"),
        _LIVE,
        "slot = tl.where(in_rows, tl.maximum(slot, 0), -1)\n    live = (slot >= 0) & (slot < tokens)",
    ),
    _kernel(
        "past-the-end-clamped-slot",
        "a slot past the cache's end is clamped to the last token",
        ("write-past-end",),
        _LIVE,
        "slot = tl.minimum(slot, tokens - 1)\n    live = slot >= 0",
    ),
)
