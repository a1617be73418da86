"""Checks of values, which synchronise: on the validation level ``values`` only, never in capture."""

from __future__ import annotations

from typing import cast

import torch

from ..errors import IndexValueError

__all__ = ["block_ids", "lookups", "refuse", "requests"]


def refuse(bad: torch.Tensor, name: str, values: torch.Tensor, expected: str, remedy: str) -> None:
    """Raise ``IndexValueError`` for the first True of ``bad``, naming that entry of ``values``."""
    if bool(bad.any()):
        at = tuple(cast("list[int]", bad.nonzero()[0].tolist()))
        raise IndexValueError(f"{name}[{', '.join(map(str, at))}]", int(values[at]), expected, remedy)


def requests(table: torch.Tensor, rows: torch.Tensor, used: torch.Tensor) -> None:
    """The request of every row in ``used`` has a row of the table."""
    refuse(
        used & ((rows < 0) | (rows >= table.shape[0])),
        "token_to_req_indices",
        rows,
        f"a request in [0, {table.shape[0]}), the rows of block_table",
        "Give padding rows slot -1; otherwise correct the request, or pass the whole table.",
    )


def lookups(
    table: torch.Tensor,
    owners: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    used: torch.Tensor,
    block_size: int,
    num_blocks: int | None,
) -> None:
    """What looking up indices ``first..last`` (int64, inclusive) of each row needs, for rows in ``used``.

    Refuses a request out of range, a table too short, and a block id out of range in the columns needed.
    """
    owners = owners.to(torch.int64)
    requests(table, owners, used)
    used = used & (last >= first)
    if not bool(used.any()):
        return
    first, last, owners = first[used] // block_size, last[used] // block_size, owners[used]
    needed = int(last.max()) + 1
    if needed > table.shape[1]:
        raise IndexValueError(
            "block_table.shape[1]",
            table.shape[1],
            f"at least {needed} columns of {block_size} entries, for the longest row",
            "Pass the table of all blocks of the sequence.",
        )
    column = torch.arange(table.shape[1], device=table.device).expand(len(owners), -1)
    wanted = (column >= first[:, None]) & (column <= last[:, None])
    blocks = table[owners].to(torch.int64)
    block_ids(blocks[wanted], owners[:, None].expand_as(column)[wanted], column[wanted], num_blocks)


def block_ids(
    blocks: torch.Tensor, owners: torch.Tensor, columns: torch.Tensor, num_blocks: int | None
) -> None:
    """Block ids in range: int64 ``[n]``, found at ``block_table[owners, columns]``."""
    bad, expected = blocks < 0, "a block id >= 0"
    if num_blocks is not None:
        bad, expected = bad | (blocks >= num_blocks), f"a block id in [0, {num_blocks})"
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise IndexValueError(
            f"block_table[{int(owners[at])}, {int(columns[at])}]",
            int(blocks[at]),
            expected,
            "A block that a live token needs must be allocated; give padding rows slot -1.",
        )
