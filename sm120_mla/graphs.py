"""Capture and replay with one interface: CUDA graphs on CUDA, a recorder on the CPU.

The CPU recorder is a model of a CUDA graph, and says less than the real one in three ways: capturing runs
the work once (a CUDA capture runs nothing), replay is ordered op by op, and a copy from host memory passes
for a copy (``x[i] = 2.0`` is one, and a capturing stream refuses it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from . import device
from .errors import ArgumentError, CaptureError
from .graph_recorder import HeldAddress, Recording, record

__all__ = ["Graph", "HeldAddress", "capture"]


class Graph(Protocol):
    """A captured piece of work. ``result`` is what the captured function returned."""

    result: Any

    def replay(self) -> None:
        """Run the recorded work again, on the recorded addresses."""

    def addresses(self) -> list[HeldAddress] | None:
        """The memory the graph holds, or None where that is not known (CUDA)."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory was allocated inside the capture."""

    def drop(self) -> None:
        """Release the graph; replay raises afterwards."""


def capture(fn: Callable[[], Any], *, device_type: str | None = None, warmup: int = 0) -> Graph:
    """Capture the work of ``fn``: a CUDA graph on CUDA, a recording on the CPU.

    ``fn`` takes no arguments and works on tensors it closes over; refill them in place before a replay.
    ``warmup`` calls it that many times before. ``device_type`` is ``cuda`` or ``cpu``; by default that of
    the machine's mode. Raises ``HostSyncError`` (CPU) for work that needs a value on the host,
    ``GrowthDuringCaptureError`` where a persistent buffer was not reserved, ``CaptureError`` for a nested
    capture. A failed capture leaves no state behind.
    """
    if device_type is None:
        device_type = "cpu" if device.mode() == "reference" else "cuda"
    if device_type not in ("cpu", "cuda"):
        raise ArgumentError("device_type", repr(device_type), "'cpu' or 'cuda'", "Correct it.")
    if warmup < 0:
        raise ArgumentError("warmup", warmup, "a number of calls >= 0", "Correct it.")
    if device.is_capturing():
        raise CaptureError("a capture is already in progress. Finish it before starting another.")
    for _ in range(warmup):
        fn()
    return _CudaGraph(fn) if device_type == "cuda" else _RecordedGraph(fn)


class _Replayable:
    result: Any
    _token: device.Capture | None

    def _replayed(self) -> None:
        for call in self._token.on_replay if self._token else ():
            call()

    def _check_alive(self) -> None:
        if self._token is None:
            raise CaptureError("this graph was dropped. Capture again.")


class _RecordedGraph(_Replayable):
    """The CPU recorder's graph."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._token = device.Capture()
        with device.capturing(self._token):
            self._recording: Recording
            self.result, self._recording = record(fn)

    def replay(self) -> None:
        self._check_alive()
        self._recording.replay()
        self._replayed()

    def addresses(self) -> list[HeldAddress]:
        self._check_alive()
        return self._recording.addresses()

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._recording.owns(tensor)

    def drop(self) -> None:
        self._token = None
        self._recording, self.result = Recording(), None


class _CudaGraph(_Replayable):
    """``torch.cuda.CUDAGraph``, captured on a side stream."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._token = device.Capture()
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        with device.capturing(self._token), torch.cuda.graph(self._graph):
            self.result = fn()

    def replay(self) -> None:
        self._check_alive()
        assert self._graph is not None
        self._graph.replay()
        self._replayed()

    def addresses(self) -> None:
        self._check_alive()

    def owns(self, tensor: torch.Tensor) -> bool:
        if self._graph is None:
            return False
        pool, address = tuple(self._graph.pool()), tensor.untyped_storage().data_ptr()
        segments: Iterable[dict[str, Any]] = torch.cuda.memory_snapshot()
        return any(
            tuple(segment.get("segment_pool_id", ())) == pool
            and segment["address"] <= address < segment["address"] + segment["total_size"]
            for segment in segments
        )

    def drop(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._token, self._graph, self.result = None, None, None
