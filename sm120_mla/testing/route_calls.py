"""From a RouteCase to the inputs of a call, to its numbers, and to the backend that must serve it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import device
from ..case import CacheSpec, RouteCase
from ..envelopes import Envelope, Plan, Refusal, by_name, plan
from ..layout import PageGeometry
from ..layout import by_name as layout_by_name
from ..targets.base import AttentionInputs
from .derive import indices_of, lengths_of, run_device
from .guards import GUARD_BYTES

__all__ = ["Numbers", "envelope_of", "expected", "inputs_of", "numbers_of"]

SMALLEST_SCALE = 2.0**-60
"""Below it the mask of FlashInfer 0.6, -1e30 times the scale, is no longer far from any logit."""


@dataclass(frozen=True)
class CacheNumbers:
    """As ``envelopes.CacheNumbers``."""

    page_size: int
    pages: int
    page_stride: int
    width: int
    lane_bytes: int


@dataclass(frozen=True)
class Numbers:
    """As ``envelopes.CallNumbers``; caches without pages or columns are left out. None: nothing can count."""

    layout: str
    tokens: int
    heads: int
    main: CacheNumbers
    extra: CacheNumbers | None


def _pool(spec: CacheSpec, case: RouteCase) -> torch.Tensor:
    """A pool every byte of which is 0xFF: NaN by every field."""
    layout = layout_by_name(case.layout)
    stride = layout.payload(spec.page_size) + spec.stride_gap
    start = GUARD_BYTES + spec.offset
    storage = torch.full((start + spec.pages * stride,), 0xFF, dtype=torch.uint8, device=run_device())
    return torch.as_strided(storage, (spec.pages, layout.payload(spec.page_size)), (stride, 1), start)


def inputs_of(case: RouteCase) -> AttentionInputs:
    """The call. Values of q are 0 and those of the caches NaN: nothing of them is judged."""
    where = run_device()
    q = torch.zeros((case.tokens, case.heads + case.q_gap, 512), dtype=torch.bfloat16, device=where)
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    for spec in (case.main, case.extra):
        if spec is not None:
            index = spec.index.model_copy(update={"rows": case.tokens})
            rows = indices_of(index, spec.pages * spec.page_size, spec.page_size)
            parts.append((_pool(spec, case), rows, lengths_of(index)))
    extra = parts[1] if len(parts) > 1 else (None, None, None)
    return AttentionInputs(
        q=q[:, : case.heads],
        kv_cache=parts[0][0],
        page_size=case.main.page_size,
        indices=parts[0][1],
        topk_length=parts[0][2],
        attn_sink=torch.zeros(case.heads, device=where) if case.sink else None,
        softmax_scale=case.scale,
        extra_kv_cache=extra[0],
        extra_page_size=None if case.extra is None else case.extra.page_size,
        extra_indices=extra[1],
        extra_topk_length=extra[2],
    )


def numbers_of(case: RouteCase, inputs: AttentionInputs) -> Numbers | None:
    """The call as numbers, or None where its result is known without a launch."""
    found = []
    for spec, pool in ((case.main, inputs.kv_cache), (case.extra, inputs.extra_kv_cache)):
        if spec is None or pool is None or not spec.pages or not spec.index.width:
            continue
        layout = layout_by_name(case.layout)
        # A pool of one page has no next one.
        stride = pool.stride(0) if spec.pages > 1 else layout.default_stride(spec.page_size)
        at = int(pool.storage_offset())
        geometry = PageGeometry(layout, spec.page_size, spec.pages, stride, at, "uint8")
        lane = geometry.lane_bytes(pool.data_ptr())
        found.append(CacheNumbers(spec.page_size, spec.pages, stride, spec.index.width, lane))
    if not case.tokens or not found:
        return None
    return Numbers(case.layout, case.tokens, case.heads, found[0], found[1] if len(found) > 1 else None)


def envelope_of(case: RouteCase) -> Envelope | None:
    """The tables of the generation that counts as installed."""
    return None if case.flashinfer is None else by_name(case.flashinfer)


def _flashinfer(case: RouteCase, numbers: Numbers) -> str:
    """Why FlashInfer does not serve the call; "" where it does."""
    envelope = envelope_of(case)
    if envelope is None:
        return "installed"
    if case.capability is None or case.capability[0] != 12:
        return "capability"
    found = plan(envelope, numbers)
    if isinstance(found, Refusal):
        return found.argument
    assert isinstance(found, Plan)
    small = case.scale is not None and case.scale < SMALLEST_SCALE
    return "softmax_scale" if small and envelope.masks_before_scale else ""


def _triton(case: RouteCase) -> str:
    if case.layout != "dsv4":
        return "layout"
    return "capability" if case.capability is not None and case.capability < (8, 0) else ""


def expected(case: RouteCase, numbers: Numbers) -> tuple[str, dict[str, str]]:
    """The backend that must serve the call, or "" and what is at fault by each backend that was asked.

    An order serves or is refused. By capability: FlashInfer on 12.x, then Triton; elsewhere Triton; without a
    GPU the reference, after Triton where kernels are interpreted.
    """
    reasons = {"flashinfer": _flashinfer(case, numbers), "triton": _triton(case), "reference": ""}
    if case.backend != "auto":
        asked: tuple[str, ...] = (case.backend,)
    elif case.capability is None:
        asked = ("triton", "reference") if device.interpreting() else ("reference",)
    else:
        asked = ("flashinfer", "triton") if case.capability[0] == 12 else ("triton",)
    for name in asked:
        if not reasons[name]:
            return name, {}
    return "", {name: reasons[name] for name in asked}
