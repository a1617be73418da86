"""Time the page split of a 4,096-page DSv4 pool: touched pages, windows, and the whole pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..layout import DSV4
from ..pages import reserve_split, split_pages
from . import bench_timing
from .bench_timing import CALLS, BenchCase, Row, Times, require_cuda, row

__all__ = ["CASES", "measure"]

PAGE, PAGES = 256, 4096

FLOOR = BenchCase("empty launch (floor of a graph step)")
TWO = BenchCase("touched: 2 pages, all 4 sub-pages, 1 row x 128", 4)
ONE = BenchCase("touched: 2 pages, 1 sub-page each, 1 row x 128")
MANY = BenchCase("touched: 120 pages, all 4 sub-pages, 64 rows x 128", 11)
WINDOWS = BenchCase("touched: 64 windows of 128 tokens")
COPY = BenchCase("device copy of the same payload")
FULL = BenchCase("full split, 4,096 pages")
CASES = (FLOOR, TWO, ONE, MANY, WINDOWS, COPY, FULL)
"""What is timed, in this order."""


def measure() -> list[Row]:
    """One row a case. Raises ``UnavailableError`` without a GPU."""
    require_cuda()
    where = bench_timing.DEVICE
    pool = torch.randint(0, 256, (PAGES, DSV4.default_stride(PAGE)), dtype=torch.uint8, device=where)
    reserve_split(pool, PAGE)
    sub_page = DSV4.payload(64)

    def touched(indices: list[torch.Tensor]) -> Times:
        def call(index: torch.Tensor) -> Callable[[], object]:
            return lambda: split_pages(pool, PAGE, index)

        return bench_timing.time_graph([call(index) for index in indices])

    two = [_cover(2, (0, 64, 128, 192), 1, 128, seed) for seed in range(CALLS)]
    one = [_cover(2, (70,), 1, 128, seed) for seed in range(CALLS)]
    many = [_cover(120, (0, 64, 128, 192), 64, 128, seed) for seed in range(CALLS)]
    windows = [_windows(64, seed) for seed in range(CALLS)]
    mean = sum(len(set((w // 64).flatten().tolist())) for w in windows) / len(windows)
    rows = [
        row(FLOOR, bench_timing.time_graph(_empty_launches()), 0),
        row(TWO, touched(two), 2 * 8 * sub_page),
        row(ONE, touched(one), 2 * 2 * sub_page),
        row(MANY, touched(many), 2 * 480 * sub_page),
        row(WINDOWS, touched(windows), int(2 * mean * sub_page)),
    ]
    payload = PAGES * DSV4.payload(PAGE)
    how, copied = bench_timing.copy_times(pool.view(-1)[:payload])
    copy = row(COPY, copied, 2 * payload, how)
    full = bench_timing.time_graph([lambda: split_pages(pool, PAGE)] * 4)
    ratio = copied[0] / full[0]
    return [*rows, copy, row(FULL, full, 2 * payload, f"{ratio:.3f} of copy, target 0.95")]


def _cover(pages: int, per_page: Sequence[int], rows: int, width: int, seed: int) -> torch.Tensor:
    """``[rows, width]`` int32 indices that touch exactly ``pages`` pages at the slots given."""
    gen = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(PAGES, generator=gen)[:pages]
    cover = (chosen[:, None] * PAGE + torch.tensor(per_page)[None, :]).reshape(-1)
    pick = torch.randint(0, cover.numel(), (rows * width,), generator=gen)
    pick[: cover.numel()] = torch.arange(cover.numel())
    return cover[pick].reshape(rows, width).to(device=bench_timing.DEVICE, dtype=torch.int32)


def _windows(rows: int, seed: int) -> torch.Tensor:
    """``[rows, 128]`` sliding windows as sglang builds them: descending, across two pages or one."""
    gen = torch.Generator().manual_seed(seed)
    end = torch.randint(128, PAGE + 128, (rows, 1), generator=gen)
    pages = torch.randperm(PAGES, generator=gen)[: 2 * rows].reshape(rows, 2)
    position = end - torch.arange(128)
    page = torch.where(position < PAGE, pages[:, :1], pages[:, 1:])
    return (page * PAGE + position % PAGE).to(device=bench_timing.DEVICE, dtype=torch.int32)


def _empty_launches() -> list[Callable[[], object]]:
    where = bench_timing.DEVICE
    pool = torch.zeros((1, DSV4.default_stride(PAGE)), dtype=torch.uint8, device=where)
    nothing = torch.full((1, 32), -1, dtype=torch.int32, device=where)
    reserve_split(pool, PAGE, scope="floor")
    return [lambda: split_pages(pool, PAGE, nothing, scope="floor")] * CALLS
