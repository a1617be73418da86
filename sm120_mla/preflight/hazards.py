"""What else would bite a configuration: known hazards of the release, the engine and the shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..contract import DECODE_MAX_ROWS
from ..envelopes import Envelope
from ..widths import C128A_RATIO, active_width, capacity
from .judge import Request, Row, verdict
from .launches import Launch, draft_width
from .releases import rules

__all__ = ["SHARED_MEMORY", "Hazard", "hazards", "over_budget"]

SHARED_MEMORY = {12: 101_376, 9: 232_448, 10: 232_448}
"""Bytes of shared memory that a block may have, by major capability."""

KERNEL_BYTES = (
    (
        "sglang",
        "extend attention with BLOCK=128",
        131_072,
        "sglang pull 27962",
    ),
)
"""Kernels of the engines known to ask for more than SM120 has: engine, what, bytes, where reported."""


@dataclass(frozen=True)
class Hazard:
    """``argument``: what of the configuration brings it about. ``where``: the launches, in words."""

    id: str
    text: str
    argument: str
    where: str
    remedy: str
    reference: str


def over_budget(nbytes: int, capability: tuple[int, int]) -> bool:
    """Whether a block cannot have that much shared memory on such a GPU; an unknown GPU counts as SM120."""
    return nbytes > SHARED_MEMORY.get(capability[0], SHARED_MEMORY[12])


def hazards(request: Request, rows: tuple[Row, ...]) -> tuple[Hazard, ...]:
    """Those that apply, most dangerous first."""
    launches = tuple(row.launch for row in rows)
    envelope = rules(request.setup.flashinfer)
    found = [check(request, launches, envelope) for check in _CHECKS]
    return tuple(hazard for hazard in found if hazard is not None)


def _direct(request: Request) -> bool:
    return request.backend == "flashinfer" and request.capability[0] == 12


def _many(launches: tuple[Launch, ...]) -> str:
    kinds = dict.fromkeys(f"{n.what} {n.layer}" for n in launches if n.most > DECODE_MAX_ROWS)
    return f"{', '.join(kinds)} above {DECODE_MAX_ROWS} rows"


def _hang(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    if envelope is None or not envelope.known or request.backend not in ("flashinfer", "sm120-mla"):
        return None
    many = [n for n in launches if n.most > DECODE_MAX_ROWS]
    if not any(verdict(request, n).route.startswith("flashinfer") for n in many):
        return None
    return Hazard(
        "prefill-hang",
        "a barrier of the prefill kernel can be passed twice: the GPU is busy and nothing comes back",
        "flashinfer version",
        _many(launches),
        "FlashInfer 0.6.18, or no call above 64 rows",
        "flashinfer issue 3700, pull 4732",
    )


def _slot_zero(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    if envelope is None or not envelope.gathers_slot_zero or not _direct(request):
        return None
    split = request.setup.engine.split_main and not request.setup.engine.zeroed_split
    more = "; the engine's page split leaves that page as allocated" if split else ""
    return Hazard(
        "page-zero",
        f"every masked column reads slot 0 of its cache, and NaN there reaches the output{more}",
        "flashinfer version",
        "all launches",
        "page 0 of both pools zeroed, or FlashInfer 0.7.1",
        "flashinfer issue 5095; sglang pull 39288",
    )


def _holes(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    if envelope is None or not envelope.masks_before_scale or not _direct(request):
        return None
    return Hazard(
        "empty-rows",
        "a row with a length above 0 and only -1 entries in both caches gives values of slot 0, not zeros",
        "flashinfer version",
        "padded rows of captured batches",
        "length 0 for empty rows, or FlashInfer 0.7.1",
        "FlashInfer 0.6.18 decode_dsv4_kernel.cuh",
    )


def _lse(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    if envelope is None or not _direct(request):
        return None
    empty = "-1e30" if envelope.masks_before_scale else "-inf"
    return Hazard(
        "lse-base",
        f"the LSE is base 2 and includes the sink, and {empty} where nothing counts: a merge that expects "
        "natural units is wrong",
        "LSE",
        "only where partial results are merged (context parallelism)",
        "multiply by ln 2 and take the sink out, or lse_scale of FlashInfer 0.7.1",
        "flashinfer issue 4485; vllm pull 28840",
    )


def _cutoff(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    few = {n.key for n in launches if n.most <= DECODE_MAX_ROWS}
    many = {n.key for n in launches if n.most > DECODE_MAX_ROWS}
    both = [" ".join(key) for key in sorted(few & many) if key[0] != "prefill"]
    if envelope is None or not both or not _direct(request):
        return None
    setup = request.setup
    most = DECODE_MAX_ROWS // (1 + setup.speculation.tokens) * setup.dp
    keep = f"at most {most} requests at once keep" if most else "fewer draft tokens, so that a request keeps"
    return Hazard(
        "cutoff-64",
        "batches cross 64 rows, where FlashInfer changes kernel, tables, contiguity checks and arithmetic",
        "max-batch",
        ", ".join(both),
        f"{keep} to the decode kernel",
        "DeepSeek-v4-Flash-DSpark-2x-DGX-Spark issue 141; vllm pull 53574",
    )


def _width_assert(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    setup = request.setup
    has = any(layer.ratio == C128A_RATIO for layer in setup.model.layers)
    first = setup.engine.asserts_width_from
    if first is None or setup.max_model_len < first or not has:
        return None
    longest, columns = setup.max_model_len + setup.block_size, capacity(setup.max_model_len)
    if active_width(longest, columns) >= longest // C128A_RATIO:
        return None
    fits = columns * C128A_RATIO - setup.block_size
    return Hazard(
        "c128a-assert",
        f"a capture that assumes {longest:,} tokens needs {longest // C128A_RATIO:,} C128A columns and has "
        f"{columns:,}: an assertion of the builder tripped so in one report",
        "max-model-len",
        "decode C128A in capture",
        f"a max-model-len of at most {fits:,}, or no capture",
        "eugr/spark-vllm-docker issue 400",
    )


def _short_draft(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    setup, tokens = request.setup, request.setup.speculation.tokens
    if setup.speculation.scheme != "dspark" or draft_width(setup) > setup.model.window + tokens:
        return None
    return Hazard(
        "draft-width",
        f"draft rows have {draft_width(setup)} columns for a window of {setup.model.window} and a block of "
        f"1 + {tokens}: one short of the longest row",
        "speculative",
        "draft SWA",
        f"another K than {tokens}",
        "vLLM get_dspark_swa_index_width rounds window + K",
    )


def _warm_up(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    if envelope is None or not envelope.warm_up or not _direct(request):
        return None
    return Hazard(
        "warm-up",
        "a shape must have run once before it is captured; tuning may send up to 64 rows to prefill",
        "graph-sizes",
        "every captured shape",
        "run each captured batch once eagerly before the capture",
        "FlashInfer 0.7.4 mla/_sparse_mla_sm120/_prepared.py",
    )


def _binary(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    if envelope is None or not _direct(request):
        return None
    return Hazard(
        "jit-cache",
        "an installed flashinfer-jit-cache is loaded before the sources: its kernels count, not these tables",
        "flashinfer version",
        "all launches",
        "the same release of both packages",
        "vllm issues 50720 and 55526",
    )


def _memory(request: Request, launches: tuple[Launch, ...], envelope: Envelope | None) -> Hazard | None:
    for engine, what, nbytes, reference in KERNEL_BYTES:
        if engine == request.setup.engine.name and over_budget(nbytes, request.capability):
            limit = SHARED_MEMORY.get(request.capability[0], SHARED_MEMORY[12])
            return Hazard(
                "shared-memory",
                f"{what}, asks for {nbytes:,} bytes of shared memory; the GPU has {limit:,}",
                "capability",
                "layers and drafts that are not sparse MLA",
                "BLOCK=64 on capability 12.x",
                reference,
            )
    return None


_CHECKS: tuple[Callable[[Request, tuple[Launch, ...], Envelope | None], Hazard | None], ...] = (
    _hang,
    _slot_zero,
    _width_assert,
    _short_draft,
    _holes,
    _cutoff,
    _warm_up,
    _lse,
    _binary,
    _memory,
)
