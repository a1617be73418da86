"""Index rows from top-k selections: global C4A slots, and rows into a prefill workspace."""

from __future__ import annotations

import torch

from .. import device
from ..errors import ArgumentError
from ..kernels import index_topk as kernels
from ..widths import combined_width
from . import _checks as checks
from . import _values as values

__all__ = ["c4a_global_indices", "combine_topk_swa"]

_MOST = 2**31


def c4a_global_indices(
    local_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    num_blocks: int | None = None,
    out: torch.Tensor | None = None,
    lens_out: torch.Tensor | None = None,
    validate: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global slots of the indexer's selection, each in the column it was selected in.

    ``slot = block_table[request, i // block_size] * block_size + i % block_size`` for each local index
    ``i >= 0``; a negative one is a hole and stays -1. The length of a row is one more than the column of its
    last slot, 0 if it has none: no slot lies past it, and holes before it count as columns. (vLLM counts
    the slots instead, and so cuts off the last ones of a row with holes.) Padding rows (negative slot in
    ``slot_mapping``) hold -1 and have length 0.

    Args:
        local_indices: int32 or int64 ``[T, k]`` or ``[T, 1, k]``, dense rows of any stride.
        token_to_req_indices, slot_mapping: ``[>= T]``.
        block_table: ``[requests, columns]``; never changed.
        block_size: entries per block of the compressed cache (256 / 4 = 64).
        out: int32 row-major ``[>= T, >= k]``, written to its full width (-1 from column k on); None: a fresh
            ``[T, k]``. lens_out: int32 ``[>= T]``.
        num_blocks, validate: as in ``build_c128a_topk_metadata``.

    Returns ``(rows [T, columns of out], lengths [T])``: contiguous, and views of the outputs if given.
    Unchecked, a request, table column or block id out of range is a hole.
    Raises ``ArgumentError`` (nothing is written) and ``IndexValueError``.
    """
    block = checks.positive("block_size", block_size)
    blocks = checks.block_count(num_blocks)
    local = checks.index_rows("local_indices", local_indices)
    rows, topk = local.shape
    inputs = {
        "local_indices": local,
        "token_to_req_indices": checks.int_vector(
            "token_to_req_indices", token_to_req_indices, rows, "local_indices"
        ),
        "block_table": checks.block_table(block_table),
        "slot_mapping": checks.int_vector("slot_mapping", slot_mapping, rows, "local_indices"),
    }
    out, lens = checks.outputs(out, lens_out, rows, topk, topk, "those of local_indices", inputs)
    if device.validate_values(validate):
        _check_global_values(inputs, block, blocks)
    if rows:
        kernels.global_kernel[kernels.global_grid(rows)](
            **kernels.global_arguments(
                out,
                lens,
                local,
                token_to_req_indices,
                slot_mapping,
                block_table,
                block_size=block,
                num_blocks=blocks,
            )
        )
    return out[:rows], lens[:rows]


def _check_global_values(inputs: dict[str, torch.Tensor], block_size: int, num_blocks: int | None) -> None:
    local, table = inputs["local_indices"].to(torch.int64), inputs["block_table"]
    rows = local.shape[0]
    live = inputs["slot_mapping"][:rows] >= 0
    requests = inputs["token_to_req_indices"][:rows].to(torch.int64)
    values.requests(table, requests, live)
    used = live[:, None] & (local >= 0)
    column = local // block_size
    values.refuse(
        used & (column >= table.shape[1]),
        "local_indices",
        local,
        f"below {table.shape[1] * block_size}, the entries that {table.shape[1]} columns of block_table name",
        "Pass the table of all blocks of the sequence, and -1 for no entry.",
    )
    if bool(used.any()):
        where = requests[:, None].expand_as(column)[used], column[used]
        values.block_ids(table[where].to(torch.int64), *where, num_blocks)


def combine_topk_swa(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    compress_ratio: int,
    topk: int,
    workspace_stride: int,
    window_base: int,
    *,
    out: torch.Tensor | None = None,
    lens_out: torch.Tensor | None = None,
    validate: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows into a prefill workspace: a token's compressed entries, then its window.

    The workspace holds ``workspace_stride`` rows for each request: compressed entries in the first
    ``window_base`` of them, then the last ``gather_lens`` tokens of its sequence. A token at position p
    gets ``m = min((p + 1) // compress_ratio, topk, k)`` columns from its top-k row, then
    ``min(p + 1, window)`` for the window, ascending, then -1; its length is the sum. A hole (negative
    entry) stays -1, as does an entry at or past ``window_base``, and a window token that the workspace does
    not hold. Rows that belong to no request hold -1 and have length 0.

    Args:
        topk_indices: int32 or int64 ``[T, k]`` or ``[T, 1, k]``, dense rows of any stride: the prefill view
            of ``build_c128a_topk_metadata`` or the indexer's selection.
        query_start_loc: ``[R + 1]``, first token of each request; a constant offset is taken off, so that
            a slice of the batch's own serves for a chunk.
        seq_lens, gather_lens: ``[R]``.
        window, compress_ratio, topk: tokens, tokens per entry, and entries; topk 0 is the window alone.
        workspace_stride, window_base: workspace rows (M and N in vLLM's ``combine_topk_swa_indices``).
        out: int32 row-major ``[>= T, >= min(topk, k) + window]``, written to its full width; None: a fresh
            one of ``widths.combined_width(topk, window)`` columns. lens_out: int32 ``[>= T]``.
        validate: ``values`` also checks that starts, lengths and entries fit together.

    Returns ``(rows [T, columns of out], lengths [T])``: contiguous, and views of the outputs if given.
    Raises ``ArgumentError`` (nothing is written) and ``IndexValueError``.
    """
    window = checks.positive("window", window)
    ratio = checks.positive("compress_ratio", compress_ratio)
    checks.positive("topk", topk, 0)
    checks.positive("window_base", window_base, 0)
    checks.positive("workspace_stride", workspace_stride)
    local = checks.index_rows("topk_indices", topk_indices)
    rows, columns = local.shape
    requests = checks.int_vector("seq_lens", seq_lens, 1 if rows else 0, "the requests").shape[0]
    if window_base > workspace_stride:
        raise ArgumentError(
            "window_base", window_base, f"at most {workspace_stride}, the workspace_stride", "Swap them."
        )
    if requests * workspace_stride > _MOST:
        raise ArgumentError(
            "workspace_stride",
            workspace_stride,
            f"at most {_MOST // requests} rows, so that {requests} requests fit int32 indices",
            "Prefill fewer requests at a time.",
        )
    inputs = {
        "topk_indices": local,
        "query_start_loc": checks.int_vector(
            "query_start_loc", query_start_loc, requests + 1, "seq_lens and one more"
        ),
        "seq_lens": seq_lens,
        "gather_lens": checks.int_vector("gather_lens", gather_lens, requests, "seq_lens"),
    }
    entries = min(topk, columns)
    out, lens = checks.outputs(
        out,
        lens_out,
        rows,
        entries + window,
        combined_width(topk, window),
        "the top-k entries and the window",
        inputs,
    )
    if device.validate_values(validate):
        _check_combine_values(inputs, window, ratio, entries, workspace_stride, window_base)
    if rows:
        kernels.combine_kernel[kernels.combine_grid(rows, out.shape[1])](
            **kernels.combine_arguments(
                out,
                lens,
                local,
                query_start_loc,
                seq_lens,
                gather_lens,
                topk=entries,
                window=window,
                ratio=ratio,
                workspace_stride=workspace_stride,
                window_base=window_base,
            )
        )
    return out[:rows], lens[:rows]


def _check_combine_values(
    inputs: dict[str, torch.Tensor],
    window: int,
    ratio: int,
    entries: int,
    workspace_stride: int,
    window_base: int,
) -> None:
    local, seq_lens = inputs["topk_indices"], inputs["seq_lens"].to(torch.int64)
    requests, rows = seq_lens.shape[0], local.shape[0]
    starts = inputs["query_start_loc"][: requests + 1].to(torch.int64)
    query = starts.diff()
    values.refuse(query < 0, "query_start_loc", starts[:-1], "an ascending sequence", "Correct it.")
    if requests and int(starts[-1] - starts[0]) != rows:
        raise ArgumentError(
            "topk_indices.shape[0]",
            rows,
            f"{int(starts[-1] - starts[0])}, the tokens of query_start_loc",
            "Pass the rows of these requests.",
        )
    values.refuse(seq_lens < query, "seq_lens", seq_lens, "at least its query length", "Count the query in.")
    gather = inputs["gather_lens"][:requests].to(torch.int64)
    needed = torch.minimum(seq_lens, query + window - 1)
    most = seq_lens.clamp(max=workspace_stride - window_base)
    values.refuse(
        (query > 0) & ((gather < needed) | (gather > most)),
        "gather_lens",
        gather,
        "min(seq_len, query_len + window - 1) at least, min(seq_len, workspace_stride - window_base) at most",
        "Gather every token that a window reaches, into a workspace with room for them.",
    )
    row = torch.arange(rows, device=local.device)
    owner = torch.repeat_interleave(torch.arange(requests, device=local.device), query)
    position = seq_lens[owner] - query[owner] + row - (starts[owner] - starts[0])
    used = torch.arange(local.shape[1], device=local.device) < ((position + 1) // ratio).clamp(
        max=entries
    ).reshape(-1, 1)
    values.refuse(
        used & (local >= window_base),
        "topk_indices",
        local,
        f"below {window_base}, the window_base",
        "Pass -1 for no entry, or a larger compressed region.",
    )
