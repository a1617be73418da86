"""Padding rows of a captured batch, bound to values that mean nothing is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ArgumentError
from . import _checks as checks

__all__ = ["bind_padding"]

_DTYPES = (torch.int32, torch.int64)


def bind_padding(
    num_rows: int,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    token_to_req_indices: torch.Tensor | None = None,
    lengths: Sequence[torch.Tensor] = (),
    indices: Sequence[torch.Tensor] = (),
) -> None:
    """Make every row from ``num_rows`` on neutral, in place: nothing is left of a larger earlier batch.

    A graph replays as many rows as it was captured with, and its padding rows read whatever the persistent
    inputs hold. Slots become -1, from which every builder here makes length 0; positions and requests
    become 0, lengths 0, and index rows -1.

    Args:
        num_rows: real rows, 0 to the number of rows of ``slot_mapping``.
        slot_mapping: int32 or int64 ``[rows]``, rows as captured. All others have as many rows:
        positions, token_to_req_indices: ``[rows]``.
        lengths: any of ``[rows]`` or ``[rows, ...]``. indices: ``[rows, ...]``.

    Neither synchronises nor allocates. Call it outside the graph, before the replay: inside, ``num_rows`` is
    that of the capture for ever. Raises ``ArgumentError`` before anything is changed.
    """
    rows = checks.int_vector("slot_mapping", slot_mapping, 0, "").shape[0]
    if checks.positive("num_rows", num_rows, 0) > rows:
        raise ArgumentError(
            "num_rows", num_rows, f"at most {rows}, the rows of slot_mapping", "Use a graph of more rows."
        )
    fills: list[tuple[str, torch.Tensor, int]] = [("slot_mapping", slot_mapping, -1)]
    if positions is not None:
        fills.append(("positions", positions, 0))
    if token_to_req_indices is not None:
        fills.append(("token_to_req_indices", token_to_req_indices, 0))
    fills.extend((f"lengths[{at}]", tensor, 0) for at, tensor in enumerate(lengths))
    fills.extend((f"indices[{at}]", tensor, -1) for at, tensor in enumerate(indices))
    for name, tensor, _ in fills:
        _check(name, tensor, rows)
    if num_rows < rows:
        for _, tensor, value in fills:
            tensor[num_rows:].fill_(value)


def _check(name: str, tensor: object, rows: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, type(tensor).__name__, "a torch.Tensor", "Pass a tensor.")
    if tensor.dtype not in _DTYPES:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, "torch.int32 or torch.int64", "Convert it.")
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise ArgumentError(
            f"{name}.shape", tuple(tensor.shape), f"{rows} rows, as slot_mapping", "Pass the captured buffer."
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            name,
            "an inference tensor",
            "an ordinary tensor",
            "Allocate it under torch.inference_mode(False); it outlives the step.",
        )
