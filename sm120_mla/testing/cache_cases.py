"""What the cache writer is judged by: K rows worth writing, and what a cache must hold afterwards."""

from __future__ import annotations

import torch

from ..codec import DEEPSEEK, Recipe, quantise, view_field
from ..errors import ArgumentError
from ..layout import PageLayout

__all__ = ["after_write", "differences", "k_rows", "sweep_rows"]


def k_rows(rows: int, layout: PageLayout, seed: int = 0) -> torch.Tensor:
    """bf16 ``[rows, head_dim]`` on the CPU, each tile of a magnitude between 2^-40 and 2^20.

    About one tile in four is instead zero (of either sign), subnormal, negative only, or has 448 times a
    power of two as its largest magnitude.
    """
    gen = torch.Generator().manual_seed(seed)
    parts = -(-layout.head_dim // layout.tile)  # the last one may be part of a tile
    shape = (rows, parts, layout.tile)

    def draw(low: int, high: int, size: tuple[int, ...] = (rows, parts, 1)) -> torch.Tensor:
        return torch.randint(low, high, size, generator=gen)

    power = torch.exp2(draw(-40, 21).float())
    normal = (torch.randn(shape, generator=gen) * power).to(torch.bfloat16)
    signs = draw(0, 2, shape)
    zero = (signs << 15).to(torch.int16).view(torch.bfloat16)
    subnormal = ((signs << 15) + draw(0, 0x80, shape)).to(torch.int16).view(torch.bfloat16)
    exact = normal.clamp(-448 * power, 448 * power).to(torch.bfloat16)
    exact[:, :, 3] = (448 * power * (1 - 2 * signs[:, :, :1]))[:, :, 0].to(torch.bfloat16)
    kind = draw(0, 16)
    for n, values in enumerate((zero, subnormal, -normal.abs(), exact)):
        normal = torch.where(kind == n, values, normal)
    return normal.flatten(1)[:, : layout.head_dim].contiguous()


def sweep_rows(layout: PageLayout, largest: float) -> torch.Tensor:
    """bf16 rows whose tiles have ``largest`` first, and behind it, over all tiles, every bf16 up to it.

    The RoPE part, where there is one, is zero.
    """
    top = int(torch.tensor(largest, dtype=torch.bfloat16).view(torch.int16))
    magnitudes = torch.arange(top + 1)
    bits = torch.cat((magnitudes, magnitudes + 0x8000))
    tiles = layout.field("scales").count
    each = tiles * (layout.tile - 1)
    rows = -(-len(bits) // each)
    padded = torch.zeros(rows * each, dtype=torch.int64)
    padded[: len(bits)] = bits
    k = torch.zeros((rows, layout.head_dim), dtype=torch.int16)
    view = k[:, : tiles * layout.tile].unflatten(1, (tiles, layout.tile))
    view[:, :, 0] = top
    view[:, :, 1:] = padded.view(rows, tiles, layout.tile - 1).to(torch.int16)
    return k.view(torch.bfloat16)


def after_write(
    before: torch.Tensor,
    k: torch.Tensor,
    slots: torch.Tensor,
    layout: PageLayout,
    page_size: int,
    recipe: Recipe = DEEPSEEK,
    dummy_slot: int | None = None,
) -> torch.Tensor:
    """A copy on the CPU of the 2-D pool ``before``, as ``write_cache`` must leave it.

    By the codec alone. Slots may be anything; two rows with one slot, other than ``dummy_slot``, have no
    defined result and raise ``ArgumentError``. A tile that is not finite is as ``write_cache`` states.
    """
    after, k = before.cpu().clone(), k.cpu()
    slots = slots.cpu().to(torch.int64)
    written = (slots >= 0) & (slots < after.shape[0] * page_size)
    k, slots = k[written].clone(), slots[written]
    if dummy_slot is not None:
        k[slots == dummy_slot] = 0
    real = slots[slots != dummy_slot] if dummy_slot is not None else slots
    if len(real.unique()) != len(real):
        raise ArgumentError("slots", "duplicates", "a slot of its own for each row", "Judge those apart.")

    nope = layout.field("nope").count
    rope = k[:, nope:].contiguous().view(torch.int16)
    tiles = k[:, :nope].unflatten(1, (-1, layout.tile))
    broken = ~torch.isfinite(tiles).all(-1)
    k = torch.cat((tiles.masked_fill(broken[..., None], 0).flatten(1), k[:, nope:] * 0), 1).nan_to_num(0)
    tokens = quantise(k, layout, recipe)
    codes = torch.where(broken[..., None], 0x7F, tokens.nope.unflatten(1, (-1, layout.tile))).flatten(1)
    if layout.field("scales").dtype == "fp32":
        scales = torch.where(broken, 0x7FC00000, tokens.scales.view(torch.int32)).to(torch.int32)
    else:
        scales = torch.where(broken, 0xFF, tokens.scales).to(torch.uint8)
    values = {"nope": codes.to(torch.uint8), "scales": scales, "rope": rope}
    page, token = slots // page_size, slots % page_size
    for field in layout.fields:
        view = view_field(after, layout, field.name, page_size)
        value = values.get(field.name)
        view[page, token] = (
            torch.zeros((), dtype=torch.uint8) if value is None else value.contiguous().view(torch.uint8)
        )
    return after


def differences(got: torch.Tensor, want: torch.Tensor, layout: PageLayout, page_size: int) -> list[str]:
    """The first bytes of two 2-D uint8 pools that differ, each by page, token and field."""
    found = []
    for page, byte in (got.cpu() != want.cpu()).nonzero()[:8].tolist():
        where = layout.locate(byte, page_size)
        found.append(f"page {page}, {where}: {int(got[page, byte]):#04x}, want {int(want[page, byte]):#04x}")
    return found
