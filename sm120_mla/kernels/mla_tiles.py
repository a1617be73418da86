"""Device functions of one tile of entries: which they are, their values of K, and their weight.

What must not reach the output is never read (its lanes load zeros instead), and has weight exactly 0.
"""

# mypy: disable-error-code="assignment"
# (kernels build tuples of tensors piece by piece)

from __future__ import annotations

import math

from .runtime import INTERPRETED, tl, triton

__all__ = [
    "SCAN_FROM",
    "bf16",
    "counted_columns",
    "dequantise",
    "finish",
    "load_key",
    "load_queries",
    "scale_bytes",
    "tile_of_row",
    "tiles_of_row",
    "weigh",
    "zeros",
]

SCAN_FROM = 1024
"""A row of more columns than this and of unknown length is searched for its last counted column first."""

_INTERPRETED = tl.constexpr(INTERPRETED)
_NEVER = tl.constexpr(float("-inf"))
_SCAN_BLOCK = tl.constexpr(1024)
_SCAN_FROM = tl.constexpr(SCAN_FROM)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
# Moves a 4-bit exponent of bias 7 that stands in fp32's low exponent bits to where it belongs; exact, and
# codes that are subnormal come out right as well.
_E4M3_TO_FP32 = tl.constexpr(2.0**120)


@triton.jit
def bf16(x):
    """fp32 rounded to the nearest bf16, ties to even: as bf16, or as the same fp32 value if interpreted."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        result = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        result = x.to(tl.bfloat16)
    return result


@triton.jit
def dequantise(codes, scale_byte, BY_BITS: tl.constexpr):
    """The codec's bf16 values of e4m3fn codes, uint8 ``[n, m]``, under UE8M0 bytes, int32 ``[n, m or 1]``.

    ``BY_BITS`` decodes by integer arithmetic, for the interpreter (which decodes NaN codes to 480) and for
    GPUs without an e4m3 converter.
    """
    if BY_BITS:
        code = codes.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * _E4M3_TO_FP32
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The top mantissa bit is 2^-127 over exponent 0, and a quiet NaN over exponent 255.
    half = (scale_byte == 0) | (scale_byte == 255)
    scale = ((scale_byte << 23) | tl.where(half, 0x400000, 0)).to(tl.float32, bitcast=True)
    return bf16(value * scale)


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of fp32 zeros; the shape may come from a tuple, which a list of sizes may not."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def counted_columns(
    lengths,
    length_step,
    indices,  # of this row
    tokens,
    width,
    row,
    HAS_LENGTHS: tl.constexpr,
):
    """Columns to look at: the row's length cut to ``[0, width]``, or all."""
    if HAS_LENGTHS:
        length = tl.load(lengths + row * length_step).to(tl.int64)
        columns = tl.minimum(tl.maximum(length, 0), width).to(tl.int32)
    else:
        columns = width + tl.zeros((), tl.int32)
        if width > _SCAN_FROM:
            columns = tl.zeros((), tl.int32)
            for start in range(0, width, _SCAN_BLOCK):
                column = start + tl.arange(0, _SCAN_BLOCK)
                index = tl.load(indices + column, mask=column < width, other=-1).to(tl.int64)
                counted = (index >= 0) & (index < tokens)
                columns = tl.maximum(columns, tl.max(tl.where(counted, column + 1, 0), axis=0))
    return columns


@triton.jit
def _entries(indices, start, columns, tokens, N: tl.constexpr):
    """Token indices of columns ``[start, start + N)``, -1 where nothing is counted."""
    column = start + tl.arange(0, N)
    inside = (column >= 0) & (column < columns)
    index = tl.load(indices + column, mask=inside, other=-1).to(tl.int64)
    return tl.where((index >= 0) & (index < tokens), index, -1)


@triton.jit
def scale_bytes(pool, footer, counted, SCALES: tl.constexpr, ALIGN: tl.constexpr):
    """The footer records of a tile, one int64 an entry."""
    if ALIGN == 16:
        at = (pool + tl.multiple_of(footer, 8)).to(tl.pointer_type(tl.int64), bitcast=True)
        record = tl.load(at, mask=counted, other=0)
    else:
        record = tl.zeros_like(footer)
        for j in tl.static_range(SCALES):
            byte = tl.load(pool + footer + j, mask=counted, other=0)
            record |= byte.to(tl.int64) << (8 * j)
    return record


@triton.jit
def _rope(pool, start, element, mask, ALIGN: tl.constexpr):
    """The bf16 ``element``s [1, m] from byte offsets ``start`` [n] on."""
    if ALIGN > 1:
        at = (pool + start).to(tl.pointer_type(tl.bfloat16), bitcast=True)[:, None] + element
        values = tl.load(at, mask=mask, other=0.0)
    else:
        at = pool + start[:, None] + 2 * element
        low = tl.load(at, mask=mask, other=0).to(tl.int16)
        high = tl.load(at + 1, mask=mask, other=0).to(tl.int16)
        values = ((high << 8) | low).to(tl.bfloat16, bitcast=True)
    return values


@triton.jit
def load_key(
    pool,
    record,
    scales,
    counted,
    FIRST: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    NOPE: tl.constexpr,
    ALIGN: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Dimensions ``[FIRST, FIRST + PIECE)`` of a tile of K, ready for a dot product; 0 where not counted."""
    dim = FIRST + tl.arange(0, PIECE)[None, :]
    mask = counted[:, None]
    if FIRST >= NOPE:
        key = _rope(pool, record + NOPE, dim - NOPE, mask, ALIGN)
    else:
        if PIECE <= TILE:
            scale_byte = (scales >> (8 * (FIRST // TILE)))[:, None]
        else:
            scale_byte = scales[:, None] >> (8 * (dim // TILE)).to(tl.int64)
        if FIRST + PIECE <= NOPE:
            codes = tl.load(pool + record[:, None] + dim, mask=mask, other=0)
        else:
            codes = tl.load(pool + record[:, None] + dim, mask=mask & (dim < NOPE), other=0)
        if not _INTERPRETED:
            # A move that the compiler must not look through: for mma.sync it would carry the layouts of both
            # dot products up to the load, and then neither copies asynchronously nor shares the conversion.
            codes = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [codes], dtype=tl.uint8, is_pure=False, pack=4
            )
        key = dequantise(codes, (scale_byte & 0xFF).to(tl.int32), BY_BITS)
        if FIRST + PIECE > NOPE:
            rope = _rope(pool, record + NOPE, dim - NOPE, mask & (dim >= NOPE), ALIGN)
            key = tl.where(dim < NOPE, key, rope)
    if _INTERPRETED:  # which would multiply the bit patterns of bf16
        key = key.to(tl.float32)
    return key


@triton.jit
def tiles_of_row(
    row,
    main_indices,  # of this row, as those of extra
    main_lengths,
    main_tokens,
    main_width,
    main_length_step,
    extra_indices,
    extra_lengths,
    extra_tokens,
    extra_width,
    extra_length_step,
    HAS_EXTRA: tl.constexpr,
    HAS_MAIN_LENGTHS: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A row's list of tiles: (columns of main, of extra, tiles of main, tiles of both)."""
    main_columns = counted_columns(
        main_lengths, main_length_step, main_indices, main_tokens, main_width, row, HAS_MAIN_LENGTHS
    )
    main_tiles = tl.cdiv(main_columns, BLOCK_N)
    tiles = main_tiles
    extra_columns = main_columns
    if HAS_EXTRA:
        extra_columns = counted_columns(
            extra_lengths,
            extra_length_step,
            extra_indices,
            extra_tokens,
            extra_width,
            row,
            HAS_EXTRA_LENGTHS,
        )
        tiles += tl.cdiv(extra_columns, BLOCK_N)
    return main_columns, extra_columns, main_tiles, tiles


@triton.jit
def tile_of_row(
    tile,
    lane,  # first of the tile's lanes wanted
    main_pool,
    main_indices,  # of this row, as those of extra
    main_columns,
    main_tokens,
    main_page,
    main_tiles,
    extra_pool,
    extra_indices,
    extra_columns,
    extra_tokens,
    extra_page,
    MAIN_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,  # lanes of a tile
    LANES: tl.constexpr,  # lanes wanted
):
    """Of lanes of a tile of a row's list: (pool, offset of each record, of its scales, whether it counts)."""
    start = tile * BLOCK_N + lane
    index = _entries(main_indices, start, main_columns, main_tokens, LANES)
    pool = main_pool
    page_bytes = main_page
    in_main = tile < main_tiles
    if HAS_EXTRA:
        # At most one of the two reads anything.
        main_index = tl.where(in_main, index, -1)
        start = (tile - main_tiles) * BLOCK_N + lane
        index = _entries(extra_indices, start, extra_columns, extra_tokens, LANES)
        index = tl.maximum(main_index, index)
        pool = tl.where(in_main, main_pool, extra_pool)
        page_bytes = tl.where(in_main, main_page, extra_page)
    counted = index >= 0
    token = tl.maximum(index, 0)
    page = token // MAIN_PAGE_SIZE
    slot = token % MAIN_PAGE_SIZE
    footer = slot * FOOTER_BYTES + MAIN_PAGE_SIZE * TOKEN_BYTES
    if HAS_EXTRA:
        page = tl.where(in_main, page, token // EXTRA_PAGE_SIZE)
        slot = tl.where(in_main, slot, token % EXTRA_PAGE_SIZE)
        start_of_footer = tl.where(in_main, MAIN_PAGE_SIZE * TOKEN_BYTES, EXTRA_PAGE_SIZE * TOKEN_BYTES)
        footer = slot * FOOTER_BYTES + start_of_footer
    footer += page * page_bytes
    record = page * page_bytes + slot * TOKEN_BYTES
    if ALIGN == 16:
        record = tl.multiple_of(record, 16)
    return pool, record, footer, counted


@triton.jit
def load_queries(at, in_heads, FIRSTS: tl.constexpr, WIDTHS: tl.constexpr):
    """The pieces of a block of heads, ready for dot products; ``at`` [heads] is where each begins."""
    queries = ()
    for j in tl.static_range(len(WIDTHS)):
        dim = FIRSTS[j] + tl.arange(0, WIDTHS[j])[None, :]
        query = tl.load(at[:, None] + dim, mask=in_heads[:, None], other=0.0)
        if _INTERPRETED:
            query = query.to(tl.float32)
        queries += (query,)
    return queries


@triton.jit
def weigh(scores, counted, keys, peak, total, sums, scale, PIECES: tl.constexpr):
    """One step of the online softmax: (peak, total, sums) after a tile of ``keys``."""
    scores = tl.where(counted[None, :], scores * scale, _NEVER)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == _NEVER, 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    weights = bf16(weights)
    new_sums = ()
    for j in tl.static_range(PIECES):
        new_sums += (tl.dot(weights, keys[j], sums[j] * shrink[:, None]),)
    return new_peak, total, new_sums


@triton.jit
def finish(
    out,
    lse,
    sink,
    peak,
    total,
    sums,
    row,
    split,
    splits,
    head,
    heads,
    out_t,
    out_h,
    lse_t,
    lse_h,
    sink_h,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PARTIAL: tl.constexpr,
    DIM: tl.constexpr,
    FIRSTS: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    """Write what a block of heads of one row comes to: the result, or this part of it."""
    in_heads = head < heads
    nothing = total == 0
    base = tl.where(peak == _NEVER, 0.0, peak)
    log_total = peak + tl.log2(tl.where(nothing, 1.0, total))
    if PARTIAL:
        part = (row * splits + split) * heads + head
        tl.store(lse + part, log_total, mask=in_heads)
        out_at = out + part * DIM
    else:
        if HAS_LSE:
            tl.store(lse + row * lse_t + head * lse_h, log_total * _LN_2, mask=in_heads)
        if HAS_SINK:
            share = tl.load(sink + head * sink_h, mask=in_heads, other=_NEVER)
            total += tl.exp2(share * _LOG2_E - base)
        out_at = out + row * out_t + head * out_h
    inverse = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))[:, None]
    for j in tl.static_range(len(WIDTHS)):
        dim = FIRSTS[j] + tl.arange(0, WIDTHS[j])[None, :]
        result = sums[j] * inverse
        if not PARTIAL:
            result = bf16(result)
        tl.store(out_at[:, None] + dim, result, mask=in_heads[:, None])
