"""Faults of the page split."""

from __future__ import annotations

from ...targets.own import Patch
from .base import Fault

__all__ = ["SPLIT_FAULTS"]

_KERNEL = "kernels/page_split.py"
_BYTES = ("SPLIT-BYTES", "SPLIT-INDEX")
_SELECTION = ("SPLIT-FRAME", "SPLIT-TOUCHED")
_OWNED_COUNTED = "counted = inside & (index >= 0) & (index < tokens)"
_EPOCH = 'epoch = (tl.atomic_add(marks, share, sem="relaxed") >> SHIFT) + 1'


def _kernel(old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(_KERNEL, old, new),)


SPLIT_FAULTS = (
    Fault(
        "scales-of-unsplit-page",
        "the footer is looked for where a 64-token page has it",
        _BYTES,
        ("split-full", "split-holes"),
        _kernel("base + RATIO * DATA + sub * FOOTER", "base + DATA + sub * FOOTER"),
        _SELECTION,
    ),
    Fault(
        "scales-of-neighbour",
        "the scales are those of the next sub-page",
        _BYTES,
        ("split-full", "split-holes"),
        _kernel("base + RATIO * DATA + sub * FOOTER", "base + RATIO * DATA + (sub + 1) % RATIO * FOOTER"),
        _SELECTION,
    ),
    Fault(
        "sub-page-off-by-one",
        "each sub-page gets the bytes of the next one",
        _BYTES,
        ("split-full", "split-holes"),
        _kernel("    sub = out % RATIO\n", "    sub = (out + 1) % RATIO\n"),
        _SELECTION,
    ),
    Fault(
        "stride-ignored",
        "pages are taken to follow one another without the padding of the page stride",
        _BYTES,
        ("split-full", "split-holes"),
        _kernel("base = page * page_stride * UNIT", "base = page * RATIO * (DATA + FOOTER)"),
        _SELECTION,
    ),
    Fault(
        "last-token-lost",
        "the token records are copied but for the last",
        _BYTES,
        ("split-full",),
        _kernel("mask = lane < PART - start\n", "mask = lane < PART - start - DATA // 64\n"),
        _SELECTION,
    ),
    Fault(
        "source-offset-32-bit",
        "the byte offset of a source page is computed in 32 bits",
        ("SPLIT-OFFSET64",),
        ("offset-2g",),
        _kernel(
            "base = page * page_stride * UNIT",
            "base = (page * page_stride * UNIT * 8).to(tl.int32).to(tl.int64) // 8",
        ),
    ),
    Fault(
        "target-offset-32-bit",
        "the byte offset of a split page is cut to 32 bits",
        ("SPLIT-OFFSET64",),
        ("offset-4g",),
        _kernel(
            "target = dst + out * DST_STRIDE", "target = dst + ((out * DST_STRIDE * 8) & 0xFFFFFFFF) // 8"
        ),
    ),
    Fault(
        "tail-overwritten",
        "the whole row of the destination is written, its 64-byte tail with zeros",
        ("SPLIT-FRAME",),
        ("split-full", "split-holes"),
        _kernel(
            "        tl.store(target + DATA + foot, scales, mask=mine)\n",
            "        tl.store(target + DATA + foot, scales, mask=mine)\n"
            "        tl.store(target + DATA + FOOTER + tl.arange(0, 8),\n"
            "                 tl.zeros((8,), dst.dtype.element_ty))\n",
        ),
        (*_BYTES, "SPLIT-TOUCHED"),
    ),
    Fault(
        "marks-survive",
        "the marks of an earlier call survive: what it claimed is never split again, also on replay",
        ("SPLIT-BYTES", "SPLIT-INDEX", "SPLIT-TOUCHED", "BUF-ADDRESS"),
        ("split-marks", "boot-replay-marks"),
        _kernel(_EPOCH, 'epoch = (tl.atomic_add(marks, share, sem="relaxed") >> SHIFT) * 0 + 1'),
        ("SPLIT-FRAME",),
    ),
    Fault(
        "epoch-wraps",
        "the epoch is kept in two bits, so marks of four calls ago count as this call's",
        ("SPLIT-BYTES", "SPLIT-INDEX", "SPLIT-TOUCHED"),
        ("split-marks-later",),
        _kernel(_EPOCH, _EPOCH.replace("epoch = (", "epoch = 1 + (").replace(") + 1", ") % 4")),
        ("SPLIT-FRAME",),
    ),
    Fault(
        "hole-swallows-neighbour",
        "a hole counts as a neighbour in sub-page 0, so the entry behind it is dropped as a duplicate",
        ("SPLIT-BYTES", "SPLIT-INDEX", "SPLIT-TOUCHED"),
        ("split-hole-first",),
        _kernel(
            "repeated = (left >= 0) & (left // SUB_TOKENS == sub_page)",
            "repeated = tl.maximum(left, 0) // SUB_TOKENS == sub_page",
        ),
        ("SPLIT-FRAME",),
    ),
    Fault(
        "past-the-end-written",
        "an index past the pool's end is split like any other",
        _SELECTION,
        ("split-past-end",),
        _kernel(_OWNED_COUNTED, "counted = inside & (index >= 0)"),
        _BYTES,
    ),
    Fault(
        "past-the-end-clamped",
        "an index past the pool's end is clamped to the last token",
        _SELECTION,
        ("split-past-end",),
        _kernel(
            _OWNED_COUNTED,
            "counted = inside & (index >= 0)\n    index = tl.minimum(index, tokens - 1)",
        ),
        _BYTES,
    ),
    Fault(
        "hole-clamped",
        "-1 is clamped to token 0, so page 0 is always split",
        _SELECTION,
        ("split-all-holes",),
        _kernel(
            _OWNED_COUNTED,
            "index = tl.maximum(index, 0)\n    counted = inside & (index < tokens)",
        ),
        _BYTES,
    ),
    Fault(
        "length-ignored",
        "columns past topk_length are split too",
        _SELECTION,
        ("split-lengths",),
        _kernel("    if HAS_LENGTHS:\n        at_length", "    if HAS_LENGTHS and False:\n        at_length"),
        _BYTES,
    ),
    Fault(
        "length-off-by-one",
        "the column at the length still counts",
        _SELECTION,
        ("split-lengths",),
        _kernel("counted &= column < tl.load(at_length", "counted &= column <= tl.load(at_length"),
        _BYTES,
    ),
    Fault(
        "narrowed-before-compared",
        "a 64-bit index is narrowed to 32 bits before it is compared with the pool's end",
        _SELECTION,
        ("split-wide",),
        _kernel(
            "index = tl.load(at, mask=inside, other=-1).to(tl.int64)",
            "index = tl.load(at, mask=inside, other=-1).to(tl.int32).to(tl.int64)",
        ),
        _BYTES,
    ),
    Fault(
        "row-gap-read",
        "a row is read to the next power of two, into the gap before the next row",
        _SELECTION,
        ("split-row-gap",),
        _kernel("inside = (row < rows) & (column < width)", "inside = (row < rows) & (column < WIDTH)"),
        _BYTES,
    ),
    Fault(
        "row-stride-ignored",
        "index rows are taken to follow one another without a gap",
        ("SPLIT-BYTES", "SPLIT-INDEX", "SPLIT-TOUCHED"),
        ("split-row-gap",),
        _kernel(
            "row.to(tl.int64) * row_stride + column\n    index = tl.load(at, mask=inside",
            "row.to(tl.int64) * width + column\n    index = tl.load(at, mask=inside",
        ),
    ),
    Fault(
        "owner-lost",
        "the sub-pages of one owner are never split",
        ("SPLIT-BYTES", "SPLIT-INDEX", "SPLIT-TOUCHED"),
        ("split-holes",),
        _kernel("(sub_page & (OWNERS - 1)) == owner", "(sub_page & (OWNERS - 1)) == owner + 1"),
        ("SPLIT-FRAME",),
    ),
    Fault(
        "empty-means-all",
        "an empty index tensor splits the whole pool",
        _SELECTION,
        ("split-empty",),
        (
            Patch(
                "pages.py",
                "    index2d, lengths = _check_indices(pool, indices, topk_length)\n",
                "    index2d, lengths = _check_indices(pool, indices, topk_length)\n"
                "    index2d = None if index2d is not None and not index2d.numel() else index2d\n",
            ),
        ),
        _BYTES,
    ),
    Fault(
        "copy-at-64",
        "a pool of 64-token pages is copied instead of returned",
        ("SPLIT-BYTES",),
        ("split-64",),
        (
            Patch(
                "pages.py",
                "    if geometry.page_size == SUB_PAGE:\n        return SplitPages(SUB_PAGE",
                "    if geometry.page_size < SUB_PAGE:\n        return SplitPages(SUB_PAGE",
            ),
        ),
        ("SPLIT-FRAME", "SPLIT-INDEX", "SPLIT-TOUCHED"),
    ),
)
