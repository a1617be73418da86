"""Class c: launches that have no kernel, or reach one that hangs."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

_MISS = "sparse-MLA has no decode kernel for this shape"
_PREFILL = "Unsupported sparse-MLA prefill configuration"
_SHAPE = r"num_heads=(?P<num_heads>\d+),? topk=(?P<topk>\d+)"
_PAGES = r".*?\bpage_block_size=(?P<page_block_size>\d+)"
_EXTRA = _PAGES + r".*? topk_extra=(?P<topk_extra>\d+) extra_page_block_size=(?P<extra_page_block_size>\d+)"
_HANG = "No available shared memory broadcast block found in 60 seconds"
_STUCK = "Scheduler watchdog timeout"
_ASK = "Ask sm120-mla preflight for the whole table of the configuration."


def _with(pattern: str, **values: str) -> str:
    """``pattern`` with the group of each name narrowed to a value (itself a pattern)."""
    for name, value in values.items():
        pattern = pattern.replace(rf"(?P<{name}>\d+)", rf"(?P<{name}>{value})\b")
    return pattern


ROWS = (
    KnownFailure(
        id="c-decode-falls-through",
        title="a decode call has no kernel and fell through to prefill, which only says that it is too small",
        signatures=(
            named("must go through sparse_mla_sm120_decode", r"got num_tokens=(?P<num_tokens>\d+)"),
            likely("num_tokens > 64 (", r"num_tokens > 64 \((?P<num_tokens>\d+) vs\. 64\)"),
        ),
        engine="FlashInfer under sglang or vLLM",
        versions="FlashInfer 0.6.14 to 0.6.17",
        invariants=("ROUTE-TOTAL",),
        cause="The number of tokens is not at fault. (heads, width, page size 64) is not in the decode "
        "table; widths 192 and 256, which DSpark drafts use, came with 0.6.18.",
        remedy="FlashInfer 0.6.18 or later (with the matching flashinfer-jit-cache), or another width. "
        + _ASK,
        references=(
            "flashinfer-ai/flashinfer#3828",
            "flashinfer-ai/flashinfer#4541",
            "vllm-project/vllm#50720",
        ),
        example="tvm.error.InternalError: Check failed: num_tokens > 64 (5 vs. 64) : Decode (num_tokens <= "
        "64) must go through sparse_mla_sm120_decode_dsv3_2 or sparse_mla_sm120_decode_dsv4; got "
        "num_tokens=5",
        reports=("C01", "C02", "C08"),
    ),
    KnownFailure(
        id="c-no-decode-kernel",
        title="no decode kernel for this number of heads, width or page size",
        signatures=(named(_MISS, _SHAPE), named(_MISS)),
        engine="FlashInfer under sglang or vLLM",
        versions="0.6.18; in 0.7 only where the prefill envelope refuses too",
        invariants=("ROUTE-TOTAL",),
        cause="Decode is built for heads 8, 16, 32, 64, 128, widths 128, 192, 256, 512, 1024 and main "
        "pages of 64 tokens. In 0.7 any width goes up to 64 rows; above them it is a multiple of 64, and "
        "index rows that lie apart are refused with these words.",
        remedy="Pad the width to a listed one with -1, split pages to 64 tokens, or take FlashInfer 0.7.1; "
        "there, hand over dense index rows above 64. " + _ASK,
        references=("flashinfer-ai/flashinfer#4541", "flashinfer-ai/flashinfer#4380"),
        example="ValueError: SM120 sparse-MLA has no decode kernel for this shape: num_tokens=5, "
        "num_heads=64, topk=384, d_qk=512, page_block_size=64, model_type=1, extra_topk=0.",
        reports=("C02",),
    ),
    KnownFailure(
        id="c-no-prefill-kernel",
        title="no prefill kernel for this number of heads, width or extra page size",
        signatures=(named(_PREFILL, _SHAPE + _EXTRA), named(_PREFILL)),
        engine="FlashInfer under sglang or vLLM",
        versions="0.6.14 to 0.6.18",
        invariants=("ROUTE-TOTAL",),
        cause="Above 64 rows: one cache takes widths 128, 512, 1024, 2048 (192 and 256 from 0.6.18), two "
        "caches take main width 128 and extra pages of 64 or 2 tokens only; 8 heads from 0.6.18.",
        remedy="Batches of at most 64 rows, a listed width, or FlashInfer 0.7.1, where these are run-time "
        "arguments. " + _ASK,
        references=("flashinfer-ai/flashinfer#3828", "flashinfer-ai/flashinfer#5135"),
        example="tvm.error.InternalError: Check failed: (ok) is false: Unsupported sparse-MLA prefill "
        "configuration: model=DSV4 num_heads=64 topk=320 page_block_size=64 topk_extra=0 "
        "extra_page_block_size=0",
        reports=("C01", "C04"),
    ),
    KnownFailure(
        id="c-width-192",
        title="width 192: a window of 128 and a DSpark draft, padded to 64",
        signatures=(
            named(_PREFILL, _with(_SHAPE, topk="192")),
            named(_MISS, _with(_SHAPE, topk="192")),
        ),
        engine="sglang with FlashInfer",
        versions="FlashInfer 0.6.14 to 0.6.17",
        invariants=("ROUTE-TOTAL",),
        cause="128 window entries and 5 (or 7) drafts are 133 (135), padded to tiles of 64: 192. The "
        "model's own index_topk is not at fault.",
        remedy="FlashInfer 0.6.18, which has 192 in both tables.",
        references=("sgl-project/sglang#33134", "sgl-project/sglang#33943", "flashinfer-ai/flashinfer#4380"),
        example="Check failed: (ok) is false: Unsupported sparse-MLA prefill configuration: model=DSV4 "
        "num_heads=64 topk=192 page_block_size=64 topk_extra=0 extra_page_block_size=0",
        narrows="c-no-prefill-kernel",
        reports=("C03",),
    ),
    KnownFailure(
        id="c-width-256",
        title="width 256: a window of 128 and a DSpark draft, padded to 128",
        signatures=(
            named(_PREFILL, _with(_SHAPE, topk="256")),
            named(_MISS, _with(_SHAPE, topk="256")),
        ),
        engine="vLLM with FlashInfer",
        versions="FlashInfer 0.6.14 to 0.6.17",
        invariants=("ROUTE-TOTAL",),
        cause="vLLM pads window and draft to a multiple of 128. The dispatch key is the primary table's "
        "width: an integration that passes the window as primary and the top-k as extra never meets 256.",
        remedy="FlashInfer 0.6.18 with a flashinfer-jit-cache of the same version; an older cache hides "
        "the fix.",
        references=(
            "flashinfer-ai/flashinfer#3828",
            "flashinfer-ai/flashinfer#4336",
            "vllm-project/vllm#50720",
        ),
        example="Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=32 topk=256 "
        "page_block_size=64 topk_extra=0 extra_page_block_size=0",
        narrows="c-no-prefill-kernel",
        reports=("C01", "C08"),
    ),
    KnownFailure(
        id="c-width-1152",
        title="width 1152 (V4.1: 1,024 and a window of 128) has no kernel",
        signatures=(
            named(_MISS, _with(_SHAPE, topk="1152")),
            named(_PREFILL, _with(_SHAPE, topk="1152")),
        ),
        engine="vLLM with FlashInfer",
        versions="FlashInfer to 0.6.18.post1",
        invariants=("ROUTE-TOTAL",),
        cause="V4.1-Flash's shape is in no table of 0.6, and FlashMLA's sparse kernels are SM90a and "
        "SM100f only.",
        remedy="FlashInfer 0.7, where the width is a run-time argument.",
        references=(
            "vllm-project/vllm#56837",
            "flashinfer-ai/flashinfer#5244",
            "flashinfer-ai/flashinfer#5197",
        ),
        example="ValueError: SM120 sparse-MLA has no decode kernel for this shape: num_tokens=16, "
        "num_heads=64, topk=1152, d_qk=512, page_block_size=64, model_type=1, extra_topk=0.",
        narrows="c-no-decode-kernel",
        reports=("C06", "C07"),
    ),
    KnownFailure(
        id="c-dual-main-width",
        title="two caches above 64 rows, and the main width is not 128",
        signatures=(
            named(
                _PREFILL,
                _with(_SHAPE + _EXTRA, topk=r"(?!128\b)\d+", topk_extra=r"[1-9]\d*"),
            ),
        ),
        engine="vLLM with FlashInfer",
        versions="FlashInfer 0.6.14 to 0.6.18",
        invariants=("ROUTE-TOTAL",),
        cause="Dual-cache prefill is built for a main width of 128. A vision checkpoint's window of 512 goes "
        "through decode and dies at the first batch of 65 rows.",
        remedy="FlashInfer 0.7 (any multiple of 64), or the narrow table as primary.",
        references=("flashinfer-ai/flashinfer#5135",),
        example="Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=16 topk=512 "
        "page_block_size=64 topk_extra=512 extra_page_block_size=64",
        narrows="c-no-prefill-kernel",
        reports=("C04",),
    ),
    KnownFailure(
        id="c-eight-heads",
        title="8 heads a rank have no prefill kernel",
        signatures=(named(_PREFILL, _with(_SHAPE, num_heads="8")),),
        engine="sglang and vLLM with FlashInfer at TP8 or TP16",
        versions="FlashInfer 0.6.14 to 0.6.17",
        invariants=("ROUTE-TOTAL",),
        cause="Up to 64 rows 8 heads are served, above them the smallest tile had 16.",
        remedy="FlashInfer 0.6.18, or pad the heads to 16 above 64 rows (the padding rows' output is "
        "dropped).",
        references=("sgl-project/sglang#38969", "flashinfer-ai/flashinfer#4380", "sgl-project/sglang#35104"),
        example="Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=8 topk=128 "
        "page_block_size=64 topk_extra=512 extra_page_block_size=128",
        narrows="c-no-prefill-kernel",
        reports=("C09", "C11"),
    ),
    KnownFailure(
        id="c-extra-page",
        title="the extra cache's pages are not 64 or 2 tokens",
        signatures=(
            named(
                _PREFILL,
                _with(_SHAPE + _EXTRA, topk_extra=r"[1-9]\d*", extra_page_block_size=r"(?!(?:2|64)\b)\d+"),
            ),
        ),
        engine="sglang and vLLM with FlashInfer",
        versions="FlashInfer 0.6.14 to 0.7.0",
        invariants=("ROUTE-TOTAL", "ROUTE-CONTRACT"),
        cause="Layers of compress ratio 1 have extra pages of 128 tokens; the main cache was split to 64, "
        "the extra one was not.",
        remedy="Split both caches, each into a buffer of its own, or take FlashInfer 0.7.1.",
        references=("sgl-project/sglang#39914", "flashinfer-ai/flashinfer#5244", "sgl-project/sglang#38969"),
        example="Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=16 topk=128 "
        "page_block_size=64 topk_extra=1152 extra_page_block_size=128",
        narrows="c-no-prefill-kernel",
        reports=("C06", "C09", "D11"),
    ),
    KnownFailure(
        id="c-main-page",
        title="the main cache's pages are not 64 tokens",
        signatures=(
            named(_MISS, _with(_SHAPE + _PAGES, page_block_size=r"(?!64\b)\d+")),
            named(_PREFILL, _with(_SHAPE + _PAGES, page_block_size=r"(?!64\b)\d+")),
        ),
        engine="vLLM V4.1, or any engine that does not split",
        versions="FlashInfer 0.6.14 to 0.7.0",
        invariants=("ROUTE-CONTRACT", "SPLIT-INDEX"),
        cause="Kernels are compiled for pages of 64 tokens. Prefill of 0.6 does not check, and reads another "
        "as if it had 64: wrong output with no error.",
        remedy="Split pages to 64 tokens before both (sm120_mla.split_pages), choose a block size that "
        "gives 64, or take FlashInfer 0.7.1.",
        references=(
            "flashinfer-ai/flashinfer#5323",
            "flashinfer-ai/flashinfer#3395",
            "vllm-project/vllm#56702",
        ),
        example="ValueError: SM120 sparse-MLA has no decode kernel for this shape: num_tokens=1, "
        "num_heads=8, topk=128, d_qk=512, page_block_size=32, model_type=1, extra_topk=512.",
        narrows="c-no-decode-kernel",
        reports=("D09", "D14"),
    ),
    KnownFailure(
        id="c-heads-count",
        title="the number of heads a rank is none the public function takes",
        signatures=(
            named("query heads for SM120 DSv4 sparse MLA, got", r"got (?P<num_heads>\d+)"),
            named("NVFP4 sparse MLA does not yet support 8 query heads"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later",
        invariants=("ROUTE-TOTAL",),
        cause="64 heads over TP16 are 4 a rank; 8, 16, 32, 64 and 128 are served (NVFP4: not 8).",
        remedy="Pad the heads to the next served number, with a sink of -inf, and drop the padding's output.",
        references=("sgl-project/sglang#35104", "vllm-project/vllm#48047", "flashinfer-ai/flashinfer#4955"),
        example="ValueError: Expected 8, 16, 32, 64, or 128 query heads for SM120 DSv4 sparse MLA, got 4",
        reports=("C11",),
    ),
    KnownFailure(
        id="c-specialisation-refused",
        title="vLLM finds no SM120 specialisation in the FlashInfer that is installed",
        signatures=(
            named(
                "sparse MLA decode specialization for",
                r"\(num_q_heads=(?P<num_heads>\d+), top_k=(?P<topk>\d+)\)",
            ),
            likely("DSV4 sparse MLA decode specialization"),
        ),
        engine="vLLM",
        versions="0.27 to 0.29",
        invariants=("ROUTE-TOTAL",),
        cause="The start-up check asks the installed package, the launch runs the module that is loaded: "
        "on 16 ranks over several nodes one of them may have another FlashInfer. Not settled in the report.",
        remedy="Compare python -m flashinfer.collect_env on every node; same flashinfer-python, -cubin and "
        "-jit-cache everywhere.",
        references=("vllm-project/vllm#55526",),
        example="RuntimeError: FLASHINFER_MLA_SPARSE_DSV4 on SM120 requires a FlashInfer DSV4 sparse MLA "
        "decode specialization for (num_q_heads=8, top_k=128).",
        reports=("C15",),
    ),
    KnownFailure(
        id="c-hang-beyond-64-rows",
        title="workers stand still: verify batches beyond 64 rows, or a barrier fault of the prefill kernel",
        signatures=(
            likely(_HANG, times=5, near=("sparse_mla", "SPARSE_MLA", "deepseek_v4", "DeepSeek-V4", "DSpark")),
            symptom(_HANG, times=5),
            symptom(_STUCK),
            likely("acquire_read", r"cancelled", near=("shm_broadcast",)),
            likely("cancelled", r"RuntimeError\(?:? ?[\"']?cancelled", near=("shm_broadcast",)),
        ),
        engine="vLLM and sglang with FlashInfer, first seen on DGX Spark",
        versions="FlashInfer 0.6.14 to 0.6.17 (fixed in 0.6.18); swapAB prefill of main builds before 0.7.0",
        invariants=("ROUTE-TOTAL", "ATTN-ROWS"),
        cause="Requests times (1 + drafts) above 64 rows take the prefill kernel, whose barrier can be "
        "passed twice; padded rows of a captured verify batch with stale indices hang as well. One such "
        "line is ordinary during compilation, five are not.",
        remedy="FlashInfer 0.6.18 or later; until then keep max_num_seqs * (1 + drafts) at 64 or less, and "
        "bind padding rows to length 0 and index -1.",
        references=(
            "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#141",
            "flashinfer-ai/flashinfer#4732",
            "flashinfer-ai/flashinfer#5048",
            "flashinfer-ai/flashinfer#5015",
        ),
        example="\n".join(
            ["INFO Using FLASHINFER_MLA_SPARSE_DSV4 attention backend for DeepSeek-V4-Flash"]
            + [
                f"(EngineCore pid=222) INFO 08-15 11:1{minute}:19 [shm_broadcast.py:705] {_HANG}."
                for minute in range(5)
            ]
        ),
        reports=("C10", "C12", "C13", "C14"),
    ),
)
