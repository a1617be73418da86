"""Index rows and lengths as a specification: row by row, with Python's own integers.

Every function returns fresh int32 tensors on the device of its first tensor. Rows have exactly ``width``
columns, all of them specified. An entry whose request, block-table column or block id is out of range is
-1 and keeps its place; a length counts columns, such entries included.
"""

from __future__ import annotations

import torch

__all__ = ["c128a", "c4a_global", "combine", "swa_window", "verify_window"]

_SLOTS = 2**31


def _lookup(
    table: torch.Tensor, request: int, index: torch.Tensor, block_size: int, num_blocks: int | None
) -> torch.Tensor:
    """Slot of each int64 ``index`` of ``request``, -1 where there is none."""
    slots = torch.full_like(index, -1)
    if not 0 <= request < table.shape[0]:
        return slots
    column = torch.div(index, block_size, rounding_mode="floor")
    known = (index >= 0) & (column < table.shape[1])
    block = table[request].to(torch.int64)[column[known]]
    blocks = _SLOTS // block_size if num_blocks is None else min(num_blocks, _SLOTS // block_size)
    good = (block >= 0) & (block < blocks)
    slots[known] = torch.where(good, block * block_size + index[known] % block_size, -1)
    return slots


def _row(values: torch.Tensor, width: int) -> torch.Tensor:
    row = values.new_full((width,), -1)
    row[: values.numel()] = values
    return row


def _stack(rows: list[torch.Tensor], width: int, like: torch.Tensor) -> torch.Tensor:
    if not rows:
        return torch.empty((0, width), dtype=torch.int32, device=like.device)
    return torch.stack(rows).to(dtype=torch.int32, device=like.device)


def _lengths(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def c128a(
    positions: torch.Tensor,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    width: int,
    num_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode rows ``[nd, width]``, their lengths ``[nd]`` and prefill rows ``[T - nd, width]``.

    ``n = min((position + 1) // compress_ratio, width)``, at least 0. A decode row holds the slots of
    entries 0..n-1 of its request, a prefill row the numbers 0..n-1; then -1. A length is n, or 0 where the
    row's slot is negative: the row of such a padding token is filled all the same, as vLLM does it.
    """
    table, requests, slots = block_table.cpu(), token_to_req_indices.tolist(), slot_mapping.tolist()
    decode, lengths, prefill = [], [], []
    for token, position in enumerate(positions.tolist()):
        count = max(0, min((position + 1) // compress_ratio, width))
        entries = torch.arange(count)
        if token < num_decode_tokens:
            decode.append(_row(_lookup(table, requests[token], entries, block_size, num_blocks), width))
            lengths.append(count if slots[token] >= 0 else 0)
        else:
            prefill.append(_row(entries, width))
    return (
        _stack(decode, width, positions),
        _lengths(lengths, positions),
        _stack(prefill, width, positions),
    )


def _window(
    rows: list[tuple[int, int, int]],
    table: torch.Tensor,
    block_size: int,
    width: int,
    num_blocks: int | None,
    like: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``(request, start, end)``: the slots of positions start..end-1, ascending."""
    table = table.cpu()
    out = []
    for request, start, end in rows:
        # Python's integers cannot overflow, torch's can: no table reaches beyond 2**62.
        far = start >= 2**62
        position = torch.full((end - start,), -1) if far else torch.arange(start, end)
        out.append(_row(_lookup(table, request, position, block_size, num_blocks), width))
    return _stack(out, width, like), _lengths([end - start for _, start, end in rows], like)


def swa_window(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    window: int,
    width: int,
    num_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[T, width]`` and lengths ``[T]``: a token sees itself and the ``window - 1`` before it.

    Positions ``max(p - window + 1, 0)`` to ``p``, ascending, then -1. A token whose slot or position is
    negative sees nothing: length 0 and a row of -1.
    """
    slots, requests, rows = slot_mapping.tolist(), token_to_req_indices.tolist(), []
    for token, position in enumerate(positions.tolist()):
        if slots[token] < 0 or position < 0:
            rows.append((-1, 0, 0))
        else:
            rows.append((requests[token], max(position - window + 1, 0), position + 1))
    return _window(rows, block_table, block_size, width, num_blocks, positions)


def verify_window(
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    num_speculative_tokens: int,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    window: int,
    width: int,
    num_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[D * (1 + K), width]`` and lengths ``[D * (1 + K)]`` of a DSpark verify batch.

    Every token of a request's block sees the ``window`` tokens before the block and the whole block:
    positions ``max(seq_len - query_len - window, 0)`` to ``seq_len - 1``, ascending. ``query_len`` is cut
    to ``[0, 1 + K]``. Rows at or past it, and rows whose slot is negative, have length 0 and hold -1.
    """
    per_request = 1 + num_speculative_tokens
    slots, queries, rows = slot_mapping.tolist(), query_lens.tolist(), []
    for request, given in enumerate(seq_lens.tolist()):
        seq_len = max(given, 0)
        query = max(0, min(queries[request], per_request))
        for token in range(per_request):
            if token >= query or slots[request * per_request + token] < 0:
                rows.append((-1, 0, 0))
            else:
                rows.append((request, max(seq_len - query - window, 0), seq_len))
    return _window(rows, block_table, block_size, width, num_blocks, seq_lens)


def c4a_global(
    local_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    width: int,
    num_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[T, width]`` and lengths ``[T]``: each local index becomes its slot, in its own column.

    A negative local index is a hole: -1. The length is one more than the column of the last slot, so that
    no slot lies past it and holes before it are kept. A row whose slot is negative is -1, length 0.
    """
    table, requests, slots = block_table.cpu(), token_to_req_indices.tolist(), slot_mapping.tolist()
    rows, lengths = [], []
    for token, local in enumerate(local_indices.reshape(local_indices.shape[0], -1).cpu().to(torch.int64)):
        row = torch.full((width,), -1)
        if slots[token] >= 0:
            row = _row(_lookup(table, requests[token], local, block_size, num_blocks), width)
        rows.append(row)
        lengths.append(max((column + 1 for column, slot in enumerate(row.tolist()) if slot >= 0), default=0))
    return _stack(rows, width, local_indices), _lengths(lengths, local_indices)


def combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    compress_ratio: int,
    topk: int,
    workspace_stride: int,
    window_base: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[T, width]`` and lengths ``[T]`` into a prefill workspace.

    The workspace gives each request ``workspace_stride`` rows: compressed entries in the first
    ``window_base``, then the last ``gather_len`` tokens of the sequence. A token at position p has
    ``min((p + 1) // compress_ratio, topk, k)`` entries taken from its top-k row, then
    ``min(p + 1, window)`` for the window, ascending; what points outside its region is -1 and keeps its
    place. A token that belongs to no request has length 0 and a row of -1.
    """
    first, *_ = starts = query_start_loc.tolist()
    seqs, gathers = seq_lens.tolist(), gather_lens.tolist()
    chosen = topk_indices.reshape(topk_indices.shape[0], -1).tolist()
    limit = min(topk, topk_indices.shape[-1])
    rows, lengths = [], []
    for token in range(topk_indices.shape[0]):
        row: list[int] = []
        for request in range(len(seqs)):
            begin, end = starts[request] - first, starts[request + 1] - first
            if not begin <= token < end:
                continue
            position = seqs[request] - (end - begin) + (token - begin)
            base = request * workspace_stride
            for entry in chosen[token][: max(0, min((position + 1) // compress_ratio, limit))]:
                row.append(base + entry if 0 <= entry < window_base else -1)
            for p in range(max(position - window + 1, 0), position + 1):
                at = p - (seqs[request] - gathers[request])
                held = 0 <= at < workspace_stride - window_base
                row.append(base + window_base + at if held else -1)
        lengths.append(len(row))
        rows.append(torch.tensor(row + [-1] * (width - len(row))))
    return _stack(rows, width, topk_indices), _lengths(lengths, topk_indices)
