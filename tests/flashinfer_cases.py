"""Test equipment: calls for the FlashInfer backend, and exact attention to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from sm120_mla.backends.base import AttentionCall, AttentionShape, CacheInput, CacheShape
from sm120_mla.buffers import PersistentBuffers
from sm120_mla.codec import dequantise_pages, pack, quantise
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4, PageGeometry

DEVICE = "cpu" if INTERPRETED else "cuda"


@dataclass(frozen=True)
class CacheSpec:
    """A cache and its rows. ``lengths``: None, "full", "some" (0 to the width) or "long" (past it)."""

    page_size: int
    pages: int
    width: int
    lengths: str | None = "some"
    holes: float = 0.2
    wide: bool = False
    page_stride: int | None = None


@dataclass(frozen=True)
class CallSpec:
    """A call; every tensor is drawn from ``seed``."""

    rows: int
    heads: int
    main: CacheSpec
    extra: CacheSpec | None = None
    sink: bool = True
    lse: bool = True
    seed: int = 0


def geometry_of(pool: torch.Tensor, page_size: int) -> PageGeometry:
    """Of a 2-D pool; pages of 2 tokens cannot be split and are fine for FlashInfer."""
    stride = pool.stride(0) if pool.shape[0] > 1 else DSV4.default_stride(page_size)
    offset = int(pool.storage_offset())
    dtype = str(pool.dtype).removeprefix("torch.")
    return PageGeometry(DSV4, page_size, pool.shape[0], stride, offset, dtype)


def shape_of(cache: CacheInput) -> CacheShape:
    geometry = cache.geometry
    return CacheShape(
        page_size=geometry.page_size,
        pages=geometry.pages,
        page_stride=geometry.page_stride,
        width=cache.indices.shape[1],
        index_dtype=str(cache.indices.dtype).removeprefix("torch."),
        lane_bytes=geometry.lane_bytes(cache.pool.data_ptr()),
    )


def make_pool(spec: CacheSpec, generator: torch.Generator) -> torch.Tensor:
    """uint8 ``[pages, stride]`` of random tokens; a stride of 1728 is what two tokens are padded to."""
    stride = spec.page_stride or DSV4.default_stride(spec.page_size)
    k = torch.randn((spec.pages, spec.page_size, 512), generator=generator)
    return pack(quantise(k.bfloat16()), DSV4, spec.page_size, stride).to(DEVICE)


def make_cache(spec: CacheSpec, rows: int, generator: torch.Generator) -> CacheInput:
    pool = make_pool(spec, generator)
    kind = torch.int64 if spec.wide else torch.int32
    tokens = spec.pages * spec.page_size
    indices = torch.randint(0, max(tokens, 1), (rows, spec.width), generator=generator)
    hole = torch.rand((rows, spec.width), generator=generator) < spec.holes
    indices = indices.masked_fill(hole | (tokens == 0), -1).to(kind)
    lengths = None
    if spec.lengths is not None:
        low, high = {
            "full": (spec.width, spec.width + 1),
            "some": (0, spec.width + 1),
            "long": (spec.width, spec.width + 9),
        }[spec.lengths]
        lengths = torch.randint(low, high, (rows,), generator=generator).to(kind).to(DEVICE)
    return CacheInput(pool, geometry_of(pool, spec.page_size), indices.to(DEVICE), lengths)


def make(spec: CallSpec, buffers: PersistentBuffers | None = None) -> AttentionCall:
    generator = torch.Generator().manual_seed(spec.seed)
    main = make_cache(spec.main, spec.rows, generator)
    extra = None if spec.extra is None else make_cache(spec.extra, spec.rows, generator)
    q = torch.randn((spec.rows, spec.heads, 512), generator=generator).bfloat16().to(DEVICE)
    sink = torch.randn(spec.heads, generator=generator).to(DEVICE) if spec.sink else None
    return call_of(q, main, extra, sink, lse=spec.lse, buffers=buffers)


def call_of(
    q: torch.Tensor,
    main: CacheInput,
    extra: CacheInput | None = None,
    sink: torch.Tensor | None = None,
    *,
    lse: bool = True,
    buffers: PersistentBuffers | None = None,
    scale: float = 512**-0.5,
) -> AttentionCall:
    rows, heads = q.shape[:2]
    shape = AttentionShape(
        layout="dsv4",
        tokens=rows,
        heads=heads,
        main=shape_of(main),
        extra=None if extra is None else shape_of(extra),
        has_sink=sink is not None,
        return_lse=lse,
    )
    return AttentionCall(
        q=q,
        main=main,
        extra=extra,
        sink=sink,
        scale=scale,
        out=torch.full((rows, heads, 512), 7.0, dtype=torch.bfloat16, device=DEVICE),
        lse=torch.full((rows, heads), 7.0, device=DEVICE) if lse else None,
        shape=shape,
        buffers=PersistentBuffers() if buffers is None else buffers,
    )


def again(call: AttentionCall, **changed: object) -> AttentionCall:
    """The same call with results of its own, and other parts as given."""
    lse = None if call.lse is None else torch.full(call.lse.shape, 7.0, device=DEVICE)
    fresh = {"out": torch.full(call.out.shape, 7.0, dtype=torch.bfloat16, device=DEVICE), "lse": lse}
    return replace(call, **(fresh | changed))


def counted(cache: CacheInput) -> torch.Tensor:
    """bool ``[T, k]``: which entries count."""
    column = torch.arange(cache.indices.shape[1], device=cache.indices.device)
    found = (cache.indices >= 0) & (cache.indices < cache.geometry.tokens)
    return found if cache.lengths is None else found & (column < cache.lengths[:, None])


def exact(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 out ``[T, H, 512]`` and natural LSE ``[T, H]`` over the dequantised cache."""
    keys, masks = [], []
    for cache in (call.main, call.extra):
        if cache is None:
            continue
        geometry = cache.geometry
        pages = torch.as_strided(
            cache.pool.view(torch.uint8),
            (geometry.pages, DSV4.payload(geometry.page_size)),
            (geometry.page_stride, 1),
        )
        flat = torch.zeros((1, 512), device=DEVICE)
        if geometry.tokens:
            flat = dequantise_pages(pages, DSV4, geometry.page_size).reshape(-1, 512)
        mask = counted(cache)
        keys.append(flat[torch.where(mask, cache.indices, 0).long()].double())
        masks.append(mask)
    k, mask = torch.cat(keys, 1), torch.cat(masks, 1)
    k = k.masked_fill(~mask[..., None], 0)
    scores = torch.einsum("thd,tkd->thk", call.q.double(), k) * call.scale
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(mask[:, None], torch.exp(scores - lse[..., None]), 0)
    out = torch.einsum("thk,tkd->thd", weights, k)
    if call.sink is not None:
        out = out * torch.sigmoid(lse - call.sink.double())[..., None]
    return torch.where(lse.isneginf()[..., None], 0, out), lse


def poison(pool: torch.Tensor, geometry: PageGeometry, keep: torch.Tensor) -> None:
    """NaN in every part of every token but those of ``keep``, in the pages' tails too."""
    rows = torch.as_strided(
        pool.view(torch.uint8), (geometry.pages, geometry.page_stride), (geometry.page_stride, 1)
    )
    rows = rows.clone()
    held = torch.zeros(geometry.tokens, dtype=torch.bool)
    held[keep] = True
    size = geometry.page_size
    for page in range(geometry.pages):
        fresh = torch.full((geometry.page_stride,), 0xFF, dtype=torch.uint8)
        for slot in range(size):
            if held[page * size + slot]:
                at, foot = slot * DSV4.token_bytes, size * DSV4.token_bytes + slot * DSV4.footer_bytes
                fresh[at : at + DSV4.token_bytes] = rows[page, at : at + DSV4.token_bytes]
                fresh[foot : foot + DSV4.footer_bytes] = rows[page, foot : foot + DSV4.footer_bytes]
        rows[page] = fresh
    pool.view(torch.uint8)[:, : geometry.page_stride].copy_(rows[:, : pool.shape[1]])
