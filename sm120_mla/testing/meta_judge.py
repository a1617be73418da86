"""What is asked of one C128A build: values, view, contract. Each answers with a complaint, or ""."""

from __future__ import annotations

import torch

from .. import contract
from ..targets.base import C128AInputs
from .meta_batch import want

__all__ = ["consume", "contract_complaint", "values_complaint", "view_complaint"]

Snapshot = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _first_wrong(name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    if got.shape != wanted.shape:
        return f"{name} has shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    wrong = (got != wanted).nonzero()
    if not wrong.numel():
        return ""
    at = tuple(int(n) for n in wrong[0])
    rows = sorted({int(n) for n in wrong[:, 0]})
    return (
        f"{name}{list(at)} is {int(got[at])} instead of {int(wanted[at])}; "
        f"{wrong.shape[0]} entries of {len(rows)} rows differ, first in row {rows[0]}"
    )


def values_complaint(
    inputs: C128AInputs, table: torch.Tensor, before: Snapshot, after: tuple[torch.Tensor, ...]
) -> str:
    """Rows, lengths and what lies around them, against the reference and the memory before.

    ``table`` is the block table as it was; ``after`` the decode view's content and the three buffers.
    """
    rows, lens, prefill = want(inputs)
    decode_n, width = rows.shape
    prefill_n = prefill.shape[0]
    view, decode_after, lens_after, prefill_after = after
    if not torch.equal(inputs.block_table, table):
        return "the shared block table was changed in place"
    return (
        _first_wrong("decode_lens", lens_after[:decode_n], lens)
        or _first_wrong("decode rows", view[:, :width], rows)
        or _first_wrong("prefill rows", prefill_after[:prefill_n, :width], prefill)
        or _first_wrong("decode rows past the batch", decode_after[decode_n:], before[0][decode_n:])
        or _first_wrong("prefill rows past the batch", prefill_after[prefill_n:], before[2][prefill_n:])
        or _first_wrong("decode_lens past the batch", lens_after[decode_n:], before[1][decode_n:])
    )


def view_complaint(
    inputs: C128AInputs,
    capability: tuple[int, int] | None,
    decode: torch.Tensor,
    lens: torch.Tensor,
    prefill: torch.Tensor,
) -> str:
    """Shape, memory and stride of the views; contiguity only where it can differ."""
    buffer = inputs.global_decode_buffer
    capacity, width = buffer.shape[1], inputs.max_compressed_tokens
    decode_n = inputs.num_decode_tokens
    prefill_n = inputs.positions.shape[0] - decode_n
    full = capability is not None and capability[0] == 12
    columns = capacity if full else width
    gpu = "no capability" if capability is None else f"capability {capability[0]}.{capability[1]}"
    kind = "full width" if full else "narrow"
    if tuple(decode.shape) != (decode_n, columns):
        return f"decode view {tuple(decode.shape)} on {gpu}: expected {kind}, {(decode_n, columns)}"
    if tuple(prefill.shape) != (prefill_n, width):
        return f"prefill view {tuple(prefill.shape)}: expected narrow everywhere, {(prefill_n, width)}"
    if tuple(lens.shape) != (decode_n,):
        return f"lengths {tuple(lens.shape)}: expected {(decode_n,)}"
    for name, view, home in (
        ("decode", decode, buffer),
        ("lengths", lens, inputs.decode_lens_buffer),
        ("prefill", prefill, inputs.prefill_buffer),
    ):
        if view.numel() and view.data_ptr() != home.data_ptr():
            return f"the {name} view is not in its buffer: the consumer would get a copy"
        if view.dtype != torch.int32:
            return f"the {name} view is {view.dtype}: expected torch.int32"
    if full and decode_n > 1 and not decode.is_contiguous():
        return f"the decode view on {gpu} is not contiguous: strides {decode.stride()}"
    return ""


def stride_complaint(inputs: C128AInputs, decode: torch.Tensor, prefill: torch.Tensor) -> str:
    """A row stride that is not the buffer's depends on the width."""
    for name, view, home in (
        ("decode", decode, inputs.global_decode_buffer),
        ("prefill", prefill, inputs.prefill_buffer),
    ):
        if view.shape[0] > 1 and view.stride(0) != home.stride(0):
            return (
                f"the {name} row stride is {view.stride(0)} at width {inputs.max_compressed_tokens}: "
                f"expected {home.stride(0)}, the buffer's, at every width"
            )
    return ""


def contract_complaint(decode: torch.Tensor, lens: torch.Tensor, rows: int) -> str:
    """What FlashInfer 0.6.14-0.6.18, the strictest, needs of the decode view in a call of ``rows`` tokens."""
    for name, tensor in (("eidx", decode), ("etl", lens)):
        given = contract.IndexTensor(
            name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch.")
        )
        said = contract.needs(given, rows)
        if said is not None:
            refused = contract.refusal(given, rows)
            return f"{rows} rows: {said}" + ("" if refused else " (not checked: silently wrong)")
    return ""


def consume(decode: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    """A consumer as graphs hold it: copies the counted entries of each row, -1 elsewhere, into ``out``."""
    column = torch.arange(decode.shape[1], device=decode.device)
    none = torch.full((), -1, dtype=torch.int32, device=decode.device)
    torch.where(column < lens[:, None], decode, none, out=out)
