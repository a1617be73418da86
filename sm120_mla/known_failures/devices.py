"""Class g: what the GPU, the compiler or the installed packages do not have."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

ROWS = (
    KnownFailure(
        id="g-shared-memory",
        title="a Triton kernel asks for more shared memory than a block has on SM120",
        signatures=(
            named(
                "out of resource: shared memory",
                r"Required: (?P<required>\d+), Hardware limit: (?P<limit>101376)",
            ),
        ),
        engine="any Triton kernel",
        versions="launch configurations chosen by capability > 8",
        invariants=("COMPILE-SM120",),
        cause="Capability 9 and 10 have 227 KiB a block, 12.x has 101,376 bytes; one bucket for all above 8 "
        "gives SM120 a tile that does not fit.",
        remedy="Halve the tile or num_stages on capability 12. For this package: sm120-mla aot shows every "
        "configuration's figure with no GPU.",
        references=("sgl-project/sglang#27962", "triton-lang/triton#8182"),
        example="triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
        "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        reports=("G03",),
    ),
    KnownFailure(
        id="g-dynamic-shared-memory",
        title="a CUDA kernel with a Hopper-sized tile on a 99 KiB device",
        signatures=(
            named(
                "Failed to set the allowed dynamic shared",
                r"dynamic shared(?: memory size to (?P<required>\d+))?",
            ),
            likely("memory size to", r"dynamic shared memory size to (?P<required>\d+)"),
        ),
        engine="TileLang and CUDA kernels",
        versions="kernels written for SM90",
        invariants=("COMPILE-SM120",),
        cause="192 KB of dynamic shared memory are asked for, 101,376 bytes exist.",
        remedy="Another backend, or a build with smaller tiles.",
        references=("QwenLM/FlashQLA#4", "kvcache-ai/sglang#70"),
        example="tvm.error.InternalError: Failed to set the allowed dynamic shared memory size to 196608",
        reports=("G11",),
    ),
    KnownFailure(
        id="g-ptxas-too-old",
        title="the assembler does not know this GPU",
        signatures=(named("is not defined for option 'gpu-name'", r"Value '(?P<arch>sm_\w+)'"),),
        engine="Triton",
        versions="Triton 3.5 and older for sm_121a",
        invariants=("COMPILE-SM120",),
        cause="Triton brings its own ptxas, older than the GPU.",
        remedy="TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas (TRITON_PTXAS_BLACKWELL_PATH in newer Triton) of "
        "CUDA 13, or a newer Triton.",
        references=("triton-lang/triton#8539", "vllm-project/vllm#31338"),
        example="ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
        reports=("G04",),
    ),
    KnownFailure(
        id="g-arch-suffix",
        title="an instruction that needs the a or f suffix was compiled for the plain architecture",
        signatures=(
            named("not supported on .target", r"not supported on \.target '(?P<arch>sm_1[02]\d)'"),
            likely("requires .target", r"requires \.target sm_1[02]\d[af]"),
        ),
        engine="FlashInfer and other ahead-of-time builds",
        versions="arch lists such as 12.0 without a suffix",
        invariants=("COMPILE-SM120",),
        cause="fp4 conversions and block-scaled MMA exist for sm_120a and sm_120f only.",
        remedy="FLASHINFER_CUDA_ARCH_LIST=12.0f (or 12.0a, 12.1a); the same for TORCH_CUDA_ARCH_LIST.",
        references=("flashinfer-ai/flashinfer#1966",),
        example="ptxas quantization.compute_120.ptx, line 15870; error   : Instruction 'cvt with .e2m1x2' "
        "not supported on .target 'sm_120'",
        reports=("G05",),
    ),
    KnownFailure(
        id="g-no-image",
        title="the binary holds no code for this GPU",
        signatures=(
            named("no kernel image is available for execution on the device"),
            named(
                "No supported CUDA architectures found for major versions", r"versions \[(?P<major>[\d, ]+)\]"
            ),
            named("SM 12.x requires CUDA >= 12.9"),
            named("SM120 sparse MLA requires SM120a (CUDA >= 12.8) or SM121a"),
        ),
        engine="any wheel; FlashInfer's just-in-time builds",
        versions="wheels without 12.0 or 12.1, CUDA toolkits before 12.8 (SM120) or 12.9 and 13.0 (SM121)",
        invariants=("COMPILE-SM120", "ROUTE-TOTAL"),
        cause="An arch list was cut to other GPUs, 12.1 was rewritten to 12.0, or the local toolkit is too "
        "old for the build that starts at first use.",
        remedy="A wheel for CUDA 13 with 12.0 and 12.1, or FLASHINFER_CUDA_ARCH_LIST=12.0f with a toolkit "
        "that knows it.",
        references=("vllm-project/vllm#52708", "vllm-project/vllm#50705", "flashinfer-ai/flashinfer#3170"),
        example="RuntimeError: No supported CUDA architectures found for major versions [12].",
        reports=("G06", "G12"),
    ),
    KnownFailure(
        id="g-wrong-device",
        title="the SM120 backend was asked for on another GPU, or by a predicate that takes 12.1 for 12.0",
        signatures=(
            named("backend='sparse' requires SM120/SM121, got SM", r"got SM(?P<sm>\d+)"),
            named("supports SM100/SM103 via TRTLLM-GEN or SM120/SM121 via sparse backend"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later",
        invariants=("ROUTE-TOTAL",),
        cause="Exact 12.0, any 12.x and the family suffix f are three predicates, and they are mixed.",
        remedy="One table of predicates by capability, tested at 9.0, 10.0, 10.3, 11.0, 12.0 and 12.1.",
        references=("sgl-project/sglang#36806", "flashinfer-ai/flashinfer#3170"),
        example="ValueError: backend='sparse' requires SM120/SM121, got SM90",
        reports=("G12",),
    ),
    KnownFailure(
        id="g-no-backend",
        title="no attention backend of this vLLM takes sparse MLA on this GPU",
        signatures=(
            named("No valid attention backend found for cuda", r"use_sparse=True"),
            named("requires FlashInfer's sparse MLA decode API"),
            likely("FlashMLA Sparse is only supported"),
        ),
        engine="vLLM",
        versions="before its SM120 backends, or with a FlashInfer that lacks what they probe for",
        invariants=("ROUTE-TOTAL",),
        cause="Backends name capability 9 and 10; adding 12 to the list would admit kernels with no SM12x "
        "code. FLASHINFER_MLA_SPARSE_SM120 probes the installed FlashInfer and drops out without it.",
        remedy="A vLLM with FLASHINFER_MLA_SPARSE_SM120 and FlashInfer 0.6.14 or later (python -c 'import "
        "flashinfer.mla').",
        references=("vllm-project/vllm#45317", "vllm-project/vllm#57932", "local-inference-lab/vllm#260"),
        example="ValueError: No valid attention backend found for cuda with AttentionSelectorConfig("
        "head_size=576, use_mla=True, use_sparse=True). Reasons: {FLASHMLA_SPARSE: [compute capability not "
        "supported]}",
        reports=("G01",),
    ),
    KnownFailure(
        id="g-flashmla-arch",
        title="FlashMLA's sparse kernel, which exists for SM90a and SM100f only",
        signatures=(
            named("only supported on SM90a and SM100f"),
            likely("Sparse Attention Forward Kernel is only supported"),
        ),
        engine="sglang and vLLM",
        versions="sglang 0.5.15.post1, whose default was switched",
        invariants=("ROUTE-TOTAL",),
        cause="A default was changed with no regard to the GPU.",
        remedy="SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0 in sglang; the FlashInfer SM120 backend in vLLM.",
        references=("sgl-project/sglang#31578", "vllm-project/vllm#56837"),
        example="RuntimeError: Sparse Attention Forward Kernel is only supported on SM90a and SM100f "
        "architectures.",
        reports=("C07", "G08"),
    ),
    KnownFailure(
        id="g-deepgemm-arch",
        title="DeepGEMM's paged logits were not built for this GPU",
        signatures=(
            named("attention.hpp", r"Unsupported architecture|get_arch_major\(\) == 10"),
            likely("DeepGEMM only supports", r"capability is (?P<capability>\d+)"),
        ),
        engine="vLLM and sglang",
        versions="DeepGEMM pins before SM120 support (0.27 and earlier vLLM)",
        invariants=("ROUTE-TOTAL",),
        cause="The package is there and imports, so the engine takes it; its kernels refuse capability 12.",
        remedy="A pin with SM120 kernels, or the Torch or Triton indexer (VLLM_USE_DEEP_GEMM=0).",
        references=("vllm-project/vllm#46726", "sgl-project/sglang#39914", "sgl-project/sglang#29927"),
        example="RuntimeError: Assertion error (csrc/apis/attention.hpp:219): Unsupported architecture",
        reports=("D11", "E17"),
    ),
    KnownFailure(
        id="g-trtllm-gen-arch",
        title="the TRTLLM-GEN kernels, which exist for SM100 and SM103 only",
        signatures=(named("TllmGenFmhaRunner", r"Unsupported architecture"),),
        engine="sglang and vLLM with FlashInfer",
        versions="any FlashInfer on SM120",
        invariants=("ROUTE-TOTAL",),
        cause="A backend default made for SM100 is used on 12.x.",
        remedy="The sparse backend of FlashInfer, or Triton.",
        references=("flashinfer-ai/flashinfer#5445", "sgl-project/sglang#39302"),
        example="RuntimeError: Error in function 'TllmGenFmhaRunner' at fmhaRunner.cuh:37: Unsupported "
        "architecture",
    ),
    KnownFailure(
        id="g-dense-prefill-inherited",
        title="a sparse implementation inherited 'has dense prefill' and is asked for it",
        signatures=(named("has no attribute 'masked_mha_available'"),),
        engine="vLLM",
        versions="0.27, 0.28",
        invariants=("ROUTE-TOTAL",),
        cause="The base class says True, the SM120 class implements decode-style attention only. Short "
        "prompts pass, the first realistic one kills the engine.",
        remedy="A vLLM with pull requests 51395 and 54057.",
        references=("vllm-project/vllm#55757", "vllm-project/vllm#51395", "vllm-project/vllm#51920"),
        example="AttributeError: 'FlashInferMLASparseSM120Impl' object has no attribute "
        "'masked_mha_available'",
        reports=("G09",),
    ),
    KnownFailure(
        id="g-old-flashinfer",
        title="this FlashInfer does not know an argument of the sparse MLA call",
        signatures=(
            named(
                "got an unexpected keyword argument",
                r"keyword argument '(?P<argument>swa_topk_lens|extra_sparse_\w+|sparse_topk_lens|"
                r"kv_cache_format|kv_scale_format|hca_\w+|sparse_mla_top_k\w*)'",
            ),
        ),
        engine="vLLM and sglang",
        versions="FlashInfer before 0.6.14 (swa_topk_lens, extra_sparse_*) or 0.7 (kv_cache_format)",
        invariants=("ROUTE-CONTRACT",),
        cause="0.6.13 has the function for SM100 only; backend and hca_* came with 0.6.18.",
        remedy="Raise flashinfer-python, and -cubin and -jit-cache with it.",
        references=("AEON-7/vllm-ultimate-dgx-spark#4",),
        example="TypeError: trtllm_batch_decode_sparse_mla_dsv4() got an unexpected keyword argument "
        "'swa_topk_lens'",
    ),
    KnownFailure(
        id="g-dot-scaled",
        title="a scaled dot product does not lower for capability 120",
        signatures=(
            likely("ConvertTritonGPUToLLVM", r"Pipeline failed"),
            symptom("PassManager::run failed", near=("compute-capability=120", "sm_120", "sm_121")),
        ),
        engine="Triton",
        versions="3.6.0, bisected and fixed",
        invariants=("COMPILE-SM120",),
        cause="fp16 with mxfp operands in tl.dot_scaled crashed a lowering pass.",
        remedy="Another Triton; sm120-mla aot compiles every kernel of this package for both targets.",
        references=("triton-lang/triton#9558",),
        example="note: Pipeline failed while executing [`ConvertTritonGPUToLLVM` on 'builtin.module' "
        "operation]",
        reports=("G07",),
    ),
    KnownFailure(
        id="g-fallback-out-of-memory",
        title="the Triton fallback's prefill runs out of memory",
        signatures=(
            symptom(
                "CUDA out of memory", near=("triton_mla_sparse", "sparse_mla_triton", "TRITON_MLA_SPARSE")
            ),
        ),
        engine="vLLM",
        versions="prototypes of April 2026",
        invariants=("ROUTE-TOTAL",),
        cause="The reference attention's buffers grow with the prompt; chunks of 256 or 128 assert, of 64 "
        "run out.",
        remedy="A later fallback (pull request 41834), or a smaller --max-num-batched-tokens.",
        references=("vllm-project/vllm#40899", "vllm-project/vllm#41834"),
        example="INFO Using TRITON_MLA_SPARSE attention backend\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.37 GiB.",
        reports=("G10",),
    ),
)
