"""Class b: what a callee asks of the tensors it is handed."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

_LOCALS = (
    "FlashInfer names C++ variables: tl is topk_length, s attn_sink, ekv extra_kv_cache, eidx extra_indices, "
    "etl extra_topk_length, ix an index tensor. "
)

_LOCAL = r"\b(?P<argument>q|kv|kv_cache|indices|output|out_lse|tl|s|ekv|etl|ix) ?must be contiguous"

ROWS = (
    KnownFailure(
        id="b-extra-indices-view",
        title="the extra (C128A) index rows are a narrow view of a wider buffer",
        signatures=(named("eidx must be contiguous"),),
        engine="vLLM with FlashInfer",
        versions="vLLM from the adaptive width to pull request 53574; FlashInfer 0.6.14 to 0.7.0",
        invariants=("META-VIEW", "META-STRIDE", "ROUTE-CONTRACT"),
        cause="The adaptive width hands over columns [:width] of a buffer of full capacity, whose rows are "
        "not adjacent. Up to 64 rows nobody looks; a verify batch of 11 requests with 5 drafts has 66.",
        remedy="On capability 12.x pass full-width rows (pull request 53574). A .contiguous() is no fix: it "
        "allocates every step and breaks capture. FlashInfer 0.7 takes row strides up to 64 rows only; above "
        "them it says, from 0.7.1 on, that the shape has no decode kernel.",
        references=("vllm-project/vllm#53574", "flashinfer-ai/flashinfer#5075"),
        example="RuntimeError: Check failed: (eidx.IsContiguous()) is false: eidx must be contiguous",
        reports=("B01",),
    ),
    KnownFailure(
        id="b-not-contiguous",
        title="an argument of FlashInfer's prefill is not contiguous",
        signatures=(
            likely("must be contiguous", rf"IsContiguous\(\).*{_LOCAL}"),
            likely("must be contiguous at last dimension", rf"{_LOCAL} at last dimension"),
            symptom(
                "must be contiguous",
                rf"{_LOCAL}(?! (?:in|for)\b)",
                near=("flashinfer", "sparse_mla", "sparse-MLA"),
            ),
            named("indices must be dense row-major over the token dimension"),
            named("indices shape/stride mismatch"),
        ),
        engine="FlashInfer",
        versions="0.6.14 to 0.7.0 above 64 rows; later at any number, index rows apart",
        invariants=("ROUTE-CONTRACT",),
        cause=_LOCALS + "Decode (up to 64 rows) does not check and reads wrong rows instead.",
        remedy="Allocate the tensor at the width it is used at, and hand over that; check at 64 and at 65 "
        "rows.",
        references=("flashinfer-ai/flashinfer#4802", "flashinfer-ai/flashinfer#4362"),
        example="RuntimeError: Check failed: (indices.IsContiguous()) is false: indices must be contiguous",
        reports=("B04",),
    ),
    KnownFailure(
        id="b-wrong-dtype",
        title="an argument of sparse MLA has the wrong dtype",
        signatures=(
            likely("Inconsistency of Tensor type: ", r"type: (?P<argument>\w+)"),
            named(
                "must have dtype torch.int32",
                r"(?P<argument>\S*(?:indices|lens)\S*) must have dtype torch\.int32, got (?P<got>\S+)",
            ),
            named("SM120 DSv4 sparse MLA only supports BF16 query", r"got (?P<got>\S+)"),
        ),
        engine="FlashInfer",
        versions="any; 0.6 decode does not check and misreads int64 as int32",
        invariants=("ROUTE-CONTRACT",),
        cause=_LOCALS + "Index rows and lengths are int32, queries bf16, the cache uint8, the sink fp32.",
        remedy="Make the tensor in the right dtype; a conversion a step allocates inside capture.",
        references=("flashinfer-ai/flashinfer#5347", "flashinfer-ai/flashinfer#3395"),
        example="ValueError: sparse_mla_segments[1].indices must have dtype torch.int32, got torch.int64",
        reports=("E10",),
    ),
    KnownFailure(
        id="b-c128a-active-width",
        title="the active C128A width is smaller than the longest sequence needs",
        signatures=(named("assert active_topk_width >= cm.max_seq_len // self.compress_ratio"),),
        engine="vLLM",
        versions="vision checkpoints, September 2026",
        invariants=("META-VALUES", "META-VIEW"),
        cause="The width comes from one length, the assertion from another: capture builds with the model's "
        "maximum.",
        remedy="--enforce-eager starts; otherwise derive both from the length that the capture uses.",
        references=("eugr/spark-vllm-docker#400",),
        example="    assert active_topk_width >= cm.max_seq_len // self.compress_ratio\nAssertionError",
        reports=("B03",),
    ),
    KnownFailure(
        id="b-index-rows",
        title="index rows and query rows differ in number or rank",
        signatures=(
            named("indices leading dimension must match num_tokens"),
            named("indices must be [num_tokens, topk] or [num_tokens, 1, topk]"),
            named("indices middle dimension must be singleton"),
            named("indices 3D form requires size(1) == 1"),
            named(
                "sparse_mla_segments[",
                r"Expected (?:flattened )?sparse_mla_segments\[\d\]\.indices\.shape == "
                r"(?P<expected>\(.*?\)), got",
            ),
        ),
        engine="FlashInfer",
        versions="checked above 64 rows only in 0.6: up to 64 a short tensor is read past its end",
        invariants=("ROUTE-CONTRACT",),
        cause="Decode hands over [T, 1, k] and prefill [T, k], or padding changed the one and not the other.",
        remedy="One rank on both paths, and as many index rows as query rows, padding included (-1, length "
        "0).",
        references=("flashinfer-ai/flashinfer#4802", "vllm-project/vllm#57388"),
        example="RuntimeError: Check failed: indices leading dimension must match num_tokens",
        reports=("B05",),
    ),
    KnownFailure(
        id="b-lengths-shape",
        title="the lengths have a shape that stands for other rows than the indices",
        signatures=(
            named("_lens.shape ==", r"Expected (?:flattened )?\S+_lens\.shape == (?P<expected>\(.*?\))"),
            named("topk_length must be a contiguous vector of length"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later",
        invariants=("ROUTE-CONTRACT", "META-VALUES"),
        cause="One length a request was passed where one a token is meant. With several query tokens a "
        "request, some versions accept [batch] and ignore it, which is worse.",
        remedy="Expand the lengths to one per token.",
        references=("flashinfer-ai/flashinfer#4031",),
        example="ValueError: Expected flattened sparse_mla_segments[0].indices_lens.shape == (66,), got "
        "(11,)",
        reports=("B09",),
    ),
    KnownFailure(
        id="b-kv-axis",
        title="the cache view has its single head on the other axis (HND and NHD)",
        signatures=(
            named("Expected packed SM120 DSV4", r"DSV4 (?P<layout>HND|NHD)\b"),
            named("kv_cache must have a singleton KV-head axis"),
            likely("kv_layout must be either"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later; kv_layout defaults to HND",
        invariants=("ROUTE-CONTRACT",),
        cause="[pages, 64, 1, 584] and [pages, 1, 64, 584] are the same bytes, but only one is what "
        "kv_layout says. FlashInfer's own benchmark had it wrong.",
        remedy="Pass kv_layout='NHD', or view the cache the other way; nothing is copied.",
        references=("flashinfer-ai/flashinfer#3989",),
        example="ValueError: Expected packed SM120 DSV4 HND swa_kv_cache.shape[1] == 1, got (40, 64, 1, 584)",
        reports=("B06",),
    ),
    KnownFailure(
        id="b-topk-buffer-width",
        title="the top-k buffer is wider than the width the kernel was built for",
        signatures=(
            named(
                "requires an effective topk buffer width of",
                r"width of (?P<kernel>\d+); got (?P<buffer>\d+)",
            ),
            likely("sparse_mla_top_k", r"block_tables \(\w+, \w+, (?P<buffer>\d+)\).*sparse_mla_top_k"),
        ),
        engine="vLLM",
        versions="GLM-5.3 with kpool, before a fix that fits the width",
        invariants=("ROUTE-TOTAL",),
        cause="The kpool indexer appends its tail and rounds up to 128: 2,048 becomes 2,176, the kernel "
        "takes exactly 2,048.",
        remedy="index_topk 2044 fits with kpool 4; FlashInfer 0.7 takes the width at run time.",
        references=("vllm-project/vllm#53969", "vllm-project/vllm#55563", "vllm-project/vllm#55277"),
        example="ValueError: FLASHINFER_MLA_SPARSE_SM120 requires an effective topk buffer width of 2048; "
        "got 2176",
        reports=("B08",),
    ),
    KnownFailure(
        id="b-workspace-int8",
        title="the FlashInfer workspace is uint8 where one tactic wants int8",
        signatures=(named("workspace_buffer must be torch.int8"),),
        engine="vLLM on SM100",
        versions="before vLLM pull request 48046 (July 2026)",
        invariants=("ROUTE-CONTRACT",),
        cause="The usual tactic reinterprets the buffer, the one the autotuner visits does not.",
        remedy="Allocate the workspace as int8, which every tactic takes.",
        references=("vllm-project/vllm#48046",),
        example="ValueError: workspace_buffer must be torch.int8, got torch.uint8",
        reports=("B10",),
    ),
    KnownFailure(
        id="b-pair-missing",
        title="one half of a pair of sparse MLA arguments is missing",
        signatures=(
            named("extra_sparse_indices and extra_sparse_topk_lens must be provided together"),
            named("extra_kv_cache and extra_indices must be provided together"),
            named("compressed_kv_cache is required when extra_sparse_indices is provided"),
            named("backend='sparse' requires swa_topk_lens"),
            named("backend='sparse' requires sparse_indices"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later",
        invariants=("ROUTE-CONTRACT",),
        cause="On SM120 the lengths are required, and the extra cache, its indices and its lengths belong "
        "together. A compressed cache without indices is ignored without a word.",
        remedy="Pass all of them; an empty row has length 0.",
        references=("flashinfer-ai/flashinfer#3395",),
        example="ValueError: backend='sparse' requires swa_topk_lens",
    ),
    KnownFailure(
        id="b-scratch",
        title="the decode kernel's scratch is missing or too small",
        signatures=(
            named("decode requires caller-supplied mid_out and mid_lse scratch"),
            likely("too small for required", r"(?P<buffer>mid_out|mid_lse) shape"),
            named("mid_out scratch capacity must cover padded heads and allocated splits"),
        ),
        engine="FlashInfer through its private entry points",
        versions="0.6.14 and later; 0.7 pads the heads to 16",
        invariants=("BUF-CAPTURE", "ROUTE-CONTRACT"),
        cause="Scratch is [T, H, S, 512] bf16 and [T, H, S] fp32 with S = ceil(k/64) + ceil(extra k/64).",
        remedy="Reserve it for the largest T and both widths.",
        references=("flashinfer-ai/flashinfer#3395",),
        example="ValueError: mid_out shape (64, 64, 2, 512) too small for required "
        "[num_tokens=64,num_heads=64,num_splits=10,d_v=512]",
    ),
)
