"""Time the C128A builder at capacity 8,192 (a context of 1M tokens), decode rows at full width."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..metadata import build_c128a_topk_metadata
from . import bench_timing
from .bench_timing import CALLS, BenchCase, Row, require_cuda, row

__all__ = ["CASES", "measure"]

CAPACITY = 8192
ROWS = (64, 1024)
CASES = tuple(BenchCase(f"C128A build, {rows:,} decode rows x 8,192 columns") for rows in ROWS)
"""What is timed, in this order."""


def measure() -> list[Row]:
    """One row a case. Raises ``UnavailableError`` without a GPU."""
    require_cuda()
    found = []
    for case, rows in zip(CASES, ROWS, strict=True):
        times = bench_timing.time_graph(_calls(rows))
        found.append(row(case, times, rows * CAPACITY * 4, "bytes written"))
    return found


def _calls(rows: int) -> list[Callable[[], object]]:
    where = bench_timing.DEVICE
    gen = torch.Generator().manual_seed(rows)
    table = torch.randint(0, 1 << 20, (64, CAPACITY // 2), generator=gen, dtype=torch.int32).to(where)
    decode = torch.empty((rows, CAPACITY), dtype=torch.int32, device=where)
    prefill = torch.empty((1, CAPACITY), dtype=torch.int32, device=where)
    lens = torch.empty((rows,), dtype=torch.int32, device=where)

    def call(seed: int) -> Callable[[], object]:
        gen = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, CAPACITY * 128, (rows,), generator=gen).to(where)
        requests = torch.randint(0, 64, (rows,), generator=gen, dtype=torch.int32).to(where)
        slots = torch.zeros(rows, dtype=torch.int64, device=where)
        return lambda: build_c128a_topk_metadata(
            positions, 128, rows, requests, table, 2, slots, decode, lens, prefill, CAPACITY
        )

    return [call(seed) for seed in range(CALLS)]
