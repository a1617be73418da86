"""What a target may say of the way a call takes: an optional part of the Target protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..device import Capability
from ..layout import PageLayout
from .base import AttentionInputs, Support

__all__ = ["Handed", "HasServes", "Routed", "Routes", "Way"]


@dataclass(frozen=True)
class Way:
    """How a call is to be asked for, and on which machine.

    ``backend`` is the argument (``auto`` chooses by capability); ``flashinfer`` the generation that counts
    as installed (``envelopes.by_name``), or None. With ``launch`` kernels are launched, but FlashInfer's are
    not; without it, launches are noted and none is made.
    """

    backend: str
    capability: Capability | None
    flashinfer: str | None
    layout: PageLayout
    launch: bool = False


@dataclass(frozen=True)
class Handed:
    """What FlashInfer would be given; caches are uint8 ``[pages, P, 1, bytes]``, the rest is named as
    FlashInfer's own arguments. ``extra_*`` are None together.
    """

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mid_out: torch.Tensor
    mid_lse: torch.Tensor
    sink: torch.Tensor | None
    extra_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_lengths: torch.Tensor | None


@dataclass(frozen=True)
class Routed:
    """What was said of a call beforehand, and what the call did.

    ``said`` and ``served`` are a backend's name, or "" where the result is known without one; None where the
    question or the call raised, with the error beside it. ``launches`` are in order, by names of the target's
    own; ``changed`` names outputs and persistent buffers that were written or made. ``finite_slot_zero`` are
    the caches whose slot 0 the caller must keep finite.
    """

    said: str | None
    said_error: Exception | None
    served: str | None
    error: Exception | None
    launches: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    handed: Handed | None = None
    finite_slot_zero: tuple[str, ...] = ()


@runtime_checkable
class Routes(Protocol):
    """A target that tells the way of a call. One without it is judged unknown."""

    def route(self, inputs: AttentionInputs, way: Way) -> Routed:
        """Ask which backend would serve the call, then make it."""


@runtime_checkable
class HasServes(Protocol):
    """A target whose attention does not serve everything, or asks something of what it is given."""

    def serves(self, inputs: AttentionInputs) -> Support:
        """Whether ``attend`` takes the call; no, with the reason, is judged unknown."""

    def finite_slot_zero(self, inputs: AttentionInputs) -> tuple[str, ...]:
        """Caches (``kv_cache``, ``extra_kv_cache``) whose slot 0 must be finite, counted or not."""
