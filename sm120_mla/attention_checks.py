"""Checks of an attention call, all of them before anything is written.

Metadata (shape, dtype, stride, device, memory) is checked always and never waits for a value. Values are
checked where ``device.validate_values`` says so.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from . import device
from .backends.base import AttentionShape, CacheInput, CacheShape
from .errors import ArgumentError, IndexValueError, LayoutError
from .layout import DSV4, LAYOUTS, PageGeometry, PageLayout
from .placement import own_elements, pool_geometry, share_memory

__all__ = ["HEAD_DIM", "MAX_HEADS", "Names", "Request", "check"]

HEAD_DIM = 512
"""Width of K and V (docs/design.md, section 4)."""

MAX_HEADS = 128
"""Query heads of DeepSeek-V4 on one GPU, and FlashInfer's limit (mla/_core.py, 0.6.18 and 0.7.4)."""

_INDEX_DTYPES = (torch.int32, torch.int64)
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Normal range of fp32, which kernels take the scale in."""


@dataclass(frozen=True)
class Names:
    """What the caller calls the arguments: errors name them so."""

    kv_cache: str = "kv_cache"
    page_size: str = "page_size"
    indices: str = "indices"
    topk_length: str = "topk_length"
    extra_kv_cache: str = "extra_kv_cache"
    extra_page_size: str = "extra_page_size"
    extra_indices: str = "extra_indices"
    extra_topk_length: str = "extra_topk_length"


@dataclass(frozen=True)
class Request:
    """A call whose arguments are in order. ``q``, ``out`` and ``lse`` are views of what was passed."""

    q: torch.Tensor
    """bf16 ``[T, H, 512]``."""
    caches: tuple[CacheInput, ...]
    """Main first; a cache without pages or columns is left out, since nothing of it can count."""
    sink: torch.Tensor | None
    scale: float
    out: torch.Tensor | None
    """``[T, H, 512]`` view of the caller's output, or None: to be allocated."""
    lse: torch.Tensor | None
    """fp32 ``[T, H]`` as passed, or None."""
    has_head_axis: bool
    """Whether q came as ``[T, 1, H, 512]``."""

    @property
    def empty(self) -> bool:
        """Whether the result is known without looking at anything: no row, or nothing that could count."""
        return not self.q.shape[0] or not self.caches

    def shape(self, return_lse: bool) -> AttentionShape:
        """The call as numbers; only where it is not ``empty``."""
        main, *rest = (_cache_shape(cache) for cache in self.caches)
        return AttentionShape(
            layout=self.caches[0].geometry.layout.name,
            tokens=self.q.shape[0],
            heads=self.q.shape[1],
            main=main,
            extra=rest[0] if rest else None,
            has_sink=self.sink is not None,
            return_lse=return_lse,
            capturing=device.is_capturing(),
            scale=self.scale,
        )


def _cache_shape(cache: CacheInput) -> CacheShape:
    geometry = cache.geometry
    return CacheShape(
        page_size=geometry.page_size,
        pages=geometry.pages,
        page_stride=geometry.page_stride,
        width=cache.indices.shape[1],
        index_dtype=str(cache.indices.dtype).removeprefix("torch."),
        lane_bytes=geometry.lane_bytes(cache.pool.data_ptr()),
    )


def check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    page_size: int | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    layout: PageLayout = DSV4,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    validate: str | None = None,
    names: Names | None = None,
) -> Request:
    """Everything ``sparse_mla`` demands of its arguments, which are described there.

    Raises ``ArgumentError``, ``LayoutError`` or ``IndexValueError``.
    """
    names = names or Names()
    check_values = device.validate_values(validate)
    _check_layout(layout)
    rows = _query(q)
    tokens = rows.shape[0]
    main = _cache(kv_cache, page_size, indices, topk_length, tokens, q, layout, names)
    extra = None
    parts = {
        names.extra_indices: extra_indices,
        names.extra_topk_length: extra_topk_length,
        names.extra_page_size: extra_page_size,
    }
    given = [name for name, part in parts.items() if part is not None]
    if extra_kv_cache is None and given:
        raise ArgumentError(
            given[0],
            "given",
            f"{names.extra_kv_cache} as well",
            "Pass the extra cache, or none of its parts.",
        )
    if extra_kv_cache is not None:
        if extra_indices is None:
            raise ArgumentError(
                names.extra_kv_cache,
                "given",
                f"{names.extra_indices} as well",
                "Pass the index rows of the extra cache, or leave the cache out.",
            )
        second = Names(
            names.extra_kv_cache, names.extra_page_size, names.extra_indices, names.extra_topk_length
        )
        extra = _cache(
            extra_kv_cache, extra_page_size, extra_indices, extra_topk_length, tokens, q, layout, second
        )
    _sink(attn_sink, rows)
    scale = _scale(softmax_scale)
    out_rows = _out(out, q)
    _lse(lse, rows)
    inputs = {
        "q": q,
        names.kv_cache: kv_cache,
        names.indices: indices,
        names.topk_length: topk_length,
        "attn_sink": attn_sink,
        names.extra_kv_cache: extra_kv_cache,
        names.extra_indices: extra_indices,
        names.extra_topk_length: extra_topk_length,
    }
    _memory(out, lse, {name: tensor for name, tensor in inputs.items() if tensor is not None})
    if check_values:
        _index_values(main, names.indices)
        if extra is not None:
            _index_values(extra, names.extra_indices)
        _sink_values(attn_sink)
    caches = [main] if extra is None else [main, extra]
    return Request(
        q=rows,
        caches=tuple(c for c in caches if c.geometry.pages and c.indices.shape[1]),
        sink=attn_sink,
        scale=scale,
        out=out_rows,
        lse=lse,
        has_head_axis=q.dim() == 4,
    )


def _check_layout(layout: PageLayout) -> None:
    if not isinstance(layout, PageLayout):
        raise ArgumentError("layout", repr(layout), "a PageLayout", "Pass layout=by_name(...).")
    if layout.head_dim != HEAD_DIM:
        fitting = ", ".join(row.name for row in LAYOUTS if row.head_dim == HEAD_DIM)
        raise LayoutError(
            "layout",
            layout.name,
            f"a layout of {HEAD_DIM}-wide rows that are K and V at once: {fitting}",
            "Use another attention for it.",
        )


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(name, type(value).__name__, "a torch.Tensor", "Pass a tensor.")
    return value


def _on_device(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    if tensor.device != q.device:
        raise ArgumentError(f"{name}.device", tensor.device, f"{q.device}, as q", "Move it there.")


def _query(q: torch.Tensor) -> torch.Tensor:
    """``[T, H, 512]`` view of q."""
    _tensor("q", q)
    if q.dim() not in (3, 4) or (q.dim() == 4 and q.shape[1] != 1):
        raise ArgumentError(
            "q.shape", tuple(q.shape), f"[T, H, {HEAD_DIM}] or [T, 1, H, {HEAD_DIM}]", "Flatten the tokens."
        )
    if q.shape[-1] != HEAD_DIM:
        raise ArgumentError(
            "q.shape[-1]", q.shape[-1], str(HEAD_DIM), "Pass q after the absorbed projection, with its rope."
        )
    if not 1 <= q.shape[-2] <= MAX_HEADS:
        raise ArgumentError("q.shape[-2]", q.shape[-2], f"1 to {MAX_HEADS} heads", "Split the heads.")
    if q.dtype != torch.bfloat16:
        raise ArgumentError("q.dtype", q.dtype, "torch.bfloat16", "Convert it.")
    if q.stride(-1) != 1:
        raise ArgumentError("q.stride(-1)", q.stride(-1), "1", "Pass a q whose last dimension is dense.")
    return q[:, 0] if q.dim() == 4 else q


def _geometry(
    pool: torch.Tensor, page_size: int | None, layout: PageLayout, pool_name: str, size_name: str
) -> PageGeometry:
    try:
        return pool_geometry(pool, page_size, layout, pool_name)
    except LayoutError as error:
        if error.argument != "page_size":
            raise
        raise LayoutError(size_name, error.value, error.expected, error.remedy) from None


def _cache(
    pool: torch.Tensor,
    page_size: int | None,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    tokens: int,
    q: torch.Tensor,
    layout: PageLayout,
    names: Names,
) -> CacheInput:
    """One cache with its index rows; ``names`` are those of this cache, in the places of the main one."""
    _tensor(names.kv_cache, pool)
    geometry = _geometry(pool, page_size, layout, names.kv_cache, names.page_size)
    _on_device(names.kv_cache, pool, q)
    name = names.indices
    _integers(name, indices, q)
    if indices.dim() not in (2, 3) or (indices.dim() == 3 and indices.shape[1] != 1):
        raise ArgumentError(f"{name}.shape", tuple(indices.shape), "[T, k] or [T, 1, k]", "Reshape it.")
    if indices.shape[0] != tokens:
        raise ArgumentError(
            f"{name}.shape[0]",
            indices.shape[0],
            f"{tokens}, one row for each of q",
            "Pass one row per token.",
        )
    rows = indices[:, 0] if indices.dim() == 3 else indices
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ArgumentError(
            f"{name}.stride(-1)", rows.stride(1), "1", "Make each row dense; rows may lie apart."
        )
    if lengths is not None:
        name = names.topk_length
        _integers(name, lengths, q)
        if tuple(lengths.shape) not in ((tokens,), (tokens, 1)):
            raise ArgumentError(
                f"{name}.shape",
                tuple(lengths.shape),
                f"({tokens},) or ({tokens}, 1), one for each row of q",
                "Pass one length per row.",
            )
        lengths = lengths[:, 0] if lengths.dim() == 2 else lengths
    return CacheInput(pool, geometry, rows, lengths)


def _integers(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    _tensor(name, tensor)
    if tensor.dtype not in _INDEX_DTYPES:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, "torch.int32 or torch.int64", "Convert it.")
    _on_device(name, tensor, q)


def _sink(sink: torch.Tensor | None, rows: torch.Tensor) -> None:
    if sink is None:
        return
    _tensor("attn_sink", sink)
    heads = rows.shape[1]
    if tuple(sink.shape) != (heads,):
        raise ArgumentError("attn_sink.shape", tuple(sink.shape), f"({heads},), one per head", "Slice it.")
    if sink.dtype != torch.float32:
        raise ArgumentError("attn_sink.dtype", sink.dtype, "torch.float32", "Convert it once, at load.")
    if heads > 1 and sink.stride(0) != 1:
        raise ArgumentError("attn_sink.stride(0)", sink.stride(0), "1", "Pass a dense vector.")
    _on_device("attn_sink", sink, rows)


def _scale(scale: float | None) -> float:
    if scale is None:
        return float(HEAD_DIM**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise ArgumentError(
            "softmax_scale", type(scale).__name__, "a number", "Pass a float; a tensor would have to be read."
        )
    value = float(scale)
    if not math.isfinite(value) or not _SMALLEST <= value <= _LARGEST:
        raise ArgumentError(
            "softmax_scale",
            value,
            "a finite number above 0, normal in fp32",
            f"Leave it out for {HEAD_DIM}**-0.5.",
        )
    return value


def _out(out: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    if out is None:
        return None
    _tensor("out", out)
    if out.shape != q.shape:
        raise ArgumentError("out.shape", tuple(out.shape), f"{tuple(q.shape)}, as q", "Reshape it.")
    if out.dtype != torch.bfloat16:
        raise ArgumentError("out.dtype", out.dtype, "torch.bfloat16", "Allocate it as bf16.")
    _on_device("out", out, q)
    own_elements("out", out)
    return out[:, 0] if out.dim() == 4 else out


def _lse(lse: torch.Tensor | None, rows: torch.Tensor) -> None:
    if lse is None:
        return
    _tensor("lse", lse)
    want = tuple(rows.shape[:2])
    if tuple(lse.shape) != want:
        raise ArgumentError("lse.shape", tuple(lse.shape), f"{want}: [T, H]", "Reshape it.")
    if lse.dtype != torch.float32:
        raise ArgumentError("lse.dtype", lse.dtype, "torch.float32", "Allocate it as fp32.")
    _on_device("lse", lse, rows)
    own_elements("lse", lse)


def _memory(out: torch.Tensor | None, lse: torch.Tensor | None, inputs: dict[str, torch.Tensor]) -> None:
    outputs = {name: tensor for name, tensor in (("out", out), ("lse", lse)) if tensor is not None}
    for name, tensor in outputs.items():
        others = inputs if name == "out" else {**inputs, "out": out}
        for other, memory in others.items():
            if memory is not None and share_memory(tensor, memory):
                raise ArgumentError(
                    name, f"memory shared with {other}", f"memory apart from {other}", "Allocate another."
                )


def _index_values(cache: CacheInput, name: str) -> None:
    """Refuse a counted column at or past the pool's end. Synchronises."""
    indices, lengths, geometry = cache.indices, cache.lengths, cache.geometry
    wrong = indices >= geometry.tokens
    if lengths is not None:
        wrong &= torch.arange(indices.shape[1], device=indices.device) < lengths.unsqueeze(1)
    if not bool(wrong.any()):
        return
    row, column = (int(n) for n in wrong.nonzero()[0])
    raise IndexValueError(
        f"{name}[{row}, {column}]",
        int(indices[row, column]),
        f"a token index below {geometry.tokens} ({geometry.pages} pages of {geometry.page_size}), or -1",
        "Check the block table, or pass validate='metadata' to treat it as no token.",
    )


def _sink_values(sink: torch.Tensor | None) -> None:
    """Refuse a sink that is not a number. Synchronises."""
    if sink is None or not bool(sink.isnan().any()):
        return
    head = int(sink.isnan().nonzero()[0])
    raise ArgumentError(
        f"attn_sink[{head}]", "nan", "a number, or -inf for no sink", "Find what produced it; a weight?"
    )
