"""Sparse MLA as a specification: fp64, and a form that rounds where bf16 kernels round.

K and V are the same 512-wide rows, dequantised to bf16. An entry counts iff its index lies in
``[0, tokens)`` of its pool and its column is below its row's length; one softmax runs over the counted
entries of every cache. ``lse`` is their natural log-sum-exp, without the sink; the sink only divides.
A row with no counted entry has ``out = 0`` and ``lse = -inf``.

Shapes are static and nothing waits for a value, so a call may be captured. Bytes of uncounted entries are
replaced by zeros before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..codec import Quantised, dequantise, view_field
from ..layout import PageGeometry

__all__ = ["Entries", "Slab", "attention", "counted", "faithful", "slabs", "values"]

_SLAB_ELEMENTS = 1 << 23
_NEVER = float("-inf")


@dataclass(frozen=True)
class Entries:
    """One cache and what each query row reads of it.

    ``pool`` is a uint8 or float8_e4m3fn view of any rank, ``indices`` int32 or int64 ``[T, k]``,
    ``lengths`` int32 or int64 ``[T]`` or None (every column).
    """

    pool: torch.Tensor
    geometry: PageGeometry
    indices: torch.Tensor
    lengths: torch.Tensor | None = None

    def rows(self, begin: int, end: int) -> Entries:
        """The same for query rows ``[begin, end)``."""
        lengths = None if self.lengths is None else self.lengths[begin:end]
        return Entries(self.pool, self.geometry, self.indices[begin:end], lengths)


@dataclass(frozen=True)
class Slab:
    """Everything about query rows ``[begin, end)``, in one float dtype; ``K`` columns over all caches."""

    begin: int
    end: int
    q: torch.Tensor
    """``[t, H, 512]``."""
    values: torch.Tensor
    """``[t, K, 512]``, 0 where nothing counts."""
    token: torch.Tensor
    """int64 ``[t, K]``: which token, told apart over all caches; -1 where nothing counts."""
    scores: torch.Tensor
    """``[t, H, K]``: scale times q.k, -inf where nothing counts."""
    lse: torch.Tensor
    """``[t, H]``, natural, without the sink."""
    share: torch.Tensor
    """``[t, H]``: ``exp(lse) / (exp(lse) + exp(sink))``."""

    @property
    def softmax(self) -> torch.Tensor:
        """``[t, H, K]``: weights that sum to 1, or to 0 in an empty row; without the sink."""
        return torch.exp(self.scores - _finite_or_zero(self.lse).unsqueeze(-1))

    @property
    def out(self) -> torch.Tensor:
        """``[t, H, 512]``."""
        return torch.bmm(self.softmax, self.values) * self.share.unsqueeze(-1)


def counted(entries: Entries) -> torch.Tensor:
    """bool ``[T, k]``: which entries count."""
    wide = entries.indices.to(torch.int64)
    keep = (wide >= 0) & (wide < entries.geometry.tokens)
    if entries.lengths is not None:
        column = torch.arange(wide.shape[1], device=wide.device)
        keep &= column < entries.lengths.to(torch.int64).unsqueeze(1)
    return keep


def values(entries: Entries) -> torch.Tensor:
    """bf16 ``[T, k, head_dim]``: the dequantised tokens, 0 where an entry does not count.

    Reads no byte of a token that nothing counts, except token 0 where some entry does not count.
    """
    geometry, keep = entries.geometry, counted(entries)
    layout, page_size = geometry.layout, geometry.page_size
    if not geometry.tokens or not keep.numel():
        return entries.pool.new_zeros((*keep.shape, layout.head_dim), dtype=torch.bfloat16)
    raw = entries.pool.view(torch.uint8)
    pages = torch.as_strided(raw, (geometry.pages, layout.payload(page_size)), (geometry.page_stride, 1))
    index = torch.where(keep, entries.indices.to(torch.int64), 0)
    page, slot = torch.div(index, page_size, rounding_mode="floor"), index % page_size

    def read(name: str) -> torch.Tensor:
        return view_field(pages, layout, name, page_size)[page, slot].contiguous()

    scales = read("scales")
    if layout.field("scales").dtype == "fp32":
        scales = scales.view(torch.float32)
    has_rope = any(field.name == "rope" for field in layout.fields)
    rope = read("rope").view(torch.int16) if has_rope else None
    tokens = dequantise(Quantised(read("nope"), scales, rope), layout)
    return torch.where(keep.unsqueeze(-1), tokens, 0.0)


def slabs(
    q: torch.Tensor,
    caches: Sequence[Entries],
    sink: torch.Tensor | None,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Slab]:
    """Query rows a few at a time, so that any number of them fits in memory.

    ``q`` is bf16 ``[T, H, 512]``, ``sink`` fp32 ``[H]`` or None, ``scale`` in natural units.
    """
    columns = sum(entries.indices.shape[1] for entries in caches)
    step = max(1, _SLAB_ELEMENTS // max(1, columns * (q.shape[-1] + q.shape[1])))
    for begin in range(0, q.shape[0], step):
        end = min(begin + step, q.shape[0])
        yield _slab(begin, end, q, [entries.rows(begin, end) for entries in caches], sink, scale, dtype)


def _slab(
    begin: int,
    end: int,
    q: torch.Tensor,
    caches: Sequence[Entries],
    sink: torch.Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Slab:
    keep = torch.cat([counted(entries) for entries in caches], dim=1)
    base, tokens = 0, []
    for entries in caches:
        tokens.append(entries.indices.to(torch.int64) + base)
        base += entries.geometry.tokens
    k = torch.cat([values(entries) for entries in caches], dim=1).to(dtype)
    rows = q[begin:end].to(dtype)
    scores = torch.bmm(rows, k.transpose(1, 2)) * scale
    scores = torch.where(keep.unsqueeze(1), scores, _NEVER)
    lse = torch.logsumexp(scores, dim=-1)
    token = torch.where(keep, torch.cat(tokens, dim=1), -1)
    return Slab(begin, end, rows, k, token, scores, lse, _share(lse, sink))


def _share(lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    if sink is None:
        return torch.ones_like(lse)
    # An empty row: its out is 0 whatever the share, and -inf less -inf would not be a number.
    return torch.sigmoid(_finite_or_zero(lse) - sink.to(lse.dtype))


def _finite_or_zero(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == _NEVER, 0.0, lse)


def attention(
    q: torch.Tensor, caches: Sequence[Entries], sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The yardstick: fp64 ``out [T, H, 512]`` and ``lse [T, H]``."""
    out = q.new_empty(q.shape, dtype=torch.float64)
    lse = q.new_empty(q.shape[:2], dtype=torch.float64)
    for slab in slabs(q, caches, sink, scale):
        out[slab.begin : slab.end] = slab.out
        lse[slab.begin : slab.end] = slab.lse
    return out, lse


def faithful(
    q: torch.Tensor,
    caches: Sequence[Entries],
    sink: torch.Tensor | None,
    scale: float,
    *,
    p_bf16: bool = True,
    splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a bf16 kernel computes: bf16 ``out [T, H, 512]`` and fp32 ``lse [T, H]``.

    Products of bf16 q and K accumulate in fp32; weights are rounded to bf16 (unless ``p_bf16`` is false)
    for the second product and summed unrounded; each of ``splits`` runs of columns is normalised by itself
    and merged by its log-sum-exp in fp32. On CUDA it needs ``torch.backends.cuda.matmul.allow_tf32``
    off, as it is by default.
    """
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for slab in slabs(q, caches, sink, scale, torch.float32):
        width = -(-slab.scores.shape[-1] // splits)
        parts = [
            _partial(slab.scores[..., n * width : (n + 1) * width], slab.values[:, n * width :], p_bf16)
            for n in range(splits)
        ]
        each = torch.stack([part_lse for _, part_lse in parts])
        total = torch.logsumexp(each, dim=0)
        weight = torch.exp(each - _finite_or_zero(total))
        merged = (torch.stack([part for part, _ in parts]) * weight.unsqueeze(-1)).sum(0)
        out[slab.begin : slab.end] = (merged * _share(total, sink).unsqueeze(-1)).to(out.dtype)
        lse[slab.begin : slab.end] = total
    return out, lse


def _partial(scores: torch.Tensor, v: torch.Tensor, p_bf16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised fp32 output and lse of one run of columns."""
    if not scores.shape[-1]:
        empty = scores.new_zeros((*scores.shape[:2], v.shape[-1]))
        return empty, scores.new_full(scores.shape[:2], _NEVER)
    top = scores.amax(-1)
    p = torch.exp(scores - _finite_or_zero(top).unsqueeze(-1))
    total = p.sum(-1)
    if p_bf16:
        p = p.to(torch.bfloat16).float()
    out = torch.bmm(p, v[:, : scores.shape[-1]]) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, top + torch.log(total)
