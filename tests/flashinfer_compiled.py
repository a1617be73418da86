"""Test equipment: the exports of FlashInfer's compiled SM120 module, on CPU tensors that stand for CUDA ones.

They make the checks of the C++ bindings (csrc/sparse_mla_sm120*.cu at 0.6.18, csrc/sparse_mla_sm120/ at
0.7.4) with their messages, then what those do not check and the kernels need (``Unmet``), and compute by
``flashinfer_emulation``.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import flashinfer_emulation as emulation
import torch
from flashinfer_emulation import NEW, OLD, Section

from sm120_mla.envelopes import Envelope

TOKEN = 584
SM_COUNT = 188
SHARED = 101_376


class Unmet(AssertionError):
    """A demand of the kernel that nothing in FlashInfer checks."""


@dataclass
class Record:
    """What reached the compiled module: ``launches`` are "decode" and "prefill", in order."""

    launches: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    fp8: bool = False

    def add(self, launch: str, **arguments: Any) -> None:
        self.launches.append(launch)
        self.calls.append(arguments)


def check(condition: object, message: str) -> None:
    """TVM_FFI_ICHECK."""
    if not condition:
        raise RuntimeError(f"Check failed: {message}")


def need(condition: object, message: str) -> None:
    if not condition:
        raise Unmet(message)


def aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def demands(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    caches: list[tuple[str, Any, Any, Any]],
) -> None:
    """What every kernel takes for granted of tensors and of the values in them."""
    rows, heads = q.shape[:2]
    for name, tensor, dtype in (("q", q, torch.bfloat16), ("output", out, torch.bfloat16)):
        need(tensor.dtype == dtype and tensor.is_contiguous() and aligned(tensor), f"{name}: {tensor.shape}")
        need(tensor.shape == (rows, heads, 512), f"{name} shape")
    need(lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (rows, heads), "out_lse")
    if sink is not None:
        need(sink.dtype == torch.float32 and sink.is_contiguous() and sink.shape == (heads,), "attn_sink")
        need(not bool(sink.isnan().any()), "attn_sink is NaN")
    for name, cache, indices, lengths in caches:
        need(cache.dtype == torch.uint8 and aligned(cache) and cache.stride(0) % 16 == 0, f"{name} alignment")
        need(cache.shape[0] > 0, f"{name} has no slot 0")
        need(indices.dtype == torch.int32 and indices.is_contiguous(), f"{name} indices")
        need(indices.shape[0] == rows, f"{name} index rows")
        need(lengths is not None and lengths.dtype == torch.int32, f"{name} lengths")
        need(lengths.is_contiguous() and lengths.shape == (rows,), f"{name} lengths layout")
        width = indices.shape[1]
        need(bool((lengths >= 0).all() and (lengths <= width).all()), f"{name} lengths outside [0, {width}]")
        counted = (indices >= 0) & (torch.arange(width) < lengths[:, None])
        need(counted.any(1).equal(lengths > 0), f"{name}: a length over nothing but -1")
        tokens = cache.shape[0] * cache.shape[1]
        need(bool(((indices >= -1) & (indices < tokens)).all()), f"{name}: a stale column out of range")


# ---- 0.6


class CompiledOld:
    """The exports of 0.6.14-0.6.18 (sparse_mla_sm120_jit_binding.cu:208-213)."""

    def __init__(self, envelope: Envelope, record: Record) -> None:
        self._envelope, self._record = envelope, record

    @staticmethod
    def _layout(cache: torch.Tensor, name: str) -> int:
        if cache.ndim == 2:
            check(cache.shape[1] % TOKEN == 0, f"{name} 2D block width")
            return cache.shape[1] // TOKEN
        check(cache.shape[-1] == TOKEN, f"{name} last dim must be bytes_per_token=584")
        if cache.ndim == 3:
            return cache.shape[1]
        check(cache.ndim == 4 and 1 in cache.shape[1:3], f"{name} 4D form must have singleton KV-head axis")
        return cache.shape[2] if cache.shape[1] == 1 else cache.shape[1]

    def _run(
        self,
        launch: str,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None,
        caches: list[tuple[str, Any, Any, Any]],
        pages: list[int],
    ) -> None:
        demands(q, out, lse, sink, caches)
        sections = [
            Section(cache, page, indices, lengths)
            for (_, cache, indices, lengths), page in zip(caches, pages, strict=True)
        ]
        width = caches[0][2].shape[1]
        narrow = 128 if self._envelope.name == "A" else 256
        bf16_qk = launch == "prefill" and (len(caches) == 2 or width <= narrow)
        result, found = emulation.attend(
            q,
            sections,
            scale,
            sink,
            rules=OLD,
            prefill=launch == "prefill",
            fp8=self._record.fp8,
            bf16_qk=bf16_qk,
        )
        out.copy_(result)
        lse.copy_(found)
        self._record.add(launch, q=q, caches=caches, sink=sink, scale=scale, pages=pages)

    def sparse_mla_sm120_decode_dsv4(
        self,
        q,
        kv,
        indices,
        mid_out,
        mid_lse,
        output,
        out_lse,
        num_splits,
        sm_scale,
        topk_length,
        attn_sink,
        extra_kv,
        extra_indices,
        extra_topk_length,
        cpb_override,
    ) -> None:
        check(q.ndim == 3, "q must be [T, H, D_QK]")
        check(indices.ndim == 2 or indices.shape[1] == 1, "indices 3D form requires size(1) == 1")
        check(q.shape[2] == 512, "decode-dsv4 currently DSV4-only")
        page = self._layout(kv, "kv_cache")
        check(extra_kv is None or extra_indices is not None, "extra_kv_cache requires extra_indices")
        heads, width = q.shape[1], indices.shape[-1]
        served = heads in self._envelope.decode_heads and width in self._envelope.decode_widths
        check(
            served and page == 64 and num_splits > 0,
            "decode-dsv4 launch failed (unsupported shape or kernel error)",
        )
        extra_width = 0 if extra_indices is None else extra_indices.shape[-1]
        need(num_splits == -(-width // 64) + -(-extra_width // 64), "splits do not cover the columns")
        room = q.shape[0] * heads * num_splits
        for name, scratch, dtype, size in (
            ("mid_out", mid_out, torch.bfloat16, room * 512),
            ("mid_lse", mid_lse, torch.float32, room),
        ):
            bytes_behind = scratch.untyped_storage().nbytes() - scratch.storage_offset() * dtype.itemsize
            need(scratch.dtype == dtype and aligned(scratch), f"{name} dtype and alignment")
            need(bytes_behind >= size * dtype.itemsize, f"{name} is written past its end")
            torch.as_strided(scratch, (size,), (1,)).fill_(math.nan)  # all of it is the kernel's to write
        caches = [("kv_cache", kv, indices, topk_length)]
        pages = [page]
        if extra_kv is not None:
            caches.append(("extra_kv_cache", extra_kv, extra_indices, extra_topk_length))
            pages.append(self._layout(extra_kv, "extra_kv_cache"))
        self._run("decode", q, output, out_lse, sm_scale, attn_sink, caches, pages)

    def sparse_mla_sm120_decode_dsv3_2(self, *_: Any) -> None:
        raise AssertionError("DSv4 calls never come here")

    def sparse_mla_sm120_paged_attention(
        self,
        q,
        kv,
        indices,
        output,
        out_lse,
        sm_scale,
        model_type,
        topk_length,
        attn_sink,
        extra_kv,
        extra_indices,
        extra_topk_length,
    ) -> None:
        self._input("q", q, torch.bfloat16)
        check(kv.stride(-1) == 1, "kv_cachemust be contiguous at last dimension")
        check(kv.dtype == torch.uint8, "Inconsistency of Tensor type: kv_cache")
        self._input("indices", indices, torch.int32)
        self._input("output", output, torch.bfloat16)
        self._input("out_lse", out_lse, torch.float32)
        rows, heads = q.shape[:2]
        check(indices.shape[0] == rows, "indices leading dimension must match num_tokens")
        check(model_type == 1, "model type")
        self._layout(kv, "kv_cache")
        check(output.shape == (rows, heads, 512), "SM120 sparse-MLA requires d_v == 512")
        check(out_lse.shape == (rows, heads), "out_lse must be [num_tokens, num_heads]")
        for name, lengths in (("tl", topk_length), ("etl", extra_topk_length)):
            if lengths is not None:
                self._input(name, lengths, torch.int32)
                check(lengths.shape == (rows,), f"{name} must be [num_tokens]")
        if attn_sink is not None:
            self._input("s", attn_sink, torch.float32)
            check(attn_sink.shape == (heads,), "attn_sink must be [num_heads]")
        check((extra_kv is None) == (extra_indices is None), "extra_kv_cache requires extra_indices")
        width, page = indices.shape[-1], 64  # whatever the cache says, the kernel divides by 64
        need(self._layout(kv, "kv_cache") == page, "the prefill reads pages of another size as pages of 64")
        caches, pages = [("kv_cache", kv, indices, topk_length)], [page]
        if extra_kv is not None:
            check(extra_kv.dtype == torch.uint8, "Inconsistency of Tensor type: ekv")
            self._input("eidx", extra_indices, torch.int32)
            caches.append(("extra_kv_cache", extra_kv, extra_indices, extra_topk_length))
            pages.append(self._layout(extra_kv, "extra_kv_cache"))
            need(extra_indices.shape[1] % 64 == 0, "the prefill reads whole tiles of 64 extra columns")
        check(rows > 64, "Decode (num_tokens <= 64) must go through sparse_mla_sm120_decode_dsv4")
        single = extra_kv is None and width in self._envelope.prefill_widths
        dual = extra_kv is not None and width in self._envelope.prefill_dual_widths
        dual = dual and pages[-1] in self._envelope.prefill_extra_pages
        check(
            heads in self._envelope.prefill_heads and (single or dual),
            f"Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads={heads} topk={width}",
        )
        self._run("prefill", q, output, out_lse, sm_scale, attn_sink, caches, pages)

    @staticmethod
    def _input(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        check(tensor.is_contiguous(), f"{name} must be contiguous")
        check(tensor.dtype == dtype, f"Inconsistency of Tensor type: {name}")


# ---- 0.7.1 and later

FIELDS = (
    *("model", "tokens", "heads", "topk", "extra_topk", "page_size", "extra_page_size"),
    *("page_stride_bytes", "extra_page_stride_bytes", "row_stride_bytes"),
    *("indices_stride", "extra_indices_stride", "lse_stride"),
    *("has_lengths", "has_extra_lengths", "has_sink", "extra_fp4", "variant", "extra_row_stride_bytes"),
)
"""The metadata ABI of 0.7.4 (attention_descriptor.h:17-32); 0.7.1 and 0.7.2 lack the last."""


@dataclass(frozen=True)
class ExecutionPlan:
    """``resolve_attention`` (attention_resolve.cu:96-241), for DSv4."""

    m: SimpleNamespace
    splits: int
    scratch_heads: int
    numeric: str

    def workspace(self) -> list[tuple[list[int], str, int, int]]:
        slots = self.m.tokens * self.scratch_heads * self.splits
        lse = self.m.tokens * self.m.heads
        return [
            ([slots * 512], "bfloat16", slots * 512 * 2, 16),
            ([slots], "float32", slots * 4, 16),
            ([self.m.tokens, self.m.heads], "float32", lse * 4, 4),
        ]

    def inspect(self) -> dict[str, object]:
        return {
            "scratch_heads": self.scratch_heads,
            "scratch_split_stride": self.splits,
            "variant": self.m.variant,
        }


def resolve(values: Any) -> ExecutionPlan:
    names = FIELDS[: len(values)]
    m = SimpleNamespace(**dict(zip(names, (int(v) for v in values), strict=True)))
    check(m.model == 1 and m.tokens > 0 and 0 < m.heads <= 128 and m.topk > 0, "unsupported metadata")
    check(m.page_size > 0, "unsupported sparse-MLA main page size")
    check(m.row_stride_bytes == TOKEN, "invalid row stride")
    check(
        m.page_stride_bytes >= m.page_size * TOKEN and m.page_stride_bytes % 16 == 0,
        "invalid main page stride",
    )
    check(m.indices_stride >= m.topk and m.lse_stride >= m.heads, "invalid indices/LSE stride")
    dual = m.extra_topk > 0
    if dual:
        payload = m.extra_page_size * TOKEN
        check(
            m.extra_page_size > 0
            and m.extra_indices_stride >= m.extra_topk
            and m.extra_page_stride_bytes >= payload
            and m.extra_page_stride_bytes % 16 == 0,
            "invalid extra page layout",
        )
    splits = -(-m.topk // 64) + -(-m.extra_topk // 64)
    if m.variant == 0:
        return ExecutionPlan(m, splits, m.heads if m.heads == 8 else -(-m.heads // 16) * 16, "fp8")
    check(m.topk % 64 == 0 and m.indices_stride == m.topk, "invalid sparse-MLA prefill variant/topk/indices")
    check(not dual or m.extra_indices_stride == m.extra_topk, "prefill extra indices must be dense")
    check(m.variant == (3 if dual else 2), "sparse-MLA MG dual metadata mismatch")
    check(m.heads in (8, 16, 32, 64, 128), "unsupported sparse-MLA prefill heads")
    return ExecutionPlan(m, 0, 0, "hybrid" if dual or m.topk <= 256 else "fp8")


class CompiledNew:
    """The exports of 0.7.1-0.7.4 that a DSv4 call can reach."""

    def __init__(self, fields: int, record: Record) -> None:
        self._fields, self._record = fields, record

    sparse_mla_sm120_dsv41_fp4_quantize_pack = None  # fetched by name, never called
    sparse_mla_sm120_dsv41_fp4_quantize_append = None
    sparse_mla_sm120_dsv41_fp8_quantize_pack = None
    sparse_mla_sm120_dsv41_fp8_quantize_append = None

    def resolve_format(self, query_dim: int, scale: str) -> int:
        check((query_dim, scale) == (512, "auto"), "unsupported d_qk")
        return 1

    def format_info(self, model: int) -> dict[str, int]:
        check(model == 1, "model")
        sizes = {"query_dim": 512, "value_dim": 512, "bytes_per_token": TOKEN}
        return {**sizes, "chunk_width": 64, "page_size": 64}

    def main_page_sizes(self, model: int) -> list[int]:
        return []

    def decode_scratch_heads(self, heads: int) -> int:
        return heads if heads == 8 else -(-heads // 16) * 16

    def candidates(self, model, heads, topk, page, dual, extra_page, precision) -> list[int]:
        stride = -(-page * TOKEN // 16) * 16
        extra = (64, extra_page, -(-extra_page * TOKEN // 16) * 16) if dual else (0, 0, 0)
        values = [model, 1, heads, topk, extra[0], page, extra[1], stride, extra[2], TOKEN, topk, extra[0]]
        values += [heads, 0, 0, 0, 0, 0, TOKEN if dual else 0]
        return list(self._legal(values))

    def metadata_candidates(self, metadata, numeric, sm_count, max_shared) -> dict[int, int]:
        return {
            variant: plan.splits
            for variant, plan in self._legal(metadata).items()
            if variant or int(metadata[1]) <= 64
        }

    @staticmethod
    def _legal(values: Any) -> dict[int, ExecutionPlan]:
        found, at = {}, FIELDS.index("variant")
        for variant in range(5):
            with contextlib.suppress(RuntimeError):
                found[variant] = resolve([*values[:at], variant, *values[at + 1 :]])
        return found

    @staticmethod
    def _pages(cache: torch.Tensor, name: str) -> tuple[int, int, int]:
        check(cache.dtype == torch.uint8, "Inconsistency of Tensor type: kv")
        check(2 <= cache.ndim <= 4, f"{name} must be 2D, 3D or 4D")
        check(cache.stride(-1) == 1, f"{name} last dim must be contiguous")
        check(aligned(cache), f"{name} data pointer must be 16B-aligned")
        check(cache.stride(0) % 16 == 0, f"{name} block stride must be 16B-aligned")
        check(cache.ndim > 2, "2-D caches are not used here")
        axis = 1
        if cache.ndim == 4:
            check(1 in cache.shape[1:3], f"{name} requires singleton KV-head axis")
            axis = 2 if cache.shape[1] == 1 else 1
        rows, advance = cache.shape[axis], cache.stride(axis)
        check(rows > 0, f"{name} page capacity must be positive")
        check(advance == TOKEN, f"{name} footer-scale rows must stay tightly packed")
        check(cache.stride(0) >= rows * advance, f"{name} block stride is smaller than page capacity")
        return rows, cache.stride(0), advance

    def inspect_metadata(
        self,
        q,
        cache,
        indices,
        output,
        lengths,
        sink,
        extra,
        eidx,
        elens,
        lse,
        mid,
        mlse,
        model,
        fp4,
        value_dim,
    ) -> list[int]:
        for name, tensor in (("q", q), ("output", output)):
            check(tensor.is_contiguous(), f"{name} must be contiguous")
            check(tensor.dtype == torch.bfloat16, f"Inconsistency of Tensor type: {name}")
        rows, heads, dim = q.shape
        check(rows > 0 and 0 < heads <= 128, "unsupported tokens/heads")
        check(dim == 512 and value_dim in (0, 512), "query/d_v geometry mismatch")
        check(output.shape == (rows, heads, 512), "output shape mismatch")
        check((extra is None) == (eidx is None), "extra cache and indices must be provided together")
        check(elens is None or extra is not None, "extra lengths require cache")
        check((mid is None) == (mlse is None), "scratch must be passed together")
        for name, vector, count, dtype in (
            ("topk_length", lengths, rows, torch.int32),
            ("extra_topk_length", elens, rows, torch.int32),
            ("attn_sink", sink, heads, torch.float32),
        ):
            if vector is not None:
                check(vector.dtype == dtype, f"{name} has incorrect dtype")
                check(vector.shape == (count,) and vector.is_contiguous(), f"{name} must be contiguous")
        for rows_of in (indices, *(() if eidx is None else (eidx,))):
            check(rows_of.dtype == torch.int32, "Inconsistency of Tensor type: ix")
            dense = rows_of.stride(-1) == 1 and rows_of.stride(0) >= rows_of.shape[-1] > 0
            check(rows_of.ndim == 2 and rows_of.shape[0] == rows and dense, "indices shape/stride mismatch")
        if lse is not None:
            check(lse.dtype == torch.float32, "Inconsistency of Tensor type: value")
            fits = lse.shape[0] >= rows and lse.shape[1] >= heads and lse.stride(1) == 1
            check(fits, "out_lse capacity/stride mismatch")
        for scratch, dtype in ((mid, torch.bfloat16), (mlse, torch.float32)):
            if scratch is not None:
                check(scratch.dtype == dtype and scratch.is_contiguous(), "scratch layout mismatch")
                check(aligned(scratch), "scratch must be 16B-aligned")
        page, stride, advance = self._pages(cache, "kv_cache")
        more = (0, 0, 0) if extra is None else self._pages(extra, "extra_kv_cache")
        extra_topk, extra_stride = (0, 0) if eidx is None else (eidx.shape[1], eidx.stride(0))
        found = [1, rows, heads, indices.shape[1], extra_topk, page, more[0], stride, more[1], advance]
        found += [indices.stride(0), extra_stride, heads if lse is None else lse.stride(0)]
        found += [int(given is not None) for given in (lengths, elens, sink)]
        return [*found, int(fp4), 0, more[2]][: self._fields]

    def resolve_attention(self, metadata, numeric, cpb, sm_count, max_shared) -> ExecutionPlan:
        check(sm_count == SM_COUNT and max_shared == SHARED, "invalid resolver capabilities/route")
        return resolve(metadata)

    def execute_attention(
        self,
        plan,
        q,
        cache,
        indices,
        mid,
        mlse,
        output,
        lse,
        scale,
        lengths,
        sink,
        extra,
        eidx,
        elens,
        lse_scale,
    ) -> None:
        m = plan.m
        check(aligned(q), "q must be 16B-aligned")
        check(aligned(output), "output must be 16B-aligned")
        fields = self.inspect_metadata(
            *(q, cache, indices, output, lengths, sink, extra, eidx, elens, lse, mid, mlse, 1, False, 512)
        )
        planned = [0 if name == "variant" else int(getattr(m, name)) for name in FIELDS[: self._fields]]
        check(fields == planned, "execution plan tensor metadata mismatch")
        check(lse.shape == (m.tokens, m.heads), "out_lse shape/stride mismatch")
        room = m.tokens * plan.scratch_heads * plan.splits
        check(mid.numel() >= room * 512, "mid_out scratch capacity must cover padded heads and splits")
        check(mlse.numel() >= room, "mid_lse scratch capacity must cover padded heads and allocated splits")
        mid.fill_(math.nan)
        mlse.fill_(math.nan)
        caches = [("kv_cache", cache, indices, lengths)]
        if extra is not None:
            caches.append(("extra_kv_cache", extra, eidx, elens))
        demands(q, output, lse, sink, caches)
        pages = [m.page_size, m.extra_page_size][: len(caches)]
        sections = [
            Section(pool, page, rows, lens) for (_, pool, rows, lens), page in zip(caches, pages, strict=True)
        ]
        launch = "decode" if m.variant == 0 else "prefill"
        result, found = emulation.attend(
            q,
            sections,
            scale,
            sink,
            rules=NEW,
            prefill=launch == "prefill",
            fp8=self._record.fp8,
            bf16_qk=plan.numeric == "hybrid",
        )
        output.copy_(result)
        lse.copy_(found * lse_scale)
        self._record.add(launch, q=q, caches=caches, sink=sink, scale=scale, pages=pages)
