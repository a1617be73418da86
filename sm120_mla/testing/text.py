"""The text of a violation: what is violated, on what, where, got and want, and how to see it again."""

from __future__ import annotations

import shlex
from typing import Any

from .. import device, settings
from ..case import MetaCase, Offset64Case, OrderCase, RouteCase, SplitCase, SubjectCase
from ..layout import SUB_PAGE, PageLayout, by_name
from ..targets.base import Target
from .verdict import Invariant, Verdict

__all__ = ["about", "called", "how", "render"]


def how() -> str:
    """What ran the kernels: ``interpreter``, or the mode and the GPU's capability."""
    mode = device.mode()
    if mode == "reference":
        return "interpreter"
    capability = device.capability()
    return mode if capability is None else f"{mode}, sm_{capability[0]}{capability[1]}"


def about(case: Any) -> str:
    """The case in half a line: its layout and sizes in tokens and bytes, or what it names."""
    if isinstance(case, SplitCase):
        return _layout(case.page_layout, case.page_size)
    if isinstance(case, Offset64Case):
        where = f"page stride {case.page_stride:,} B, about 2^{case.boundary_bits} B"
        return f"{_layout(by_name(case.layout), case.page_size)}, {where}"
    if isinstance(case, OrderCase):
        steps = "1 step" if len(case.steps) == 1 else f"{len(case.steps)} steps"
        return f"boot {case.name or 'drawn'}: {steps}, pages of {case.page_size} tokens"
    if isinstance(case, MetaCase):
        builds = "1 build" if len(case.builds) == 1 else f"{len(case.builds)} builds"
        return f"C128A metadata, {_gpu(case)}: {builds}, model length {case.max_model_len:,} tokens"
    if isinstance(case, RouteCase):
        widths = "+".join(str(c.index.width) for c in (case.main, case.extra) if c is not None)
        beside = "no FlashInfer" if case.flashinfer is None else f"FlashInfer {case.flashinfer}"
        call = f"{case.tokens} rows, {case.heads} heads, {widths} columns"
        return f"backend {case.backend}, {_gpu(case)}, {beside}: {call}"
    if isinstance(case, SubjectCase):
        return f"subject {case.subject}"
    return f"case of kind {case.kind}"


def _gpu(case: MetaCase | RouteCase) -> str:
    found = case.capability
    return "no GPU" if found is None else f"capability {found[0]}.{found[1]}"


def _layout(layout: PageLayout, page_size: int) -> str:
    sizes = f"{page_size} -> {SUB_PAGE} tokens" if page_size != SUB_PAGE else f"{SUB_PAGE} tokens"
    return f"layout {layout.name}: {sizes}, {layout.bytes_per_token} B/token"


def called(target: Target) -> str:
    """The target's name, with the attention backend of one that has several."""
    backend = getattr(target, "backend", "")
    return f"{target.name}/{backend}" if backend else target.name


def _ordered() -> str:
    """What a command must be told of the backend where the environment names one."""
    backend = settings.get("SM120_MLA_BACKEND")
    return "" if backend == "auto" else f" --backend {backend}"


def render(inv: Invariant, verdict: Verdict, target: Target, case: Any, path: str) -> str:
    """The message of a violation. ``path`` is where its case file is, or will be."""
    body = [verdict.headline, *verdict.details.splitlines()]
    lines = [
        f"target {called(target)} ({how()})      {about(case)}",
        *(line for line in body if line.strip()),
        f"replay: sm120-mla replay {path} --target {shlex.quote(target.name)}{_ordered()}",
    ]
    return "\n  ".join([f"{inv.id} violated: {inv.statement}", *lines])
