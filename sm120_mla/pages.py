"""Split pages into 64-token pages: validation, buffers and launch (host side of kernels/page_split.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import device
from .buffers import Buffer, PersistentBuffers, default_buffers
from .errors import ArgumentError, IndexValueError, OvertakenError
from .kernels import page_split as kernels
from .kernels.runtime import require_device
from .layout import DSV4, SUB_PAGE, PageGeometry, PageLayout
from .placement import pool_geometry, share_memory

__all__ = ["SplitPages", "pool_geometry", "reserve_split", "rows_at_once", "split_pages"]

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(eq=False)
class _Written:
    """Which generation of its buffer a split wrote; a graph's replay writes a new one."""

    buffer: Buffer
    generation: int

    def again(self) -> None:
        self.generation = self.buffer.advance()


@dataclass(frozen=True)
class SplitPages:
    """The result of one split. The destination is shared, so the tensor is borrowed, not owned.

    ``page_size`` is 64 tokens, ``source_page_size`` what the pool has.
    """

    page_size: int
    source_page_size: int
    _tensor: torch.Tensor = field(repr=False)
    _written: _Written | None = field(default=None, repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """``[sub_pages, 64, 1, bytes_per_token]`` in the pool's dtype, or the pool itself at page size 64.

        Token index ``t`` is at page ``t // 64``, slot ``t % 64``. Raises ``OvertakenError`` once a later
        split, or the replay of a graph that holds one, has written into the same destination.
        """
        w = self._written
        if w is not None and w.buffer.generation != w.generation:
            raise OvertakenError(
                f"this split is number {w.generation} into buffer {w.buffer.key}, which has since been "
                f"written by split {w.buffer.generation}. Use the result before the next split, or give "
                f"each user a destination of its own with scope= or out=."
            )
        return self._tensor


def split_pages(
    pool: torch.Tensor,
    page_size: int | None = None,
    indices: torch.Tensor | None = None,
    *,
    topk_length: torch.Tensor | None = None,
    layout: PageLayout = DSV4,
    buffers: PersistentBuffers | None = None,
    scope: str = "",
    out: torch.Tensor | None = None,
    validate: str | None = None,
) -> SplitPages:
    """Split the pool, or with ``indices`` only the sub-pages they touch, into 64-token pages.

    Args:
        pool: uint8 or float8_e4m3fn, ``[pages, bytes]``, ``[pages, P, b]``, ``[pages, P, 1, b]`` or
            ``[pages, 1, P, b]``; any page stride >= the payload, any storage offset.
        page_size: tokens per page, a multiple of 64; may be left out for 3-D and 4-D pools.
        indices: int32 or int64 ``[T, k]`` or ``[T, 1, k]``, last dimension dense, any row stride. A token
            index counts iff it is in ``[0, pages * page_size)`` and its column is below its row's length.
            None splits the whole pool; an empty tensor splits nothing.
        topk_length: int32 or int64 ``[T]`` or ``[T, 1]``, clamped to ``[0, k]``.
        scope: names a destination of one's own, for streams or layers that run at once.
        out: uint8 ``[>= sub_pages, >= 64 * bytes_per_token]`` destination of the caller's.
        validate: ``values`` also refuses an index at or past the pool's end, with ``IndexValueError``;
            ``metadata`` does not look at values. None: values in reference mode. Never in capture.

    Sub-pages that nothing touches, and bytes past each sub-page's payload, keep what they held. Bytes are
    copied as they are: nothing is promised about slot 0. At page size 64 the pool itself is returned.

    Raises ``LayoutError``, ``ArgumentError``, ``IndexValueError``, ``GrowthDuringCaptureError``.
    """
    geometry = pool_geometry(pool, page_size, layout, multiple_of=SUB_PAGE)
    require_device("pool", pool)
    index2d, lengths = _check_indices(pool, indices, topk_length)
    values = device.validate_values(validate)
    if index2d is not None and values:
        _check_index_values(index2d, lengths, geometry)
    if out is not None:
        _check_out(out, pool, geometry)
    if geometry.page_size == SUB_PAGE:
        return SplitPages(SUB_PAGE, SUB_PAGE, pool)

    buffers = default_buffers() if buffers is None else buffers
    written = None
    if out is None:
        buffer = _destination(pool, geometry, buffers, scope)
        target, written = buffer.tensor, _Written(buffer, 0)
    else:
        target = out
    marks = None if index2d is None else _marks(pool, geometry, buffers, scope)
    if geometry.pages and (index2d is None or index2d.numel()):
        _launch(pool, geometry, target, marks, index2d, lengths)
    if written is not None:
        written.again()
        capture = device.current_capture()
        if capture is not None:
            capture.on_replay.append(written.again)
    return SplitPages(SUB_PAGE, geometry.page_size, _view(target, pool, geometry), written)


def reserve_split(
    pool: torch.Tensor,
    page_size: int | None = None,
    *,
    layout: PageLayout = DSV4,
    buffers: PersistentBuffers | None = None,
    scope: str = "",
) -> None:
    """Allocate what ``split_pages`` of this pool will need, ahead of a capture."""
    geometry = pool_geometry(pool, page_size, layout, multiple_of=SUB_PAGE)
    require_device("pool", pool)
    if geometry.page_size == SUB_PAGE:
        return
    buffers = default_buffers() if buffers is None else buffers
    _destination(pool, geometry, buffers, scope)
    _marks(pool, geometry, buffers, scope)


def _hint(geometry: PageGeometry, scope: str) -> str:
    layout = f", layout=by_name({geometry.layout.name!r})" if geometry.layout is not DSV4 else ""
    scoped = f", scope={scope!r}" if scope else ""
    return (
        f"reserve_split(pool, page_size={geometry.page_size}{layout}{scoped}) for a pool of "
        f"{geometry.pages} pages ({geometry.sub_pages} sub-pages)"
    )


def _destination(
    pool: torch.Tensor, geometry: PageGeometry, buffers: PersistentBuffers, scope: str
) -> Buffer:
    shape = (geometry.sub_pages, geometry.layout.default_stride(SUB_PAGE))
    return buffers.buffer(
        "split-destination",
        shape,
        torch.uint8,
        pool,
        layout=geometry.layout,
        scope=scope,
        hint=_hint(geometry, scope),
    )


def _marks(
    pool: torch.Tensor, geometry: PageGeometry, buffers: PersistentBuffers, scope: str
) -> torch.Tensor:
    # Ticket and marks live and grow together: an old graph keeps both, a new buffer starts both at 0.
    shape = (kernels.MARKS_HEADER + geometry.sub_pages,)
    return buffers.get(
        "split-marks",
        shape,
        torch.int64,
        pool,
        layout=geometry.layout,
        scope=scope,
        zero=True,
        hint=_hint(geometry, scope),
    )


def _view(target: torch.Tensor, pool: torch.Tensor, geometry: PageGeometry) -> torch.Tensor:
    token = geometry.layout.bytes_per_token
    view = torch.as_strided(
        target, (geometry.sub_pages, SUB_PAGE, 1, token), (target.stride(0), token, token, 1)
    )
    return view if view.dtype == pool.dtype else view.view(pool.dtype)


def _launch(
    pool: torch.Tensor,
    geometry: PageGeometry,
    target: torch.Tensor,
    marks: torch.Tensor | None,
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> None:
    lane = min(geometry.lane_bytes(pool.data_ptr()), _target_lane(target))
    dtype = getattr(torch, kernels.LANE_DTYPES[lane])
    flat = pool.view(torch.uint8) if pool.dtype != torch.uint8 else pool
    payload = geometry.layout.payload(geometry.page_size)
    source = torch.as_strided(flat, (geometry.pages, payload), (geometry.page_stride, 1)).view(dtype)
    lanes = target.view(dtype)
    page_stride, row = geometry.page_stride // lane, lanes.stride(0)
    if indices is None:
        config = kernels.full_config(lane)
        constexprs = kernels.full_constexprs(geometry, lane, row, config)
        kernels.full_kernel[(geometry.sub_pages * config.pieces,)](
            source, lanes, page_stride, **constexprs, num_warps=config.num_warps
        )
        return
    rows, width = indices.shape
    has_lengths = lengths is not None
    index_args = (
        indices,
        indices if lengths is None else lengths,
        geometry.tokens,
        width,
        indices.stride(0),
        lengths.stride(0) if lengths is not None else 0,
        page_stride,
    )
    if owned(rows, width):
        config = kernels.owned_config(lane)
        constexprs = kernels.owned_constexprs(geometry, lane, row, config, has_lengths, rows, width)
        kernels.owned_kernel[(config.owners * config.pieces,)](
            source, lanes, *index_args, rows, **constexprs, num_warps=config.num_warps
        )
        return
    config = kernels.claimed_config(lane)
    constexprs = kernels.claimed_constexprs(geometry, lane, row, config, has_lengths)
    kernels.claimed_kernel[(rows, -(-width // config.chunk))](
        source, lanes, marks, *index_args, **constexprs, num_warps=config.num_warps
    )


def owned(rows: int, width: int) -> bool:
    """Whether an index set of this shape needs no marks (``kernels.page_split.owned_kernel``)."""
    padded = (1 << (rows - 1).bit_length()) * (1 << (width - 1).bit_length())
    return padded <= kernels.OWNED_ENTRIES


def rows_at_once(width: int) -> int:
    """The most index rows of ``width`` columns that one split takes; 0 where a row is too wide already."""
    return ((1 << kernels.EPOCH_SHIFT) - 1) // max(width, 1)


def _target_lane(target: torch.Tensor) -> int:
    steps = (target.data_ptr(), target.stride(0), target.shape[1])
    return next(n for n in (16, 8, 4, 2, 1) if all(step % n == 0 for step in steps))


def _check_indices(
    pool: torch.Tensor, indices: torch.Tensor | None, lengths: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Metadata of indices ``[T, k]`` and lengths ``[T]``; never looks at values."""
    if indices is None:
        if lengths is not None:
            raise ArgumentError(
                "topk_length", "given", "indices as well", "Pass both, or neither for a full split."
            )
        return None, None
    _check_integers("indices", indices, pool)
    if indices.dim() not in (2, 3) or (indices.dim() == 3 and indices.shape[1] != 1):
        raise ArgumentError(
            "indices.shape", tuple(indices.shape), "[T, k] or [T, 1, k]", "Reshape the index rows."
        )
    flat = indices[:, 0] if indices.dim() == 3 else indices
    rows, width = flat.shape
    if width > 1 and flat.stride(1) != 1:
        raise ArgumentError(
            "indices.stride(-1)", flat.stride(1), "1", "Make each row dense; rows may lie apart."
        )
    if rows > rows_at_once(width):
        raise ArgumentError(
            "indices.shape",
            tuple(indices.shape),
            f"fewer than {1 << kernels.EPOCH_SHIFT:,} entries",
            "Split the batch.",
        )
    if lengths is None:
        return flat, None
    _check_integers("topk_length", lengths, pool)
    if tuple(lengths.shape) not in ((rows,), (rows, 1)):
        raise ArgumentError(
            "topk_length.shape",
            tuple(lengths.shape),
            f"({rows},) or ({rows}, 1): one length per index row",
            "Pass one length per row.",
        )
    return flat, lengths[:, 0] if lengths.dim() == 2 else lengths


def _check_integers(argument: str, tensor: torch.Tensor, pool: torch.Tensor) -> None:
    if tensor.dtype not in _INDEX_DTYPES:
        raise ArgumentError(
            f"{argument}.dtype", tensor.dtype, "torch.int32 or torch.int64", "Convert it to int32."
        )
    if tensor.device != pool.device:
        raise ArgumentError(
            f"{argument}.device", tensor.device, f"{pool.device}, as the pool", "Move it there."
        )


def _check_index_values(indices: torch.Tensor, lengths: torch.Tensor | None, geometry: PageGeometry) -> None:
    """Refuse a counted column at or past the pool's end. Synchronises."""
    wrong = indices >= geometry.tokens
    if lengths is not None:
        column = torch.arange(indices.shape[1], device=indices.device)
        wrong &= column < lengths.reshape(-1, 1)
    if not bool(wrong.any()):
        return
    row, column_ = (int(n) for n in wrong.nonzero()[0])
    raise IndexValueError(
        f"indices[{row}, {column_}]",
        int(indices[row, column_]),
        f"a token index below {geometry.tokens} ({geometry.pages} pages of {geometry.page_size}), or -1",
        "Check the block table, or pass validate='metadata' to treat it as no token.",
    )


def _check_out(out: torch.Tensor, pool: torch.Tensor, geometry: PageGeometry) -> None:
    need = (geometry.sub_pages, geometry.layout.payload(SUB_PAGE))
    if out.dtype != torch.uint8 or out.dim() != 2 or out.device != pool.device:
        raise ArgumentError(
            "out",
            f"{out.dtype} {tuple(out.shape)} on {out.device}",
            f"uint8 [sub_pages, bytes] on {pool.device}",
            "Pass a 2-D uint8 tensor.",
        )
    if out.shape[0] < need[0] or out.shape[1] < need[1] or out.stride(1) != 1:
        raise ArgumentError(
            "out.shape", tuple(out.shape), f"at least {need}, rows dense", "Make the destination larger."
        )
    if out.shape[0] > 1 and out.stride(0) < need[1]:
        raise ArgumentError(
            "out.stride(0)", out.stride(0), f"at least {need[1]}", "Rows of the destination overlap."
        )
    if share_memory(out, pool):
        raise ArgumentError(
            "out", "a view of the pool's memory", "memory apart from the pool", "Allocate a destination."
        )
