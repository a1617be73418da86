"""The Triton backend: split-K sparse MLA on paged DSv4 caches, and a merge where a row was split.

One launch dequantises and attends; on Hopper, where a row has several blocks of heads, one launch dequantises
and another attends.

Deterministic: which configuration runs, and into how many parts a row is split, depends on the shape of a
call and the GPU's capability, never on values; parts are merged in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .. import device, own_envelopes
from ..buffers import PersistentBuffers, default_buffers
from ..device import Capability
from ..errors import ArgumentError
from ..kernels import merge, sparse_mla, staged_mla
from ..kernels.runtime import INTERPRETED, require_device
from ..layout import DSV4
from .base import AttentionCall, AttentionShape, CacheInput, Support, support

__all__ = ["Plan", "TritonBackend", "plan", "reserve_attention", "rows_at_once", "scratch_elements"]

OUT_BUFFER, LSE_BUFFER = "mla-partial-out", "mla-partial-lse"
STAGE_BUFFER, WORDS_BUFFER = "mla-stage", "mla-stage-words"
STAGE_BYTES = 128 << 20
"""Most scratch for values dequantised ahead; a call of more rows is taken in parts."""

E4M3_CAPABILITY: Capability = (8, 9)
"""The first that converts e4m3 in hardware."""

MULTIPROCESSORS: dict[Capability, int] = {(9, 0): 132, (10, 0): 148, (12, 0): 188, (12, 1): 48}
"""What a split aims to fill, by capability: the largest part sold of each (H100/H200 SXM, B200, RTX PRO 6000,
DGX Spark). Not asked of the GPU at hand, so that equal calls give equal bits on equal capabilities."""

DEFAULT_MULTIPROCESSORS = 108

_SCRATCH_DTYPES = {
    OUT_BUFFER: torch.float32,
    LSE_BUFFER: torch.float32,
    STAGE_BUFFER: torch.bfloat16,
    WORDS_BUFFER: torch.int32,
}

_MERGE_NS, _MERGE_PART_NS = 1500, 0.7
_STAGE_NS, _STAGE_TILE_NS = 2500, 34
"""A merge, and each part of it; staging, and each tile of it. Measured on an H200, as the times of
``sparse_mla.Config``."""


@dataclass(frozen=True)
class Plan:
    """How a call is launched: ``splits`` parts a row; 1 needs no scratch and no merge."""

    config: sparse_mla.Config
    splits: int
    by_bits: bool


def plan(
    tokens: int,
    heads: int,
    widths: tuple[int, ...],
    capability: Capability | None,
    *,
    interpreted: bool = INTERPRETED,
) -> Plan:
    """Configuration and split count for ``tokens`` rows of ``widths`` columns (main, extra).

    A pure function: the configuration and number of parts with the least estimated time.
    """
    if interpreted:
        # Two parts, so that the merge is seen there.
        config = sparse_mla.interpreted_config(heads)
        tiles = _tiles(widths, config)
        return Plan(config, min(2, max(tiles, 1)), by_bits=True)
    tokens = max(tokens, 1)
    best: tuple[float, Plan] | None = None
    by_bits = capability is not None and capability < E4M3_CAPABILITY
    multiprocessors = MULTIPROCESSORS.get(capability or (0, 0), DEFAULT_MULTIPROCESSORS)
    for config in configs(capability):
        tiles = max(_tiles(widths, config), 1)
        rows = rows_at_once(config, tokens, tiles)
        if rows == 0:
            continue
        launches = -(-tokens // rows)
        programs = rows * -(-heads // config.block_h)
        slots = multiprocessors * config.residents
        for splits in range(1, min(tiles, merge.MAX_SPLITS) + 1):
            waves = -(-programs * splits // slots)
            tile_ns = config.tile_ns if 2 * programs * splits <= slots else config.busy_ns
            time: float = waves * (config.start_ns + tile_ns * -(-tiles // splits))
            time += _MERGE_NS + _MERGE_PART_NS * rows * heads * splits if splits > 1 else 0
            time += _STAGE_NS + _STAGE_TILE_NS * rows * tiles if config.staged else 0
            if best is None or launches * time < best[0]:
                best = launches * time, Plan(config, splits, by_bits)
    assert best is not None
    return best[1]


def configs(capability: Capability | None) -> tuple[sparse_mla.Config, ...]:
    """Configurations that a GPU of this capability may be given."""
    return sparse_mla.CONFIGS.get(capability[0] if capability else 0, sparse_mla.SM120_CONFIGS)


def _tiles(widths: tuple[int, ...], config: sparse_mla.Config) -> int:
    return sum(-(-width // config.block_n) for width in widths)


def rows_at_once(config: sparse_mla.Config, tokens: int, tiles: int) -> int:
    """Rows of ``tiles`` tiles that one launch takes of ``tokens``: all, or where they are staged an equal
    share that fits ``STAGE_BYTES``; 0 where not even one row does.
    """
    if not config.staged:
        return tokens
    most = STAGE_BYTES // (max(tiles, 1) * config.block_n * DSV4.head_dim * 2)
    return -(-tokens // -(-tokens // most)) if most else 0


def scratch_elements(chosen: Plan, tokens: int, heads: int, tiles: int) -> dict[str, int]:
    """Elements of each scratch buffer that a call of ``tokens`` rows of ``tiles`` tiles needs; no zeros."""
    config, splits = chosen.config, chosen.splits
    rows = rows_at_once(config, tokens, tiles)
    lanes = rows * max(tiles, 1) * config.block_n if config.staged else 0
    pairs = rows * splits * heads if splits > 1 else 0
    need = {
        OUT_BUFFER: pairs * DSV4.head_dim,
        LSE_BUFFER: pairs,
        STAGE_BUFFER: lanes * DSV4.head_dim,
        WORDS_BUFFER: lanes // staged_mla.STAGE_LANES,
    }
    return {name: elements for name, elements in need.items() if elements}


def reserve_attention(
    q: torch.Tensor,
    *,
    width: int,
    extra_width: int = 0,
    buffers: PersistentBuffers | None = None,
    scope: str = "",
) -> None:
    """Allocate what the Triton backend needs for calls of up to ``q.shape[0]`` rows, ahead of a capture.

    Args:
        q: bf16 ``[T, H, 512]``, the largest batch; only its shape and device count.
        width: columns of the main index rows.
        extra_width: columns of the extra index rows, 0 without an extra cache.
        scope: as the calls will have it.

    Fewer rows may be split into more parts, so that every batch size up to T is looked at; and each cache
    alone, as one without pages is left out of a call. Raises ``ArgumentError``.
    """
    if q.dim() != 3:
        raise ArgumentError("q.shape", tuple(q.shape), "[T, H, 512]", "Pass the q of the largest batch.")
    for name, columns in (("width", width), ("extra_width", extra_width)):
        if columns < 0:
            raise ArgumentError(name, columns, "a number of columns >= 0", "Correct it.")
    require_device("q", q)
    buffers = default_buffers() if buffers is None else buffers
    capability = device.capability(q.device)
    heads, widths = q.shape[1], (width, extra_width)
    need: dict[str, int] = {}
    for looked_at in {widths, (width, 0), (extra_width or width, 0)}:
        for tokens in range(1, q.shape[0] + 1):
            chosen = plan(tokens, heads, looked_at, capability)
            tiles = _tiles(looked_at, chosen.config)
            for name, elements in scratch_elements(chosen, tokens, heads, tiles).items():
                need[name] = max(need.get(name, 0), elements)
    _scratch(q, need, buffers, scope, widths)


def _scratch(
    q: torch.Tensor, need: Mapping[str, int], buffers: PersistentBuffers, scope: str, widths: tuple[int, int]
) -> dict[str, torch.Tensor]:
    scoped = f", scope={scope!r}" if scope else ""
    hint = f"reserve_attention(q, width={widths[0]}, extra_width={widths[1]}{scoped}) with the largest q"
    return {
        name: buffers.get(name, (elements,), _SCRATCH_DTYPES[name], q, scope=scope, hint=hint)
        for name, elements in need.items()
    }


class TritonBackend:
    """``Backend`` over ``kernels.sparse_mla``; see ``backends.base``."""

    name = "triton"

    def available(self) -> Support:
        """Kernels are interpreted in this process, or torch sees a GPU."""
        if INTERPRETED or device.cuda_available():
            return Support(True)
        return Support(False, "torch sees no CUDA GPU", "Start the process with SM120_MLA_MODE=reference.")

    def supports(self, shape: AttentionShape, capability: Capability | None) -> Support:
        """Every DSv4 shape: any rows, heads, widths, page sizes, strides and alignments."""
        chosen = _plan_of(shape, capability)
        programs = shape.tokens * -(-shape.heads // chosen.config.block_h) * chosen.splits
        return support(own_envelopes.triton(shape.layout, capability, programs))

    def run(self, call: AttentionCall) -> None:
        """Write ``call.out`` and ``call.lse``: one launch, one more where values are staged or rows split.

        Raises ``GrowthDuringCaptureError`` where a capture needs scratch that nobody reserved.
        """
        self.launch(call, _plan_of(call.shape, device.capability(call.q.device)))

    def launch(self, call: AttentionCall, chosen: Plan) -> None:
        """``run`` by a given plan."""
        tokens, heads = call.q.shape[0], call.q.shape[1]
        if tokens == 0 or heads == 0:
            return
        widths = call.main.indices.shape[1], call.extra.indices.shape[1] if call.extra else 0
        tiles = max(_tiles(widths, chosen.config), 1)
        need = scratch_elements(chosen, tokens, heads, tiles)
        scratch = _scratch(call.q, need, call.buffers, call.scope, widths)
        rows = rows_at_once(chosen.config, tokens, tiles)
        for start in range(0, tokens, rows):
            part = call if tokens <= rows else _rows(call, start, min(start + rows, tokens))
            target, logs = scratch.get(OUT_BUFFER, part.out), scratch.get(LSE_BUFFER, part.lse)
            if chosen.config.staged:
                self._staged(part, chosen, tiles, scratch, target, logs)
            else:
                self._whole(part, chosen, target, logs)
            if chosen.splits > 1:
                assert logs is not None
                self._merge(part, target, logs, chosen.splits)

    def _whole(
        self, call: AttentionCall, chosen: Plan, target: torch.Tensor, logs: torch.Tensor | None
    ) -> None:
        config = chosen.config
        constants = _constants(call, chosen)
        sparse_mla.sparse_mla_kernel[_grid(call, chosen)](
            call.q,
            target,
            logs if logs is not None else target,
            call.sink if call.sink is not None else call.q,
            *_cache_arguments(call.main),
            *_cache_arguments(call.extra if call.extra is not None else call.main),
            *_row_arguments(call, chosen),
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _staged(
        self,
        call: AttentionCall,
        chosen: Plan,
        tiles: int,
        scratch: Mapping[str, torch.Tensor],
        target: torch.Tensor,
        logs: torch.Tensor | None,
    ) -> None:
        config = chosen.config
        constants = _constants(call, chosen)
        main = _cache_arguments(call.main)
        extra = _cache_arguments(call.extra if call.extra is not None else call.main)
        stage, words = scratch[STAGE_BUFFER], scratch[WORDS_BUFFER]
        lanes = staged_mla.STAGE_LANES
        staged_mla.stage_kernel[(call.q.shape[0] * tiles * config.block_n // lanes,)](
            stage,
            words,
            tiles,
            *main,
            *extra,
            **{name: constants[name] for name in staged_mla.STAGE_CONSTANTS},
            LANES=lanes,
            PIECE=staged_mla.stage_piece(),
            num_warps=staged_mla.STAGE_WARPS,
        )
        staged_mla.staged_mla_kernel[_grid(call, chosen)](
            call.q,
            target,
            logs if logs is not None else target,
            call.sink if call.sink is not None else call.q,
            stage,
            words,
            tiles,
            *main[1:-1],  # all but the pool and its page stride
            *extra[1:-1],
            *_row_arguments(call, chosen),
            **{name: constants[name] for name in staged_mla.ATTEND_CONSTANTS},
            LANES=lanes,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _merge(
        self, call: AttentionCall, part_out: torch.Tensor, part_lse: torch.Tensor, splits: int
    ) -> None:
        tokens, heads, dim = call.out.shape
        config = merge.merge_config(splits)
        grid = (-(-tokens * heads // config.rows), dim // config.block)
        merge.merge_kernel[grid](
            part_out,
            part_lse,
            call.out,
            call.lse if call.lse is not None else part_lse,
            call.sink if call.sink is not None else part_lse,
            tokens * heads,
            heads,
            splits,
            call.out.stride(0),
            call.out.stride(1),
            *_strides(call.lse),
            call.sink.stride(0) if call.sink is not None else 0,
            HAS_SINK=call.sink is not None,
            HAS_LSE=call.lse is not None,
            DIM=dim,
            ROWS=config.rows,
            SPLITS=config.splits,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )


def _rows(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """Rows ``[start, stop)`` of a call, as one of its own."""

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[start:stop]

    def cache(given: CacheInput) -> CacheInput:
        return replace(given, indices=given.indices[start:stop], lengths=cut(given.lengths))

    return replace(
        call,
        q=call.q[start:stop],
        out=call.out[start:stop],
        lse=cut(call.lse),
        main=cache(call.main),
        extra=None if call.extra is None else cache(call.extra),
    )


def _grid(call: AttentionCall, chosen: Plan) -> tuple[int]:
    tokens, heads = call.q.shape[0], call.q.shape[1]
    return (tokens * chosen.splits * -(-heads // chosen.config.block_h),)


def _constants(call: AttentionCall, chosen: Plan) -> dict[str, object]:
    main, extra = call.main, call.extra
    return sparse_mla.constexprs(
        main.geometry.layout,
        chosen.config,
        main_page_size=main.geometry.page_size,
        extra_page_size=extra.geometry.page_size if extra else None,
        has_main_lengths=main.lengths is not None,
        has_extra_lengths=extra is not None and extra.lengths is not None,
        has_sink=call.sink is not None,
        has_lse=call.lse is not None,
        partial=chosen.splits > 1,
        align=_align(main, extra),
        by_bits=chosen.by_bits,
    )


def _row_arguments(call: AttentionCall, chosen: Plan) -> tuple[object, ...]:
    """Heads, splits, strides of q, out, lse and sink, and the scale, as both kernels take them."""
    return (
        call.q.shape[1],
        chosen.splits,
        call.q.stride(0),
        call.q.stride(1),
        *((0, 0) if chosen.splits > 1 else (call.out.stride(0), call.out.stride(1))),
        *_strides(call.lse),
        call.sink.stride(0) if call.sink is not None else 0,
        call.scale * math.log2(math.e),
    )


def _plan_of(shape: AttentionShape, capability: Capability | None) -> Plan:
    widths = (shape.main.width, shape.extra.width if shape.extra else 0)
    return plan(shape.tokens, shape.heads, widths, capability)


def _cache_arguments(cache: CacheInput) -> tuple[object, ...]:
    """Pool, index rows, lengths, tokens, width, steps and page stride, as the kernel takes them."""
    pool = cache.pool if cache.pool.dtype == torch.uint8 else cache.pool.view(torch.uint8)
    indices, lengths = cache.indices, cache.lengths
    return (
        pool,
        indices,
        lengths if lengths is not None else indices,
        cache.geometry.tokens,
        indices.shape[1],
        indices.stride(0),
        lengths.stride(0) if lengths is not None else 0,
        cache.geometry.page_stride,
    )


def _align(main: CacheInput, extra: CacheInput | None) -> int:
    """The strictest of ``sparse_mla.ALIGNMENTS`` that every record of both caches keeps."""
    lane = min(c.geometry.lane_bytes(c.pool.data_ptr()) for c in (main, extra) if c is not None)
    return next(a for a in sparse_mla.ALIGNMENTS if lane >= a)


def _strides(lse: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if lse is None else (lse.stride(0), lse.stride(1))
