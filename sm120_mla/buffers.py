"""PersistentBuffers: the registry of everything that outlives a call.

One rule made this module: a tensor allocated under ``torch.inference_mode()`` is an inference tensor for
life, and a torch-level write to it outside inference mode raises. So nothing here is ever allocated
inside inference mode, whoever asks; and nothing is allocated or grown while a graph is being captured.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from . import device
from .errors import ArgumentError, GrowthDuringCaptureError
from .layout import PageLayout

__all__ = ["Allocation", "Buffer", "BufferKey", "BufferReport", "PersistentBuffers", "default_buffers"]


@dataclass(frozen=True, order=True)
class BufferKey:
    """What two callers must share to share a buffer. ``scope`` is the caller's own, "" by default."""

    purpose: str
    device: str
    layout: str = ""
    scope: str = ""

    def __str__(self) -> str:
        parts = [self.purpose, self.device, self.layout]
        return "/".join(p for p in parts if p) + (f"[{self.scope}]" if self.scope else "")


@dataclass(frozen=True)
class Allocation:
    """How one allocation came about: the evidence that settles a report of a lost guard."""

    site: str
    inference_mode: bool
    capturing: bool
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class BufferReport:
    """One line of ``PersistentBuffers.report()``; ``nbytes`` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    address: int
    is_inference: bool
    generation: int
    superseded: bool
    allocations: tuple[Allocation, ...]


@dataclass(eq=False)
class Buffer:
    """One allocation. ``generation`` counts how often its contents were replaced as a whole."""

    key: BufferKey
    tensor: torch.Tensor
    allocations: list[Allocation]
    generation: int = 0
    # Graphs whose recorded work may write here. A graph of unknown life pins for good.
    pins: weakref.WeakSet[device.Capture] = field(default_factory=weakref.WeakSet)
    pinned_for_good: bool = False

    def advance(self) -> int:
        """Note that the contents are being replaced; returns the new generation."""
        self.generation += 1
        return self.generation

    @property
    def pinned(self) -> bool:
        return self.pinned_for_good or len(self.pins) > 0


class PersistentBuffers:
    """Buffers by key, grown along their first dimension, never shrunk.

    A buffer replaced by a larger one stays alive for as long as a graph captured through
    ``graphs.capture`` may hold its address, and for good if it was handed out inside a capture that
    this package did not start.
    """

    def __init__(self) -> None:
        self._entries: dict[BufferKey, Buffer] = {}
        self._superseded: list[Buffer] = []

    def get(
        self,
        purpose: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        like: torch.Tensor,
        *,
        layout: PageLayout | None = None,
        scope: str = "",
        zero: bool = False,
        hint: str = "",
    ) -> torch.Tensor:
        """The tensor of ``buffer``: at least ``shape`` along dimension 0, on the device of ``like``.

        Returns the whole tensor (dimension 0 may be longer than asked). ``zero`` clears it when it is
        allocated, and only then. ``hint`` is what the error should tell the caller to reserve. Raises
        ``GrowthDuringCaptureError`` when an allocation would be needed inside a capture, and
        ``ArgumentError`` for a dtype or trailing shape other than the buffer was made with.
        """
        return self.buffer(
            purpose, shape, dtype, like, layout=layout, scope=scope, zero=zero, hint=hint
        ).tensor

    def buffer(
        self,
        purpose: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        like: torch.Tensor,
        *,
        layout: PageLayout | None = None,
        scope: str = "",
        zero: bool = False,
        hint: str = "",
    ) -> Buffer:
        """As ``get``, with the buffer's key and generation."""
        shape = tuple(int(n) for n in shape)
        if not shape or any(n < 0 for n in shape):
            raise ArgumentError("shape", shape, "one or more sizes >= 0", "Correct the shape.")
        key = self.key(purpose, like, layout=layout, scope=scope)
        entry = self._entries.get(key)
        if entry is not None:
            have = entry.tensor
            if have.dtype != dtype or tuple(have.shape[1:]) != shape[1:]:
                raise ArgumentError(
                    f"buffer {key}",
                    f"{dtype} [*, {', '.join(map(str, shape[1:]))}]",
                    f"{have.dtype} [*, {', '.join(map(str, have.shape[1:]))}], as it was made",
                    "Use another purpose or scope.",
                )
            if have.shape[0] >= shape[0]:
                self._pin(entry)
                return entry
        if device.is_capturing():
            have_rows = 0 if entry is None else entry.tensor.shape[0]
            wanted = hint or _reservation(purpose, shape, dtype, layout, scope, zero)
            raise GrowthDuringCaptureError(
                f"buffer {key} has {have_rows} rows and {shape[0]} are needed, but a graph is being "
                f"captured. Call {wanted} before the capture."
            )
        return self._allocate(key, entry, shape, dtype, like, zero)

    reserve = get
    """``get`` by the name that says what it is for ahead of a capture."""

    @staticmethod
    def key(
        purpose: str, like: torch.Tensor, *, layout: PageLayout | None = None, scope: str = ""
    ) -> BufferKey:
        """The key under which a buffer is kept."""
        return BufferKey(purpose, device.device_key(like), layout.name if layout else "", scope)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every live buffer by name, superseded ones included (``name@n``)."""
        named = {str(key): entry.tensor for key, entry in sorted(self._entries.items())}
        for n, entry in enumerate(self._prune()):
            named[f"{entry.key}@{n}"] = entry.tensor
        return named

    def report(self) -> list[BufferReport]:
        """What there is, where it is, and how each allocation came about."""
        current = [(entry, False) for _, entry in sorted(self._entries.items())]
        return [
            BufferReport(
                name=str(entry.key),
                shape=tuple(entry.tensor.shape),
                dtype=str(entry.tensor.dtype).removeprefix("torch."),
                nbytes=entry.tensor.untyped_storage().nbytes(),
                address=entry.tensor.data_ptr(),
                is_inference=entry.tensor.is_inference(),
                generation=entry.generation,
                superseded=old,
                allocations=tuple(entry.allocations),
            )
            for entry, old in current + [(entry, True) for entry in self._prune()]
        ]

    def clear(self) -> None:
        """Forget every buffer that no graph may hold. For restarts and tests."""
        if device.is_capturing():
            raise GrowthDuringCaptureError(
                "buffers cannot be cleared while a graph is being captured. Clear before or after."
            )
        self._superseded = [e for e in [*self._superseded, *self._entries.values()] if e.pinned]
        self._entries.clear()

    def _allocate(
        self,
        key: BufferKey,
        old: Buffer | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        like: torch.Tensor,
        zero: bool,
    ) -> Buffer:
        made = Allocation(
            site=_call_site(),
            inference_mode=torch.is_inference_mode_enabled(),
            capturing=device.is_capturing(),
            shape=shape,
            nbytes=torch.Size(shape).numel() * dtype.itemsize,
        )
        make = torch.zeros if zero else torch.empty
        with torch.inference_mode(False):
            tensor = make(shape, dtype=dtype, device=like.device)
        entry = Buffer(key, tensor, [made])
        if old is not None:
            old.advance()
            entry.generation = old.generation
            entry.allocations = [*old.allocations, made]
            if old.pinned:
                self._superseded.append(old)
        self._prune()
        self._entries[key] = entry
        return entry

    def _pin(self, entry: Buffer) -> None:
        token = device.current_capture()
        if token is not None:
            entry.pins.add(token)
        elif device.is_capturing():
            entry.pinned_for_good = True

    def _prune(self) -> list[Buffer]:
        self._superseded = [entry for entry in self._superseded if entry.pinned]
        return self._superseded

    def __iter__(self) -> Iterator[BufferKey]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


def _reservation(
    purpose: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: PageLayout | None,
    scope: str,
    zero: bool,
) -> str:
    """The call that makes room for one buffer."""
    arguments = [repr(purpose), str(shape), str(dtype), "like"]
    if layout is not None:
        arguments.append(f"layout=by_name({layout.name!r})")
    if scope:
        arguments.append(f"scope={scope!r}")
    if zero:
        arguments.append("zero=True")
    return f"PersistentBuffers.reserve({', '.join(arguments)})"


def _call_site() -> str:
    """``file:line in function`` of the nearest caller outside this module, without its folder."""
    for frame in reversed(traceback.extract_stack(limit=12)):
        if frame.filename != __file__:
            name = frame.filename.replace("\\", "/").rsplit("/", 1)[-1]
            return f"{name}:{frame.lineno} in {frame.name}"
    return "unknown"


_default: PersistentBuffers | None = None


def default_buffers() -> PersistentBuffers:
    """The registry of this process, used wherever none is passed."""
    global _default
    if _default is None:
        _default = PersistentBuffers()
    return _default
