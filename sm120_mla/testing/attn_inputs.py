"""From an AttnCase to the inputs of a call: caches whose every uncounted byte is poison, q, sink."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..case import AttnCase, CacheSpec
from ..codec import DEEPSEEK, pack, quantise
from ..layout import DSV4, PageGeometry
from ..pages import pool_geometry
from ..reference.attention import Entries, counted
from ..targets.base import AttentionInputs
from .derive import indices_of, lengths_of, run_device
from .guards import GUARD_BYTES, noise

__all__ = ["Cache", "Call", "call_of", "entries_of", "poisoned"]

_BYTES = {"nan": (0x7F, 0xFF, 0x7FC0), "inf": (0x7E, 0xFE, 0x7F80)}
"""NoPE byte, scale byte and RoPE word of a poisoned token: NaN by every field, or as large as it gets."""


@dataclass(frozen=True)
class Cache:
    """One cache: its 2-D view, geometry, index rows ``[T, k]`` and lengths."""

    pool: torch.Tensor
    geometry: PageGeometry
    indices: torch.Tensor
    lengths: torch.Tensor | None
    storage: torch.Tensor

    @property
    def entries(self) -> Entries:
        """As the reference takes it."""
        return Entries(self.pool, self.geometry, self.indices, self.lengths)


@dataclass(frozen=True)
class Call:
    """A call, ready for a target and for the reference."""

    q: torch.Tensor
    main: Cache
    extra: Cache | None
    sink: torch.Tensor | None
    scale: float

    @property
    def caches(self) -> list[Cache]:
        """Main, then extra."""
        return [self.main] if self.extra is None else [self.main, self.extra]

    def inputs(self) -> AttentionInputs:
        """As a target takes it."""
        extra = self.extra
        return AttentionInputs(
            q=self.q,
            kv_cache=self.main.pool,
            page_size=self.main.geometry.page_size,
            indices=self.main.indices,
            topk_length=self.main.lengths,
            attn_sink=self.sink,
            softmax_scale=self.scale,
            extra_kv_cache=None if extra is None else extra.pool,
            extra_page_size=None if extra is None else extra.geometry.page_size,
            extra_indices=None if extra is None else extra.indices,
            extra_topk_length=None if extra is None else extra.lengths,
        )


def entries_of(call: Call) -> list[Entries]:
    """The caches of a call, as the reference takes them."""
    return [cache.entries for cache in call.caches]


def _values(shape: tuple[int, ...], spread: str, gen: torch.Generator) -> torch.Tensor:
    value = torch.randn(shape, generator=gen)
    if spread == "wide":
        tiles = torch.exp2(torch.randint(-6, 4, (*shape[:-1], 8), generator=gen).float())
        value *= tiles.repeat_interleave(64, dim=-1)
    if spread == "huge":
        value *= 30
    return value.to(torch.bfloat16)


def _cache(spec: CacheSpec, case: AttnCase, seed: int) -> Cache:
    """A packed cache with guard zones; uncounted bytes are not poisoned yet."""
    gen = torch.Generator().manual_seed(seed)
    where = run_device()
    stride = DSV4.payload(spec.page_size) + spec.stride_gap
    start = GUARD_BYTES + spec.offset
    storage = noise(start + spec.pages * stride + GUARD_BYTES, seed)
    pool = torch.as_strided(storage, (spec.pages, DSV4.payload(spec.page_size)), (stride, 1), start)
    if spec.pages:
        k = _values((spec.pages, spec.page_size, 512), case.spread, gen)
        pack(quantise(k, DSV4, DEEPSEEK), DSV4, spec.page_size, out=pool)
    index = spec.index.model_copy(update={"rows": case.tokens, "seed": spec.index.seed + seed})
    tokens = spec.pages * spec.page_size
    rows = indices_of(index, tokens, spec.page_size)
    moved = storage.to(where)
    pool = torch.as_strided(moved, pool.shape, pool.stride(), start)
    lengths = lengths_of(index)
    return Cache(
        pool,
        pool_geometry(pool, spec.page_size, DSV4),
        rows[:, 0] if rows.dim() == 3 else rows,
        None if lengths is None else lengths.reshape(-1),
        moved,
    )


def poisoned(cache: Cache, kind: str, seed: int, *, spare_slot_zero: bool = False) -> Cache:
    """The same cache with every byte replaced that no counted entry reads: other tokens, pads, guards.

    ``spare_slot_zero``: token 0 keeps its bytes, which are finite.
    """
    geometry = cache.geometry
    layout, size = geometry.layout, geometry.page_size
    fresh = noise(cache.storage.numel(), seed, cache.storage.device)
    pool = torch.as_strided(fresh, cache.pool.shape, cache.pool.stride(), cache.pool.storage_offset())
    if kind in _BYTES and geometry.pages:
        nope, scale, rope = _BYTES[kind]
        record = pool[:, : size * layout.token_bytes].view(geometry.pages, size, layout.token_bytes)
        record[..., :448] = nope
        record[..., 448::2], record[..., 449::2] = rope & 0xFF, rope >> 8
        pool[:, size * layout.token_bytes :] = scale
    keep = counted(cache.entries)
    kept = set(cache.indices[keep].to(torch.int64).unique().tolist())
    if spare_slot_zero and geometry.tokens:
        kept.add(0)
    for index in sorted(kept):
        page, slot = divmod(index, size)
        for field in layout.fields:
            if field.dtype != "pad":
                at = layout.offset(field.name, slot, size)
                pool[page, at : at + field.nbytes] = cache.pool[page, at : at + field.nbytes]
    return Cache(pool, geometry, cache.indices, cache.lengths, fresh)


def call_of(case: AttnCase, poison_seed: int = 0, finite_slot_zero: tuple[str, ...] = ()) -> Call:
    """The inputs of a case. ``poison_seed`` chooses the bytes that must not matter; slot 0 of the caches
    named (``kv_cache``, ``extra_kv_cache``) is not among them.
    """
    # A seed apart from the caches': queries that are keys make every softmax one-hot.
    gen = torch.Generator().manual_seed(case.seed + 500_009)
    where = run_device()
    width = case.heads + case.q_gap
    storage = _values((case.tokens, width, 512), case.spread, gen).to(where)
    sink = None
    if case.sink != "none":
        sink = torch.randn(case.heads, generator=gen) * 2
        if case.sink == "neg_inf":
            sink.fill_(float("-inf"))
        if case.sink == "pos_inf":
            sink.fill_(float("inf"))
        if case.sink == "mixed":
            sink[::3], sink[1::3] = float("-inf"), float("inf")
        sink = sink.to(where)
    caches = [
        poisoned(
            _cache(spec, case, case.seed + 1000 * n),
            case.poison,
            case.seed + 77 * n + poison_seed,
            spare_slot_zero=name in finite_slot_zero,
        )
        for n, (name, spec) in enumerate((("kv_cache", case.main), ("extra_kv_cache", case.extra)))
        if spec is not None
    ]
    return Call(
        storage[:, : case.heads],
        caches[0],
        caches[1] if len(caches) > 1 else None,
        sink,
        512**-0.5 if case.scale is None else case.scale,
    )
