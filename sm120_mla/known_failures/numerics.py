"""Class f: numbers that are not numbers, and lengths and scales that a format demands."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

ROWS = (
    KnownFailure(
        id="f-nan-logits",
        title="NaN in the logits: an empty or padded row, or NaN bytes that a masked lane touched",
        signatures=(
            likely("NaN in the logits"),
            likely(
                "Out of range float values are not JSON compliant", r"JSON compliant: (?P<value>-?nan|-?inf)"
            ),
            likely("probability tensor contains either `inf`, `nan` or element < 0"),
        ),
        engine="sglang and vLLM",
        versions="any; FlashInfer 0.6.14 to 0.6.18 for the masked lanes",
        invariants=("ATTN-DONTCARE", "ATTN-EMPTY", "ATTN-ROWS"),
        cause="Seen causes: a row with no entry divided by zero, padding rows of a captured batch with "
        "stale indices, an uninitialised split buffer whose slot 0 every masked lane reads, unused tokens "
        "of the last page, and a scale byte of 255. A shared scale then spreads one row's NaN to all.",
        remedy="Zero page 0 and new scratch, encode empty rows as length 0, bind padding rows to length 0; "
        "then ask the ATTN invariants. One request being fine and two not points at padding.",
        references=(
            "vllm-project/vllm#57017",
            "sgl-project/sglang#39288",
            "flashinfer-ai/flashinfer#941",
            "local-inference-lab/vllm#621",
            "sgl-project/sglang#25733",
        ),
        example="[2026-09-13 11:02:07 TP1] Detected errors during sampling! NaN in the logits.",
        reports=("A13", "E02", "F04", "F06", "F09"),
    ),
    KnownFailure(
        id="f-degenerate-output",
        title="the output is one token repeated: attention may be a constant",
        signatures=(symptom("!!!!!!!!", r"(?<!!)(?<!\w )!{24,}(?!!)(?! \w)"),),
        engine="any",
        versions="any",
        invariants=("ATTN-VALUE", "ATTN-DONTCARE"),
        cause="Token 0 decodes to an exclamation mark; it is what NaN or all-zero logits give. Identical "
        "logprobs at every step mean that the output does not depend on the query.",
        remedy="Change one query row and one cached byte: the output must change. Then ask ATTN-VALUE.",
        references=("vllm-project/vllm#52938", "vllm-project/vllm#49896"),
        example='{"text": "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!"}',
        reports=("H16",),
    ),
    KnownFailure(
        id="f-nope-lengths",
        title="a NoPE call is refused for lengths that the SM120 kernel never reads",
        signatures=(named("requires sparse_mla_top_k_lens"), likely("requires sparse_mla_top_k > 0")),
        engine="FlashInfer under vLLM and sglang",
        versions="before FlashInfer pull request 4947 (September 2026)",
        invariants=("ROUTE-CONTRACT",),
        cause="The check stands before the backend is chosen.",
        remedy="A FlashInfer with pull request 4947, or pass a length tensor all the same.",
        references=("flashinfer-ai/flashinfer#4947", "sgl-project/sglang#39302"),
        example="ValueError: Native qk_rope_head_dim=0 TRTLLM-GEN MLA requires sparse_mla_top_k_lens",
        reports=("F12",),
    ),
    KnownFailure(
        id="f-scale-arguments",
        title="a scale that SM120 sparse MLA does not take in this form",
        signatures=(
            named("DSv4 sparse MLA does not support bmm2_scale"),
            named("sparse MLA expects bmm", r"(?P<argument>bmm[12]_scale) to be a float"),
            named("kv_scale_format is only configurable for d_qk=576"),
            likely("kv_scale_format must be one of"),
        ),
        engine="FlashInfer",
        versions="0.6.14 and later",
        invariants=("ROUTE-CONTRACT", "ATTN-VALUE"),
        cause="bmm1_scale is a float (and defaults to 1.0, not to 512**-0.5), bmm2_scale must be 1.0.",
        remedy="Pass bmm1_scale = 512**-0.5 (or the model's) as a float, leave bmm2_scale out.",
        references=("flashinfer-ai/flashinfer#3395",),
        example="ValueError: SM120 DSv4 sparse MLA does not support bmm2_scale",
    ),
)
