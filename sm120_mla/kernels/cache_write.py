"""Quantise K rows and scatter them into pages, in one launch.

Every conversion is integer arithmetic on bf16 bits, so that the interpreter, whose casts to e4m3 and bf16
are wrong, and any GPU, whatever its compiler fuses or flushes, write the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LayoutError
from ..layout import DSV4, LAYOUTS, PageGeometry, PageLayout
from .runtime import INTERPRETED, tl, triton
from .spec import CompileSpec

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_FLOOR_BYTE",
    "MIN_FLOOR_BYTE",
    "arguments",
    "compile_specs",
    "constexprs",
    "grid",
    "write_kernel",
]

MIN_FLOOR_BYTE, MAX_FLOOR_BYTE = 11, 247
"""What a recipe's smallest scale byte may be: from 11 on, every subnormal bf16 rounds to 0."""

# One token is 1 KiB to read: a program of one warp has it in flight at once.
TOKENS = 64 if INTERPRETED else 1
NUM_WARPS = 1

_NOT_SPECIALISED = ("rows", "tokens", "dummy", "min_byte", "slot_stride")


@triton.jit(do_not_specialize=_NOT_SPECIALISED, do_not_specialize_on_alignment=["slots"])
def write_kernel(
    k,  # bf16 [rows, head_dim]
    slots,  # int32 or int64 [rows]
    cache,  # uint8, page 0
    rows,
    tokens,  # pages * page_size
    dummy,  # slot that gets a zero token whatever its rows hold; negative: none
    min_byte,
    k_stride,  # elements
    slot_stride,  # elements
    page_stride,  # bytes
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # elements that share a scale
    TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr,  # power of two >= TILES and >= SCALE_SLOTS
    NOPE_START: tl.constexpr,  # byte of the field of token 0 in its page, and from token to token
    NOPE_RECORD: tl.constexpr,
    SCALE_START: tl.constexpr,
    SCALE_RECORD: tl.constexpr,
    SCALE_SLOTS: tl.constexpr,  # scales, and the pad behind them
    SCALE_BYTES: tl.constexpr,  # 1: UE8M0; 4: fp32
    ROPE_START: tl.constexpr,
    ROPE_RECORD: tl.constexpr,
    ROPE_BYTES: tl.constexpr,  # 0: none
    TOKENS: tl.constexpr,
):
    """Grid ``(ceil(rows / TOKENS),)``: a program writes whole tokens, every byte of them once."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_rows = row < rows
    slot = tl.load(slots + row * slot_stride, mask=in_rows, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < tokens)
    wanted = live & (slot != dummy)
    slot = tl.where(live, slot, 0)
    page = cache + (slot // PAGE_SIZE) * page_stride
    within = slot % PAGE_SIZE
    source = k.to(tl.pointer_type(tl.int16), bitcast=True) + row * k_stride

    tile = tl.arange(0, TILES_BLOCK)
    lane = tl.arange(0, TILE)
    column = tile[None, :, None] * TILE + lane[None, None, :]
    inside = tile[None, :, None] < TILES
    # Loaded for every row, not only wanted ones, so as not to wait for the slot.
    bits = tl.load(source[:, None, None] + column, mask=in_rows[:, None, None] & inside, other=0).to(tl.int32)
    bits = tl.where(wanted[:, None, None], bits, 0)
    magnitude = bits & 0x7FFF  # orders as |x| does, NaN and inf above all
    largest = tl.max(magnitude, axis=2)
    broken = largest >= 0x7F80
    # As 448 is 1.75 * 2^8, the least power of two >= largest / 448 has this exponent, biased.
    byte = (largest >> 7) - 8 + ((largest & 0x7F) > 0x60).to(tl.int32)
    byte = tl.maximum(byte, min_byte)

    # |x| / scale = significand * 2^(power - 7). It is at most 448, so no code has to saturate.
    # Zero and subnormals are taken for values below 2^-126, which round to 0 under any scale allowed.
    significand = (magnitude & 0x7F) + 0x80
    power = (magnitude >> 7) - byte[:, :, None]
    target = tl.maximum(power, -6)  # e4m3's exponent, with a quantum of 2^(target - 3)
    shift = tl.minimum(target - power + 4, 16)  # a significand has 8 bits: from 10 on nothing is left
    half_less = (1 << (shift - 1)) - 1
    quanta = (significand + half_less + ((significand >> shift) & 1)) >> shift
    # A carry past 15 quanta lands in the exponent field, as it should.
    code = ((bits >> 8) & 0x80) | ((target + 6) * 8 + quanta)
    code = tl.where(broken[:, :, None], 0x7F, code)
    nope = page + (within * NOPE_RECORD + NOPE_START)
    tl.store(nope[:, None, None] + column, code.to(tl.uint8), mask=live[:, None, None] & inside)

    scales = page + (within * SCALE_RECORD + SCALE_START)
    scale = tl.where(broken, 0xFF, byte)
    if SCALE_BYTES == 1:
        scale = tl.where(tile[None, :] < TILES, scale, 0)
        mask = live[:, None] & (tile[None, :] < SCALE_SLOTS)
        tl.store(scales[:, None] + tile[None, :], scale.to(tl.uint8), mask=mask)
    else:
        part = tl.arange(0, SCALE_BYTES)[None, None, :]
        word = tl.where(broken, 0x7FC00000, byte << 23)[:, :, None]
        at = scales[:, None, None] + tile[None, :, None] * SCALE_BYTES + part
        mask = live[:, None, None] & inside & (part < SCALE_BYTES)
        tl.store(at, ((word >> (part * 8)) & 0xFF).to(tl.uint8), mask=mask)

    if ROPE_BYTES > 0:
        at = tl.arange(0, ROPE_BYTES)[None, :]
        values = (source + TILES * TILE).to(tl.pointer_type(tl.uint8), bitcast=True)
        moved = tl.load(values[:, None] + at, mask=in_rows[:, None], other=0)
        moved = tl.where(wanted[:, None], moved, 0)
        rope = page + (within * ROPE_RECORD + ROPE_START)
        tl.store(rope[:, None] + at, moved, mask=live[:, None])


def constexprs(layout: PageLayout, page_size: int) -> dict[str, int]:
    """Compile-time arguments of ``write_kernel``; raises ``LayoutError`` for a layout it cannot write."""
    fields = {field.name: field for field in layout.fields}
    nope, scales = fields.get("nope"), fields.get("scales")
    rope, pad = fields.get("rope"), fields.get("scale_pad")
    if nope is None or scales is None or set(fields) - {"nope", "scales", "rope", "scale_pad"}:
        raise _unwritable(
            layout, "fields", list(fields), "nope and scales, with rope and scale_pad or without"
        )
    if (nope.dtype, nope.count) != ("e4m3fn", scales.count * layout.tile) or not _power_of_two(layout.tile):
        raise _unwritable(layout, "nope", nope, f"e4m3fn, {scales.count} tiles of a power of two of elements")
    if scales.dtype not in ("ue8m0", "fp32"):
        raise _unwritable(layout, "scales", scales, "ue8m0 or fp32")
    if rope is not None and (rope.dtype != "bf16" or not _power_of_two(rope.count)):
        raise _unwritable(layout, "rope", rope, "a power of two of bf16")
    if nope.count + (rope.count if rope else 0) != layout.head_dim:
        raise _unwritable(layout, "head_dim", layout.head_dim, "the elements of nope and rope")
    if pad is not None and (
        (pad.region, pad.offset) != (scales.region, scales.offset + scales.nbytes)
        or scales.item_bytes != 1
        or pad.dtype != "pad"
    ):
        raise _unwritable(layout, "scale_pad", pad, "a pad right behind scales of one byte")

    def place(name: str) -> tuple[int, int]:
        record = layout.token_bytes if fields[name].region == "token" else layout.footer_bytes
        return layout.offset(name, 0, page_size), record

    slots = scales.count + (pad.count if pad else 0)
    nope_start, nope_record = place("nope")
    scale_start, scale_record = place("scales")
    rope_start, rope_record = place("rope") if rope else (0, 0)
    return {
        "PAGE_SIZE": page_size,
        "TILE": layout.tile,
        "TILES": scales.count,
        "TILES_BLOCK": triton.next_power_of_2(slots),
        "NOPE_START": nope_start,
        "NOPE_RECORD": nope_record,
        "SCALE_START": scale_start,
        "SCALE_RECORD": scale_record,
        "SCALE_SLOTS": slots,
        "SCALE_BYTES": scales.item_bytes,
        "ROPE_START": rope_start,
        "ROPE_RECORD": rope_record,
        "ROPE_BYTES": rope.nbytes if rope else 0,
        "TOKENS": TOKENS,
    }


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _unwritable(layout: PageLayout, part: str, value: object, expected: str) -> LayoutError:
    names = ", ".join(row.name for row in LAYOUTS)
    return LayoutError(
        f"layout.{part} ({layout.name})",
        value,
        expected,
        f"This kernel writes {names} and layouts built as they are; use codec.pack for another.",
    )


def grid(rows: int) -> tuple[int]:
    """Programs of one launch."""
    return (triton.cdiv(rows, TOKENS),)


def arguments(
    k: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    geometry: PageGeometry,
    *,
    min_byte: int,
    dummy_slot: int | None,
) -> dict[str, Any]:
    """Everything a launch is given, by name. ``cache`` is uint8 and starts at page 0 of ``geometry``."""
    rows = k.shape[0]
    return {
        "k": k,
        "slots": slots,
        "cache": cache,
        "rows": rows,
        "tokens": geometry.tokens,
        "dummy": -1 if dummy_slot is None else dummy_slot,
        "min_byte": min_byte,
        # torch gives the stride of a dimension of one any value; a fixed one makes no further binary.
        "k_stride": k.stride(0) if rows > 1 else geometry.layout.head_dim,
        "slot_stride": slots.stride(0),
        "page_stride": geometry.page_stride,
        **constexprs(geometry.layout, geometry.page_size),
        "num_warps": NUM_WARPS,
    }


def compile_specs() -> tuple[CompileSpec, ...]:
    """DSv4 at the page sizes in the field with both index types; the other layouts at 64; aligned and not."""
    chosen = [(DSV4, page_size, index) for page_size in (64, 256, 2) for index in ("i64", "i32")]
    chosen += [(layout, 64, "i64") for layout in LAYOUTS if layout is not DSV4]
    specs = []
    for layout, page_size, index in chosen:
        for aligned in (True, False):
            specs.append(
                CompileSpec(
                    name=f"cache_write/{layout.name}/page{page_size}/{index}/{'16B' if aligned else '1B'}",
                    module="kernels.cache_write",
                    function="write_kernel",
                    signature={"k": "*bf16", "slots": f"*{index}", "cache": "*u8"}
                    | dict.fromkeys((*_NOT_SPECIALISED, "k_stride", "page_stride"), "i32"),
                    constexprs={**constexprs(layout, page_size), "TOKENS": 1},
                    num_warps=NUM_WARPS,
                    aligned=("k", "cache", "k_stride", "page_stride") if aligned else (),
                    shared_bytes=4096,
                )
            )
    return tuple(specs)
