"""Sliding-window index rows for decode and for a DSpark verify batch."""

from __future__ import annotations

import torch

from .. import device
from ..errors import IndexValueError
from ..kernels import index_windows as kernels
from ..widths import SWA_WINDOW, align, verify_width
from . import _checks as checks
from . import _values as values

__all__ = ["swa_window_indices", "verify_window_indices"]

_DECODE_UNIT = 64


def swa_window_indices(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    window: int = SWA_WINDOW,
    num_blocks: int | None = None,
    out: torch.Tensor | None = None,
    lens_out: torch.Tensor | None = None,
    validate: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the last ``window`` tokens that each decode token sees, itself included, ascending.

    Row t holds the slots of positions ``max(p - window + 1, 0)..p``, then -1 to the end of the row; its
    length is ``min(p + 1, window)``. A padding row (negative slot) holds -1 and has length 0, whatever its
    position and request say.

    Args:
        positions, token_to_req_indices, slot_mapping: int32 or int64 ``[T]`` (the latter two may be longer).
        block_table: ``[requests, columns]``; never changed.
        block_size: tokens per block of the window's cache (64).
        out: int32 row-major ``[>= T, >= window]``, written to its full width; None: a fresh one of
            ``window`` columns rounded up to 64. lens_out: int32 ``[>= T]``.
        num_blocks, validate: as in ``build_c128a_topk_metadata``.

    Returns ``(rows [T, columns of out], lengths [T])``: contiguous, and views of the outputs if given.
    Unchecked, a request, table column or block id out of range gives -1 in its column.
    Raises ``ArgumentError`` (nothing is written) and ``IndexValueError``.
    """
    block = checks.positive("block_size", block_size)
    window = checks.positive("window", window)
    blocks = checks.block_count(num_blocks)
    rows = checks.int_vector("positions", positions, 0, "").shape[0]
    inputs = {
        "positions": positions,
        "token_to_req_indices": checks.int_vector(
            "token_to_req_indices", token_to_req_indices, rows, "positions"
        ),
        "slot_mapping": checks.int_vector("slot_mapping", slot_mapping, rows, "positions"),
        "block_table": checks.block_table(block_table),
    }
    width = align(window, _DECODE_UNIT)
    out, lens = checks.outputs(out, lens_out, rows, window, width, "the window", inputs)
    if device.validate_values(validate):
        live = slot_mapping[:rows] >= 0
        values.refuse(live & (positions < 0), "positions", positions, ">= 0", "Give padding rows slot -1.")
        last = positions.to(torch.int64)
        first = (last - (window - 1)).clamp(min=0)
        values.lookups(block_table, token_to_req_indices[:rows], first, last, live, block, blocks)
    if rows:
        kernels.window_kernel[kernels.grid(rows, out.shape[1])](
            **kernels.arguments(
                out,
                lens,
                positions,
                token_to_req_indices,
                slot_mapping,
                block_table,
                rows=rows,
                draft=0,
                window=window,
                block_size=block,
                num_blocks=blocks,
            )
        )
    return out[:rows], lens[:rows]


def verify_window_indices(
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    num_speculative_tokens: int,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    window: int = SWA_WINDOW,
    num_blocks: int | None = None,
    out: torch.Tensor | None = None,
    lens_out: torch.Tensor | None = None,
    validate: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Window rows of a DSpark verify batch: ``D * (1 + K)`` rows, ``1 + K`` to each of D requests.

    Attention within the block is not causal: every token of a request's block gets the same row, the slots
    of positions ``max(seq_len - query_len - window, 0)..seq_len - 1``, ascending: up to ``window`` tokens
    before the block, then the block. Then -1 to the end of the row. Rows at or past the request's
    ``query_len``, and padding rows (negative slot), hold -1 and have length 0. (A causal verify batch is
    ``swa_window_indices`` on its positions.)

    Args:
        seq_lens: int32 or int64 ``[D]``: tokens of each sequence, its block included.
        query_lens: ``[>= D]``: tokens of each block, cut to ``[0, 1 + K]``.
        num_speculative_tokens: K.
        block_table: ``[requests, columns]``, row d for request d; never changed.
        slot_mapping: ``[>= D * (1 + K)]``.
        out: int32 row-major ``[>= rows, >= window + 1 + K]``, written to its full width; None: a fresh one
            of ``widths.verify_width(K, window)`` columns. lens_out: int32 ``[>= rows]``.
        block_size, num_blocks, validate: as in ``swa_window_indices``.

    Returns ``(rows [D * (1 + K), columns of out], lengths)``: contiguous, and views of the outputs if given.
    Raises ``ArgumentError`` (nothing is written) and ``IndexValueError``.
    """
    per_request = 1 + checks.positive("num_speculative_tokens", num_speculative_tokens, 0)
    block = checks.positive("block_size", block_size)
    window = checks.positive("window", window)
    blocks = checks.block_count(num_blocks)
    requests = checks.int_vector("seq_lens", seq_lens, 0, "").shape[0]
    rows = requests * per_request
    inputs = {
        "seq_lens": seq_lens,
        "query_lens": checks.int_vector("query_lens", query_lens, requests, "seq_lens"),
        "slot_mapping": checks.int_vector("slot_mapping", slot_mapping, rows, "the rows, 1 + K a request"),
        "block_table": checks.block_table(block_table),
    }
    width = verify_width(num_speculative_tokens, window)
    out, lens = checks.outputs(
        out, lens_out, rows, window + per_request, width, "the window and the block of 1 + K", inputs
    )
    if device.validate_values(validate):
        _check_verify_values(inputs, per_request, window, block, blocks)
    if rows:
        kernels.window_kernel[kernels.grid(rows, out.shape[1])](
            **kernels.arguments(
                out,
                lens,
                seq_lens,
                query_lens,
                slot_mapping,
                block_table,
                rows=rows,
                draft=per_request,
                window=window,
                block_size=block,
                num_blocks=blocks,
            )
        )
    return out[:rows], lens[:rows]


def _check_verify_values(
    inputs: dict[str, torch.Tensor], per_request: int, window: int, block_size: int, num_blocks: int | None
) -> None:
    seq_lens, table = inputs["seq_lens"], inputs["block_table"]
    requests = seq_lens.shape[0]
    given = inputs["query_lens"][:requests]
    slots = inputs["slot_mapping"][: requests * per_request].reshape(requests, per_request)
    live = (slots >= 0).any(dim=1)
    values.refuse(
        live & ((given < 0) | (given > per_request)),
        "query_lens",
        given,
        f"in [0, {per_request}], the tokens of a block",
        "Pass the tokens of each block, the first included.",
    )
    live &= given > 0
    values.refuse(
        live & (seq_lens < given), "seq_lens", seq_lens, "at least its query length", "Count the block in."
    )
    if bool(live[table.shape[0] :].any()):
        raise IndexValueError(
            "block_table.shape[0]",
            table.shape[0],
            f"at least {requests} rows",
            "Pass a row for each request.",
        )
    last = seq_lens.to(torch.int64) - 1
    first = (last + 1 - given - window).clamp(min=0)
    owner = torch.arange(requests, device=seq_lens.device)
    values.lookups(table, owner, first, last, live, block_size, num_blocks)
