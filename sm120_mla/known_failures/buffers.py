"""Class a: buffers that outlive the mode, the size or the stream they were made in."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

_INFERENCE = "Inplace update to inference tensor outside InferenceMode"
_ILLEGAL = "illegal memory access"

ROWS = (
    KnownFailure(
        id="a-inference-tensor",
        title="a lazily made buffer is an inference tensor, and somebody writes to it outside inference mode",
        signatures=(named(_INFERENCE),),
        engine="sglang and others",
        versions="sglang before August 2026; any backend with a buffer made on first use",
        invariants=("BUF-GUARD", "BUF-WRITABLE"),
        cause="Whether a tensor is an inference tensor is settled where it is allocated. Autotune and "
        "warm-up run under torch.inference_mode(), graph capture and serving do not; a buffer first made "
        "in the former cannot be written by torch in the latter.",
        remedy="Allocate persistent buffers before autotune, or wrap their allocation in "
        "torch.inference_mode(False). Until then: start without the FlashInfer autotune.",
        references=("sgl-project/sglang#33470", "sgl-project/sglang#35116", "ROCm/ATOM#2233"),
        example="RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed."
        "You can make a clone to get a normal tensor before doing inplace update.",
        reports=("A01",),
    ),
    KnownFailure(
        id="a-split-buffer-guard",
        title="the SM120 page split's mask or destination was first made in inference mode",
        signatures=(named(_INFERENCE, near=("_split_kv_pages_to_64", "flash_mla_sm120")),),
        engine="sglang",
        versions="after pull request 32320, before 35116 (August 2026)",
        invariants=("BUF-GUARD", "BUF-WRITABLE", "BUF-CAPTURE"),
        cause="Two buffers of one lifetime, the dirty-page mask and the split destination, are made on first "
        "use inside the autotune context; only one of them was guarded, or neither.",
        remedy="Take a sglang with pull request 35116, or guard both allocations with "
        "torch.inference_mode(False).",
        references=("sgl-project/sglang#32320", "sgl-project/sglang#35116"),
        example='File "sglang/kernels/ops/attention/flash_mla_sm120.py", line 210, in _split_kv_pages_to_64\n'
        "    mbuf.zero_()\n"
        "RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed.",
        narrows="a-inference-tensor",
        reports=("A02", "A03"),
    ),
    KnownFailure(
        id="a-verify-buffer-guard",
        title="DSpark's verify buffers were first made in the autotune dummy run",
        signatures=(likely(_INFERENCE, near=("target_verify", "target-verify", "TARGET_VERIFY")),),
        engine="sglang",
        versions="DSpark branches of July 2026",
        invariants=("BUF-GUARD", "BUF-CAPTURE"),
        cause="A get-or-make helper is first called from a forward pass, so the verify batch's length and "
        "offset buffers take the mode of the dummy run.",
        remedy="Allocate them in the backend's constructor.",
        references=("sgl-project/sglang#30759",),
        example="deepseek_v4_backend.py, in init_forward_metadata_target_verify\n"
        "RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed.",
        narrows="a-inference-tensor",
        reports=("A04",),
    ),
    KnownFailure(
        id="a-workspace-locked",
        title="a workspace was sized by a warm-up that never took this path, and may not grow any more",
        signatures=(
            named(
                "Workspace is locked but allocation",
                r"allocation(?: from '(?P<where>[^']+)')? requires (?P<needed>[\d.]+ MB), "
                r"current size is (?P<reserved>[\d.]+ MB)",
            ),
        ),
        engine="vLLM",
        versions="0.20 to 0.28, backend by backend",
        invariants=("BUF-CAPTURE",),
        cause="vLLM locks the workspace after profiling. A backend that asks for its scratch on the first "
        "real request, or for more than the dummy run needed, is refused.",
        remedy="Reserve the worst case in the backend's constructor. Until a version that does: lower "
        "--max-num-batched-tokens to what was profiled, or --enforce-eager.",
        references=("vllm-project/vllm#42112", "vllm-project/vllm#41700", "local-inference-lab/vllm#224"),
        example="AssertionError: Workspace is locked but allocation from 'b12x.py:354:_run_compressed_mla' "
        "requires 607.70 MB, current size is 578.50 MB. Workspace growth is not allowed after locking.",
        reports=("A10",),
    ),
    KnownFailure(
        id="a-autotune-in-capture",
        title="FlashInfer was asked to tune while a graph is being captured",
        signatures=(
            named("AutoTuner profiling cannot begin during an active outer CUDA Graph capture"),
            named("warm up functional attention metadata before CUDA graph capture"),
            named("warm up this attention shape before CUDA graph capture"),
            named("attention workspace insufficient for resolved plan"),
        ),
        engine="FlashInfer",
        versions="tuning: 0.6.14 and later; plans and workspace: 0.7",
        invariants=("BUF-CAPTURE", "GRAPH-REPLAY"),
        cause="A shape, plan or workspace size is met for the first time inside a capture, where nothing "
        "may be measured or allocated.",
        remedy="Run every batch size and width once, eagerly, with the serving workspace, before capture.",
        references=("flashinfer-ai/flashinfer#5197",),
        example="RuntimeError: AutoTuner profiling cannot begin during an active outer CUDA Graph capture",
    ),
    KnownFailure(
        id="a-forbidden-in-capture",
        title="something a capturing stream refuses: a host sync, an allocation outside the pool, a first "
        "launch",
        signatures=(
            likely("operation not permitted when stream is capturing"),
            likely("operation failed due to a previous error during capture"),
            likely("cudaErrorStreamCapture", r"cudaErrorStreamCapture(?P<error>\w+)"),
        ),
        engine="any",
        versions="any",
        invariants=("BUF-CAPTURE", "GRAPH-REPLAY"),
        cause="The captured code reads a value back, grows a buffer or compiles a kernel. The first such "
        "line in the log names it; later ones only say that the capture was already lost.",
        remedy="Warm the exact shape up before capture, and reserve buffers for the largest batch.",
        references=("vllm-project/vllm#57227",),
        example="torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
        reports=("A19",),
    ),
    KnownFailure(
        id="a-warmup-misses-width",
        title="warm-up never met this extra width, so every long decode runs untuned",
        signatures=(
            named("SparseMlaDecodeV3Runner", r"tactic\s*=\s*-1"),
            likely("No tuned config covers", r"sparse_mla_sm120\w*"),
        ),
        engine="vLLM with FlashInfer",
        versions="vLLM to 0.29, FlashInfer 0.6.14 to 0.6.18",
        invariants=("ROUTE-TOTAL",),
        cause="The mixed warm-up batch has sequences of length 1, so the adaptive C128A width is 128 there; "
        "256 and 384 are only met from 16,512 and 32,896 tokens on. Results are right, speed is not.",
        remedy="Warm up every width that --max-model-len can reach, or run FlashInfer's calibration for "
        "them.",
        references=("vllm-project/vllm#53600", "vllm-project/vllm#53605", "flashinfer-ai/flashinfer#4598"),
        example="WARNING autotuner.py: No tuned config for sparse_mla_sm120_decode_dsv4: "
        "SparseMlaDecodeV3Runner tactic=-1 (extra_topk=384)",
        reports=("A18",),
    ),
    KnownFailure(
        id="a-jit-while-serving",
        title="a kernel specialisation is compiled while requests wait",
        signatures=(likely("JIT compilation during inference", r"during inference: (?P<kernel>\w+)"),),
        engine="vLLM",
        versions="0.26 and later, which log it",
        invariants=("ROUTE-TOTAL", "GRAPH-REPLAY"),
        cause="Warm-up ran other specialisation keys (size 1, divisible by 16, chunk with a prefix) than "
        "the first real request. In a lazily captured graph the same miss is a fault, not a delay.",
        remedy="Extend the warm-up to the shapes named; never compile inside a capture.",
        references=("vllm-project/vllm#57227",),
        example="WARNING [jit_monitor.py:103] Triton kernel JIT compilation during inference: "
        "_build_prefill_chunk_metadata_kernel. This causes a latency spike.",
        reports=("A19",),
    ),
    KnownFailure(
        id="a-capture-race",
        title="graph capture of a large decode batch faults at another place every time",
        signatures=(
            likely(_ILLEGAL, near=("Capture cuda graph failed", "capture_one", "FullCudaGraphBackend")),
        ),
        engine="sglang",
        versions="0.5.15, 0.5.16",
        invariants=("GRAPH-REPLAY", "META-VALUES"),
        cause="Three separate defects look alike: a plan kernel without a block barrier makes a ragged batch "
        "look uniform, the last warm-up launch is not waited for before capture, and the fault surfaces in "
        "whatever kernel runs next.",
        remedy="Lower the largest captured batch (32 was clean), and take the two fixes named in the report.",
        references=("sgl-project/sglang#33356", "sgl-project/sglang#32467", "sgl-project/sglang#33795"),
        example="Exception: Capture cuda graph failed: CUDA error: an illegal memory access was encountered",
        narrows="e-illegal-access",
        reports=("A16",),
    ),
    KnownFailure(
        id="a-shared-workspace",
        title="eager prefill and a captured verify graph may share one workspace (cause not proven)",
        signatures=(
            symptom(_ILLEGAL, near=("deepseek_v4_1", "deepseek_v41", "DeepseekV41", "DeepSeek-V4.1")),
        ),
        engine="vLLM",
        versions="0.29 with V4.1-Flash and DSpark",
        invariants=("BUF-KEY", "BUF-ADDRESS"),
        cause="Plausible, not proven: the per-device workspace is aliased, index rows have another rank in "
        "decode than in prefill, and a block-table load has no upper bound.",
        remedy="Short prompts pass: halve --max-num-batched-tokens, or run without speculation, to tell it "
        "from others; then follow the report.",
        references=("vllm-project/vllm#56771", "vllm-project/vllm#57388"),
        example="(Worker_TP2) ERROR vllm/models/deepseek_v41/nvidia/flashinfer_sparse.py in "
        "_forward_prefill\n"
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        narrows="e-illegal-access",
        reports=("A11",),
    ),
    KnownFailure(
        id="a-fresh-output-in-pool",
        title="an indexer's output is allocated anew inside the shared graph pool",
        signatures=(symptom(_ILLEGAL, near=("tensorrt_llm", "TensorRT-LLM")),),
        engine="TensorRT-LLM",
        versions="before pull request 16290 (July 2026)",
        invariants=("BUF-CAPTURE", "BUF-ADDRESS"),
        cause="Scratch was made persistent, the top-k output was not; batches above 16 a rank fault in the "
        "sampling graph's warm-up.",
        remedy="Take the fix, or keep the per-rank batch at 16.",
        references=("NVIDIA/TensorRT-LLM#16290",),
        example="[TensorRT-LLM][ERROR] CUDA error: an illegal memory access was encountered",
        narrows="e-illegal-access",
        reports=("A07",),
    ),
    KnownFailure(
        id="a-grid-barrier",
        title="a software grid barrier was launched without all its blocks resident",
        signatures=(likely("Xid", r"\bXid\b.*?\b(?P<xid>31|109)\b", near=("b12x", "B12X")),),
        engine="b12x kernels in vLLM",
        versions="before b12x pull request 32 (July 2026)",
        invariants=("GRAPH-REPLAY",),
        cause="376 blocks are assumed to be resident at once; work on a second stream takes multiprocessors "
        "away, and the barrier never completes or reads what is not there. From 9 rows on.",
        remedy="Take the cooperative launch of pull request 32, or keep shared-expert work on the main "
        "stream.",
        references=("local-inference-lab/b12x#32", "vllm-project/vllm#54385"),
        example="INFO Using b12x MoE backend\n"
        "kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=166, name=VLLM::Worker, Ch 00000008, MMU Fault",
        reports=("A17",),
    ),
)
