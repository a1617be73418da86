"""How the benchmarks time: CUDA-graph replays, medians, cold L2.

A figure is the time of one call inside a graph of ``CALLS`` calls, each on its own indices, with the L2
cache overwritten between replays, so every call reads cold pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from ..errors import UnavailableError

__all__ = ["CALLS", "BenchCase", "Row", "Times", "copy_times", "floor_us", "require_cuda", "row"]

CALLS, REPLAYS = 24, 25
FLUSH_BYTES = 256 << 20
"""More than any L2 cache has."""

DEVICE = "cuda"

Times = tuple[float, float]
"""Median and best, in microseconds a call."""


@dataclass(frozen=True)
class BenchCase:
    """One thing to time. ``target_us``: the time to reach on an H200, where there is one."""

    name: str
    target_us: float | None = None


@dataclass(frozen=True)
class Row:
    """One measurement. Times in microseconds a call; bytes a call, read plus written.

    ``floor_us``: the time the bytes that must move would take at the rate of a device copy in this run.
    ``sm120_us``: the median of the configuration that SM120 would get, run on this GPU.
    """

    name: str
    median_us: float
    best_us: float
    bytes_moved: int
    gbps: float
    note: str = ""
    target_us: float | None = None
    floor_us: float | None = None
    sm120_us: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain data, for ``--json``."""
        return asdict(self)


def row(
    case: BenchCase,
    times: Times,
    bytes_moved: int,
    note: str = "",
    *,
    floor_us: float | None = None,
    sm120_us: float | None = None,
) -> Row:
    """The row of a case."""
    rate = bytes_moved / times[0] / 1e3
    return Row(case.name, *times, bytes_moved, rate, note, case.target_us, floor_us, sm120_us)


def require_cuda() -> None:
    """Raise ``UnavailableError`` where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise UnavailableError("bench", "torch sees no CUDA GPU", "Run it on a CUDA machine.")


def time_graph(calls: Sequence[Callable[[], object]]) -> Times:
    """Median and best microseconds per call of one graph that holds ``calls`` in order."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
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


def time_eager(call: Callable[[], object]) -> Times:
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


def copy_times(source: torch.Tensor) -> tuple[str, Times]:
    """How a device copy of ``source`` (uint8, a multiple of four bytes) is fastest, and its times.

    A copy node of a graph can be slower than a copy kernel: the best of three.
    """
    target = torch.empty_like(source)
    words = source.view(torch.int32), target.view(torch.int32)
    copies = {
        "copy_ in a graph": time_graph([lambda: target.copy_(source)] * 4),
        "copy_ eagerly": time_eager(lambda: target.copy_(source)),
        "an elementwise kernel in a graph": time_graph([lambda: torch.add(words[0], 0, out=words[1])] * 4),
    }
    best = min(copies, key=lambda name: copies[name][0])
    return best, copies[best]


def floor_us(needed_bytes: int, copied_bytes: int, copy_us: float) -> float:
    """Microseconds that ``needed_bytes`` take at the rate of a copy of ``copied_bytes``, read and written."""
    return needed_bytes * copy_us / (2 * copied_bytes)
