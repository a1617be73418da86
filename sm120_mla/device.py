"""The one place that asks CUDA anything, and the seam that tests patch.

Every caller goes through the module (``device.capability()``), never through a copied name, so that
``pretend_device`` and a monkeypatch reach all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import settings
from .errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    import torch

__all__ = [
    "SM120_SHARED_MEMORY",
    "Capture",
    "capability",
    "current_capture",
    "device_key",
    "interpreting",
    "is_capturing",
    "is_sm12x",
    "mode",
    "pretend_device",
    "pretend_device_key",
    "shared_memory_limit",
    "sm_count",
]

SM120_SHARED_MEMORY = 101_376
"""Bytes of shared memory one block may use on SM120 and SM121 (docs/design.md, section 8)."""

Capability = tuple[int, int]


@dataclass(frozen=True)
class _Pretence:
    capability: Capability | None
    shared_memory: int | None
    sm_count: int | None


@dataclass(eq=False)
class Capture:
    """Token of one capture, alive as long as its graph. ``on_replay`` is called after each replay."""

    on_replay: list[Callable[[], object]] = field(default_factory=list)


_pretence: list[_Pretence] = []
_device_keys: list[str] = []
_captures: list[Capture] = []


@contextlib.contextmanager
def pretend_device(
    capability: Capability | None,
    *,
    shared_memory: int | None = None,
    sm_count: int | None = None,
) -> Iterator[None]:
    """Answer as another GPU would. ``capability=None`` pretends a machine without one."""
    if shared_memory is None and capability is not None and capability[0] == 12:
        shared_memory = SM120_SHARED_MEMORY
    _pretence.append(_Pretence(capability, shared_memory, sm_count))
    try:
        yield
    finally:
        _pretence.pop()


@contextlib.contextmanager
def pretend_device_key(key: str) -> Iterator[None]:
    """Answer ``key`` for every tensor: lets one CPU stand for two devices."""
    _device_keys.append(key)
    try:
        yield
    finally:
        _device_keys.pop()


def cuda_available() -> bool:
    """Whether torch sees a CUDA GPU (the pretence does not change this)."""
    import torch

    return torch.cuda.is_available()


def capability(device: torch.device | str | int | None = None) -> Capability | None:
    """(major, minor) of the GPU, or None where there is none."""
    if _pretence:
        return _pretence[-1].capability
    if not cuda_available():
        return None
    import torch

    if device is not None and torch.device(device).type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def is_sm12x(device: torch.device | str | int | None = None) -> bool:
    """True on capability 12.x (12.1 behaves as 12.0); False elsewhere, and where there is none."""
    found = capability(device)
    return found is not None and found[0] == 12


def shared_memory_limit(device: torch.device | str | int | None = None) -> int | None:
    """Bytes of shared memory a block may opt into, or None where there is no GPU."""
    if _pretence:
        return _pretence[-1].shared_memory
    if not cuda_available():
        return None
    import torch

    properties: Any = torch.cuda.get_device_properties(device or 0)
    return int(properties.shared_memory_per_block_optin)


def sm_count(device: torch.device | str | int | None = None) -> int | None:
    """Number of multiprocessors, or None where there is no GPU."""
    if _pretence:
        return _pretence[-1].sm_count
    if not cuda_available():
        return None
    import torch

    return int(torch.cuda.get_device_properties(device or 0).multi_processor_count)


def mode() -> str:
    """``reference``, ``cuda`` or ``sm120``.

    ``SM120_MLA_MODE=auto`` takes the strongest that the machine has. Raises ``UnavailableError``
    when an explicit mode cannot be served: nothing falls back silently.
    """
    wanted = settings.get("SM120_MLA_MODE")
    if wanted == "reference":
        return wanted
    have = cuda_available() and not interpreting()
    if wanted == "auto":
        if not have:
            return "reference"
        return "sm120" if is_sm12x() else "cuda"
    if not have:
        why = "TRITON_INTERPRET is set" if interpreting() else "torch sees no CUDA GPU"
        raise UnavailableError(
            f"mode {wanted}", why, "Use SM120_MLA_MODE=reference, or unset it to choose by machine."
        )
    if wanted == "sm120" and not is_sm12x():
        raise UnavailableError(
            "mode sm120", f"the GPU has capability {capability()}", "Use SM120_MLA_MODE=cuda."
        )
    return wanted


def interpreting() -> bool:
    """Whether kernels decorated from now on run in Triton's interpreter."""
    return settings.get("TRITON_INTERPRET").lower() in ("1", "true", "on", "yes")


def device_key(tensor: torch.Tensor) -> str:
    """What tells one device from another in a buffer key: ``cpu``, ``cuda:0``, ..."""
    if _device_keys:
        return _device_keys[-1]
    return str(tensor.device)


def current_capture() -> Capture | None:
    """Token of the capture that ``graphs.capture`` has in progress, or None."""
    return _captures[-1] if _captures else None


def is_capturing() -> bool:
    """Whether work launched now would be captured: by ``graphs.capture`` or by anybody's CUDA graph."""
    if _captures:
        return True
    if not cuda_available():
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def capturing(token: Capture) -> Iterator[Capture]:
    """Mark a capture as in progress; used by ``graphs`` only."""
    _captures.append(token)
    try:
        yield token
    finally:
        _captures.remove(token)


def validate_values(level: str | None) -> bool:
    """Whether values are to be checked: never in capture, else as asked, else in reference mode.

    ``level`` is an argument of a public function: None, ``metadata`` or ``values``.
    """
    if level not in (None, "metadata", "values"):
        raise ArgumentError("validate", repr(level), "'metadata', 'values' or None", "Correct it.")
    if is_capturing():
        return False
    level = level or settings.get("SM120_MLA_VALIDATE")
    return mode() == "reference" if level == "auto" else level == "values"
