"""One call of FlashInfer laid out: every tensor it is given, and what is launched before and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..envelopes import Envelope, Plan
from ..kernels import fi_finish
from ..kernels.fi_prepare import Rows
from ..layout import SUB_PAGE
from .base import AttentionCall, CacheInput
from .flashinfer_api import KernelCall

__all__ = ["Job", "assemble"]

_ALIGNMENT = 16  # bytes, of q, out and scratch (attention_binding.cu of 0.7.4, check_decode_tensors)


@dataclass
class Job:
    """``copies`` (target, source), ``splits`` (cache, destination [sub_pages, bytes]); ``finish`` launch
    arguments of ``fi_finish``, or None where FlashInfer's results are final.
    """

    main: Rows
    extra: Rows | None
    kernel: KernelCall
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    splits: list[tuple[CacheInput, torch.Tensor]] = field(default_factory=list)
    finish: dict[str, Any] | None = None


class _Scratch:
    """Flat persistent buffers of one call, viewed as the shapes it needs."""

    def __init__(self, call: AttentionCall) -> None:
        self._call = call

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        flat = self._call.buffers.get(
            f"flashinfer-{purpose}",
            (max(count, _ALIGNMENT),),
            dtype,
            self._call.q,
            scope=self._call.scope,
            hint=self.hint,
        )
        return flat[:count].view(shape)

    @property
    def hint(self) -> str:
        shape = self._call.shape
        return f"the same attention ({shape.tokens} rows, backend flashinfer)"


def assemble(call: AttentionCall, plan: Plan, envelope: Envelope) -> Job:
    """Reserve buffers and lay out every view. Raises ``GrowthDuringCaptureError`` in a capture."""
    scratch = _Scratch(call)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    splits: list[tuple[CacheInput, torch.Tensor]] = []
    main, cache = _cache(call, scratch, "main", call.main, plan.split_main, plan.main_width, splits)
    extra, extra_cache = None, None
    if plan.extra_width and call.extra is not None:
        extra, extra_cache = _cache(
            call, scratch, "extra", call.extra, plan.split_extra, plan.extra_width, splits
        )

    tokens, heads, dim = call.q.shape
    q = _contiguous(scratch, "q", call.q, copies)
    sink = None if call.sink is None else _contiguous(scratch, "sink", call.sink, copies)
    out = call.out if _dense(call.out) else scratch.take("out", (tokens, heads, dim), torch.bfloat16)
    wanted = call.lse
    lse = wanted if wanted is not None and _dense(wanted) else None
    if lse is None:
        lse = scratch.take("lse", (tokens, heads), torch.float32)
    partial = (tokens, plan.scratch_heads, plan.splits)  # empty where nothing is split
    kernel = KernelCall(
        q=q,
        cache=cache,
        indices=main.out,
        lengths=main.out_lengths,
        out=out,
        lse=lse,
        mid_out=scratch.take("mid-out", (*partial, dim), torch.bfloat16),
        mid_lse=scratch.take("mid-lse", partial, torch.float32),
        scale=float(call.scale),
        sink=sink if wanted is None else None,
        extra_cache=extra_cache,
        extra_indices=None if extra is None else extra.out,
        extra_lengths=None if extra is None else extra.out_lengths,
    )
    job = Job(main, extra, kernel, copies, splits)
    finish = fi_finish.arguments(
        out.view(torch.int16),
        lse,
        call.out.view(torch.int16),
        wanted,
        sink if wanted is not None else None,
        main.out_lengths,
        None if extra is None else extra.out_lengths,
        lse_unit=1.0 if envelope.natural_lse else math.log(2.0),
    )
    if finish["WRITE_OUT"] or finish["WRITE_LSE"]:
        job.finish = finish
    return job


def _cache(
    call: AttentionCall,
    scratch: _Scratch,
    name: str,
    cache: CacheInput,
    split: bool,
    width: int,
    splits: list[tuple[CacheInput, torch.Tensor]],
) -> tuple[Rows, torch.Tensor]:
    """Index rows of one cache, and the cache itself as FlashInfer is to see it: ``[pages, P, 1, 584]``."""
    geometry = cache.geometry
    page_size, pages, stride, pool, zero = (
        geometry.page_size,
        geometry.pages,
        geometry.page_stride,
        None,
        None,
    )
    if split or not pages:
        # Page 0 is ours and slot 0 is cleared in each step, so a masked column reads zeros.
        page_size, pages = SUB_PAGE, 1 + (geometry.sub_pages if split else 0)
        stride = geometry.layout.default_stride(SUB_PAGE)
        pool = call.buffers.get(
            f"flashinfer-{name}-split",
            (pages, stride),
            torch.uint8,
            cache.pool,
            layout=geometry.layout,
            scope=call.scope,
            zero=True,
            hint=scratch.hint,
        )
        zero = pool[0]
        if split and geometry.pages:
            splits.append((cache, pool[1:pages]))
    else:
        pool = cache.pool.view(torch.uint8)
    token = geometry.layout.bytes_per_token
    tokens = cache.indices.shape[0]
    rows = Rows(
        indices=cache.indices,
        lengths=cache.lengths,
        tokens=geometry.tokens,
        out=scratch.take(f"{name}-indices", (tokens, width), torch.int32),
        out_lengths=scratch.take(f"{name}-lengths", (tokens,), torch.int32),
        shift=SUB_PAGE if split else 0,
        zero=zero,
    )
    return rows, torch.as_strided(pool, (pages, page_size, 1, token), (stride, token, token, 1))


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def _contiguous(
    scratch: _Scratch, purpose: str, tensor: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    if _dense(tensor):
        return tensor
    target = scratch.take(purpose, tuple(tensor.shape), tensor.dtype)
    copies.append((target, tensor))
    return target
