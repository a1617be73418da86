"""Page split as a specification: which indices count, what they touch, where each byte goes."""

from __future__ import annotations

import torch

from ..layout import SUB_PAGE, PageGeometry

__all__ = ["counted", "split", "touched_pages", "touched_sub_pages"]


def counted(indices: torch.Tensor, lengths: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """The token indices that count, in order, as int64 ``[n]``.

    ``indices`` is ``[T, k]`` of any integer dtype, ``lengths`` ``[T]`` or None (all columns). An entry
    counts iff its column is below its row's length (clamped to ``[0, k]``) and it lies in
    ``[0, tokens)``.
    """
    wide = indices.to(torch.int64)
    keep = (wide >= 0) & (wide < tokens)
    if lengths is not None:
        width = indices.shape[1]
        column = torch.arange(width, device=indices.device)
        keep &= column < lengths.to(torch.int64).clamp(0, width).reshape(-1, 1)
    return wide[keep]


def touched_pages(
    indices: torch.Tensor, lengths: torch.Tensor | None, pages: int, page_size: int
) -> set[int]:
    """Source pages that some counted index points into."""
    return {int(i) // page_size for i in counted(indices, lengths, pages * page_size)}


def touched_sub_pages(
    indices: torch.Tensor, lengths: torch.Tensor | None, pages: int, page_size: int
) -> set[int]:
    """64-token sub-pages, numbered over the whole pool, that some counted index points into."""
    return {int(i) // SUB_PAGE for i in counted(indices, lengths, pages * page_size)}


def split(pool: torch.Tensor, geometry: PageGeometry) -> torch.Tensor:
    """Every payload byte of every sub-page: uint8 ``[sub_pages, 64 * bytes_per_token]``.

    ``pool`` is uint8 ``[pages, at least payload bytes]``.
    """
    layout, ratio = geometry.layout, geometry.sub_pages_per_page
    out = pool.new_empty((geometry.sub_pages, layout.payload(SUB_PAGE)))
    for page in range(geometry.pages):
        for sub in range(ratio):
            for span in layout.spans(geometry.page_size, sub):
                piece = pool[page, span.source : span.source + span.nbytes]
                out[page * ratio + sub, span.target : span.target + span.nbytes] = piece
    return out
