"""The specification as a backend: plain torch, on any device, for any shape. Slow on purpose."""

from __future__ import annotations

import torch

from .. import own_envelopes
from ..device import Capability
from ..errors import ArgumentError
from ..reference.attention import Entries, attention, faithful
from .base import AttentionCall, AttentionShape, Support, support

__all__ = ["FORMS", "ReferenceBackend", "entries_of"]

FORMS = ("fp64", "bf16")
"""``fp64`` is the yardstick, rounded once at the end; ``bf16`` rounds where bf16 kernels do."""


def entries_of(call: AttentionCall) -> list[Entries]:
    """The caches of a call as the specification takes them."""
    caches = [call.main] if call.extra is None else [call.main, call.extra]
    return [Entries(c.pool, c.geometry, c.indices, c.lengths) for c in caches]


class ReferenceBackend:
    """``reference.attention`` behind the interface of a backend. Uses no scratch, and can be captured."""

    name = "reference"

    def __init__(self, form: str = "fp64") -> None:
        if form not in FORMS:
            raise ArgumentError("form", repr(form), f"one of {', '.join(FORMS)}", "Correct it.")
        self.form = form

    def available(self) -> Support:
        """Always: it needs torch and nothing else."""
        return Support(True)

    def supports(self, shape: AttentionShape, capability: Capability | None) -> Support:
        """Every shape on every device, in a layout of rows that are K and V at once."""
        return support(own_envelopes.reference(shape.layout))

    def run(self, call: AttentionCall) -> None:
        """Write ``call.out`` and, where wanted, ``call.lse``."""
        compute = attention if self.form == "fp64" else faithful
        # In inference mode a torch-level write reaches ordinary and inference tensors alike.
        with torch.inference_mode():
            out, lse = compute(call.q, entries_of(call), call.sink, call.scale)
            call.out.copy_(out)
            if call.lse is not None:
                call.lse.copy_(lse)
