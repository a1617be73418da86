"""The Triton backend: split-K sparse MLA on paged DSv4 caches, and a merge where a row was split.

Deterministic: which configuration runs, and into how many parts a row is split, depends on the shape of a
call and the GPU's capability, never on values; parts are merged in a fixed order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .. import device
from ..buffers import PersistentBuffers, default_buffers
from ..device import Capability
from ..errors import ArgumentError
from ..kernels import merge, sparse_mla
from ..kernels.runtime import INTERPRETED, require_device
from ..layout import DSV4
from .base import AttentionCall, AttentionShape, CacheInput, Support

__all__ = ["Plan", "TritonBackend", "partial_elements", "plan", "reserve_attention"]

OUT_BUFFER, LSE_BUFFER = "mla-partial-out", "mla-partial-lse"

MIN_CAPABILITY: Capability = (8, 0)
"""The first with bf16 tensor cores."""

E4M3_CAPABILITY: Capability = (8, 9)
"""The first that converts e4m3 in hardware."""

MULTIPROCESSORS: dict[Capability, int] = {(9, 0): 132, (10, 0): 148, (12, 0): 188, (12, 1): 48}
"""What a split aims to fill, by capability: the largest part sold of each (H100/H200 SXM, B200, RTX PRO 6000,
DGX Spark). Not asked of the GPU at hand, so that equal calls give equal bits on equal capabilities."""

DEFAULT_MULTIPROCESSORS = 108

_MERGE_NS = 3000
_MAX_PROGRAMS = 2**31 - 1


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
    best: tuple[int, Plan] | None = None
    by_bits = capability is not None and capability < E4M3_CAPABILITY
    multiprocessors = MULTIPROCESSORS.get(capability or (0, 0), DEFAULT_MULTIPROCESSORS)
    for config in configs(capability):
        tiles = max(_tiles(widths, config), 1)
        programs = max(tokens, 1) * -(-heads // config.block_h)
        slots = multiprocessors * config.residents
        for splits in range(1, min(tiles, merge.MAX_SPLITS) + 1):
            waves = -(-programs * splits // slots)
            time = waves * (config.start_ns + config.tile_ns * -(-tiles // splits))
            time += _MERGE_NS + tokens * heads * splits // 16 if splits > 1 else 0
            if best is None or time < best[0]:
                best = time, Plan(config, splits, by_bits)
    assert best is not None
    return best[1]


def configs(capability: Capability | None) -> tuple[sparse_mla.Config, ...]:
    """Configurations that a GPU of this capability may be given."""
    return sparse_mla.CONFIGS.get(capability[0] if capability else 0, sparse_mla.SM120_CONFIGS)


def _tiles(widths: tuple[int, ...], config: sparse_mla.Config) -> int:
    return sum(-(-width // config.block_n) for width in widths)


def partial_elements(tokens: int, heads: int, splits: int) -> tuple[int, int]:
    """fp32 elements of scratch for partial outputs and partial log-sum-exps."""
    return (0, 0) if splits == 1 else (tokens * splits * heads * DSV4.head_dim, tokens * splits * heads)


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

    Fewer rows may be split into more parts, so that every batch size up to T is looked at. Raises
    ``ArgumentError``.
    """
    if q.dim() != 3:
        raise ArgumentError("q.shape", tuple(q.shape), "[T, H, 512]", "Pass the q of the largest batch.")
    for name, columns in (("width", width), ("extra_width", extra_width)):
        if columns < 0:
            raise ArgumentError(name, columns, "a number of columns >= 0", "Correct it.")
    require_device("q", q)
    buffers = default_buffers() if buffers is None else buffers
    capability = device.capability(q.device)
    heads, need = q.shape[1], (0, 0)
    for tokens in range(1, q.shape[0] + 1):
        splits = plan(tokens, heads, (width, extra_width), capability).splits
        need = max(need, partial_elements(tokens, heads, splits))
    if need[0]:
        _scratch(q, need, buffers, scope, width, extra_width)


def _scratch(
    q: torch.Tensor,
    need: tuple[int, int],
    buffers: PersistentBuffers,
    scope: str,
    width: int,
    extra_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    scoped = f", scope={scope!r}" if scope else ""
    hint = f"reserve_attention(q, width={width}, extra_width={extra_width}{scoped}) with the largest q"
    out = buffers.get(OUT_BUFFER, need[:1], torch.float32, q, scope=scope, hint=hint)
    return out, buffers.get(LSE_BUFFER, need[1:], torch.float32, q, scope=scope, hint=hint)


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
        if shape.layout != DSV4.name:
            return Support(
                False, f"layout {shape.layout}: only {DSV4.name} is served", "Use backend='reference'."
            )
        if capability is not None and capability < MIN_CAPABILITY:
            major, minor = capability
            return Support(
                False,
                f"capability {major}.{minor}: bf16 tensor cores come with 8.0",
                "Use backend='reference'.",
            )
        chosen = _plan_of(shape, capability)
        programs = shape.tokens * -(-shape.heads // chosen.config.block_h) * chosen.splits
        if programs > _MAX_PROGRAMS:
            return Support(
                False,
                f"{shape.tokens} rows of {shape.heads} heads: {programs} programs, at most {_MAX_PROGRAMS}",
                "Split the batch.",
            )
        return Support(True)

    def run(self, call: AttentionCall) -> None:
        """Write ``call.out`` and ``call.lse``: one launch, or two where rows are split.

        Raises ``GrowthDuringCaptureError`` where a capture needs scratch that nobody reserved.
        """
        self.launch(call, _plan_of(call.shape, device.capability(call.q.device)))

    def launch(self, call: AttentionCall, chosen: Plan) -> None:
        """``run`` by a given plan."""
        q, main, extra = call.q, call.main, call.extra
        tokens, heads = q.shape[0], q.shape[1]
        if tokens == 0 or heads == 0:
            return
        config, splits = chosen.config, chosen.splits
        partial = splits > 1
        target, logs = call.out, call.lse
        if partial:
            widths = main.indices.shape[1], extra.indices.shape[1] if extra else 0
            need = partial_elements(tokens, heads, splits)
            target, logs = _scratch(q, need, call.buffers, call.scope, *widths)
        head_blocks = -(-heads // config.block_h)
        constants = sparse_mla.constexprs(
            main.geometry.layout,
            config,
            main_page_size=main.geometry.page_size,
            extra_page_size=extra.geometry.page_size if extra else None,
            has_main_lengths=main.lengths is not None,
            has_extra_lengths=extra is not None and extra.lengths is not None,
            has_sink=call.sink is not None,
            has_lse=call.lse is not None,
            partial=partial,
            align=_align(main, extra),
            by_bits=chosen.by_bits,
        )
        sparse_mla.sparse_mla_kernel[(tokens * splits * head_blocks,)](
            q,
            target,
            logs if logs is not None else target,
            call.sink if call.sink is not None else q,
            *_cache_arguments(main),
            *_cache_arguments(extra if extra is not None else main),
            heads,
            splits,
            q.stride(0),
            q.stride(1),
            *((0, 0) if partial else (call.out.stride(0), call.out.stride(1))),
            *_strides(call.lse),
            call.sink.stride(0) if call.sink is not None else 0,
            call.scale * math.log2(math.e),
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if partial:
            assert logs is not None
            self._merge(call, target, logs, splits)

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
