"""Faults of the attention kernels."""

from __future__ import annotations

from ...targets.own import Patch
from .base import Fault

__all__ = ["ATTENTION_FAULTS"]

_KERNEL, _TILES, _STAGED = "kernels/sparse_mla.py", "kernels/mla_tiles.py", "kernels/staged_mla.py"
_VALUE = ("ATTN-VALUE",)
_LSE_STORE = "tl.store(lse + row * lse_t + head * lse_h, log_total * _LN_2, mask=in_heads)"
_COUNTED = "return tl.where((index >= 0) & (index < tokens), index, -1)"


def _fault(
    id: str,
    sentence: str,
    violates: tuple[str, ...],
    cases: tuple[str, ...],
    old: str,
    new: str,
    keeps: tuple[str, ...] = (),
    file: str = _TILES,
) -> Fault:
    return Fault(id, sentence, violates, cases, (Patch(file, old, new),), keeps)


ATTENTION_FAULTS = (
    _fault(
        "sink-in-lse",
        "the returned lse includes the sink",
        ("ATTN-LSE",),
        ("attn-small",),
        _LSE_STORE,
        "if HAS_SINK:\n"
        "                shared = tl.load(sink + head * sink_h, mask=in_heads, other=_NEVER) * _LOG2_E\n"
        "                log_total = tl.log2(tl.exp2(log_total) + tl.exp2(shared))\n"
        f"            {_LSE_STORE}",
        ("ATTN-VALUE", "ATTN-DONTCARE", "ATTN-EMPTY", "ATTN-ROWS"),
    ),
    _fault(
        "lse-base-2",
        "the returned lse is in powers of two",
        ("ATTN-LSE", "ATTN-MERGE"),
        ("attn-small",),
        _LSE_STORE,
        _LSE_STORE.replace(" * _LN_2", ""),
        ("ATTN-VALUE", "ATTN-DONTCARE", "ATTN-EMPTY", "ATTN-ROWS"),
    ),
    _fault(
        "sink-ignored",
        "the sink does not divide",
        _VALUE,
        ("attn-small",),
        "total += tl.exp2(share * _LOG2_E - base)",
        "total += 0.0 * share",
        ("ATTN-LSE", "ATTN-ROWS"),
    ),
    _fault(
        "sink-of-next-head",
        "each head gets the sink of the next",
        _VALUE,
        ("attn-small",),
        "share = tl.load(sink + head * sink_h",
        "share = tl.load(sink + (head + 1) % heads * sink_h",
        ("ATTN-LSE", "ATTN-ROWS"),
    ),
    _fault(
        "scale-of-next-tile",
        "each 64-wide tile is scaled by the next tile's byte",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-wide",),
        "scale_byte = scales[:, None] >> (8 * (dim // TILE)).to(tl.int64)",
        "scale_byte = scales[:, None] >> (8 * ((dim // TILE + 1) % 7)).to(tl.int64)",
    ),
    _fault(
        "rope-left-out",
        "the RoPE dimensions are taken for 0",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-small",),
        "rope = _rope(pool, record + NOPE, dim - NOPE, mask & (dim >= NOPE), ALIGN)\n",
        "rope = _rope(pool, record + NOPE, dim - NOPE, mask & (dim < 0), ALIGN)\n",
    ),
    _fault(
        "holes-weighed-as-slot-0",
        "a lane that counts for nothing gathers slot 0 and is weighed",
        ("ATTN-VALUE", "ATTN-DONTCARE"),
        ("attn-small",),
        _COUNTED,
        "return tl.where(index < tokens, tl.maximum(index, 0), -1)",
    ),
    _fault(
        "slot-0-times-zero",
        "a lane that counts for nothing gathers slot 0 at weight 0, and 0 * NaN is NaN",
        ("ATTN-DONTCARE",),
        ("attn-small",),
        "    mask = counted[:, None]\n    if FIRST >= NOPE:",
        "    mask = (counted | (counted == 0))[:, None]\n    if FIRST >= NOPE:",
        ("ATTN-LSE",),
    ),
    _fault(
        "past-the-end-weighed",
        "an index past the pool's end is clamped to the last token and weighed",
        ("ATTN-VALUE", "ATTN-DONTCARE"),
        ("attn-past-end",),
        _COUNTED,
        "return tl.where(index >= 0, tl.minimum(index, tokens - 1), -1)",
    ),
    _fault(
        "length-off-by-some",
        "columns just past the length still count",
        _VALUE,
        ("attn-lengths",),
        "inside = (column >= 0) & (column < columns)",
        "inside = (column >= 0) & (column < columns + 2)",
    ),
    _fault(
        "extra-length-for-main",
        "the extra cache's length is applied to the main one",
        _VALUE,
        ("attn-two-lengths",),
        "        main_lengths, main_length_step, main_indices",
        "        extra_lengths, extra_length_step, main_indices",
        file=_KERNEL,
    ),
    _fault(
        "first-length-for-all",
        "every row gets the length of the first",
        _VALUE,
        ("attn-lengths",),
        "length = tl.load(lengths + row * length_step)",
        "length = tl.load(lengths + row * 0)",
    ),
    _fault(
        "extra-with-main-page-size",
        "the slot within an extra page is computed with the main cache's page size",
        _VALUE,
        ("attn-two-lengths",),
        "slot = tl.where(in_main, slot, token % EXTRA_PAGE_SIZE)",
        "slot = tl.where(in_main, slot, token % MAIN_PAGE_SIZE)",
    ),
    _fault(
        "extra-ignored",
        "the extra cache is not looked at",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-two-lengths",),
        "tiles += tl.cdiv(extra_columns, BLOCK_N)",
        "tiles += tl.cdiv(extra_columns, BLOCK_N) * 0",
        file=_KERNEL,
    ),
    _fault(
        "empty-row-lse-0",
        "a row with no counted entry says lse 0",
        ("ATTN-EMPTY", "ATTN-LSE"),
        ("attn-empty",),
        "log_total = peak + tl.log2(",
        "log_total = base + tl.log2(",
        ("ATTN-VALUE",),
    ),
    _fault(
        "q-stride-ignored",
        "rows of q are taken to follow one another",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-strided-q",),
        "load_queries(q + row * q_t + head * q_h",
        "load_queries(q + row * heads * DIM + head * q_h",
        file=_KERNEL,
    ),
    _fault(
        "indices-of-other-row",
        "rows read each other's indices",
        ("ATTN-VALUE", "ATTN-ROWS"),
        ("attn-small",),
        "main_indices += row * main_row",
        "main_indices += (row ^ 1) * main_row",
        file=_KERNEL,
    ),
    _fault(
        "scores-scaled-twice",
        "scores are 2 % too large",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-huge",),
        "scores * scale, _NEVER)",
        "scores * (scale * 1.02), _NEVER)",
    ),
    _fault(
        "output-scaled",
        "the output is 2 % too large",
        _VALUE,
        ("attn-small",),
        "result = sums[j] * inverse",
        "result = sums[j] * inverse * 1.02",
        ("ATTN-LSE", "ATTN-DONTCARE", "ATTN-ROWS"),
    ),
    _fault(
        "output-zero",
        "the output is all zeros",
        _VALUE,
        ("attn-small",),
        "result = sums[j] * inverse",
        "result = sums[j] * 0.0",
        ("ATTN-LSE", "ATTN-DONTCARE", "ATTN-EMPTY", "ATTN-ROWS"),
    ),
    _fault(
        "sums-not-rescaled",
        "partial sums of earlier tiles keep their old scale when the peak moves",
        ("ATTN-VALUE", "ATTN-ORDER", "ATTN-MERGE"),
        ("attn-long",),
        "sums[j] * shrink[:, None])",
        "sums[j])",
        ("ATTN-LSE",),
    ),
    _fault(
        "last-tile-lost",
        "the last tile of a row is left out",
        ("ATTN-VALUE", "ATTN-LSE", "ATTN-ORDER"),
        ("attn-long",),
        "end = ((split.to(tl.int64) + 1) * tiles // splits).to(tl.int32)",
        "end = ((split.to(tl.int64) + 1) * tiles // splits).to(tl.int32) - 1",
        file=_KERNEL,
    ),
    _fault(
        "staged-row-of-other",
        "values dequantised ahead are read from the row before",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-staged",),
        "first = row * most_tiles",
        "first = tl.maximum(row - 1, 0) * most_tiles",
        file=_STAGED,
    ),
    _fault(
        "staged-holes-weighed",
        "what was staged as zeros for a lane that counts for nothing is weighed",
        ("ATTN-VALUE", "ATTN-LSE"),
        ("attn-staged",),
        "((word >> (lane % 32)) & 1) != 0",
        "word == word",
        file=_STAGED,
    ),
    _fault(
        "staged-slot-0-times-zero",
        "staging gathers slot 0 for a lane that counts for nothing, and 0 * NaN is NaN",
        ("ATTN-DONTCARE",),
        ("attn-staged",),
        "key = load_key(pool, record, scales, counted,",
        "key = load_key(pool, record, scales, counted | (counted == 0),",
        ("ATTN-LSE",),
        file=_STAGED,
    ),
)
