"""From a MetaBatch to the builder's inputs, and what the reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..case import MetaBatch
from ..reference import metadata as reference
from ..targets.base import C128AInputs
from ..widths import C128A_RATIO, active_width
from .derive import run_device
from .guards import noise

__all__ = ["Buffers", "inputs_of", "make_buffers", "refill", "rows_of", "want"]


@dataclass(frozen=True)
class Buffers:
    """What an engine allocates once for the builder, poisoned with ids that look live."""

    decode: torch.Tensor
    """int32 ``[rows, capacity]``."""
    lens: torch.Tensor
    prefill: torch.Tensor

    @property
    def capacity(self) -> int:
        """Columns."""
        return self.decode.shape[1]

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies on the CPU."""
        return self.decode.cpu().clone(), self.lens.cpu().clone(), self.prefill.cpu().clone()

    def poison(self, seed: int, tokens: int = 1 << 20) -> None:
        """Ids in ``[0, tokens)`` in every column, lengths that look like lengths."""
        for n, tensor in enumerate((self.decode, self.lens, self.prefill)):
            raw = noise(tensor.numel() * 4, seed + n, tensor.device).view(torch.int32)
            limit = tokens if tensor.dim() == 2 else self.capacity
            tensor.copy_(((raw & 0x7FFFFFFF) % limit).view(tensor.shape))


def make_buffers(rows: int, capacity: int, seed: int) -> Buffers:
    """Buffers for batches of up to ``rows`` tokens, poisoned."""
    where = run_device()
    made = Buffers(
        torch.empty((rows, capacity), dtype=torch.int32, device=where),
        torch.empty((rows,), dtype=torch.int32, device=where),
        torch.empty((rows, capacity), dtype=torch.int32, device=where),
    )
    made.poison(seed)
    return made


def rows_of(batch: MetaBatch) -> int:
    """Tokens of a batch, padding included."""
    return batch.decode + batch.padding + batch.prefill


def inputs_of(
    batch: MetaBatch,
    buffers: Buffers,
    *,
    requests: int,
    block_size: int,
    table_gap: int = 0,
    garbage: int = 0,
    num_blocks: int = 1 << 18,
) -> C128AInputs:
    """The builder's arguments for one batch.

    Real rows depend on ``batch.seed`` alone; padding rows (after the real decode rows) on ``garbage`` too:
    slot -1, positions and requests of any value. Block-table columns that no real row needs hold -1.
    """
    gen = torch.Generator().manual_seed(batch.seed)
    bad = torch.Generator().manual_seed(batch.seed * 31 + garbage)
    dtype = getattr(torch, batch.dtype)
    seq = batch.max_seq_len if batch.width_seq is None else batch.width_seq
    width = active_width(seq, buffers.capacity)
    longest = min(max(batch.max_seq_len, 1), buffers.capacity * C128A_RATIO)
    real = batch.decode + batch.prefill
    highest = min(longest, C128A_RATIO - 1) if batch.short else longest
    positions = torch.randint(0, max(highest, 1), (real,), generator=gen)
    if real and not batch.short:
        positions[torch.randint(0, real, (1,), generator=gen)] = longest - 1
    request = torch.randint(0, requests, (real,), generator=gen)
    slots = torch.randint(0, 1 << 20, (real,), generator=gen)

    def with_padding(values: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[: batch.decode], pad, values[batch.decode :]])

    pad = (batch.padding,)
    garbage_position = torch.randint(-5, 2 * longest + 5, pad, generator=bad)
    garbage_request = torch.randint(-3, requests + 3, pad, generator=bad)
    columns = max(-(-buffers.capacity // block_size), 1)
    storage = torch.randint(
        0, num_blocks, (requests, columns + table_gap), generator=gen, dtype=torch.int64
    ).to(torch.int32)
    storage[:, longest // C128A_RATIO // block_size + 1 : columns] = -1
    where = run_device()
    return C128AInputs(
        positions=with_padding(positions, garbage_position).to(where, dtype),
        compress_ratio=C128A_RATIO,
        num_decode_tokens=batch.decode + batch.padding,
        token_to_req_indices=with_padding(request, garbage_request).to(where, torch.int32),
        block_table=storage.to(where)[:, :columns],
        block_size=block_size,
        slot_mapping=with_padding(slots, torch.full(pad, -1)).to(where, dtype),
        global_decode_buffer=buffers.decode,
        decode_lens_buffer=buffers.lens,
        prefill_buffer=buffers.prefill,
        max_compressed_tokens=width,
    )


def refill(old: C128AInputs, new: C128AInputs) -> C128AInputs:
    """Copy the tensors of ``new`` into those of ``old``, as an engine does before a replay."""
    for name in ("positions", "token_to_req_indices", "block_table", "slot_mapping"):
        getattr(old, name).copy_(getattr(new, name))
    return replace(old, max_compressed_tokens=new.max_compressed_tokens)


def want(inputs: C128AInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode rows ``[nd, W]``, lengths ``[nd]``, prefill rows ``[np, W]`` of the reference, on the CPU."""
    return reference.c128a(
        inputs.positions.cpu(),
        inputs.compress_ratio,
        inputs.num_decode_tokens,
        inputs.token_to_req_indices.cpu(),
        inputs.block_table.cpu(),
        inputs.block_size,
        inputs.slot_mapping.cpu(),
        inputs.max_compressed_tokens,
    )
