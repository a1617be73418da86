"""What FlashInfer is handed, against its tables and its contract: pure judging, by one generation's rules."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import contract
from ..contract import DECODE_MAX_ROWS, IndexTensor
from ..envelopes import TILE, Envelope, widths
from ..targets.routes import Handed

__all__ = ["broken_rules", "missing_kernel"]

_LANE = 16  # bytes
_TOKEN_BYTES, _FOOTER_BYTES = 576, 8

Cache = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]


def _caches(handed: Handed) -> list[Cache]:
    """By the argument of ours it came from: cache, index rows, lengths."""
    found = [("kv_cache", handed.cache, handed.indices, handed.lengths)]
    if handed.extra_cache is not None:
        assert handed.extra_indices is not None
        assert handed.extra_lengths is not None
        found.append(("extra_kv_cache", handed.extra_cache, handed.extra_indices, handed.extra_lengths))
    return found


def missing_kernel(envelope: Envelope, handed: Handed) -> str:
    """Why the generation has no kernel for the shapes handed over; "" where it has one."""
    rows, heads = handed.q.shape[:2]
    caches = _caches(handed)
    decode, dual = rows <= DECODE_MAX_ROWS, len(caches) > 1
    served = envelope.decode_heads if decode else envelope.prefill_heads
    if served is not None and heads not in served:
        return f"{heads} heads: the kernels are for {served}"
    among, width = widths(envelope, rows, dual), handed.indices.shape[1]
    if (width not in among) if among is not None else (width % TILE or not width):
        return f"{width} columns: the kernels are for {among or 'multiples of 64'}"
    page = handed.cache.shape[1]
    if envelope.main_page not in (None, page):
        return f"pages of {page} tokens: the kernels are for {envelope.main_page}"
    if dual and not decode and envelope.prefill_extra_pages is not None:
        page = caches[1][1].shape[1]
        if page not in envelope.prefill_extra_pages:
            return f"extra pages of {page} tokens: the kernels are for {envelope.prefill_extra_pages}"
    return ""


def broken_rules(envelope: Envelope, handed: Handed, finite_slot_zero: tuple[str, ...]) -> Iterator[str]:
    """Every rule that the generation's kernels rely on and that does not hold of what is handed over.

    ``finite_slot_zero`` names the caches whose slot 0 is the caller's to keep finite.
    """
    rows, heads, dim = handed.q.shape
    for name, tensor, dtype in (
        ("q", handed.q, torch.bfloat16),
        ("output", handed.out, torch.bfloat16),
        ("out_lse", handed.lse, torch.float32),
    ):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            yield f"{name} is {tensor.dtype} with strides {tensor.stride()}: contiguous {dtype} is read"
        if name != "out_lse" and tensor.data_ptr() % _LANE:
            yield f"{name} is not 16-byte aligned"
    if tuple(handed.out.shape) != (rows, heads, dim) or tuple(handed.lse.shape) != (rows, heads):
        yield f"results of shape {tuple(handed.out.shape)} and {tuple(handed.lse.shape)}"
    sink = handed.sink
    if sink is not None and (sink.dtype != torch.float32 or not sink.is_contiguous()):
        yield "the sink is not a contiguous fp32 vector"
    for n, cache in enumerate(_caches(handed)):
        yield from _index_rules(envelope, rows, ("eidx", "etl") if n else ("indices", "tl"), cache)
        yield from _cache_rules(envelope, cache, cache[0] in finite_slot_zero)
    yield from _scratch_rules(envelope, handed)


def _index_rules(envelope: Envelope, rows: int, names: tuple[str, str], cache: Cache) -> Iterator[str]:
    _, pool, indices, lengths = cache
    for name, tensor in zip(names, (indices, lengths), strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        given = IndexTensor(name, tuple(tensor.shape), tensor.stride(), dtype)
        said = contract.needs(given, rows, envelope.contract)
        if said is not None:
            yield said
        if tensor.shape[0] != rows:
            yield f"{name} has {tensor.shape[0]} rows for {rows} tokens"
            return
    width, tokens = indices.shape[1], pool.shape[0] * pool.shape[1]
    if width % TILE:
        yield f"{names[0]} has {width} columns: whole tiles of {TILE} are read"
    if bool(((lengths < 0) | (lengths > width)).any()):
        yield f"{names[1]} holds a length outside [0, {width}]"
    if bool(((indices < -1) | (indices >= tokens)).any()):
        row = int(((indices < -1) | (indices >= tokens)).any(1).nonzero()[0])
        yield f"{names[0]} row {row} holds an index outside [-1, {tokens}): a stale column may be gathered"
    inside = torch.arange(width, device=indices.device) < lengths[:, None]
    hollow = (lengths > 0) & ~((indices >= 0) & inside).any(1)
    if envelope.contract == "A/B" and bool(hollow.any()):
        row = int(hollow.nonzero()[0])
        yield f"{names[1]}[{row}] is {int(lengths[row])} over nothing but -1: the row comes out as garbage"
    if bool(((indices >= 0) & ~inside).any()):
        yield f"{names[0]} holds a token in a column past its length"


def _cache_rules(envelope: Envelope, cache: Cache, excused: bool) -> Iterator[str]:
    name, pool, _, _ = cache
    pages, size, stride = pool.shape[0], pool.shape[1], pool.stride(0)
    if pool.dtype != torch.uint8 or pool.stride(-1) != 1:
        yield f"{name} is {pool.dtype} with strides {pool.stride()}"
    if not pages:
        yield f"{name} has no slot 0, which masked columns read"
        return
    if pool.data_ptr() % _LANE or (stride % _LANE and pages > 1):
        yield f"{name} is not 16-byte aligned, page by page"
    if not envelope.gathers_slot_zero or excused:
        return
    page = torch.as_strided(pool, (size * (_TOKEN_BYTES + _FOOTER_BYTES),), (1,))
    footer = size * _TOKEN_BYTES
    if bool(page[:_TOKEN_BYTES].any()) or bool(page[footer : footer + _FOOTER_BYTES].any()):
        yield f"slot 0 of {name} is not 0, and nobody was told to keep it finite"


def _scratch_rules(envelope: Envelope, handed: Handed) -> Iterator[str]:
    rows, heads = handed.q.shape[:2]
    if rows > DECODE_MAX_ROWS:
        return
    splits = sum(-(-cache[2].shape[1] // TILE) for cache in _caches(handed))
    unit = envelope.scratch_heads_unit
    padded = heads if heads == 8 else -(-heads // unit) * unit
    for name, tensor, dtype, count in (
        ("mid_out", handed.mid_out, torch.bfloat16, rows * padded * splits * 512),
        ("mid_lse", handed.mid_lse, torch.float32, rows * padded * splits),
    ):
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % _LANE:
            yield f"{name} is {tensor.dtype} with strides {tensor.stride()}"
        if tensor.numel() < count:
            yield f"{name} has {tensor.numel():,} elements, and {count:,} are written"
