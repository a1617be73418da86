"""SPLIT-OFFSET64 decided for real: a pool of gigabytes, of which only a few pages are ever touched."""

from __future__ import annotations

import torch

from ..case import Offset64Case
from ..layout import SUB_PAGE, PageGeometry, PageLayout
from ..reference import split as reference
from ..targets.base import Target
from .compare import compare_sub_pages
from .derive import run_device
from .guards import noise
from .observe import first, run
from .verdict import HOLDS, Verdict, unknown, violated

__all__ = ["decide", "pages_at"]


def pages_at(case: Offset64Case) -> list[int]:
    """Pages on either side of the boundary, and the page a wrapped 32-bit offset would reach instead."""
    boundary = (1 << case.boundary_bits) // case.page_stride
    return [0, boundary - 1, boundary, boundary + 1, boundary + 2]


def decide(target: Target, case: Offset64Case, layout: PageLayout) -> Verdict:
    """Write a few pages of a pool that spans the boundary, split, and compare those pages."""
    looked_at = pages_at(case)
    pages = looked_at[-1] + 1
    where = run_device()
    nbytes = pages * case.page_stride
    if where == "cuda" and torch.cuda.mem_get_info()[0] < 3 * nbytes + (1 << 31):
        return unknown(f"{3 * nbytes / 1e9:.0f} GB of GPU memory are needed and are not free")
    target.reset()
    # Room before the pool: an offset that wraps below zero stays inside the storage, and shows.
    lead = 1 << 31
    try:
        storage = torch.empty(lead + nbytes, dtype=torch.uint8, device=where)
    except RuntimeError as error:
        return unknown(f"no {nbytes / 1e9:.1f} GB of address space: {error}")
    payload = layout.payload(case.page_size)
    pool = torch.as_strided(storage, (pages, payload), (case.page_stride, 1), lead)
    for n, page in enumerate(looked_at):
        pool[page] = noise(payload, case.seed + n, where)

    indices = None
    if not case.full:
        slots = torch.arange(0, case.page_size, SUB_PAGE)
        tokens = torch.tensor(looked_at)[:, None] * case.page_size + slots
        indices = tokens.reshape(1, -1).to(device=where)
    result = run("split", lambda: target.split(pool, case.page_size, indices, None, layout=layout))

    ratio = case.page_size // SUB_PAGE
    packed = torch.stack([pool[page] for page in looked_at]).cpu()
    want = reference.split(packed, PageGeometry(layout, case.page_size, len(looked_at), payload, 0, "uint8"))
    raw = result.view(torch.uint8) if result.dtype != torch.uint8 else result
    rows = [page * ratio + sub for page in looked_at for sub in range(ratio)]
    flat = torch.as_strided(
        raw, (raw.shape[0], layout.payload(SUB_PAGE)), (raw.stride(0), 1), raw.storage_offset()
    )
    got = torch.stack([flat[row] for row in rows]).cpu()
    diff = compare_sub_pages(layout, case.page_size, got, want, range(len(rows)))
    if diff is None:
        return HOLDS
    wrong = sorted({looked_at[n // ratio] for n in diff.sub_pages})
    return violated(
        f"pages {first(wrong)} are wrong at a stride of {case.page_stride:,} bytes",
        f"page {wrong[0]} starts {wrong[0] * case.page_stride - (1 << case.boundary_bits):+,} bytes from "
        f"2^{case.boundary_bits}\n(numbered among the {len(rows)} sub-pages looked at) {diff}",
    )
