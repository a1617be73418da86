"""Steps of a boot that build metadata, capture what reads it, and serve through such graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..case import MetaBatch, Step
from ..graphs import Graph
from ..targets.base import C128AInputs
from . import meta_judge
from .meta_batch import inputs_of, want

if TYPE_CHECKING:
    from .orderings import Boot

__all__ = ["META_STEPS", "ROWS", "CapturedStep"]

ROWS = 160
"""Rows of the engine's buffers: every batch of a boot fits."""

_REQUESTS, _BLOCK_SIZE = 4, 2


@dataclass
class CapturedStep:
    """A graph whose consumer reads the decode view of one build."""

    graph: Graph
    rows: int
    width: int
    """Active width at capture."""
    seen: torch.Tensor
    """int32 ``[rows, columns of the captured view]``: what the consumer last read."""


def _batch(boot: Boot, step: Step, rows: int, padding: int = 0, prefill: int = 0) -> MetaBatch:
    boot.serial += 1
    return MetaBatch(
        decode=rows - padding,
        padding=padding,
        prefill=prefill,
        max_seq_len=min(step.seq, boot.case.max_model_len),
        seed=boot.case.seed + step.arg + boot.serial,
    )


def _build(
    boot: Boot, batch: MetaBatch
) -> tuple[C128AInputs, tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any]]:
    """Build eagerly, and judge what came of it."""
    buffers = boot.metadata()
    with torch.inference_mode(False):
        inputs = inputs_of(
            batch,
            buffers,
            requests=_REQUESTS,
            block_size=_BLOCK_SIZE,
            garbage=boot.serial,
        )
        before, table = buffers.snapshot(), inputs.block_table.clone()
    views = boot.target.build_c128a(inputs)
    with torch.inference_mode(False):
        after = (views[0].cpu().clone(), *buffers.snapshot())
    capability = boot.case.capability
    on_sm120 = capability is not None and capability[0] == 12
    seen = {
        "values": meta_judge.values_complaint(inputs, table, before, after),
        "view": meta_judge.view_complaint(inputs, capability, *views),
        "stride": meta_judge.stride_complaint(inputs, views[0], views[2]),
        "route": meta_judge.contract_complaint(views[0], views[1], inputs.num_decode_tokens)
        if on_sm120
        else "",
    }
    return inputs, views, seen


def _has_builder(boot: Boot) -> bool:
    return bool(boot.target.supports(_META, boot.case.capability))


@dataclass(frozen=True)
class _Kind:
    kind: str = "meta"
    layout: str = "dsv4"


_META = _Kind()


def _build_step(boot: Boot, step: Step) -> dict[str, Any]:
    if not _has_builder(boot):
        return {}
    return _build(boot, _batch(boot, step, step.batch))[2]


def _prefill(boot: Boot, step: Step) -> dict[str, Any]:
    """Eager prefill beside decodes: both kinds of rows in one build."""
    if not _has_builder(boot):
        return {}
    prefill = min(step.batch, 16)
    return _build(boot, _batch(boot, step, step.arg % 3, prefill=prefill))[2]


def _capture_step(boot: Boot, step: Step) -> dict[str, Any]:
    """Capture a consumer on the view of a build at the step's batch and width."""
    if not _has_builder(boot):
        return {}
    inputs, (decode, lens, _), seen = _build(boot, _batch(boot, step, step.batch))
    out = torch.empty(decode.shape, dtype=torch.int32, device=decode.device)
    graph = boot.target.capture(lambda: meta_judge.consume(decode, lens, out))
    boot.steps.append(CapturedStep(graph, step.batch, inputs.max_compressed_tokens, out))
    return seen


def _serve(boot: Boot, step: Step) -> dict[str, Any]:
    """New inputs, an eager build at their width, a replay; rows short of the captured ones are padding."""
    if not boot.steps:
        return {}
    held = boot.steps[step.arg % len(boot.steps)]
    real = min(step.batch, held.rows)
    batch = _batch(boot, step, held.rows, padding=held.rows - real)
    capability = boot.case.capability
    if capability is None or capability[0] != 12:
        # A narrow view has the columns of its capture: engines capture at the width they will serve.
        longest = min(batch.max_seq_len, held.width * 128)
        batch = batch.model_copy(update={"max_seq_len": longest})
    inputs, _, seen = _build(boot, batch)
    held.seen.fill_(-7)
    held.graph.replay()
    lost, wrong = _serve_complaint(held, inputs)
    return seen | {"replayed": wrong or lost, "stride": seen["stride"] or wrong}


def _serve_complaint(held: CapturedStep, inputs: C128AInputs) -> tuple[str, str]:
    """Entries the captured view has no column for, and rows read wrongly; each a complaint or ""."""
    rows, lens, _ = want(inputs)
    got = held.seen.cpu()
    columns, width = got.shape[1], inputs.max_compressed_tokens
    shared = min(columns, width)
    wanted = torch.full_like(got, -1)
    counted = torch.arange(shared) < lens[:, None]
    wanted[:, :shared] = torch.where(counted, rows[:, :shared], -1)
    lost = int((lens > columns).sum())
    complaint = (
        f"{lost} rows have more entries than the {columns} columns of the captured view" if lost else ""
    )
    wrong = (got != wanted).any(dim=1).nonzero().flatten().tolist()
    if not wrong:
        return complaint, ""
    row = wrong[0]
    column = int((got[row] != wanted[row]).nonzero()[0])
    return complaint, (
        f"captured at {held.rows} rows and width {held.width}, replayed after a build at width {width}: "
        f"row {row} column {column} reads {int(got[row, column])}, an eager call "
        f"{int(wanted[row, column])}; {len(wrong)} of {held.rows} rows are wrong"
    )


META_STEPS: dict[str, Callable[[Boot, Step], dict[str, Any]]] = {
    "build": _build_step,
    "prefill": _prefill,
    "capture_step": _capture_step,
    "serve": _serve,
}
