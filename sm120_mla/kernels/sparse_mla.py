"""Sparse MLA attention over paged fp8 caches: one pass over K for a block of heads, split over the entries.

MLA has one KV head and its K and V are the same rows, so a program reads each tile of entries once for all
of its heads: NoPE codes and RoPE values are gathered, dequantised in registers, and used for the scores and
for the output alike. The softmax is online, in powers of two. Main and extra cache are one list of tiles:
first the tiles that hold the counted columns of the main row, then those of the extra row.

What must not reach the output is never read (its lanes load zeros instead), and has weight exactly 0.
"""

# mypy: disable-error-code="assignment"
# (kernels build tuples of tensors piece by piece)

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ..layout import DSV4, PageLayout
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

__all__ = [
    "ALIGNMENTS",
    "CONFIGS",
    "NOT_SPECIALISED",
    "SCAN_FROM",
    "SM120_CONFIGS",
    "Config",
    "bf16",
    "compile_specs",
    "constexprs",
    "dequantise",
    "interpreted_config",
    "signature",
    "sparse_mla_kernel",
    "specs_of",
]

NOT_SPECIALISED = (
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

ALIGNMENTS = (16, 2, 1)
"""What a launch may be told about the alignment of every record: bytes."""

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


@dataclass(frozen=True)
class Config:
    """One launch configuration: ``block_h`` heads by tiles of ``block_n`` entries.

    A row of K is taken in pieces of ``widths`` dimensions, each with dot products of its own.
    ``residents`` is how many programs share a multiprocessor. ``tile_ns`` is the time one tile takes and
    ``start_ns`` what a program costs besides, in nanoseconds; they rank configurations against each other.
    """

    block_h: int
    block_n: int
    widths: tuple[int, ...]
    num_warps: int
    num_stages: int
    residents: int
    tile_ns: int
    start_ns: int


SM120_CONFIGS: tuple[Config, ...] = (
    Config(16, 32, (64,) * 8, num_warps=4, num_stages=5, residents=1, tile_ns=1500, start_ns=4000),
    Config(32, 32, (64,) * 8, num_warps=8, num_stages=3, residents=1, tile_ns=2000, start_ns=4500),
)
"""Within the 101,376 bytes of shared memory of SM120; also what any GPU but Hopper gets."""

CONFIGS: dict[int, tuple[Config, ...]] = {
    9: (
        Config(16, 32, (64,) * 8, num_warps=4, num_stages=5, residents=2, tile_ns=1500, start_ns=4000),
        Config(64, 64, (64,) * 8, num_warps=8, num_stages=4, residents=1, tile_ns=3500, start_ns=6000),
    ),
}
"""By major capability, where it is not ``SM120_CONFIGS``."""


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
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of fp32 zeros; the shape may come from a tuple, which a list of sizes may not."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _columns(
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
def _scale_bytes(pool, footer, counted, SCALES: tl.constexpr, ALIGN: tl.constexpr):
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
def _key(
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


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def sparse_mla_kernel(
    q,  # bf16 [T, heads, 512]
    out,  # bf16 [T, heads, 512]; PARTIAL: fp32 [T, splits, heads, 512]
    lse,  # fp32 [T, heads], natural; PARTIAL: fp32 [T, splits, heads], base 2
    sink,  # fp32 [heads]
    main_pool,  # uint8, page 0
    main_indices,  # int32 or int64 [T, main_width]
    main_lengths,  # int32 or int64 [T]
    main_tokens,  # pages * page_size
    main_width,
    main_row,  # elements from row to row
    main_length_step,
    main_page,  # bytes from page to page
    extra_pool,
    extra_indices,
    extra_lengths,
    extra_tokens,
    extra_width,
    extra_row,
    extra_length_step,
    extra_page,
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
    MAIN_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_MAIN_LENGTHS: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PARTIAL: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,  # dimensions that are e4m3fn; the others are bf16
    TILE: tl.constexpr,  # dimensions that share a scale
    TOKEN_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BY_BITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRSTS: tl.constexpr,  # first dimension of each piece, which has a dot product of its own
    WIDTHS: tl.constexpr,  # dimensions of each piece
):
    """Grid ``(T * splits * ceil(heads / BLOCK_H),)``: a block of heads over one share of a row's tiles.

    Programs of one row and share are neighbours, so that they find its entries in the cache. A row's
    shares are equal numbers of tiles of what its lengths leave, whatever its width.
    """
    program = tl.program_id(0)
    head_blocks = tl.cdiv(heads, BLOCK_H)
    head = (program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = (program // head_blocks) % splits
    row = (program // head_blocks // splits).to(tl.int64)
    in_heads = head < heads
    head = head.to(tl.int64)
    if PARTIAL:
        part = (row * splits + split) * heads + head

    main_indices += row * main_row
    main_columns = _columns(
        main_lengths, main_length_step, main_indices, main_tokens, main_width, row, HAS_MAIN_LENGTHS
    )
    main_tiles = tl.cdiv(main_columns, BLOCK_N)
    tiles = main_tiles
    if HAS_EXTRA:
        extra_indices += row * extra_row
        extra_columns = _columns(
            extra_lengths,
            extra_length_step,
            extra_indices,
            extra_tokens,
            extra_width,
            row,
            HAS_EXTRA_LENGTHS,
        )
        tiles += tl.cdiv(extra_columns, BLOCK_N)
    begin = (split.to(tl.int64) * tiles // splits).to(tl.int32)
    end = ((split.to(tl.int64) + 1) * tiles // splits).to(tl.int32)
    if PARTIAL:  # noqa: SIM102 - a compile-time condition, then one at run time
        if begin == end:
            tl.store(lse + part, _NEVER, mask=in_heads)
            return

    bit = tl.arange(0, BLOCK_N).to(tl.int64)
    one = tl.full([BLOCK_N], 1, tl.int64)
    queries = ()
    sums = ()
    for j in tl.static_range(len(WIDTHS)):
        dim = FIRSTS[j] + tl.arange(0, WIDTHS[j])[None, :]
        at = q + row * q_t + head[:, None] * q_h + dim
        query = tl.load(at, mask=in_heads[:, None], other=0.0)
        if _INTERPRETED:
            query = query.to(tl.float32)
        queries += (query,)
        sums += (_zeros(BLOCK_H, WIDTHS[j]),)
    peak = tl.full([BLOCK_H], _NEVER, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)

    for tile in range(begin, end):
        index = _entries(main_indices, tile * BLOCK_N, main_columns, main_tokens, BLOCK_N)
        pool = main_pool
        page_bytes = main_page
        in_main = tile < main_tiles
        if HAS_EXTRA:
            # At most one of the two reads anything.
            main_index = tl.where(in_main, index, -1)
            start = (tile - main_tiles) * BLOCK_N
            index = _entries(extra_indices, start, extra_columns, extra_tokens, BLOCK_N)
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

        scales = _scale_bytes(pool, footer, counted, NOPE // TILE, ALIGN)
        keys = ()
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for j in tl.static_range(len(WIDTHS)):
            key = _key(pool, record, scales, counted, FIRSTS[j], WIDTHS[j], TILE, NOPE, ALIGN, BY_BITS)
            scores = tl.dot(queries[j], tl.trans(key), scores)
            keys += (key,)

        # Which lanes count, as one word: it reaches the layout of the scores without reading indices again.
        word = tl.sum(tl.where(counted, one << bit, 0), axis=0)
        scores = tl.where((((word >> bit) & 1) != 0)[None, :], scores * scale, _NEVER)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == _NEVER, 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        peak = new_peak
        weights = bf16(weights)
        new_sums = ()
        for j in tl.static_range(len(WIDTHS)):
            new_sums += (tl.dot(weights, keys[j], sums[j] * shrink[:, None]),)
        sums = new_sums

    nothing = total == 0
    base = tl.where(peak == _NEVER, 0.0, peak)
    log_total = peak + tl.log2(tl.where(nothing, 1.0, total))
    if PARTIAL:
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


def interpreted_config(heads: int) -> Config:
    """For the interpreter, which pays by the operation, whatever its size."""
    block = max(16, min(64, triton.next_power_of_2(heads)))
    return Config(block, 64, (512,), num_warps=4, num_stages=1, residents=1, tile_ns=1, start_ns=1)


def constexprs(
    layout: PageLayout,
    config: Config,
    *,
    main_page_size: int,
    extra_page_size: int | None,
    has_main_lengths: bool,
    has_extra_lengths: bool,
    has_sink: bool,
    has_lse: bool,
    partial: bool,
    align: int,
    by_bits: bool,
) -> dict[str, object]:
    """Compile-time arguments; ``align`` is one of ``ALIGNMENTS``, page sizes in tokens.

    What a launch does not look at is set to one value, so that it compiles nothing of its own.
    """
    return {
        "MAIN_PAGE_SIZE": main_page_size,
        "EXTRA_PAGE_SIZE": extra_page_size or 1,
        "HAS_EXTRA": extra_page_size is not None,
        "HAS_MAIN_LENGTHS": has_main_lengths,
        "HAS_EXTRA_LENGTHS": has_extra_lengths and extra_page_size is not None,
        "HAS_SINK": has_sink and not partial,
        "HAS_LSE": has_lse and not partial,
        "PARTIAL": partial,
        "DIM": layout.head_dim,
        "NOPE": layout.field("nope").count,
        "TILE": layout.tile,
        "TOKEN_BYTES": layout.token_bytes,
        "FOOTER_BYTES": layout.footer_bytes,
        "ALIGN": align,
        "BY_BITS": by_bits,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "FIRSTS": tuple(itertools.accumulate(config.widths[:-1], initial=0)),
        "WIDTHS": config.widths,
    }


_POINTERS = {
    "q": "*bf16",
    "lse": "*fp32",
    "sink": "*fp32",
    "main_pool": "*u8",
    "main_lengths": "*i32",
    "extra_pool": "*u8",
    "extra_lengths": "*i32",
}


def signature(index: str, partial: bool) -> dict[str, str]:
    """Triton types of the runtime arguments; ``index`` is ``i32`` or ``i64``, of both index rows."""
    pointers = _POINTERS | {"main_indices": f"*{index}", "extra_indices": f"*{index}"}
    pointers["out"] = "*fp32" if partial else "*bf16"
    return (
        pointers
        | dict.fromkeys((*NOT_SPECIALISED, "q_t", "q_h", "out_t", "out_h"), "i32")
        | {"scale": "fp32"}
    )


def specs_of(
    configs: tuple[Config, ...], capabilities: tuple[int, ...], by_bits: bool = False
) -> tuple[CompileSpec, ...]:
    """What serving launches, for each configuration: SWA pages of 256 or 64 with C4A pages of 64, C128A
    pages of 2, and alone; and the rarer kinds of launch for the first.
    """
    specs = []
    for n, config in enumerate(configs):
        kinds: list[tuple[int, int | None, bool, int, str]] = [
            (256, 64, True, 16, "i32"),
            (64, 2, False, 16, "i32"),
        ]
        if n == 0:
            kinds += [(256, None, False, 16, "i64"), (64, 2, True, 2, "i32"), (64, 2, False, 1, "i32")]
        for main, extra, partial, align, index in kinds:
            plain = not (partial or extra is None)
            pages = f"{main}+{extra}" if extra else str(main)
            name = f"{config.block_h}x{config.block_n}/pages {pages}/{'part' if partial else 'whole'}"
            specs.append(
                CompileSpec(
                    name=f"sparse_mla/{name}/{align}B/{index}",
                    module="kernels.sparse_mla",
                    function="sparse_mla_kernel",
                    signature=signature(index, partial),
                    constexprs=constexprs(
                        DSV4,
                        config,
                        main_page_size=main,
                        extra_page_size=extra,
                        has_main_lengths=extra is not None,
                        has_extra_lengths=extra is not None,
                        has_sink=plain,
                        has_lse=plain,
                        partial=partial,
                        align=align,
                        by_bits=by_bits,
                    ),
                    num_warps=config.num_warps,
                    num_stages=config.num_stages,
                    aligned=("q", "out", "q_t", "q_h", "out_t", "out_h")
                    + (("main_pool", "extra_pool") if align == 16 else ()),
                    # Byte by byte, addresses take more registers than there are; no engine has such a pool.
                    spill_bytes=0 if align == 16 else 1024,  # Triton 3.6 spills 696, 3.9 spills 168
                    capabilities=capabilities,
                )
            )
    return tuple(specs)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Every configuration that capability 12.x reaches."""
    return specs_of(SM120_CONFIGS, (120, 121))
