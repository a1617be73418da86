"""Class e: what an index, a length or an empty row means."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

_ILLEGAL = "illegal memory access"

ROWS = (
    KnownFailure(
        id="e-zero-query-rows",
        title="sparse prefill was called with no query rows",
        signatures=(
            named("phase1.cuh", r"CUresult::CUDA_SUCCESS|TMA"),
            likely("Failed to initialize the TMA descriptor"),
            named("max_num_tokens must be > 0, got 0"),
        ),
        engine="vLLM with FlashMLA; FlashInfer 0.6",
        versions="vLLM 0.26 to 0.28; FlashInfer 0.6.14 to 0.6.18",
        invariants=("ATTN-EMPTY", "ROUTE-TOTAL"),
        cause="A request whose keys arrive by transfer, or a padding slot, has nothing left to compute: a "
        "chunk of zero rows reaches a kernel that builds a descriptor from an empty tensor.",
        remedy="Skip empty chunks (pull request 51489). FlashInfer 0.7 returns early.",
        references=("vllm-project/vllm#51486", "vllm-project/vllm#51489", "vllm-project/vllm#49922"),
        example="RuntimeError: Assertion error (csrc/sm90/prefill/sparse/instantiations/../phase1.cuh:614): "
        "Assertion `res == CUresult::CUDA_SUCCESS` failed.",
        reports=("E12",),
    ),
    KnownFailure(
        id="e-no-indexer",
        title="a layer that shares its top-k has no indexer of its own, and the backend insists on one",
        signatures=(named("requires a sparse-MLA indexer"),),
        engine="vLLM",
        versions="before pull request 46506 (June 2026), GLM-5.2",
        invariants=("ROUTE-TOTAL",),
        cause="With index_topk_freq 4 three layers of four reuse the last indexer's rows.",
        remedy="A vLLM with pull request 46506.",
        references=("vllm-project/vllm#46726", "vllm-project/vllm#46506"),
        example="AssertionError: FLASHINFER_MLA_SPARSE_SM120 requires a sparse-MLA indexer (model with "
        "index_topk in its config)",
        reports=("E17",),
    ),
    KnownFailure(
        id="e-block-table-bound",
        title="an unwritten index column was looked up in the block table",
        signatures=(
            likely("index out of bounds", r"Assertion `.*index out of bounds: 0 <= "),
            symptom("device-side assert triggered"),
        ),
        engine="vLLM with DSpark, long contexts",
        versions="forks of July 2026; any gather that trusts the local index",
        invariants=("META-STALE", "META-VALUES", "META-VIEW"),
        cause="The buffer is torch.empty and reused; columns past the length hold old numbers, and index "
        "// block exceeds the table. The kernel that reports it is rarely the one at fault.",
        remedy="Bound the gather by the table's width, or fill the row with -1 to its width.",
        references=(
            "tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#2",
            "sgl-project/sglang#25837",
        ),
        example="/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:93: operator(): block: [0,0,0], thread: "
        '[32,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds: 0 <= tmp"` '
        "failed.",
        reports=("E05",),
    ),
    KnownFailure(
        id="e-topk-of-nan",
        title="NaN logits leave top-k slots unwritten, and garbage becomes an index",
        signatures=(
            likely(_ILLEGAL, near=("top_k_per_row_prefill", "top_k_per_row")),
            named("mqa logits self-consistency"),
        ),
        engine="vLLM with DeepGEMM on SM12x",
        versions="vLLM 0.26 and later, July 2026",
        invariants=("META-VALUES", "ATTN-DONTCARE"),
        cause="A selection by comparison never selects NaN; its slot keeps what shared memory held. Whence "
        "the NaN is not settled: an analysis there blames an unsynchronised logits kernel. It differs by "
        "launch and stays within one.",
        remedy="Fill the top-k output with -1 first and check the logits; one launch proves nothing, "
        "repeat it.",
        references=("vllm-project/vllm#49896", "vllm-project/vllm#53906"),
        example="vllm/model_executor/layers/sparse_attn_indexer.py: torch.ops._C.top_k_per_row_prefill(\n"
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        narrows="e-illegal-access",
        reports=("E06",),
    ),
    KnownFailure(
        id="e-zero-lengths-at-capture",
        title="all-zero lengths at capture make the indexer's metadata kernel read past its array",
        signatures=(
            likely(
                _ILLEGAL,
                near=("Capturing CUDA graphs (decode, FULL)", "get_paged_mqa_logits_metadata"),
            ),
        ),
        engine="vLLM and TensorRT-LLM with DeepGEMM",
        versions="vLLM 0.27; DeepGEMM before pull request 353",
        invariants=("META-VALUES", "GRAPH-REPLAY"),
        cause="A binary search over prefix sums ends at the batch size where every length is 0, one past the "
        "end. With some flags it surfaces as an NCCL error.",
        remedy="A DeepGEMM with the clamp, or capture with lengths of at least 1.",
        references=("vllm-project/vllm#51970", "deepseek-ai/DeepGEMM#353", "NVIDIA/TensorRT-LLM#14940"),
        example="Capturing CUDA graphs (decode, FULL):   0%\n"
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        narrows="e-illegal-access",
        reports=("E13",),
    ),
    KnownFailure(
        id="e-illegal-access",
        title="an illegal memory access, which alone does not say whose",
        signatures=(
            symptom(_ILLEGAL),
            symptom("CUDA_ERROR_ILLEGAL_ADDRESS"),
            symptom("cudaErrorIllegalAddress"),
        ),
        engine="any",
        versions="any",
        invariants=("SPLIT-OFFSET64", "META-STALE", "ROUTE-CONTRACT", "BUF-ADDRESS"),
        cause="It is reported by whatever runs next. On this path it has meant: an index past the pool or "
        "the block table, a 32-bit offset, a length past the width, int64 indices read as int32, or memory "
        "of a graph that was freed.",
        remedy="CUDA_LAUNCH_BLOCKING=1 with --enforce-eager finds the kernel; then run this suite's SPLIT, "
        "META and ROUTE checks on the same shapes.",
        references=("vllm-project/vllm#48602", "sgl-project/sglang#34718", "vllm-project/vllm#56037"),
        example="RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    ),
    KnownFailure(
        id="e-unwritten-top-k",
        title="unwritten pool ids of the kpool indexer are expanded as if they were valid",
        signatures=(likely(_ILLEGAL, near=("sparse_attn_indexer_kpool", "kpool_compress", "expand_pools")),),
        engine="vLLM",
        versions="GLM-5.3 support before September 2026",
        invariants=("META-VALUES", "META-STALE"),
        cause="Both pool top-k buffers are torch.empty; rows that are masked entirely are never written, and "
        "their garbage is expanded. Prompts up to about 20,000 tokens pass.",
        remedy="Fill them with -1 and skip negative ids.",
        references=("vllm-project/vllm#53906",),
        example="File vllm/model_executor/layers/sparse_attn_indexer_kpool.py, line 538, in forward\n"
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        narrows="e-illegal-access",
    ),
)
