"""From a Case to tensors: pools, index rows, lengths. Every random value comes from the case's own seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import device
from ..case import IndexSpec, SplitCase
from ..layout import PageGeometry, PageLayout
from .guards import Guarded, guarded_bytes

__all__ = ["Pool", "indices_of", "lengths_of", "make_pool", "pool_of", "run_device"]


def run_device() -> str:
    """Where tensors of this run live: ``cuda`` unless kernels are interpreted."""
    return "cpu" if device.mode() == "reference" else "cuda"


@dataclass(frozen=True)
class Pool:
    """A pool as an engine would hand it over, and the same bytes seen plainly."""

    view: torch.Tensor
    """What the target gets: 2-D, 3-D or 4-D, uint8 or float8_e4m3fn."""
    bytes: torch.Tensor
    """uint8 ``[pages, payload]``, the page stride kept."""
    geometry: PageGeometry
    guard: Guarded


def make_pool(
    layout: PageLayout,
    page_size: int,
    pages: int,
    *,
    page_stride: int | None = None,
    offset: int = 0,
    view: str = "2d",
    dtype: str = "uint8",
    seed: int = 0,
) -> Pool:
    """A pool of noise with guard zones around it; ``page_stride`` and ``offset`` in bytes."""
    payload = layout.payload(page_size)
    stride = layout.default_stride(page_size) if page_stride is None else page_stride
    # Indices of kind past_end reach two pages past the end.
    guard = guarded_bytes(pages * stride, seed, run_device(), offset, room=3 * stride)
    token, start = layout.bytes_per_token, guard.start
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "2d": ((pages, payload), (stride, 1)),
        "3d": ((pages, page_size, token), (stride, token, 1)),
        "nhd": ((pages, page_size, 1, token), (stride, token, token, 1)),
        "hnd": ((pages, 1, page_size, token), (stride, payload, token, 1)),
    }
    typed = guard.storage.view(getattr(torch, dtype))
    plain = torch.as_strided(guard.storage, (pages, payload), (stride, 1), start)
    geometry = PageGeometry(layout, page_size, pages, stride, start, dtype)
    return Pool(torch.as_strided(typed, *shapes[view], start), plain, geometry, guard)


def pool_of(case: SplitCase, seed: int) -> Pool:
    """The pool of a split case, its bytes from ``seed``."""
    return make_pool(
        case.page_layout,
        case.page_size,
        case.pages,
        page_stride=case.page_stride,
        offset=case.offset,
        view=case.view,
        dtype=case.dtype,
        seed=seed,
    )


def indices_of(spec: IndexSpec, tokens: int, page_size: int) -> torch.Tensor:
    """Index rows: ``[T, k]`` or ``[T, 1, k]``, rows ``row_gap`` elements apart, the gap poisoned.

    ``tokens`` is pages * page_size of the pool. In an empty pool a valid entry is impossible, so such
    entries become 0, which lies past its end.
    """
    gen = torch.Generator().manual_seed(spec.seed)
    shape = (spec.rows, spec.width)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=gen, dtype=torch.int64)

    largest = 2**63 - 1 if spec.dtype == "int64" else 2**31 - 1
    valid = draw(0, max(tokens, 1))
    start = torch.randint(0, max(tokens, 1), (spec.rows, 1), generator=gen)
    column = torch.arange(spec.width)
    window = (start - column).clamp_min(0)
    duplicate = valid[:, :1].expand(shape) if spec.width else valid
    values = {
        "valid": valid,
        "window": window,
        "duplicate": duplicate,
        "minus_one": torch.full(shape, -1),
        "negative": draw(-(1 << 20), -1),
        "int_min": torch.full(shape, -largest - 1),
        "past_end": tokens + draw(0, 2 * page_size),
        "int_max": torch.full(shape, largest),
        "wide": valid + (1 << 32),
    }
    kinds = spec.kinds or ("minus_one",)
    choice = draw(0, len(kinds))
    rows = torch.full(shape, -1, dtype=torch.int64)
    for n, kind in enumerate(kinds):
        rows = torch.where(choice == n, values[kind], rows)

    dtype = getattr(torch, spec.dtype)
    # The gap between rows holds a token of the pool: reading it would touch a page.
    storage = torch.zeros((spec.rows, spec.width + spec.row_gap), dtype=dtype)
    storage[:, : spec.width] = rows.to(dtype)
    dense = storage.to(run_device())[:, : spec.width]
    return dense[:, None] if spec.rank == 3 else dense


def lengths_of(spec: IndexSpec) -> torch.Tensor | None:
    """``[T]`` or ``[T, 1]`` lengths, or None.

    Of 64 bits, some of those beyond the width would be within it if they were cut to 32.
    """
    if spec.lengths == "none":
        return None
    gen = torch.Generator().manual_seed(spec.seed + 1)
    random = torch.randint(0, spec.width + 1, (spec.rows,), generator=gen)
    wide = spec.length_dtype == "int64"
    values = {
        "full": torch.full((spec.rows,), spec.width),
        "zero": torch.zeros(spec.rows, dtype=torch.int64),
        "random": random,
        "negative": torch.where(random % 2 == 0, -1 - random, random),
        "beyond": random + (torch.where(random % 2 == 0, 1 << 32, spec.width) if wide else spec.width),
    }[spec.lengths]
    lengths = values.to(dtype=getattr(torch, spec.length_dtype), device=run_device())
    return lengths[:, None] if spec.length_rank == 2 else lengths
