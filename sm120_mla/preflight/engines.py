"""How sglang and vLLM put sparse MLA together on SM120: rules as data, and the changes that made them.

The rules are those of September 2026. A build that lacks a merged change, or carries an open one, is named by
it (``without``, ``carrying``). Units: tokens, heads, columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError

__all__ = ["CHANGES", "ENGINES", "Change", "Engine", "by_name", "change"]


@dataclass(frozen=True)
class Engine:
    """One engine's rules. ``split_*``: pages of a cache are cut to 64 tokens before FlashInfer sees them."""

    name: str
    block: int
    """Tokens of a block of the uncompressed pool; an entry of ratio r has ``block // r`` to a page."""
    swa_page: int
    """Tokens of a page of the sliding window; 0: a block."""
    swa_page_v41: int
    split_main: bool
    split_extra: bool
    heads: str
    """``pad``: up to the next of ``pad_to``. ``native``: as they are where FlashInfer decodes that many,
    else, and above 64 rows, up to 64 or 128. ``as-is``."""
    pad_to: tuple[int, ...]
    main_unit: int
    """Window rows are rounded up to this."""
    draft_unit: int
    """DSpark draft rows are rounded up to this."""
    draft_widths: tuple[int, ...]
    """Draft rows are widened to the next of these; empty: not."""
    c128a: str
    """Decode rows of C128A: ``full`` width and dense, ``narrow`` slices of a wider buffer, or ``pages``: as
    many columns as the block table has entries."""
    widens_v41: bool
    """Prefill rows of V4.1 grow by the image tokens."""
    public_api: bool
    """Calls FlashInfer's public function, which takes fewer head counts than its private one."""
    warm_up_rows: int
    """Rows of the warm-up before capture; 0: not known."""
    dsa_glm_only: bool
    falls_back: bool = False
    """Asks a coverage predicate for each call and takes its own Triton kernel where FlashInfer has none."""
    zeroed_split: bool = False
    """The destination of a page split is zeroed when it is made."""
    asserts_width_from: int | None = None
    """From this ``max_model_len`` on a capture was seen to assume a block more than C128A rows hold."""
    sources: tuple[str, ...] = ()


ENGINES: tuple[Engine, ...] = (
    Engine(
        name="sglang",
        block=256,
        swa_page=0,
        swa_page_v41=0,
        split_main=True,
        split_extra=False,
        heads="native",
        pad_to=(64, 128),
        main_unit=64,
        draft_unit=64,
        draft_widths=(),
        c128a="pages",
        widens_v41=False,
        public_api=False,
        warm_up_rows=0,
        dsa_glm_only=True,
        sources=(
            "sgl-project/sglang 04fa8c0 python/sglang/kernels/ops/attention/flash_mla_sm120.py",
            "kvcache-ai/sglang 04653fa deepseek_v4_backend_radix.py: window 128, index rows in 64s",
        ),
    ),
    Engine(
        name="vllm",
        block=256,
        swa_page=64,
        swa_page_v41=32,
        split_main=False,
        split_extra=False,
        heads="pad",
        pad_to=(8, 16, 32, 64, 128),
        main_unit=1,
        draft_unit=64,
        draft_widths=(),
        c128a="full",
        widens_v41=False,
        public_api=True,
        warm_up_rows=16,
        dsa_glm_only=False,
        asserts_width_from=1_000_000,  # issue 400 of spark-vllm-docker; 262,144 was served
        sources=(
            "vllm-project/vllm 055e47c models/deepseek_v4/nvidia/flashinfer_sparse.py",
            "vllm-project/vllm 03dc564 v1/attention/backends/mla/sparse_swa.py",
            "vllm-project/vllm 055e47c model_executor/warmup/flashinfer_sparse_mla_warmup.py: 16 rows",
        ),
    ),
)


@dataclass(frozen=True)
class Change:
    """One upstream change: ``fields`` of the rules, each before and after. ``merged``: it is in the rules."""

    name: str
    engine: str
    what: str
    fields: tuple[tuple[str, Any, Any], ...]
    merged: bool = True


CHANGES: tuple[Change, ...] = (
    Change("vllm#51538", "vllm", "draft rows in units of 64, not 128", (("draft_unit", 128, 64),)),
    Change("vllm#53574", "vllm", "dense full-width C128A rows on 12.x", (("c128a", "narrow", "full"),)),
    Change("vllm#57152", "vllm", "V4.1 rows do not grow by images", (("widens_v41", True, False),)),
    Change(
        "vllm:8-heads",
        "vllm",
        "pads to 8 heads, not 16, at the least",
        (("pad_to", (16, 32, 64, 128), (8, 16, 32, 64, 128)),),
    ),
    Change("vllm#56509", "vllm", "V4.1 window pages of 64 on SM120", (("swa_page_v41", 32, 64),), False),
    Change("sglang#35104", "sglang", "local heads above 64 rows too", (("heads", "native", "as-is"),), False),
    Change(
        "sglang#34717",
        "sglang",
        "draft rows widened to 128, 512, 1024 or 2048",
        (("draft_widths", (), (128, 512, 1024, 2048)),),
        False,
    ),
    Change(
        "sglang#38969",
        "sglang",
        "Triton where FlashInfer has none",
        (("falls_back", False, True),),
        False,
    ),
    Change("sglang#39914", "sglang", "splits the second cache too", (("split_extra", False, True),), False),
    Change("sglang#39288", "sglang", "zeroes the split destination", (("zeroed_split", False, True),), False),
)


def change(name: str) -> Change:
    """The change called ``name``; raises ``ArgumentError`` with the names there are."""
    for row in CHANGES:
        if row.name == name:
            return row
    names = ", ".join(row.name for row in CHANGES)
    raise ArgumentError("change", repr(name), f"one of {names}", "Correct the name.")


def by_name(name: str, without: Sequence[str] = (), carrying: Sequence[str] = ()) -> Engine:
    """The engine's rules, without some merged changes and with some open ones. Raises ``ArgumentError``."""
    for engine in ENGINES:
        if engine.name == name:
            break
    else:
        names = ", ".join(engine.name for engine in ENGINES)
        raise ArgumentError("engine", repr(name), f"one of {names}", "Correct the name.")
    for option, wanted in (("without", without), ("with", carrying)):
        for entry in wanted:
            row = change(entry)
            if row.engine != name:
                raise ArgumentError(option, entry, f"a change of {name}", f"It is one of {row.engine}.")
            if row.merged != (option == "without"):
                said = "it is merged" if row.merged else "it is not merged"
                raise ArgumentError(option, entry, "the other option", f"Leave it out: {said}.")
            index = 1 if option == "without" else 2
            fields: dict[str, Any] = {entry[0]: entry[index] for entry in row.fields}
            engine = replace(engine, **fields)
    return engine
