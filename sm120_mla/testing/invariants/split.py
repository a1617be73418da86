"""SPLIT: bytes move to where the reference puts them, and nothing else moves."""

from __future__ import annotations

import torch

from ...case import Offset64Case, SplitCase
from ...layout import SUB_PAGE, by_name
from ...targets.base import Target
from ..compare import compare_sub_pages
from ..observe import SplitCall, first, observe_split
from ..offset64 import decide
from ..verdict import HOLDS, Verdict, absent, invariant, violated

_ANYWHERE = ("reference", "cuda", "sm120")


def _calls(target: Target, case: SplitCase) -> list[SplitCall]:
    return observe_split(target, case)


def _in_call(call: SplitCall, of: int) -> str:
    return f" in call {call.number}" if of > 1 else ""


def _passthrough(call: SplitCall) -> Verdict | None:
    """At page size 64 the pool itself is the result; anything else is a violation."""
    if call.page_size != SUB_PAGE:
        return None
    if not call.passthrough:
        return violated("a pool of 64-token pages is returned as it is, without a copy")
    return HOLDS


@invariant(
    "SPLIT-BYTES",
    "every payload byte of every touched sub-page lands where the reference puts it, for any page size, "
    "stride, offset and rank of the source view; other sub-pages of a touched page are copied exactly or "
    "not at all",
    origin="sglang #32320, #39914; gaps 2, 8, 11-13 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("split",),
)
def split_bytes(target: Target, case: SplitCase) -> Verdict:
    """Bytes against bytes, sub-page by sub-page."""
    calls = _calls(target, case)
    for call in calls:
        if (done := _passthrough(call)) is not None:
            if done.violated:
                return done
            continue
        rows = call.after.rows()
        if rows.shape[0] < call.geometry.sub_pages:
            return violated(f"the destination has {rows.shape[0]} of {call.geometry.sub_pages} sub-pages")
        must = call.touched | (call.changed & call.allowed)
        diff = compare_sub_pages(
            call.geometry.layout, call.page_size, rows, call.reference, must, call.before.rows()
        )
        if diff is not None:
            return violated(f"wrong bytes{_in_call(call, len(calls))}", str(diff))
    return HOLDS


@invariant(
    "SPLIT-FRAME",
    "nothing else changes: sub-page tails, sub-pages of untouched pages, memory around them, the source",
    origin="sglang wrote past its mask for an index past the pool; gaps 4, 6 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("split",),
)
def split_frame(target: Target, case: SplitCase) -> Verdict:
    """Everything poisoned and not allowed to change is as it was."""
    calls = _calls(target, case)
    for call in calls:
        stray = call.pool.guard.stray()
        if stray:
            return violated(
                f"the source was written{_in_call(call, len(calls))}",
                f"bytes {first(stray)} relative to page 0 of the pool",
            )
        if call.strays:
            return violated(
                f"memory beside the target's own buffers was written{_in_call(call, len(calls))}",
                "\n".join(call.strays),
            )
        if call.page_size == SUB_PAGE:
            continue
        payload = call.geometry.layout.payload(SUB_PAGE)
        before, after = call.before.rows(), call.after.rows()
        tails = (after[:, payload:] != before[:, payload:]).any(dim=1).nonzero().flatten().tolist()
        if tails:
            return violated(
                f"sub-page tails were written{_in_call(call, len(calls))}",
                f"bytes past {payload:,} of sub-pages {first(tails)}",
            )
        extra = sorted(call.changed - call.allowed)
        if extra:
            beyond = [n for n in extra if n >= call.geometry.sub_pages]
            what = "memory past the pool's last sub-page" if beyond else "sub-pages of untouched pages"
            return violated(
                f"{what} changed{_in_call(call, len(calls))}",
                f"sub-pages {first(extra)}; the pool has {call.geometry.sub_pages}",
            )
        start = call.after.start
        if not torch.equal(call.before.raw[:start], call.after.raw[:start]):
            return violated(f"memory before the destination changed{_in_call(call, len(calls))}")
    return HOLDS


@invariant(
    "SPLIT-INDEX",
    "a token index addresses the same token before and after",
    origin="(i//P)*(P//64) + (i%P)//64 == i//64 and i%64 == (i%P)%64 where 64 divides P",
    where=_ANYWHERE,
    cases=("split",),
)
def split_index(target: Target, case: SplitCase) -> Verdict:
    """Read each counted token through both page sizes, field by field."""
    for call in _calls(target, case):
        if call.page_size == SUB_PAGE:
            continue
        layout, size = call.geometry.layout, call.page_size
        rows = call.after.rows()
        sample = call.counted.unique()
        sample = sample[:: sample.numel() // 4096 | 1]  # an odd step meets every slot of a page
        for field in layout.fields:
            record = layout.token_bytes if field.region == "token" else layout.footer_bytes
            source = layout.offset(field.name, 0, size) + (sample % size) * record
            split = layout.offset(field.name, 0, SUB_PAGE) + (sample % SUB_PAGE) * record
            run = torch.arange(field.nbytes)
            want = call.pool.bytes[(sample // size)[:, None], source[:, None] + run]
            got = rows[(sample // SUB_PAGE)[:, None], split[:, None] + run]
            wrong = (got != want).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                index = int(sample[wrong[0]])
                return violated(
                    f"token index {index} reads other {field.name} after the split",
                    f"page {index // size} slot {index % size} -> sub-page {index // SUB_PAGE} slot "
                    f"{index % SUB_PAGE}; {len(wrong)} of {sample.numel()} indices looked at differ",
                )
    return HOLDS


@invariant(
    "SPLIT-TOUCHED",
    "exactly what counted indices touch is split: every sub-page they point into, and no sub-page of a page "
    "they do not; -1, out-of-range indices and columns past the length touch nothing",
    origin="five designs of sglang's split, five answers; gaps 5-7, 12 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("split",),
)
def split_touched(target: Target, case: SplitCase) -> Verdict:
    """Which destination sub-pages changed, against which should."""
    if not getattr(target, "splits_touched", True):
        return absent("the target splits whole pools, whatever the indices are")
    calls = _calls(target, case)
    for call in calls:
        if call.page_size == SUB_PAGE:
            continue
        missing = sorted(call.touched - call.changed)
        extra = sorted(call.changed - call.allowed)
        if missing or extra:
            parts = []
            if missing:
                parts.append(f"touched but not split: {first(missing)}")
            if extra:
                parts.append(f"split but not touched: {first(extra)}")
            return violated(
                f"the wrong sub-pages were split{_in_call(call, len(calls))}",
                "; ".join(parts) + f"\n{call.counted.numel()} indices count, in sub-pages "
                f"{first(sorted(call.touched)) or 'none'}",
            )
    return HOLDS


@invariant(
    "SPLIT-OFFSET64",
    "offsets are exact at real strides: pages either side of 2^31 and 2^32 bytes",
    origin="page * 149760 wraps int32 at page 14,340, about 3.67 M tokens; gap 10 of docs/upstream-gaps.md",
    where=_ANYWHERE,
    cases=("offset64",),
)
def split_offset64(target: Target, case: Offset64Case) -> Verdict:
    """On untouched virtual memory: only the pages looked at become resident."""
    return decide(target, case, by_name(case.layout))
