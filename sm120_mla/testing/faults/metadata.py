"""Faults of the C128A builder, of its views, and of what reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...targets.base import Target
from ...targets.own import Patch
from ..field_model import FieldTarget
from .base import Fault

__all__ = ["METADATA_FAULTS"]

_HOST = "metadata/c128a.py"
_KERNEL = "kernels/c128a.py"
_ALL = ("META-VALUES", "META-VIEW", "META-STRIDE", "META-STALE")
_IS_12 = "return found is not None and found[0] == 12"
_NARROWS = "    if not device.is_sm12x(positions.device):\n        rows = rows[:, :width]\n"
_LAUNCH = "    if tokens:\n        kernels.c128a_kernel"


def _but(*violated: str) -> tuple[str, ...]:
    return tuple(id for id in _ALL if id not in violated)


def _one(file: str, old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(file, old, new),)


@contextlib.contextmanager
def _clears_outside_only() -> Iterator[Target]:
    yield FieldTarget(clears_in_capture=False)


METADATA_FAULTS = (
    Fault(
        "narrow-on-12",
        "capability 12.x gets the narrow slice, which is not contiguous",
        ("META-VIEW", "ROUTE-CONTRACT"),
        ("meta-12", "boot-e"),
        _one(_HOST, _NARROWS, "    rows = rows[:, :width]\n"),
        _but("META-VIEW"),
    ),
    Fault(
        "full-width-for-prefill",
        "prefill rows are returned at full width, so their consumer counts stale columns",
        ("META-VIEW",),
        ("meta-12", "meta-9"),
        _one(_HOST, "prefill[:prefill_tokens, :width]", "prefill[:prefill_tokens]"),
        _but("META-VIEW"),
    ),
    Fault(
        "packed-view",
        "the buffer is re-viewed as dense rows of the active width: the stride moves with the width",
        ("META-VIEW", "META-STRIDE", "GRAPH-REPLAY"),
        ("meta-12", "boot-d"),
        (
            Patch(
                _HOST,
                _LAUNCH,
                "    decode = torch.as_strided(decode, (num_decode_tokens, width), (width, 1))\n" + _LAUNCH,
            ),
        ),
    ),
    Fault(
        "contiguous-at-consumer",
        "the narrow view is made contiguous by a copy: a graph reads yesterday's copy, freed since",
        ("META-VIEW", "META-STRIDE", "BUF-ADDRESS"),
        ("meta-12", "boot-d"),
        _one(_HOST, _NARROWS, "    rows = rows[:, :width].contiguous()\n"),
        ("META-VALUES", "META-STALE"),
    ),
    Fault(
        "none-as-12",
        "a machine without a capability counts as 12.x",
        ("META-VIEW",),
        ("meta-none",),
        _one("device.py", _IS_12, "return found is None or found[0] == 12"),
        _but("META-VIEW"),
    ),
    Fault(
        "12.1-not-recognised",
        "only 12.0 counts as 12.x",
        ("META-VIEW", "ROUTE-CONTRACT"),
        ("meta-121",),
        _one("device.py", _IS_12, "return found == (12, 0)"),
        _but("META-VIEW"),
    ),
    Fault(
        "blackwell-as-12",
        "every capability from 10 on counts as 12.x",
        ("META-VIEW",),
        ("meta-10",),
        _one("device.py", _IS_12, "return found is not None and found[0] >= 10"),
        _but("META-VIEW"),
    ),
    Fault(
        "length-from-capacity",
        "the length is the width, not what the position gives: consumers read unset and stale columns",
        ("META-VALUES",),
        ("meta-12", "meta-9"),
        _one(_KERNEL, "tl.where(padding, 0, count), mask", "tl.where(padding, 0, width * UNIT), mask"),
        ("META-VIEW",),
    ),
    Fault(
        "padding-has-a-length",
        "the length of a row with slot -1 is not zeroed",
        ("META-VALUES", "ATTN-ROWS"),
        ("meta-12",),
        _one(
            _KERNEL,
            "mask=is_decode, other=-1) < 0\n",
            "mask=is_decode, other=-1) < -1\n",
        ),
        ("META-VIEW",),
    ),
    Fault(
        "clamp-missing",
        "a context longer than the width gives a length past the width",
        ("META-VALUES",),
        ("meta-long",),
        (
            Patch(
                _KERNEL,
                "position = tl.minimum(tl.maximum(position, -1), entries * RATIO)",
                "position = tl.maximum(position, -1)",
            ),
            Patch(
                _KERNEL,
                "count = tl.minimum((position + 1) // RATIO, entries).to(tl.int32)",
                "count = ((position + 1) // RATIO).to(tl.int32)",
            ),
        ),
        ("META-VIEW",),
    ),
    Fault(
        "wrong-request",
        "the row number is taken for the request",
        ("META-VALUES",),
        ("meta-12",),
        _one(
            _KERNEL,
            "request = tl.load(request_ids + row, mask=is_decode, other=-1).to(tl.int64)",
            "request = tl.where(is_decode, row, -1) % requests",
        ),
        ("META-VIEW",),
    ),
    Fault(
        "columns-left-unset",
        "columns from the length to the width keep what an earlier build left",
        ("META-VALUES",),
        ("meta-12",),
        _one(
            _KERNEL,
            "column, slot, mask=is_decode & in_width)",
            "column, slot, mask=is_decode & in_width & (column < count))",
        ),
        ("META-VIEW", "META-STRIDE", "META-STALE"),
    ),
    Fault(
        "position-off-by-one",
        "the entry that a token completes is not counted for it",
        ("META-VALUES",),
        ("meta-12", "meta-edge"),
        _one(
            _KERNEL,
            "count = tl.minimum((position + 1) // RATIO, entries)",
            "count = tl.minimum(position // RATIO, entries)",
        ),
        ("META-VIEW",),
    ),
    Fault(
        "slot-without-offset",
        "the slot within a block is dropped",
        ("META-VALUES",),
        ("meta-12",),
        _one(
            "kernels/block_table.py",
            "tl.where(inside, block, 0) * BLOCK_SIZE + (index % BLOCK_SIZE).to(tl.int32)",
            "tl.where(inside, block, 0) * BLOCK_SIZE + (index % BLOCK_SIZE).to(tl.int32) * 0",
        ),
        ("META-VIEW",),
    ),
    Fault(
        "lengths-of-prefill-rows",
        "prefill rows write lengths too, past the decode rows",
        ("META-VALUES",),
        ("meta-12",),
        _one(
            _KERNEL,
            "tl.where(padding, 0, count), mask=is_decode)",
            "tl.where(padding, 0, count), mask=live)",
        ),
        ("META-VIEW", "META-STRIDE", "META-STALE"),
    ),
    Fault(
        "block-table-clamped-in-place",
        "the shared block table is clamped in place before the kernel reads it",
        ("META-VALUES",),
        ("meta-12",),
        _one(_HOST, _LAUNCH, "    block_table.clamp_(min=0)\n" + _LAUNCH),
        ("META-VIEW",),
    ),
    Fault(
        "consumer-reads-past-length",
        "the consumer of a full-width view ignores the lengths",
        ("META-STALE",),
        ("meta-stale",),
        _one(
            "kernels/page_split.py",
            "    if HAS_LENGTHS:\n        at_length",
            "    if HAS_LENGTHS and False:\n        at_length",
        ),
        _but("META-STALE"),
    ),
    Fault(
        "mask-cleared-outside-only",
        "the field's mask is cleared on eager calls only: a graph's replays pile up marks",
        ("GRAPH-REPLAY",),
        ("boot-replay-other-pages",),
        make=_clears_outside_only,
    ),
)
