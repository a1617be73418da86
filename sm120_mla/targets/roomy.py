"""Allocations with room around them, so that a foreign kernel's stray store harms nothing and shows.

Interpreted kernels write to real memory. Within ``RoomyAllocations`` every tensor that is allocated lies in
a larger storage; between ``arm`` and ``strays`` no byte of the margins may change. Large allocations get a
margin of 2 GiB of untouched memory before them: as far as an offset that wrapped in 32 bits can reach.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RoomyAllocations"]

_MARGIN = 4096
_LARGE = 1 << 30
_WRAP = 1 << 31
_EMPTY = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
)
_FILLED = frozenset(
    {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
)


@dataclass
class _Made:
    """One allocation: bytes ``[start, end)`` of its storage, and what its margins held when armed."""

    storage: StorageWeakRef
    start: int
    end: int
    armed: tuple[bytes, bytes] | None = None

    def margins(self) -> tuple[bytes, bytes] | None:
        """4096 bytes on either side, or None where nobody holds the allocation any more.

        Read without torch: a capture in progress would record every call of it.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        at = storage.data_ptr()
        before = ctypes.string_at(at + self.start - _MARGIN, _MARGIN)
        return before, ctypes.string_at(at + self.end, _MARGIN)


class RoomyAllocations(TorchDispatchMode):
    """A dispatch mode; one instance may be entered again and again, and remembers what it allocated."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[_Made] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in _EMPTY | _FILLED or not isinstance(result, torch.Tensor):
            return result
        if result.device.type != "cpu" or not result.numel():
            return result
        return self._roomy(result, fill=name in _FILLED)

    def _roomy(self, plain: torch.Tensor, fill: bool) -> torch.Tensor:
        size, nbytes = plain.element_size(), plain.untyped_storage().nbytes()
        lead = _WRAP if nbytes >= _LARGE else _MARGIN
        raw = torch.empty(lead + -(-nbytes // size) * size + _MARGIN, dtype=torch.uint8)
        made = torch.as_strided(raw.view(plain.dtype), plain.shape, plain.stride(), lead // size)
        if fill:
            made.copy_(plain)
        noted = _Made(StorageWeakRef(raw.untyped_storage()), lead, lead + nbytes)
        noted.armed = noted.margins()
        self._made.append(noted)
        return made

    def arm(self) -> None:
        """From now on the margins may not change; those of what is allocated later, from then on."""
        for made in self._made:
            made.armed = made.margins()
        self._made = [made for made in self._made if made.armed is not None]

    def strays(self) -> tuple[str, ...]:
        """What was written in margins since they were armed, in words."""
        found = []
        for made in self._made:
            now = made.margins()
            if made.armed is None or now is None:
                continue
            for side, was, is_ in zip(("before", "past"), made.armed, now, strict=True):
                changed = sum(a != b for a, b in zip(was, is_, strict=True)) if was != is_ else 0
                if changed:
                    found.append(f"{changed} bytes {side} an allocation of {made.end - made.start:,} bytes")
        return tuple(found)
