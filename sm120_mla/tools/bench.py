"""Measure on a CUDA GPU: CUDA-graph replays, medians, cold L2. Benchmarks report; they judge nothing.

A figure is the time of one call inside a graph of ``CALLS`` calls, each on its own indices, with the L2
cache overwritten between replays, so every call reads cold pages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from ..errors import UnavailableError
from ..layout import DSV4
from ..metadata import build_c128a_topk_metadata
from ..pages import reserve_split, split_pages

__all__ = ["Row", "bench_metadata", "bench_split", "environment", "show_bench"]

CALLS, REPLAYS = 24, 25
PAGE, PAGES = 256, 4096


@dataclass(frozen=True)
class Row:
    """One measurement. Times in microseconds per call, bytes per call read plus written."""

    name: str
    median_us: float
    best_us: float
    bytes_moved: int
    gbps: float
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain data, for ``--json``."""
        return asdict(self)


def environment() -> dict[str, str]:
    """What the figures were taken on."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def time_graph(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Median and best microseconds per call of one graph that holds ``calls`` in order."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPLAYS):
        flush.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    del graph
    return statistics.median(times), min(times)


def make_row(name: str, times: tuple[float, float], nbytes: int, note: str = "") -> Row:
    return Row(name, times[0], times[1], nbytes, nbytes / times[0] / 1e3, note)


def _cover(pages: int, per_page: Sequence[int], rows: int, width: int, seed: int) -> torch.Tensor:
    """``[rows, width]`` int32 indices that touch exactly ``pages`` pages at the slots given."""
    gen = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(PAGES, generator=gen)[:pages]
    cover = (chosen[:, None] * PAGE + torch.tensor(per_page)[None, :]).reshape(-1)
    pick = torch.randint(0, cover.numel(), (rows * width,), generator=gen)
    pick[: cover.numel()] = torch.arange(cover.numel())
    return cover[pick].reshape(rows, width).to(device="cuda", dtype=torch.int32)


def _windows(rows: int, seed: int) -> torch.Tensor:
    """``[rows, 128]`` sliding windows as sglang builds them: descending, across two pages or one."""
    gen = torch.Generator().manual_seed(seed)
    end = torch.randint(128, PAGE + 128, (rows, 1), generator=gen)
    pages = torch.randperm(PAGES, generator=gen)[: 2 * rows].reshape(rows, 2)
    position = end - torch.arange(128)
    page = torch.where(position < PAGE, pages[:, :1], pages[:, 1:])
    return (page * PAGE + position % PAGE).to(device="cuda", dtype=torch.int32)


def bench_split() -> list[Row]:
    """Page split of a 4,096-page DSv4 pool: touched pages, windows, and the whole pool."""
    if not torch.cuda.is_available():
        raise UnavailableError("bench", "torch sees no CUDA GPU", "Run it on a CUDA machine.")
    stride = DSV4.default_stride(PAGE)
    pool = torch.randint(0, 256, (PAGES, stride), dtype=torch.uint8, device="cuda")
    reserve_split(pool, PAGE)
    sub_page = DSV4.payload(64)

    def touched(indices: list[torch.Tensor]) -> tuple[float, float]:
        def call(index: torch.Tensor) -> Callable[[], object]:
            return lambda: split_pages(pool, PAGE, index)

        return time_graph([call(index) for index in indices])

    rows = [make_row("empty launch (floor of a graph step)", time_graph(_empty_launches()), 0)]
    two = [_cover(2, (0, 64, 128, 192), 1, 128, seed) for seed in range(CALLS)]
    rows.append(
        make_row(
            "touched: 2 pages, all 4 sub-pages, 1 row x 128", touched(two), 2 * 8 * sub_page, "target 4 us"
        )
    )
    one = [_cover(2, (70,), 1, 128, seed) for seed in range(CALLS)]
    rows.append(make_row("touched: 2 pages, 1 sub-page each, 1 row x 128", touched(one), 2 * 2 * sub_page))
    many = [_cover(120, (0, 64, 128, 192), 64, 128, seed) for seed in range(CALLS)]
    rows.append(
        make_row(
            "touched: 120 pages, all 4 sub-pages, 64 rows x 128",
            touched(many),
            2 * 480 * sub_page,
            "target 11 us",
        )
    )
    windows = [_windows(64, seed) for seed in range(CALLS)]
    mean = sum(len(set((w // 64).flatten().tolist())) for w in windows) / len(windows)
    rows.append(make_row("touched: 64 windows of 128 tokens", touched(windows), int(2 * mean * sub_page)))

    payload = PAGES * DSV4.payload(PAGE)
    target = torch.empty(payload, dtype=torch.uint8, device="cuda")
    source = pool.view(-1)[:payload]
    words = source.view(torch.int32), target.view(torch.int32)
    # A copy node of a graph can be slower than a copy kernel: compare with the best of three.
    copies = {
        "copy_ in a graph": time_graph([lambda: target.copy_(source)] * 4),
        "copy_ eagerly": time_eager(lambda: target.copy_(source)),
        "an elementwise kernel in a graph": time_graph([lambda: torch.add(words[0], 0, out=words[1])] * 4),
    }
    best = min(copies, key=lambda name: copies[name][0])
    copy = make_row(f"device copy of the same payload, {best}", copies[best], 2 * payload)
    full = make_row("full split, 4,096 pages", time_graph([lambda: split_pages(pool, PAGE)] * 4), 2 * payload)
    ratio = full.gbps / copy.gbps
    full = make_row(
        full.name, (full.median_us, full.best_us), 2 * payload, f"{ratio:.3f} of copy, target 0.95"
    )
    return [*rows, copy, full]


def bench_metadata() -> list[Row]:
    """The C128A builder at capacity 8,192 (a context of 1M tokens), decode rows at full width."""
    if not torch.cuda.is_available():
        raise UnavailableError("bench", "torch sees no CUDA GPU", "Run it on a CUDA machine.")
    capacity, rows_out = 8192, []
    for rows in (64, 1024):
        gen = torch.Generator().manual_seed(rows)
        table = torch.randint(0, 1 << 20, (64, capacity // 2), generator=gen, dtype=torch.int32).cuda()
        decode = torch.empty((rows, capacity), dtype=torch.int32, device="cuda")
        prefill = torch.empty((1, capacity), dtype=torch.int32, device="cuda")
        lens = torch.empty((rows,), dtype=torch.int32, device="cuda")

        def call(
            seed: int,
            rows: int = rows,
            table: torch.Tensor = table,
            decode: torch.Tensor = decode,
            lens: torch.Tensor = lens,
            prefill: torch.Tensor = prefill,
        ) -> Callable[[], object]:
            gen = torch.Generator().manual_seed(seed)
            positions = torch.randint(0, capacity * 128, (rows,), generator=gen).cuda()
            requests = torch.randint(0, 64, (rows,), generator=gen, dtype=torch.int32).cuda()
            slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
            return lambda: build_c128a_topk_metadata(
                positions, 128, rows, requests, table, 2, slots, decode, lens, prefill, capacity
            )

        nbytes = rows * capacity * 4
        times = time_graph([call(seed) for seed in range(CALLS)])
        rows_out.append(
            make_row(f"C128A build, {rows:,} decode rows x 8,192 columns", times, nbytes, "bytes written")
        )
    return rows_out


def time_eager(call: Callable[[], object]) -> tuple[float, float]:
    """Median and best microseconds of one call outside a graph."""
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times), min(times)


def _empty_launches() -> list[Callable[[], object]]:
    pool = torch.zeros((1, DSV4.default_stride(PAGE)), dtype=torch.uint8, device="cuda")
    nothing = torch.full((1, 32), -1, dtype=torch.int32, device="cuda")
    reserve_split(pool, PAGE, scope="floor")
    return [lambda: split_pages(pool, PAGE, nothing, scope="floor")] * CALLS


def show_bench(as_json: bool) -> int:
    """Run every benchmark and print one table, or JSON; raises ``UnavailableError`` without a GPU."""
    rows = [*bench_split(), *bench_metadata()]
    if as_json:
        print(json.dumps({"environment": environment(), "rows": [row.as_dict() for row in rows]}, indent=2))
        return 0
    table = Table("what", "median us", "best us", "MB moved", "GB/s", "note", title=str(environment()))
    for row in rows:
        moved, rate = (f"{row.bytes_moved / 1e6:,.2f}", f"{row.gbps:,.0f}") if row.bytes_moved else ("", "")
        table.add_row(row.name, f"{row.median_us:,.2f}", f"{row.best_us:,.2f}", moved, rate, row.note)
    Console().print(table)
    return 0
