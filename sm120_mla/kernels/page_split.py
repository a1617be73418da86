"""Split pages of any multiple of 64 tokens into 64-token pages, in one launch, whatever the pool's size.

Three kernels. ``full_kernel`` copies every sub-page. ``owned_kernel`` serves index sets that one program
can hold: every program reads all indices and copies the sub-pages it owns (sub-page number modulo the
grid), so nothing is shared, claimed or remembered. ``claimed_kernel`` serves larger sets: each program
reads a chunk and claims sub-pages one by one through 64-bit marks, copying those it was first to claim.

A mark holds the epoch of the launch that last claimed its sub-page. The epoch comes from a ticket that
every program of a launch adds to: the programs of one launch together always add ``1 << EPOCH_SHIFT``, so
``ticket >> EPOCH_SHIFT`` is one number during a launch and the next one in the next launch, also when a
CUDA graph replays it. Nothing is cleared between calls, 2**39 launches pass before an epoch repeats, and
only equality is asked of it. Launches that share marks must run in order (one stream).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import DSV4, LAYOUTS, SUB_PAGE, PageGeometry
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

__all__ = [
    "EPOCH_SHIFT",
    "LANE_DTYPES",
    "MARKS_HEADER",
    "OWNED_ENTRIES",
    "SplitConfig",
    "claimed_config",
    "claimed_constexprs",
    "claimed_kernel",
    "compile_specs",
    "full_config",
    "full_constexprs",
    "full_kernel",
    "owned_config",
    "owned_constexprs",
    "owned_kernel",
]

EPOCH_SHIFT = 24
"""A launch has fewer than ``2**EPOCH_SHIFT`` programs."""

MARKS_HEADER = 16
"""Slots of the mark buffer before the first mark: the ticket has a cache line of its own."""

LANE_DTYPES = {16: "int64", 8: "int64", 4: "int32", 2: "int16", 1: "uint8"}
"""torch dtype by which bytes are moved, for each lane width in bytes; 16 is a pair of int64."""


OWNED_ENTRIES = 1024
"""Largest padded index set, in entries, that ``owned_kernel`` takes."""


@dataclass(frozen=True)
class SplitConfig:
    """Launch configuration. ``pieces`` programs share one sub-page; ``block`` is the bytes one step moves.

    ``owners`` (a power of two) is the grid of ``owned_kernel``; ``chunk`` the index columns of a program of
    ``claimed_kernel``.
    """

    block: int
    num_warps: int
    pieces: int = 1
    owners: int = 1
    chunk: int = 0


@triton.jit
def _copy_sub_page(
    src,  # source pool, lanes
    dst,  # split pool, lanes
    out,  # int64: which sub-page of the whole pool
    piece,
    page_stride,  # in units of UNIT lanes
    UNIT: tl.constexpr,
    RATIO: tl.constexpr,
    DATA: tl.constexpr,  # lanes of 64 token records
    FOOTER: tl.constexpr,  # lanes of 64 footer records
    FOOTER_BLOCK: tl.constexpr,
    DST_STRIDE: tl.constexpr,  # lanes
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,  # lanes
):
    """Copy one piece of a sub-page: its share of the token records, and with the last the footer."""
    page = out // RATIO
    sub = out % RATIO
    base = page * page_stride * UNIT
    PART: tl.constexpr = DATA // PIECES
    data = src + (base + sub * DATA + piece * PART)
    target = dst + out * DST_STRIDE
    lane = tl.arange(0, BLOCK)
    if FOOTER > 0:
        foot = tl.arange(0, FOOTER_BLOCK)
        mine = foot < tl.where(piece == PIECES - 1, FOOTER, 0)
        footer = src + (base + RATIO * DATA + sub * FOOTER)
        scales = tl.load(footer + foot, mask=mine)
    for start in tl.static_range(0, PART, BLOCK):
        mask = lane < PART - start
        moved = tl.load(data + start + lane, mask=mask)
        tl.store(target + piece * PART + start + lane, moved, mask=mask)
    if FOOTER > 0:
        tl.store(target + DATA + foot, scales, mask=mine)


@triton.jit
def full_kernel(
    src,
    dst,
    page_stride,
    UNIT: tl.constexpr,
    RATIO: tl.constexpr,
    DATA: tl.constexpr,
    FOOTER: tl.constexpr,
    FOOTER_BLOCK: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(sub_pages * PIECES,)``: one program copies one piece of one sub-page."""
    program = tl.program_id(0).to(tl.int64)
    _copy_sub_page(
        src,
        dst,
        program // PIECES,
        program % PIECES,
        page_stride,
        UNIT,
        RATIO,
        DATA,
        FOOTER,
        FOOTER_BLOCK,
        DST_STRIDE,
        PIECES,
        BLOCK,
    )


@triton.jit(do_not_specialize=["tokens", "rows", "width", "length_stride"])
def owned_kernel(
    src,
    dst,
    indices,  # int32 or int64 [rows, width]
    lengths,  # int32 or int64 [rows]; unused without HAS_LENGTHS
    tokens,  # pages * page_size
    width,
    row_stride,  # elements
    length_stride,  # elements
    page_stride,
    rows,
    HAS_LENGTHS: tl.constexpr,
    UNIT: tl.constexpr,
    RATIO: tl.constexpr,
    DATA: tl.constexpr,
    FOOTER: tl.constexpr,
    FOOTER_BLOCK: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB_TOKENS: tl.constexpr,
    OWNERS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= rows
    WIDTH: tl.constexpr,  # power of two >= width
):
    """Grid ``(OWNERS * PIECES,)``: a program copies its piece of every touched sub-page it owns."""
    program = tl.program_id(0)
    owner = program // PIECES
    piece = program % PIECES
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < width)
    at = indices + row.to(tl.int64) * row_stride + column
    index = tl.load(at, mask=inside, other=-1).to(tl.int64)
    counted = inside & (index >= 0) & (index < tokens)
    if HAS_LENGTHS:
        at_length = lengths + row.to(tl.int64) * length_stride
        counted &= column < tl.load(at_length, mask=row < rows, other=0).to(tl.int64)
    sub_page = (tl.where(counted, index, 0) // SUB_TOKENS).to(tl.int32)
    todo = tl.where(counted & ((sub_page & (OWNERS - 1)) == owner), sub_page, -1)
    out = tl.max(todo, axis=None)
    while out >= 0:
        _copy_sub_page(
            src,
            dst,
            out.to(tl.int64),
            piece,
            page_stride,
            UNIT,
            RATIO,
            DATA,
            FOOTER,
            FOOTER_BLOCK,
            DST_STRIDE,
            PIECES,
            BLOCK,
        )
        todo = tl.where(todo == out, -1, todo)
        out = tl.max(todo, axis=None)


@triton.jit(do_not_specialize=["tokens", "width", "row_stride", "length_stride"])
def claimed_kernel(
    src,
    dst,
    marks,  # int64 [HEADER + sub_pages]; slot 0 is the ticket
    indices,  # int32 or int64 [rows, width]
    lengths,  # int32 or int64 [rows]; unused without HAS_LENGTHS
    tokens,  # pages * page_size
    width,
    row_stride,  # elements
    length_stride,  # elements
    page_stride,
    HAS_LENGTHS: tl.constexpr,
    UNIT: tl.constexpr,
    RATIO: tl.constexpr,
    DATA: tl.constexpr,
    FOOTER: tl.constexpr,
    FOOTER_BLOCK: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    HEADER: tl.constexpr,
):
    """Grid ``(rows, ceil(width / CHUNK))``: a program claims and copies what its chunk touches."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    # The first program makes up the difference to one whole epoch.
    share = tl.where((row == 0) & (part == 0), (tl.full((), 1, tl.int64) << SHIFT) - programs + 1, 1)
    # Fresh marks hold 0, an epoch no launch has.
    epoch = (tl.atomic_add(marks, share, sem="relaxed") >> SHIFT) + 1

    column = part * CHUNK + tl.arange(0, CHUNK)
    at = indices + row * row_stride + column
    index = tl.load(at, mask=column < width, other=-1).to(tl.int64)
    # The left neighbour, to drop most duplicates before they reach the marks.
    left = tl.load(at - 1, mask=(column < width) & (column % CHUNK > 0), other=-1).to(tl.int64)
    limit = tl.full((), 0, tl.int64) + width
    if HAS_LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + row * length_stride).to(tl.int64))
    counted = (index >= 0) & (index < tokens) & (column < limit)
    sub_page = index // SUB_TOKENS
    repeated = (left >= 0) & (left // SUB_TOKENS == sub_page)
    # Claimed one at a time, in an order of the program's own, so that programs share the work.
    order = (row * tl.num_programs(1) + part) * 40503 & 0xFFFF
    todo = tl.where(counted & (repeated == 0), sub_page ^ order, -1)
    next_one = tl.max(todo, axis=0)
    while next_one >= 0:
        out = next_one ^ order
        if tl.atomic_xchg(marks + HEADER + out, epoch, sem="relaxed") != epoch:
            _copy_sub_page(
                src,
                dst,
                out,
                0,
                page_stride,
                UNIT,
                RATIO,
                DATA,
                FOOTER,
                FOOTER_BLOCK,
                DST_STRIDE,
                PIECES,
                BLOCK,
            )
        todo = tl.where(todo == next_one, -1, todo)
        # What others have claimed meanwhile need not be asked for. An atomic read, because a plain one is
        # made by each warp for itself, and warps that see different marks part ways.
        at_mark = marks + HEADER + tl.where(todo >= 0, todo ^ order, 0)
        taken = tl.atomic_add(at_mark, 0, mask=todo >= 0, sem="relaxed")
        todo = tl.where(taken == epoch, -1, todo)
        next_one = tl.max(todo, axis=0)


def full_config(lane: int, interpreted: bool = INTERPRETED) -> SplitConfig:
    """Launch configuration of ``full_kernel`` for ``lane``-byte loads."""
    if interpreted:  # one program costs milliseconds there, however little it moves
        return SplitConfig(block=65536, num_warps=4)
    return SplitConfig(block=min(16384, 4096 * lane), num_warps=16, pieces=4)


def owned_config(lane: int, interpreted: bool = INTERPRETED) -> SplitConfig:
    """Launch configuration of ``owned_kernel`` for ``lane``-byte loads."""
    if interpreted:
        return SplitConfig(block=65536, num_warps=4, owners=4)
    return SplitConfig(block=min(16384, 4096 * lane), num_warps=8, pieces=4, owners=64)


def claimed_config(lane: int, interpreted: bool = INTERPRETED) -> SplitConfig:
    """Launch configuration of ``claimed_kernel`` for ``lane``-byte loads."""
    if interpreted:
        return SplitConfig(block=65536, num_warps=4, chunk=128)
    return SplitConfig(block=min(65536, 4096 * lane), num_warps=8, chunk=16)


def full_constexprs(
    geometry: PageGeometry, lane: int, target_stride: int, config: SplitConfig
) -> dict[str, object]:
    """The compile-time arguments all kernels share, in lanes; so is ``target_stride``."""
    layout, item = geometry.layout, min(lane, 8)
    footer = SUB_PAGE * layout.footer_bytes // item
    return {
        "UNIT": lane // item,
        "RATIO": geometry.sub_pages_per_page,
        "DATA": SUB_PAGE * layout.token_bytes // item,
        "FOOTER": footer,
        "FOOTER_BLOCK": triton.next_power_of_2(max(footer, 1)),
        "DST_STRIDE": target_stride,
        "PIECES": config.pieces,
        "BLOCK": config.block // item,
    }


def owned_constexprs(
    geometry: PageGeometry,
    lane: int,
    target_stride: int,
    config: SplitConfig,
    has_lengths: bool,
    rows: int,
    width: int,
) -> dict[str, object]:
    """Compile-time arguments of ``owned_kernel``."""
    return full_constexprs(geometry, lane, target_stride, config) | {
        "HAS_LENGTHS": has_lengths,
        "SUB_TOKENS": SUB_PAGE,
        "OWNERS": config.owners,
        "ROWS": triton.next_power_of_2(rows),
        "WIDTH": triton.next_power_of_2(width),
    }


def claimed_constexprs(
    geometry: PageGeometry, lane: int, target_stride: int, config: SplitConfig, has_lengths: bool
) -> dict[str, object]:
    """Compile-time arguments of ``claimed_kernel``."""
    return full_constexprs(geometry, lane, target_stride, config) | {
        "HAS_LENGTHS": has_lengths,
        "SUB_TOKENS": SUB_PAGE,
        "CHUNK": config.chunk,
        "SHIFT": EPOCH_SHIFT,
        "HEADER": MARKS_HEADER,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """Every lane width for DSv4, the widest for the other layouts, with both index types."""
    specs = []
    for layout in LAYOUTS:
        for lane in LANE_DTYPES if layout is DSV4 else (16,):
            specs += _specs_of(PageGeometry(layout, 256, 2, layout.default_stride(256), 0, "uint8"), lane)
    return tuple(specs)


def _specs_of(geometry: PageGeometry, lane: int) -> list[CompileSpec]:
    pointer = "*" + {"int64": "i64", "int32": "i32", "int16": "i16", "uint8": "u8"}[LANE_DTYPES[lane]]
    row = geometry.layout.default_stride(SUB_PAGE) // min(lane, 8)
    aligned = ("src", "dst") if lane == 16 else ("dst",)
    numbers = dict.fromkeys(("tokens", "width", "row_stride", "length_stride", "page_stride"), "i64")
    tag = f"{geometry.layout.name}/{lane}B"

    def spec(
        name: str, function: str, signature: dict[str, str], constexprs: dict[str, object], warps: int
    ) -> CompileSpec:
        return CompileSpec(
            name=f"page_split.{name}",
            module="kernels.page_split",
            function=function,
            signature={"src": pointer, "dst": pointer, **signature},
            constexprs=constexprs,
            num_warps=warps,
            aligned=(*aligned, *(a for a in ("indices", "marks") if a in signature)),
            shared_bytes=4096,
        )

    full, claimed = full_config(lane, interpreted=False), claimed_config(lane, interpreted=False)
    specs = [
        spec(
            f"full/{tag}",
            "full_kernel",
            {"page_stride": "i64"},
            full_constexprs(geometry, lane, row, full),
            full.num_warps,
        )
    ]
    for index in ("i32", "i64"):
        inputs = {"indices": f"*{index}", "lengths": "*i32"}
        for rows, width in ((1, 128), (8, 128)):
            owned = owned_config(lane, interpreted=False)
            specs.append(
                spec(
                    f"owned/{tag}/{index}/{rows}x{width}",
                    "owned_kernel",
                    {**inputs, **numbers, "rows": "i64"},
                    owned_constexprs(geometry, lane, row, owned, True, rows, width),
                    owned.num_warps,
                )
            )
        specs.append(
            spec(
                f"claimed/{tag}/{index}",
                "claimed_kernel",
                {"marks": "*i64", **inputs, **numbers},
                claimed_constexprs(geometry, lane, row, claimed, True),
                claimed.num_warps,
            )
        )
    return specs
