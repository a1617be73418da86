"""What a backend is given and what it answers. Everything here has been validated by ``attention``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..buffers import PersistentBuffers
from ..device import Capability
from ..envelopes import Refusal
from ..layout import PageGeometry

__all__ = [
    "DEFAULT_SCALE",
    "AttentionCall",
    "AttentionShape",
    "Backend",
    "CacheInput",
    "CacheShape",
    "Support",
    "support",
]

DEFAULT_SCALE = 512**-0.5
"""Softmax scale where a call names none (docs/design.md, section 4)."""


@dataclass(frozen=True)
class CacheShape:
    """A cache and its index rows as numbers: tokens per page, pages, page stride (bytes), columns."""

    page_size: int
    pages: int
    page_stride: int
    width: int
    index_dtype: str
    lane_bytes: int
    """Widest aligned load at every record, 1 to 16 bytes."""


@dataclass(frozen=True)
class AttentionShape:
    """A call as numbers, all that an envelope may depend on. ``tokens`` is T, ``heads`` H."""

    layout: str
    tokens: int
    heads: int
    main: CacheShape
    extra: CacheShape | None = None
    has_sink: bool = False
    return_lse: bool = False
    capturing: bool = False
    scale: float = DEFAULT_SCALE
    """Of the softmax."""


@dataclass(frozen=True)
class CacheInput:
    """One cache of a call."""

    pool: torch.Tensor
    """The cache view as given: uint8 or float8_e4m3fn, any rank the layout can address."""
    geometry: PageGeometry
    indices: torch.Tensor
    """int32 or int64 ``[T, k]``, last dimension dense, any row stride."""
    lengths: torch.Tensor | None
    """int32 or int64 ``[T]``, or None: every column. Clamped to ``[0, k]`` by whoever reads it."""


@dataclass(frozen=True)
class AttentionCall:
    """One validated call (docs/design.md, section 4): an entry counts iff it is in ``[0, tokens)`` of its
    pool and its column is below its row's length; compared in 64 bits.
    """

    q: torch.Tensor
    """bf16 ``[T, H, 512]``, last dimension dense, other strides free."""
    main: CacheInput
    extra: CacheInput | None
    sink: torch.Tensor | None
    """fp32 ``[H]``, natural units; -inf is no sink."""
    scale: float
    out: torch.Tensor
    """bf16 ``[T, H, 512]``, to be written whole; may be strided; never overlaps an input."""
    lse: torch.Tensor | None
    """fp32 ``[T, H]``, natural log, without the sink, -inf for a row with no counted entry; or None."""
    shape: AttentionShape
    buffers: PersistentBuffers
    scope: str = ""


@dataclass(frozen=True)
class Support:
    """Yes, or no with the reason and the smallest change that would work."""

    yes: bool
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.yes


def support(refusal: Refusal | None) -> Support:
    """An envelope's answer as a backend's."""
    if refusal is None:
        return Support(True)
    return Support(False, f"{refusal.argument} {refusal.value}: {refusal.expected}", refusal.remedy)


class Backend(Protocol):
    """One implementation."""

    name: str

    def available(self) -> Support:
        """Whether it can run in this process at all (packages, mode)."""

    def supports(self, shape: AttentionShape, capability: Capability | None) -> Support:
        """Whether it serves a call of these numbers; a pure function."""

    def run(self, call: AttentionCall) -> None:
        """Write ``call.out`` and, where wanted, ``call.lse``. Scratch comes from ``call.buffers`` only."""
