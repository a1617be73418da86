"""Class d: how a page lies in memory."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

ROWS = (
    KnownFailure(
        id="d-indexer-page",
        title="the indexer's pages have a number of states that DeepGEMM was not built for",
        signatures=(
            named("block_kv == 32 or block_kv == 64"),
            named("block_kv == 64", r"Assertion error .*block_kv == 64\b"),
        ),
        engine="vLLM with DeepGEMM",
        versions="vLLM 0.26 to 0.29 on SM12x",
        invariants=("ROUTE-TOTAL",),
        cause="A block of 256 tokens at ratio 128 holds 2 states, the paged logits kernels take 32 or 64. A "
        "common workaround skips the metadata and turns this assertion into a fault later on.",
        remedy="A block size that gives 64 states a page; do not skip the metadata while the kernel still "
        "runs.",
        references=("vllm-project/vllm#53635", "deepseek-ai/DeepGEMM#317", "vllm-project/vllm#56509"),
        example="RuntimeError: Assertion error (csrc/apis/attention.hpp:262): block_kv == 32 or block_kv "
        "== 64",
        reports=("D10",),
    ),
    KnownFailure(
        id="d-no-common-block-size",
        title="the attention backends of one model agree on no block size",
        signatures=(named("No common block size for", r"size for (?P<block_size>\d+)"),),
        engine="vLLM",
        versions="0.26 to 0.29, V4.1 on SM120",
        invariants=("ROUTE-TOTAL",),
        cause="Branches over the architecture list SM90 and SM100 only, so SM120 takes the wrong default: "
        "pages of 32 for the window, 64 or 128 for the rest.",
        remedy="--block-size 128 where V4.1 accepts it (256 for V4); otherwise one of the pull requests "
        "named.",
        references=("vllm-project/vllm#56702", "vllm-project/vllm#56509", "vllm-project/vllm#57292"),
        example="ValueError: No common block size for 64. ",
        reports=("D09",),
    ),
    KnownFailure(
        id="d-not-packed",
        title="the cache handed over is not the packed format its kernel reads",
        signatures=(
            named("Expected packed SM120 DSV4 swa_kv_cache head dim 584", r"got (?P<got>\d+)"),
            named("kv_cache last dim must be", r"must be (?P<expected>\d+), got (?P<got>\d+)"),
            named(
                "bytes/token",
                r"2-D block width (?P<width>\d+) is not divisible by (?P<record>\d+) bytes/token",
            ),
            likely("swa_kv_cache dtype must match query dtype"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later",
        invariants=("ROUTE-CONTRACT", "CACHE-BYTES"),
        cause="DSv4 records have 584 bytes, DSv3.2 and GLM 656, V4.1 528: a cache of another model, a "
        "dense bf16 cache, or rows cut at a stride that is not a whole number of records.",
        remedy="--kv-cache-dtype fp8_ds_mla (or the engine's packed format) for this model; page strides in "
        "whole records.",
        references=("vllm-project/vllm#48611", "vllm-project/vllm#55528", "flashinfer-ai/flashinfer#3395"),
        example="ValueError: Expected packed SM120 DSV4 swa_kv_cache head dim 584, got 576",
        reports=("D08", "E16"),
    ),
    KnownFailure(
        id="d-no-rope-tail",
        title="a model without RoPE dimensions in a cache format that has them",
        signatures=(named("pe_dim must be 64 for fp8_ds_mla"),),
        engine="vLLM",
        versions="0.28, 0.29 with GLM-5.3",
        invariants=("ROUTE-TOTAL", "CACHE-BYTES"),
        cause="The 656-byte record reserves 64 RoPE values; GLM-5.3 has none and the writer refuses.",
        remedy="A vLLM with pull request 55277 (it zeroes the tail) and a FlashInfer with the NoPE format.",
        references=("vllm-project/vllm#55773", "vllm-project/vllm#55277", "vllm-project/vllm#53963"),
        example="RuntimeError: concat_and_cache_mla, cache_kernels.cu:928, pe_dim must be 64 for fp8_ds_mla",
    ),
    KnownFailure(
        id="d-not-aligned-16",
        title="a page, its stride or a buffer does not start at a multiple of 16 bytes",
        signatures=(
            named("must be 16B-aligned", r"(?P<what>\w[\w ]*) must be 16B-aligned"),
            named("footer-scale rows must stay tightly packed"),
            named("block stride is smaller than page capacity"),
            named("token-axis stride is smaller than row width"),
        ),
        engine="FlashInfer",
        versions="checked from 0.7; in 0.6 the copy engine reads whatever is there",
        invariants=("ROUTE-CONTRACT", "SPLIT-OFFSET64"),
        cause="Rows are moved 16 bytes at a time. A page of one token (584 bytes), a view at an odd offset "
        "and a stride of a whole number of rows but not of 16 bytes all break it.",
        remedy="Even pages, strides that are multiples of 16 bytes and at least page size times record size.",
        references=("flashinfer-ai/flashinfer#4362", "LMCache/LMCache#3171", "vllm-project/vllm#56893"),
        example="ValueError: kv_cache block stride must be 16B-aligned",
        reports=("B04", "D08", "D13"),
    ),
    KnownFailure(
        id="d-misaligned-address",
        title="a misaligned address: mostly a 32-bit slot times stride that went negative",
        signatures=(
            likely("misaligned address", r"CUDA error: misaligned address|cudaErrorMisalignedAddress"),
            symptom("CUDA_ERROR_MISALIGNED_ADDRESS"),
        ),
        engine="any Triton cache kernel",
        versions="kernels that multiply an int32 slot",
        invariants=("SPLIT-OFFSET64",),
        cause="From 2^31 / stride slots on (about 3.7 million at 576 bytes) the product wraps. It needs a "
        "large pool and a high slot, so it comes and goes.",
        remedy="Widen the index to 64 bits before the product. To tell: a pool half the size does not fail.",
        references=("lightseekorg/tokenspeed#501", "vllm-project/vllm-xpu-kernels#445"),
        example="torch.AcceleratorError: CUDA error: misaligned address",
        reports=("D02", "D04"),
    ),
    KnownFailure(
        id="d-rocm-fault",
        title="a memory access fault on a ROCm GPU: wrapped offsets, or -1 used as an index",
        signatures=(symptom("Memory access fault by GPU node", r"GPU node-?(?P<node>\d+)"),),
        engine="vLLM, ATOM and aiter on ROCm",
        versions="several",
        invariants=("SPLIT-OFFSET64", "META-VALUES", "ATTN-DONTCARE"),
        cause="Seen causes: slot times 512 beyond 2^31, a 4 GiB window from the base pointer, a "
        "prefill-shaped offset array read by a decode graph, and -1 inside the active range.",
        remedy="Run once without graphs and once with a small pool: the first tells stale metadata, the "
        "second wrapped offsets.",
        references=(
            "vllm-project/vllm#56037",
            "ROCm/aiter#4474",
            "ROCm/ATOM#1391",
            "vllm-project/vllm#58058",
        ),
        example="Memory access fault by GPU node-3 (Agent handle: 0x55d1) on address 0x7f0. Reason: Unknown.",
        reports=("A15", "D05", "D06", "E14"),
    ),
)
