"""Test equipment: what FlashInfer's SM120 kernels compute, in torch. No product module, and no yardstick.

Two arithmetics over one structure of tiles, masks and gathers: ``fp8`` rounds where the kernels round
(decode_dsv4_kernel.cuh:336-860, prefill_kernel.cuh:660-1640, common/fp8_quant.cuh at 0.6.18; merge.cuh and
prefill_mg.cuh at 0.7.4), the other keeps fp32. Both keep what a masked column reads and how it is masked,
so a caller that leaves slot 0 dirty, or gives a length over nothing but -1, gets what the hardware gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sm120_mla.codec import decode_e4m3
from sm120_mla.layout import DSV4

NOPE, ROPE, QUANT, TILE = 448, 64, 64, 64
LOG2E = 1.4426950408889634
EMPTY = -1e30


class WildGather(AssertionError):
    """An index that the kernel would follow out of the pool."""


@dataclass(frozen=True)
class Rules:
    """How one generation treats masked columns and empty rows."""

    slot_zero: bool
    sentinel: float
    sink_safe: bool


OLD = Rules(slot_zero=True, sentinel=EMPTY, sink_safe=False)
NEW = Rules(slot_zero=False, sentinel=-math.inf, sink_safe=True)


@dataclass(frozen=True)
class Section:
    """One cache uint8 ``[pages, P, 1, 584]`` with its rows; ``page_size`` is what the kernel divides by."""

    cache: torch.Tensor
    page_size: int
    indices: torch.Tensor
    lengths: torch.Tensor | None


@dataclass(frozen=True)
class _Tile:
    """64 columns of all rows: ``kept`` [T, 64], ``active`` [T]; values of what is gathered, masked or not."""

    kept: torch.Tensor
    active: torch.Tensor
    nope: torch.Tensor  # [T, 64, 7, 64], the fp8 values
    scales: torch.Tensor  # [T, 64, 7], as the scalar units see them: byte 0 is 0, byte 255 infinite
    mma_scales: torch.Tensor  # as the block-scaled MMA sees them: byte 0 is 2^-127, byte 255 NaN
    rope: torch.Tensor  # [T, 64, 64]
    value_rope: torch.Tensor


def attend(
    q: torch.Tensor,
    sections: list[Section],
    scale: float,
    sink: torch.Tensor | None,
    *,
    rules: Rules,
    prefill: bool,
    fp8: bool,
    bf16_qk: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out bf16 ``[T, H, 512]`` and LSE fp32 ``[T, H]``, base 2, with the sink, as the kernel writes them."""
    tiles = [
        _gather(section, start, rules, prefill)
        for section in sections
        for start in range(0, section.indices.shape[1], TILE)
    ]
    tiles = [tile for tile in tiles if tile is not None]
    query = _Query(q, fp8 and not bf16_qk)
    passes = _prefill if prefill else _decode
    out, total, top = passes(query, tiles, scale, rules, fp8, bf16_qk)
    return _fold(out, total, top, sink, rules, prefill)


def _gather(section: Section, start: int, rules: Rules, prefill: bool) -> _Tile | None:
    """One tile, or None where it is past the length of every row."""
    rows, width = section.indices.shape
    column = torch.arange(start, start + TILE)
    lengths = torch.full((rows,), width) if section.lengths is None else section.lengths.long()
    lengths = lengths.clamp(0, width)
    active = start < lengths
    if not bool(active.any()):
        return None
    if int(column[-1]) < width:
        index = section.indices[:, start : start + TILE].long()
    elif prefill and rules.slot_zero:
        raise WildGather("the prefill reads whole tiles of 64 columns, past the end of these rows")
    else:
        index = torch.full((rows, TILE), -1)
        index[:, : width - start] = section.indices[:, start:].long()
    within = column < lengths[:, None]
    kept = within & (index >= 0)
    pages = section.cache.shape[0]
    # The prefill of 0.6 gathers what stands past the length of a tile it reads; nothing else does.
    followed = kept | (index >= 0) & active[:, None] & prefill & rules.slot_zero
    wild = followed & (index >= pages * section.page_size)
    if bool(wild.any()):
        raise WildGather(f"index {int(index[wild][0])} of {pages} pages of {section.page_size} tokens")
    masked = ~followed
    if rules.slot_zero and pages == 0 and bool((masked & active[:, None]).any()):
        raise WildGather("a masked column reads slot 0 of a cache without pages")
    nope, rope, scale_bytes = _read(section, torch.where(followed, index, 0))
    value_rope = torch.where(masked[..., None], 0, rope) if rules.slot_zero and prefill else rope
    if not rules.slot_zero:  # a row of zeros
        nope, rope = nope.masked_fill(masked[..., None], 0), rope.masked_fill(masked[..., None], 0)
        value_rope = rope
    if not (rules.slot_zero and prefill):  # zero scales with it
        scale_bytes = scale_bytes.masked_fill(masked[..., None], 0)
    exponents = scale_bytes.float()
    mma = torch.exp2(exponents - 127).masked_fill(scale_bytes == 255, math.nan)
    scalar = (
        torch.exp2(exponents - 127).masked_fill(scale_bytes == 0, 0).masked_fill(scale_bytes == 255, math.inf)
    )
    return _Tile(
        kept=kept,
        active=active,
        nope=decode_e4m3(nope).float().unflatten(-1, (NOPE // QUANT, QUANT)),
        scales=scalar,
        mma_scales=mma,
        rope=rope.float(),
        value_rope=value_rope.float(),
    )


def _read(section: Section, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes at the addresses that the kernel computes from base, page stride and its page size."""
    cache, size = section.cache, section.page_size
    if cache.shape[0] == 0:
        empty = torch.zeros((*index.shape, NOPE), dtype=torch.uint8)
        return empty, torch.zeros((*index.shape, ROPE), dtype=torch.bfloat16), empty[..., :7]

    def records(offset: int, width: int) -> torch.Tensor:
        strides = (cache.stride(0), width, 1)
        at = cache.storage_offset() + offset
        view = torch.as_strided(cache, (cache.shape[0], size, width), strides, at)
        return view[index // size, index % size]

    data = records(0, DSV4.token_bytes)
    rope = data[..., NOPE:].contiguous().view(torch.bfloat16)
    return data[..., :NOPE], rope, records(size * DSV4.token_bytes, DSV4.footer_bytes)[..., :7]


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


class _Query:
    def __init__(self, q: torch.Tensor, quantised: bool) -> None:
        self.nope = q[..., :NOPE].float().unflatten(-1, (NOPE // QUANT, QUANT))
        self.rope = q[..., NOPE:].float()
        self.scales = torch.ones(self.nope.shape[:-1])
        if quantised:
            raw = self.nope.abs().amax(-1).clamp(min=1e-4) / 448.0
            self.scales = torch.exp2(torch.ceil(torch.log2(raw)))
            self.nope = _e4m3(self.nope / self.scales[..., None])

    def scores(self, tile: _Tile, scale: float, rules: Rules, bf16_qk: bool) -> torch.Tensor:
        """``[T, H, 64]`` in base 2, masked."""
        if bf16_qk:
            keys = (tile.nope * tile.scales[..., None]).bfloat16().float()
            product = torch.einsum("thbd,tcbd->thc", self.nope, keys)
        else:
            parts = torch.einsum("thbd,tcbd->thcb", self.nope, tile.nope)
            product = (parts * self.scales[:, :, None] * tile.mma_scales[:, None]).sum(-1)
        product = product + torch.einsum("thd,tcd->thc", self.rope, tile.rope)
        masked = ~tile.kept[:, None]
        if rules.slot_zero:
            return product.masked_fill(masked, EMPTY) * scale * LOG2E
        return (product * scale * LOG2E).masked_fill(masked, -math.inf)


def _weighted(tile: _Tile, p: torch.Tensor, fp8: bool) -> torch.Tensor:
    """``P V`` of one tile, ``[T, H, 512]``, P in the frame it comes in."""
    scaled = p[..., None] * tile.scales[:, None]  # [T, H, 64, 7]
    if fp8:
        unit = scaled.abs().amax(2, keepdim=True).clamp(min=1e-10) / 448.0
        scaled = _e4m3(scaled / unit)
        nope = torch.einsum("thcb,tcbd->thbd", scaled, tile.nope) * unit.squeeze(2)[..., None]
        rope = torch.einsum("thc,tcd->thd", p.bfloat16().float(), tile.value_rope)
    else:
        nope = torch.einsum("thcb,tcbd->thbd", scaled, tile.nope)
        rope = torch.einsum("thc,tcd->thd", p, tile.value_rope)
    return torch.cat([nope.flatten(-2), rope], -1)


def _decode(query: _Query, tiles: list[_Tile], scale: float, rules: Rules, fp8: bool, bf16_qk: bool) -> Any:
    """One split for each tile: a partial result in bf16 and its LSE, then the merge."""
    rows, heads = query.rope.shape[:2]
    partials, lses = [], []
    for tile in tiles:
        s = query.scores(tile, scale, rules, bf16_qk)
        top = s.amax(-1).clamp(min=EMPTY)
        p = torch.exp2(s - top[..., None])
        total = p.sum(-1)
        part = _weighted(tile, p, fp8) * torch.where(total > 0, 1 / total, 0)[..., None]
        partials.append(part.bfloat16().float() if fp8 else part)
        lse = torch.where(total > 0, torch.log2(total) + top, EMPTY)
        lses.append(torch.where(tile.active[:, None], lse, EMPTY))
    lse = torch.stack(lses) if lses else torch.full((0, rows, heads), EMPTY)
    top = lse.amax(0) if lses else torch.full((rows, heads), EMPTY)
    top = torch.where(top > -1e29, top, 0)
    used = lse > -1e29
    weight = torch.where(used, torch.exp2(lse - top), 0)
    out = torch.zeros((rows, heads, NOPE + ROPE))
    for part, one, takes in zip(partials, weight, used, strict=True):
        out += torch.where(takes[..., None], part * one[..., None], 0)
    # An empty row has no maximum of its own.
    return out, weight.sum(0), torch.where(used.any(0), top, EMPTY)


def _prefill(query: _Query, tiles: list[_Tile], scale: float, rules: Rules, fp8: bool, bf16_qk: bool) -> Any:
    """One pass over the tiles with a running maximum."""
    rows, heads = query.rope.shape[:2]
    top = torch.full((rows, heads), EMPTY)
    total = torch.zeros_like(top)
    out = torch.zeros((rows, heads, NOPE + ROPE))
    for tile in tiles:
        s = query.scores(tile, scale, rules, bf16_qk)
        new = torch.maximum(top, s.amax(-1))
        p, alpha = torch.exp2(s - new[..., None]), torch.exp2(top - new)
        takes = tile.active[:, None]
        out = torch.where(takes[..., None], out * alpha[..., None] + _weighted(tile, p, fp8), out)
        total = torch.where(takes, total * alpha + p.sum(-1), total)
        top = torch.where(takes, new, top)
    return out, total, top


def _fold(
    out: torch.Tensor,
    total: torch.Tensor,
    top: torch.Tensor,
    sink: torch.Tensor | None,
    rules: Rules,
    prefill: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    raw = torch.where(total > 0, torch.log2(total) + top, rules.sentinel)
    if sink is None:
        inverse, lse = torch.where(total > 0, 1 / total, 0), raw
    else:
        at = (sink * LOG2E).expand_as(raw)
        empty = total <= 0
        if rules.sink_safe:
            share = torch.sigmoid((raw - at) * math.log(2.0)).masked_fill(empty, 0)
            inverse = torch.where(total > 0, 1 / total, 0) * share
            lse = torch.where(empty, at, torch.logaddexp2(raw, at))
        else:
            frame = top if prefill else torch.where(top > -1e29, top, 0)
            whole = total + torch.exp2(at - frame)  # overflows where a sink is far above the logits
            inverse = torch.where(whole > 0, 1 / whole, 0)
            folded = torch.log2(whole) + frame
            if prefill:
                folded = torch.where(raw == EMPTY, at, raw + torch.log2(1 + torch.exp2(at - raw)))
            lse = torch.where(whole > 0, folded, EMPTY)
    return (out * inverse[..., None]).bfloat16(), lse
