"""Sparse MLA attention over paged fp8 caches: one pass over K for a block of heads, split over the entries.

MLA has one KV head and its K and V are the same rows, so a program reads each tile of entries once for all
of its heads: NoPE codes and RoPE values are gathered, dequantised in registers, and used for the scores and
for the output alike. The softmax is online, in powers of two. Main and extra cache are one list of tiles:
first the tiles that hold the counted columns of the main row, then those of the extra row.

``mla_tiles`` has the device functions that this kernel shares with that of ``staged_mla``.
"""

# mypy: disable-error-code="assignment"
# (kernels build tuples of tensors piece by piece)

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..layout import DSV4, PageLayout
from .mla_tiles import (
    SCAN_FROM,
    finish,
    load_key,
    load_queries,
    scale_bytes,
    tile_of_row,
    tiles_of_row,
    weigh,
    zeros,
)
from .runtime import tl, triton
from .spec import CompileSpec

__all__ = [
    "ALIGNMENTS",
    "CONFIGS",
    "NOT_SPECIALISED",
    "SCAN_FROM",
    "SM120_CONFIGS",
    "Config",
    "compile_specs",
    "constexprs",
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

_NEVER = tl.constexpr(float("-inf"))


@dataclass(frozen=True)
class Config:
    """One launch configuration: ``block_h`` heads by tiles of ``block_n`` entries.

    A row of K is taken in pieces of ``widths`` dimensions, each with dot products of its own.
    ``residents`` is how many programs share a multiprocessor. Times rank configurations, in nanoseconds on an
    H200: ``tile_ns`` of one tile, ``busy_ns`` the same where more than half of the GPU's places for programs
    are taken, ``start_ns`` what a program costs besides.
    ``staged``: by the two launches of ``staged_mla``.
    """

    block_h: int
    block_n: int
    widths: tuple[int, ...]
    num_warps: int
    num_stages: int
    residents: int
    tile_ns: int
    busy_ns: int
    start_ns: int
    staged: bool = False


SM120_CONFIGS: tuple[Config, ...] = (
    Config(16, 32, (64,) * 8, 4, 5, residents=1, tile_ns=2160, busy_ns=2160, start_ns=7800),
    Config(32, 32, (64,) * 8, 8, 3, residents=1, tile_ns=3600, busy_ns=3900, start_ns=8000),
)
"""Within the 101,376 bytes of shared memory of SM120; also what any GPU but Hopper gets."""

CONFIGS: dict[int, tuple[Config, ...]] = {
    9: (
        Config(16, 32, (64,) * 8, 4, 5, residents=2, tile_ns=2160, busy_ns=3000, start_ns=7800),
        Config(64, 64, (64,) * 8, 8, 4, residents=1, tile_ns=6800, busy_ns=8200, start_ns=12000),
        Config(64, 64, (512,), 8, 2, residents=1, tile_ns=2700, busy_ns=4100, start_ns=12000, staged=True),
    ),
}
"""By major capability, where it is not ``SM120_CONFIGS``."""


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
    begin = (split.to(tl.int64) * tiles // splits).to(tl.int32)
    end = ((split.to(tl.int64) + 1) * tiles // splits).to(tl.int32)
    if PARTIAL:  # noqa: SIM102 - a compile-time condition, then one at run time
        if begin == end:
            tl.store(lse + (row * splits + split) * heads + head, _NEVER, mask=in_heads)
            return

    tl.static_assert(BLOCK_N <= 64)  # the lanes of a tile are the bits of one word
    bit = tl.arange(0, BLOCK_N).to(tl.int64)
    one = tl.full([BLOCK_N], 1, tl.int64)
    queries = load_queries(q + row * q_t + head * q_h, in_heads, FIRSTS, WIDTHS)
    sums = ()
    for j in tl.static_range(len(WIDTHS)):
        sums += (zeros(BLOCK_H, WIDTHS[j]),)
    peak = tl.full([BLOCK_H], _NEVER, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)

    for tile in range(begin, end):
        pool, record, footer, counted = tile_of_row(
            tile,
            0,
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
            BLOCK_N,
        )

        scales = scale_bytes(pool, footer, counted, NOPE // TILE, ALIGN)
        keys = ()
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for j in tl.static_range(len(WIDTHS)):
            key = load_key(pool, record, scales, counted, FIRSTS[j], WIDTHS[j], TILE, NOPE, ALIGN, BY_BITS)
            scores = tl.dot(queries[j], tl.trans(key), scores)
            keys += (key,)

        # Which lanes count, as one word: it reaches the layout of the scores without reading indices again.
        word = tl.sum(tl.where(counted, one << bit, 0), axis=0)
        peak, total, sums = weigh(
            scores, ((word >> bit) & 1) != 0, keys, peak, total, sums, scale, len(WIDTHS)
        )

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


def interpreted_config(heads: int) -> Config:
    """For the interpreter, which pays by the operation, whatever its size.

    From 16 heads on it takes the two launches, so that both ways are seen there.
    """
    block = max(16, min(64, triton.next_power_of_2(heads)))
    return Config(block, 64, (512,), 4, 1, 1, tile_ns=1, busy_ns=1, start_ns=1, staged=heads >= 16)


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
