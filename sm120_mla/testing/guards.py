"""Poison and guard zones: memory that shows when somebody writes where nobody should."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["GUARD_BYTES", "Guarded", "guarded_bytes", "noise", "poison"]

GUARD_BYTES = 4096
"""Size of each guard zone around a guarded tensor."""


def noise(nbytes: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """uint8 ``[nbytes]`` of reproducible noise, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed & 0x7FFFFFFF)
    words = torch.randint(
        -(1 << 63), (1 << 63) - 1, (-(-nbytes // 8),), dtype=torch.int64, generator=generator
    )
    return words.view(torch.uint8)[:nbytes].to(device)


def poison(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill the tensor's memory with noise, and return a copy of what was filled in.

    Noise rather than one byte: a kernel that copies one wrong constant cannot look as if it had not run.
    Works on tensors of any dtype, by bytes, and on inference tensors.
    """
    with torch.inference_mode(tensor.is_inference()):
        raw = tensor.view(torch.uint8)
        raw.copy_(noise(raw.numel(), seed, tensor.device).view(raw.shape))
        return raw.clone()


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger storage whose every byte is known."""

    storage: torch.Tensor
    before: torch.Tensor
    start: int

    def stray(self) -> list[int]:
        """Bytes of the storage that changed since the guard was made, relative to the tensor's start."""
        changed = (self.storage != self.before).nonzero().flatten()
        return [int(b) - self.start for b in changed[:16]]


def guarded_bytes(
    nbytes: int, seed: int, device: torch.device | str, offset: int = 0, room: int = 0
) -> Guarded:
    """``nbytes`` of noise, ``offset`` bytes into their storage, with guard zones of noise on both sides.

    ``room`` is added to the zone behind, so that a stray read of the implementation stays inside it.
    """
    start = GUARD_BYTES + offset
    storage = noise(start + nbytes + GUARD_BYTES + room, seed, device)
    return Guarded(storage, storage.clone(), start)
