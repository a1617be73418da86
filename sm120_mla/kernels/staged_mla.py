"""Sparse MLA in two launches: every entry is dequantised once into bf16 rows, then attended to.

Where a row has several blocks of heads, the one-launch kernel dequantises each entry once per block, and that
is what it spends its time on. Here a first launch gathers the counted entries of every row of a call into
dense bf16 tiles, zeros where nothing counts, with a bit for each lane; the second reads the tiles as a dense
attention would. The tiles of a row are those of the one-launch kernel, in the same order.
"""

# mypy: disable-error-code="assignment"
# (kernels build tuples of tensors piece by piece)

from __future__ import annotations

from .mla_tiles import (
    finish,
    load_key,
    load_queries,
    scale_bytes,
    tile_of_row,
    tiles_of_row,
    weigh,
    zeros,
)
from .runtime import INTERPRETED, tl, triton

__all__ = [
    "ATTEND_CONSTANTS",
    "STAGE_CONSTANTS",
    "STAGE_LANES",
    "STAGE_WARPS",
    "stage_kernel",
    "stage_piece",
    "staged_mla_kernel",
]

STAGE_LANES = 32
"""Lanes that one program stages: the bits of one word."""

STAGE_WARPS = 8

STAGE_CONSTANTS = (
    "MAIN_PAGE_SIZE",
    "EXTRA_PAGE_SIZE",
    "HAS_EXTRA",
    "HAS_MAIN_LENGTHS",
    "HAS_EXTRA_LENGTHS",
    "DIM",
    "NOPE",
    "TILE",
    "TOKEN_BYTES",
    "FOOTER_BYTES",
    "ALIGN",
    "BY_BITS",
    "BLOCK_N",
)
ATTEND_CONSTANTS = (
    "HAS_EXTRA",
    "HAS_MAIN_LENGTHS",
    "HAS_EXTRA_LENGTHS",
    "HAS_SINK",
    "HAS_LSE",
    "PARTIAL",
    "DIM",
    "BLOCK_H",
    "BLOCK_N",
    "FIRSTS",
    "WIDTHS",
)
"""Which of ``sparse_mla.constexprs`` each launch takes."""

NOT_SPECIALISED = (
    "most_tiles",
    "main_tokens",
    "main_width",
    "main_row",
    "main_length_step",
    "main_page",
    "extra_tokens",
    "extra_width",
    "extra_row",
    "extra_length_step",
    "extra_page",
    "heads",
    "splits",
    "lse_t",
    "lse_h",
    "sink_h",
)
ANY_ALIGNMENT = ("main_indices", "main_lengths", "extra_indices", "extra_lengths", "sink", "lse")

_INTERPRETED = tl.constexpr(INTERPRETED)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=NOT_SPECIALISED[:11], do_not_specialize_on_alignment=ANY_ALIGNMENT[:4])
def stage_kernel(
    stage,  # bf16 [T, most_tiles, BLOCK_N, DIM]
    words,  # int32 [T, most_tiles, BLOCK_N / LANES]: bit n, whether lane n counts
    most_tiles,
    main_pool,
    main_indices,
    main_lengths,
    main_tokens,
    main_width,
    main_row,
    main_length_step,
    main_page,
    extra_pool,
    extra_indices,
    extra_lengths,
    extra_tokens,
    extra_width,
    extra_row,
    extra_length_step,
    extra_page,
    MAIN_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_MAIN_LENGTHS: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    TILE: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BY_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,  # dimensions gathered at once
):
    """Grid ``(T * most_tiles * BLOCK_N / LANES,)``. Nothing is written, and read, past a row's last tile."""
    program = tl.program_id(0).to(tl.int64)
    lane = (program % (BLOCK_N // LANES) * LANES).to(tl.int32)
    tile = (program // (BLOCK_N // LANES) % most_tiles).to(tl.int32)
    row = program // (BLOCK_N // LANES) // most_tiles

    main_indices += row * main_row
    if HAS_EXTRA:
        extra_indices += row * extra_row
    main_columns, extra_columns, main_tiles, tiles = tiles_of_row(
        row,
        main_indices,
        main_lengths,
        main_tokens,
        main_width,
        main_length_step,
        extra_indices,
        extra_lengths,
        extra_tokens,
        extra_width,
        extra_length_step,
        HAS_EXTRA,
        HAS_MAIN_LENGTHS,
        HAS_EXTRA_LENGTHS,
        BLOCK_N,
    )
    if tile >= tiles:
        return

    pool, record, footer, counted = tile_of_row(
        tile,
        lane,
        main_pool,
        main_indices,
        main_columns,
        main_tokens,
        main_page,
        main_tiles,
        extra_pool,
        extra_indices,
        extra_columns,
        extra_tokens,
        extra_page,
        MAIN_PAGE_SIZE,
        EXTRA_PAGE_SIZE,
        HAS_EXTRA,
        TOKEN_BYTES,
        FOOTER_BYTES,
        ALIGN,
        BLOCK_N,
        LANES,
    )
    scales = scale_bytes(pool, footer, counted, NOPE // TILE, ALIGN)
    at = stage + ((row * most_tiles + tile) * BLOCK_N + lane + tl.arange(0, LANES))[:, None] * DIM
    for j in tl.static_range(DIM // PIECE):
        key = load_key(pool, record, scales, counted, j * PIECE, PIECE, TILE, NOPE, ALIGN, BY_BITS)
        if _INTERPRETED:  # which would cut the mantissa; these are bf16 values, in fp32
            key = (key.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(at + j * PIECE + tl.arange(0, PIECE)[None, :], key)
    one = tl.full([LANES], 1, tl.int32)
    word = tl.sum(tl.where(counted, one << tl.arange(0, LANES), 0), axis=0)
    tl.store(words + program, word)


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def staged_mla_kernel(
    q,  # bf16 [T, heads, 512]
    out,  # bf16 [T, heads, 512]; PARTIAL: fp32 [T, splits, heads, 512]
    lse,  # fp32 [T, heads], natural; PARTIAL: fp32 [T, splits, heads], base 2
    sink,  # fp32 [heads]
    stage,  # as ``stage_kernel`` left them
    words,
    most_tiles,
    main_indices,  # the index rows and lengths that were staged: how many tiles a row has
    main_lengths,
    main_tokens,
    main_width,
    main_row,
    main_length_step,
    extra_indices,
    extra_lengths,
    extra_tokens,
    extra_width,
    extra_row,
    extra_length_step,
    heads,
    splits,
    q_t,  # elements
    q_h,
    out_t,
    out_h,
    lse_t,
    lse_h,
    sink_h,
    scale,  # of the scores, times log2(e)
    HAS_EXTRA: tl.constexpr,
    HAS_MAIN_LENGTHS: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PARTIAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRSTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    LANES: tl.constexpr,  # of one word
):
    """Grid ``(T * splits * ceil(heads / BLOCK_H),)``, divided among programs as in ``sparse_mla_kernel``."""
    program = tl.program_id(0)
    head_blocks = tl.cdiv(heads, BLOCK_H)
    head = (program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = (program // head_blocks) % splits
    row = (program // head_blocks // splits).to(tl.int64)
    in_heads = head < heads
    head = head.to(tl.int64)

    main_indices += row * main_row
    if HAS_EXTRA:
        extra_indices += row * extra_row
    _, _, _, tiles = tiles_of_row(
        row,
        main_indices,
        main_lengths,
        main_tokens,
        main_width,
        main_length_step,
        extra_indices,
        extra_lengths,
        extra_tokens,
        extra_width,
        extra_length_step,
        HAS_EXTRA,
        HAS_MAIN_LENGTHS,
        HAS_EXTRA_LENGTHS,
        BLOCK_N,
    )
    begin = (split.to(tl.int64) * tiles // splits).to(tl.int32)
    end = ((split.to(tl.int64) + 1) * tiles // splits).to(tl.int32)
    if PARTIAL:  # noqa: SIM102 - a compile-time condition, then one at run time
        if begin == end:
            tl.store(lse + (row * splits + split) * heads + head, _NEVER, mask=in_heads)
            return

    queries = load_queries(q + row * q_t + head * q_h, in_heads, FIRSTS, WIDTHS)
    sums = ()
    for j in tl.static_range(len(WIDTHS)):
        sums += (zeros(BLOCK_H, WIDTHS[j]),)
    peak = tl.full([BLOCK_H], _NEVER, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    first = row * most_tiles

    for tile in range(begin, end):
        at = stage + ((first + tile) * BLOCK_N + lane)[:, None] * DIM
        keys = ()
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for j in tl.static_range(len(WIDTHS)):
            key = tl.load(at + FIRSTS[j] + tl.arange(0, WIDTHS[j])[None, :])
            if _INTERPRETED:
                key = key.to(tl.float32)
            scores = tl.dot(queries[j], tl.trans(key), scores)
            keys += (key,)
        word = tl.load(words + (first + tile) * (BLOCK_N // LANES) + lane // LANES)
        counted = ((word >> (lane % 32)) & 1) != 0
        peak, total, sums = weigh(scores, counted, keys, peak, total, sums, scale, len(WIDTHS))

    finish(
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
        HAS_SINK,
        HAS_LSE,
        PARTIAL,
        DIM,
        FIRSTS,
        WIDTHS,
    )


def stage_piece() -> int:
    """Dimensions gathered at once: those of two scales; the interpreter, which pays by operation, all."""
    return 512 if INTERPRETED else 128
