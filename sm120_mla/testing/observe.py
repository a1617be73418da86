"""Run a split case on a target and keep what the invariants need: memory before, after, and the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from ..case import IndexSpec, SplitCase
from ..layout import SUB_PAGE, PageGeometry
from ..reference import split as reference
from ..targets.base import Target
from .derive import Pool, indices_of, lengths_of, make_pool, pool_of
from .guards import poison
from .verdict import TargetRaised

__all__ = ["Frame", "SplitCall", "observe_split", "run"]

_Result = TypeVar("_Result")


def run(doing: str, call: Callable[[], _Result]) -> _Result:
    """Call the target; what it raises becomes ``TargetRaised``, which ``judge`` understands."""
    try:
        return call()
    except Exception as error:
        raise TargetRaised(doing, error) from error


@dataclass(frozen=True)
class Frame:
    """The whole memory of a destination: uint8 ``raw``, seen as ``[rows, stride]`` from ``start``."""

    raw: torch.Tensor
    start: int
    stride: int

    def rows(self) -> torch.Tensor:
        """uint8 ``[rows, stride]``; what is left at the end of the storage is not part of it."""
        count = (self.raw.numel() - self.start) // self.stride
        return self.raw[self.start : self.start + count * self.stride].view(count, self.stride)


def frame_of(result: torch.Tensor) -> Frame:
    """The frame a split result lies in. Not a copy."""
    storage = result.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=result.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return Frame(raw, int(result.storage_offset()) * result.element_size(), result.stride(0))


@dataclass(frozen=True)
class SplitCall:
    """One observed call."""

    number: int
    spec: IndexSpec | None
    pool: Pool
    result: torch.Tensor
    indices: torch.Tensor | None
    """``[T, k]`` on the CPU, or None for a full split."""
    lengths: torch.Tensor | None
    before: Frame
    after: Frame
    passthrough: bool
    """The result is the pool itself."""
    page_size: int = field(default=0)
    strays: tuple[str, ...] = ()
    """What was written beside the target's own allocations, in words; nothing where it cannot tell."""

    @property
    def geometry(self) -> PageGeometry:
        """Geometry of the source pool."""
        return self.pool.geometry

    @cached_property
    def reference(self) -> torch.Tensor:
        """uint8 ``[sub_pages, payload]`` the sub-pages should hold."""
        return reference.split(self.pool.bytes, self.geometry)

    @cached_property
    def counted(self) -> torch.Tensor:
        """int64 ``[n]`` token indices that count; every token for a full split."""
        if self.indices is None:
            return torch.arange(self.geometry.tokens)
        return reference.counted(self.indices, self.lengths, self.geometry.tokens)

    @cached_property
    def touched(self) -> set[int]:
        """Sub-pages that counted indices touch."""
        return set((self.counted // SUB_PAGE).unique().tolist())

    @cached_property
    def allowed(self) -> set[int]:
        """Sub-pages of the pages that counted indices touch: what may change."""
        ratio = self.geometry.sub_pages_per_page
        pages = {sub // ratio for sub in self.touched}
        return {page * ratio + n for page in pages for n in range(ratio)}

    @cached_property
    def changed(self) -> set[int]:
        """Rows of the frame whose payload changed."""
        payload = self.geometry.layout.payload(SUB_PAGE)
        differs = (self.after.rows()[:, :payload] != self.before.rows()[:, :payload]).any(dim=1)
        return set(differs.nonzero().flatten().tolist())


def last_only(observe: Callable[[Target, Any], _Result]) -> Callable[[Target, Any], _Result]:
    """Remember the last observation, so that several invariants judge one run of a case."""
    last: list[tuple[Target, Any, _Result]] = []

    @functools.wraps(observe)
    def remembered(target: Target, case: Any) -> _Result:
        if not (last and last[0][0] is target and last[0][1] == case):
            last[:] = []
            last[:] = [(target, case, observe(target, case))]
        return last[0][2]

    return remembered


@last_only
def observe_split(target: Target, case: SplitCase) -> list[SplitCall]:
    """Make the calls of a case, each on a pool of fresh bytes and into a freshly poisoned destination."""
    target.reset()
    layout = case.page_layout
    room = make_pool(
        layout, case.page_size, case.pages + case.spare_pages, page_stride=case.page_stride, seed=case.seed
    )
    made = run(
        "making the destination", lambda: target.split(room.view, case.page_size, None, None, layout=layout)
    )
    return [_call(target, case, n, spec, made) for n, spec in enumerate(case.calls)]


def _call(
    target: Target, case: SplitCase, number: int, spec: IndexSpec | None, made: torch.Tensor
) -> SplitCall:
    pool = pool_of(case, case.seed + 1 + number)
    indices = lengths = None
    if spec is not None:
        indices = indices_of(spec, case.pages * case.page_size, case.page_size)
        lengths = lengths_of(spec)
    live = frame_of(made)
    before = Frame(poison(live.raw, case.seed - 1 - number), live.start, live.stride)
    result = run(
        f"split call {number}",
        lambda: target.split(pool.view, case.page_size, indices, lengths, layout=case.page_layout),
    )
    passthrough = result.data_ptr() == pool.view.data_ptr() and result.shape == pool.view.shape
    if not passthrough and result.untyped_storage().data_ptr() != live.raw.data_ptr():
        live = frame_of(result)  # another destination: judged against what it holds, nothing known before
        before = Frame(live.raw.clone(), live.start, live.stride)
    after = Frame(live.raw.clone().cpu(), live.start, live.stride)
    before = Frame(before.raw.cpu(), before.start, before.stride)
    return SplitCall(
        number=number,
        spec=spec,
        pool=_on_cpu(pool),
        result=result,
        indices=None if indices is None else _rows(indices).cpu(),
        lengths=None if lengths is None else lengths.reshape(-1).cpu(),
        before=before,
        after=after,
        passthrough=passthrough,
        page_size=case.page_size,
        strays=getattr(target, "strays", tuple)(),
    )


def _rows(indices: torch.Tensor) -> torch.Tensor:
    return indices[:, 0] if indices.dim() == 3 else indices


def _on_cpu(pool: Pool) -> Pool:
    if pool.bytes.device.type == "cpu":
        return pool
    return Pool(pool.view, pool.bytes.cpu(), pool.geometry, pool.guard)


def first(items: Sequence[int], most: int = 6) -> str:
    """The first few of a list of numbers, for a message."""
    shown = ", ".join(str(i) for i in items[:most])
    return shown + (f", ... ({len(items)} in all)" if len(items) > most else "")
