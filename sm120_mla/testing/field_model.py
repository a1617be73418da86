"""A small model of the split as the field ships it, with each of its guards removable.

A pool-wide mask cleared by a torch-level write, then two raw kernels; both buffers grow-only in a dict,
one per device, allocated on first touch. It reproduces the measured table of docs/design.md, section 5, and
lets the suite show that it tells a latent state from an abort. Not a product: nothing outside testing
imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import device, graphs
from ..device import Capability
from ..errors import UnavailableError
from ..graphs import Graph
from ..kernels.runtime import tl, triton
from ..kernels.spec import CompileSpec
from ..layout import SUB_PAGE, PageLayout
from ..pages import pool_geometry
from ..targets.base import AttentionInputs, C128AInputs, Support

__all__ = ["FieldTarget"]


@triton.jit
def _mark(mask, indices, row_stride, width, tokens, P: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    index = tl.load(indices + tl.program_id(0) * row_stride + column, mask=column < width, other=-1)
    ok = (index >= 0) & (index < tokens)
    tl.store(mask + tl.where(ok, index, 0) // P, 1, mask=ok)


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    src, dst, mask, stride, dst_stride, ALL: tl.constexpr, RATIO: tl.constexpr, DATA: tl.constexpr,
    FOOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    sub = tl.program_id(1)
    if not ALL and tl.load(mask + page) == 0:
        return
    lane = tl.arange(0, BLOCK)
    data = src + page * stride + sub * DATA
    foot = src + page * stride + RATIO * DATA + sub * FOOT
    to = dst + (page * RATIO + sub) * dst_stride
    tl.store(to + lane, tl.load(data + lane, mask=lane < DATA), mask=lane < DATA)
    tl.store(to + DATA + lane, tl.load(foot + lane, mask=lane < FOOT), mask=lane < FOOT)


class FieldTarget:
    """The model as a target; ``guarded`` names the buffers (``mask``, ``split``) that keep their guard."""

    def __init__(
        self, guarded: frozenset[str] = frozenset({"mask", "split"}), *, clears_in_capture: bool = True
    ) -> None:
        self.name = f"field model (guarded: {', '.join(sorted(guarded)) or 'neither'})"
        self._guarded = guarded
        self._clears_in_capture = clears_in_capture
        self._buffers: dict[str, torch.Tensor] = {}

    def supports(self, case: Any, capability: Capability | None) -> Support:
        """Split cases and boots of the one layout the field splits."""
        if case.kind in ("meta", "attn", "write"):
            return Support.no("the model only splits pages")
        if getattr(case, "layout", "dsv4") != "dsv4":
            return Support.no("the model splits dsv4 pages only")
        return Support(True)

    def _buffer(
        self, name: str, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        key = f"{name}:{device.device_key(like)}"
        have = self._buffers.get(key)
        if have is None or have.shape[0] < shape[0]:
            guard = torch.inference_mode(False) if name in self._guarded else contextlib.nullcontext()
            with guard:
                have = self._buffers[key] = torch.empty(shape, dtype=dtype, device=like.device)
        return have

    def split(
        self,
        pool: torch.Tensor,
        page_size: int,
        indices: torch.Tensor | None,
        lengths: torch.Tensor | None,
        *,
        layout: PageLayout,
        scope: str = "",
    ) -> torch.Tensor:
        """Lengths and scopes are not consulted, as in the field."""
        geometry = pool_geometry(pool, page_size, layout)
        if page_size == SUB_PAGE:
            return pool
        raw = pool.view(torch.uint8)
        source = torch.as_strided(raw, (geometry.pages, 1), (geometry.page_stride, 1))
        row = layout.default_stride(SUB_PAGE)
        out = self._buffer("split", pool, (geometry.sub_pages, row), torch.uint8)
        mask = self._buffer("mask", pool, (max(geometry.pages, 1),), torch.int8)
        masked = indices is not None and indices.numel() > 0
        if masked:
            assert indices is not None
            rows = indices[:, 0] if indices.dim() == 3 else indices
            if self._clears_in_capture or not device.is_capturing():
                mask.zero_()  # the torch-level write that an unguarded first touch turns into an abort
            block = triton.next_power_of_2(rows.shape[1])
            _mark[(rows.shape[0],)](
                mask, rows, rows.stride(0), rows.shape[1], geometry.tokens, P=page_size, BLOCK=block
            )
        if geometry.pages:
            _split[(geometry.pages, geometry.sub_pages_per_page)](
                source,
                out,
                mask,
                geometry.page_stride,
                row,
                ALL=not masked,
                RATIO=geometry.sub_pages_per_page,
                DATA=SUB_PAGE * layout.token_bytes,
                FOOT=SUB_PAGE * layout.footer_bytes,
                BLOCK=65536,
            )
        token = layout.bytes_per_token
        return torch.as_strided(out, (geometry.sub_pages, SUB_PAGE, 1, token), (row, token, token, 1))

    def reserve_split(
        self, pool: torch.Tensor, page_size: int, *, layout: PageLayout, scope: str = ""
    ) -> bool:
        """The field has no such call."""
        return False

    def build_c128a(self, inputs: C128AInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The model has none; ``supports`` says so."""
        raise UnavailableError("build_c128a", "the model has no metadata builder", "Ask supports() first.")

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The model has none; ``supports`` says so."""
        raise UnavailableError("attend", "the model has no attention", "Ask supports() first.")

    def error_budget(self) -> str:
        """The model has no attention."""
        return "reference"

    def write_cache(
        self,
        k: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        page_size: int,
        *,
        layout: PageLayout,
        recipe: str,
    ) -> None:
        """The model has none; ``supports`` says so."""
        raise UnavailableError("write_cache", "the model has no writer", "Ask supports() first.")

    def pretend_device(self, capability: Capability | None) -> AbstractContextManager[None]:
        """``device.pretend_device``."""
        return device.pretend_device(capability)

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """The dict."""
        return dict(self._buffers)

    def reset(self) -> None:
        """Empty the dict."""
        self._buffers.clear()

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """As this package captures."""
        return graphs.capture(fn)

    def second_device(self) -> AbstractContextManager[None]:
        """Pretends another device key."""
        return device.pretend_device_key("pretended:1")

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        """None: the model is not a product."""
        return ()

    def compile_origin(self) -> tuple[str, str | None]:
        """Nothing to compile."""
        return "", None
