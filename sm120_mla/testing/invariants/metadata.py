"""META, GRAPH, and what ROUTE and ATTN say of index tensors: the C128A builder and who reads its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...case import AttnCase, MetaCase, OrderCase, RouteCase
from ...layout import DSV4, SUB_PAGE
from ...reference import split as split_reference
from ...targets.base import C128AInputs, Target
from ...widths import capacity
from .. import meta_judge
from ..derive import make_pool
from ..meta_batch import Buffers, inputs_of, make_buffers, refill, rows_of, want
from ..observe import first, frame_of, last_only, run
from ..orderings import OrderLog, run_order
from ..verdict import HOLDS, Verdict, invariant, unknown, violated
from .buffers import rest, where
from .route import handed_over

_ANYWHERE = ("reference", "cuda", "sm120")
_BOTH = ("meta", "order")
_STALE_POOL = (128, 8)
"""Tokens per page and pages of the pool that stale ids would reach into."""

ORDER_JUDGES = {
    "META-VALUES": ("values", "the builder wrote wrong values"),
    "META-VIEW": ("view", "the builder returned the wrong view"),
    "META-STRIDE": ("stride", "the row stride moved"),
    "GRAPH-REPLAY": ("replayed", "a replay differs from an eager call"),
    "ROUTE-CONTRACT": ("route", "FlashInfer would refuse or misread the index tensors"),
}
"""How each of these invariants judges the notes of a boot: which note, under which headline."""


@dataclass(frozen=True)
class _Built:
    inputs: C128AInputs
    before: meta_judge.Snapshot
    after: tuple[torch.Tensor, ...]
    table: torch.Tensor
    views: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _buffers(case: MetaCase) -> Buffers:
    rows = max((rows_of(batch) for batch in case.builds), default=0) + 2
    return make_buffers(rows, capacity(case.max_model_len), case.seed)


def _inputs(case: MetaCase, n: int, buffers: Buffers, **more: Any) -> C128AInputs:
    return inputs_of(
        case.builds[n],
        buffers,
        requests=case.requests,
        block_size=case.block_size,
        table_gap=case.table_gap,
        **more,
    )


def _build(target: Target, case: MetaCase, inputs: C128AInputs, doing: str = "build") -> Any:
    with target.pretend_device(case.capability):
        return run(doing, lambda: target.build_c128a(inputs))


@last_only
def _builds(target: Target, case: MetaCase) -> list[_Built]:
    """Every build of the case, into buffers poisoned once: what earlier builds left stays."""
    buffers, built = _buffers(case), []
    for n in range(len(case.builds)):
        inputs = _inputs(case, n, buffers)
        before, table = buffers.snapshot(), inputs.block_table.clone()
        views = _build(target, case, inputs, f"build {n}")
        after = (views[0].cpu().clone(), *buffers.snapshot())
        built.append(_Built(inputs, before, after, table, views))
    return built


def of_log(id: str, log: OrderLog) -> Verdict:
    """The first complaint of one kind in the notes of a boot."""
    seen, headline = ORDER_JUDGES[id]
    for note in log.notes:
        complaint: str = getattr(note, seen)
        if complaint:
            return violated(
                f"{headline} at step {note.number} ({note.step.do})", f"{where(log, note)}\n{complaint}"
            )
    return rest(log, "meta", *(["split"] if seen == "replayed" else []))


def _first_complaint(complaints: list[str], headline: str) -> Verdict:
    for n, complaint in enumerate(complaints):
        if complaint:
            return violated(f"{headline} in build {n}", complaint)
    return HOLDS


@invariant(
    "META-VALUES",
    "decode slots, lengths and prefill rows equal the reference; columns [n, W) are -1, W the active width; "
    "columns [W, capacity) of a full-width view are unspecified, and the check poisons them",
    origin="vLLM #50004, #52823, #53574: the same rows, four views; gaps 33, 34, 40 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=_BOTH,
)
def meta_values(target: Target, case: MetaCase | OrderCase) -> Verdict:
    """Every row of every build, and the memory around them."""
    if isinstance(case, OrderCase):
        return of_log("META-VALUES", run_order(target, case))
    built = _builds(target, case)
    return _first_complaint(
        [meta_judge.values_complaint(b.inputs, b.table, b.before, b.after) for b in built],
        ORDER_JUDGES["META-VALUES"][1],
    )


@invariant(
    "META-VIEW",
    "capability 12.x: full width and contiguous; any other, or None: narrow; prefill narrow everywhere",
    origin="vLLM #52823: `eidx must be contiguous` on SM120; #53574: what holds today",
    where=_ANYWHERE,
    cases=_BOTH,
)
def meta_view(target: Target, case: MetaCase | OrderCase) -> Verdict:
    """Shape, memory and strides of what the consumer gets."""
    if isinstance(case, OrderCase):
        return of_log("META-VIEW", run_order(target, case))
    return _first_complaint(
        [meta_judge.view_complaint(b.inputs, case.capability, *b.views) for b in _builds(target, case)],
        ORDER_JUDGES["META-VIEW"][1],
    )


@invariant(
    "META-STRIDE",
    "the row stride does not depend on the active width; a graph captured at one width reads right rows "
    "after a build at another",
    origin="vLLM #50004, reverted by #51318: a packed view whose stride moved with the width",
    where=_ANYWHERE,
    cases=_BOTH,
)
def meta_stride(target: Target, case: MetaCase | OrderCase) -> Verdict:
    """The strides of every build, and a consumer captured on the first build's view, replayed after each."""
    if isinstance(case, OrderCase):
        return of_log("META-STRIDE", run_order(target, case))
    built = _builds(target, case)
    if not built or not built[0].inputs.num_decode_tokens:
        return _first_complaint(
            [meta_judge.stride_complaint(b.inputs, b.views[0], b.views[2]) for b in built],
            "the row stride moved",
        )
    buffers = _buffers(case)
    inputs = _inputs(case, 0, buffers)
    decode, lens, _ = _build(target, case, inputs)
    seen = torch.empty(decode.shape, dtype=torch.int32, device=decode.device)
    graph = run(
        "capturing a consumer", lambda: target.capture(lambda: meta_judge.consume(decode, lens, seen))
    )
    try:
        for n in range(len(case.builds)):
            later = _inputs(case, n, buffers)
            _build(target, case, later, f"build {n}")
            seen.fill_(-7)
            graph.replay()
            rows = min(seen.shape[0], later.num_decode_tokens)
            complaint = _rows_complaint(seen[:rows].cpu(), later, rows)
            if complaint:
                return violated(
                    f"a graph captured at width {inputs.max_compressed_tokens} reads wrong rows after a "
                    f"build at width {later.max_compressed_tokens}",
                    complaint,
                )
    finally:
        graph.drop()
    return _first_complaint(
        [meta_judge.stride_complaint(b.inputs, b.views[0], b.views[2]) for b in built], "the row stride moved"
    )


def _rows_complaint(seen: torch.Tensor, inputs: C128AInputs, rows: int) -> str:
    """What a consumer saw, against the counted entries of the reference, cut to the consumer's columns."""
    wanted_rows, lens, _ = want(inputs)
    columns, width = seen.shape[1], inputs.max_compressed_tokens
    wanted = torch.full((rows, columns), -1, dtype=torch.int32)
    shared = min(columns, width)
    counted = torch.arange(shared) < lens[:rows, None]
    wanted[:, :shared] = torch.where(counted, wanted_rows[:rows, :shared], -1)
    wrong = (seen != wanted).any(dim=1).nonzero().flatten().tolist()
    if not wrong:
        return ""
    row = wrong[0]
    column = int((seen[row] != wanted[row]).nonzero()[0])
    return (
        f"row {row} column {column}: got {int(seen[row, column])}, want {int(wanted[row, column])}; rows "
        f"{first(wrong)} of {rows} are wrong"
    )


@invariant(
    "META-STALE",
    "no consumer result depends on columns past the length",
    origin="vLLM #53574: on 12.x columns [W, capacity) are stale, the lengths the only protection",
    where=_ANYWHERE,
    cases=("meta",),
)
def meta_stale(target: Target, case: MetaCase) -> Verdict:
    """Two runs over different poison: a pool split by the decode view must have the same sub-pages split."""
    if not case.builds:
        return unknown("the case builds nothing")
    results = [_touched_by_the_view(target, case, poison) for poison in (1, 2)]
    for changed, expected in results:
        extra, missing = sorted(changed - expected), sorted(expected - changed)
        if extra:
            return violated(
                "the consumer read columns past the length",
                f"it touched sub-pages {first(extra)}, which no counted entry points into",
            )
        if missing:
            return violated("the consumer missed counted entries", f"sub-pages {first(missing)}")
    return HOLDS


def _touched_by_the_view(target: Target, case: MetaCase, poison: int) -> tuple[set[int], set[int]]:
    """Sub-pages that a split by the last decode view wrote, and those the counted entries point into."""
    page_size, pages = _STALE_POOL
    tokens = page_size * pages
    buffers = _buffers(case)
    buffers.poison(case.seed + 100 * poison, tokens)
    for n in range(len(case.builds)):
        inputs = _inputs(case, n, buffers, num_blocks=tokens // case.block_size)
        decode, lens, _ = _build(target, case, inputs, f"build {n}")
    pool = make_pool(DSV4, page_size, pages, seed=case.seed)
    target.reset()
    made = run("making the destination", lambda: target.split(pool.view, page_size, None, None, layout=DSV4))
    rows = frame_of(made).rows()
    rows.fill_(0x5A)
    run(
        "splitting by the decode view",
        lambda: target.split(pool.view, page_size, decode, lens, layout=DSV4),
    )
    changed = (rows[:, : DSV4.payload(SUB_PAGE)] != 0x5A).any(dim=1).nonzero().flatten().tolist()
    wanted, wanted_lens, _ = want(inputs)
    return set(changed), split_reference.touched_sub_pages(wanted, wanted_lens, pages, page_size)


@invariant(
    "GRAPH-REPLAY",
    "replay after refilling inputs equals an eager call on the same inputs, in every boot order",
    origin="rtp-llm #1259, xLLM #1939, ATOM #1391; gaps 9, 33 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=_BOTH,
)
def graph_replay(target: Target, case: MetaCase | OrderCase) -> Verdict:
    """A captured build, replayed on other inputs of the same shape; in boots, every captured step."""
    if isinstance(case, OrderCase):
        return of_log("GRAPH-REPLAY", run_order(target, case))
    if not case.builds:
        return unknown("the case builds nothing")
    captured, eager = _buffers(case), _buffers(case)
    inputs = _inputs(case, 0, captured)
    _build(target, case, inputs)  # compiles what the capture will launch

    def work() -> None:
        target.build_c128a(inputs)

    with target.pretend_device(case.capability):
        graph = run("capturing a build", lambda: target.capture(work))
    try:
        for n, seed in enumerate((case.seed + 1, case.seed + 2)):
            batch = case.builds[0].model_copy(update={"seed": seed})
            fresh = case.model_copy(update={"builds": (batch,)})
            other = _inputs(fresh, 0, eager, garbage=n + 1)
            captured.poison(seed)
            eager.poison(seed)
            refill(inputs, other)
            graph.replay()
            _build(target, case, other)
            for name, got, wanted in zip(
                ("decode rows", "decode_lens", "prefill rows"),
                captured.snapshot(),
                eager.snapshot(),
                strict=True,
            ):
                wrong = (got != wanted).nonzero()
                if wrong.numel():
                    return violated(
                        "the replay of a captured build differs from an eager build",
                        f"{name}: {wrong.shape[0]} entries differ, first at {wrong[0].tolist()}",
                    )
    finally:
        graph.drop()
    return HOLDS


@invariant(
    "ATTN-ROWS",
    "rows are independent: padding rows with any content change no real row",
    origin="xLLM #1939: a padded replay whose phantom rows were stale; gap 18 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("meta", "attn"),
)
def attn_rows(target: Target, case: MetaCase | AttnCase) -> Verdict:
    """Two builds whose padding rows hold different garbage: the same real rows, and length 0 in padding."""
    if isinstance(case, AttnCase):
        from .attention import rows_independent

        return rows_independent(target, case)
    for n, batch in enumerate(case.builds):
        results = []
        for garbage in (1, 2):
            buffers = _buffers(case)
            inputs = _inputs(case, n, buffers, garbage=garbage)
            _build(target, case, inputs, f"build {n}")
            results.append(buffers.snapshot())
            padded = results[-1][1][batch.decode : batch.decode + batch.padding]
            if bool((padded != 0).any()):
                return violated(
                    f"a padding row of build {n} has a length",
                    f"lengths {first(padded.tolist())}: expected 0",
                )
        width = inputs.max_compressed_tokens
        for name, index, rows in (("decode", 0, batch.decode), ("prefill", 2, batch.prefill)):
            a, b = (result[index][:rows, :width] for result in results)
            if not torch.equal(a, b):
                row = int((a != b).any(dim=1).nonzero()[0])
                return violated(f"{name} row {row} of build {n} depends on the content of padding rows")
        if not torch.equal(results[0][1][: batch.decode], results[1][1][: batch.decode]):
            return violated(f"a length of build {n} depends on the content of padding rows")
    return HOLDS


@invariant(
    "ROUTE-CONTRACT",
    "what is handed to FlashInfer satisfies the contract of the installed version on both sides of 64/65 "
    "tokens",
    origin="vLLM #52823: FlashInfer checks contiguity above 64 rows only",
    where=_ANYWHERE,
    cases=(*_BOTH, "route"),
)
def route_contract(target: Target, case: MetaCase | OrderCase | RouteCase) -> Verdict:
    """The index tensors' dtype and contiguity, by the strictest generation, at the batch's own row count.

    Of an attention call, everything that is prepared for FlashInfer, by the generation of the case.
    """
    if case.capability is None or case.capability[0] != 12:
        return unknown("the SM120 kernels of FlashInfer are reached on capability 12.x only")
    if isinstance(case, RouteCase):
        return handed_over(target, case)
    if isinstance(case, OrderCase):
        return of_log("ROUTE-CONTRACT", run_order(target, case))
    return _first_complaint(
        [
            meta_judge.contract_complaint(b.views[0], b.views[1], b.inputs.num_decode_tokens)
            for b in _builds(target, case)
        ],
        ORDER_JUDGES["ROUTE-CONTRACT"][1],
    )
