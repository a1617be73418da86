"""Boots: run the steps of an order on a target, and note after every step what the invariants ask about.

The executor judges nothing. It notes the inference flag and the writability of every persistent tensor,
what graphs hold, what was allocated inside a capture, and whether split bytes were right.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..case import IndexSpec, OrderCase, Step
from ..errors import UnavailableError
from ..graphs import Graph
from ..layout import DSV4, DSV41_FOOTER, SUB_PAGE, PageLayout
from ..reference import split as reference
from ..targets.base import Support, Target
from ..widths import capacity
from .compare import compare_sub_pages
from .derive import Pool, indices_of, make_pool
from .guards import noise
from .meta_batch import Buffers, make_buffers
from .meta_steps import META_STEPS, ROWS, CapturedStep
from .observe import first, frame_of, last_only

__all__ = ["Boot", "Note", "OrderLog", "run_order"]

INPLACE_ERROR = "Inplace update to inference tensor"
"""How torch's message begins when a torch-level write meets an inference tensor outside its mode."""

# By name: a patched copy of the package raises a class of its own.
STALE, REFUSED = "StaleAddressError", "GrowthDuringCaptureError"


@dataclass(frozen=True)
class Note:
    """What was seen after one step."""

    number: int
    step: Step
    inference: tuple[str, ...] = ()
    """Persistent tensors that are inference tensors."""
    persistent: int = 0
    """How many persistent tensors there are."""
    unwritable: tuple[tuple[str, str], ...] = ()
    """(name, error) of persistent tensors that refuse a torch-level write."""
    freed: tuple[str, ...] = ()
    """What a live graph recorded and nobody owns any more."""
    allocated_in_capture: tuple[str, ...] = ()
    """Persistent tensors that came into being, or moved, during a capture."""
    shared: tuple[str, ...] = ()
    """Memory used under two keys that must not share, or not shared under one key."""
    wrong: str = ""
    """What was wrong with the bytes of a split or a replay."""
    values: str = ""
    """What was wrong with the rows and lengths of a metadata build."""
    view: str = ""
    """What was wrong with the view it returned."""
    stride: str = ""
    """What was wrong with its row stride, or with the rows a graph read through another one."""
    route: str = ""
    """What FlashInfer would say of it."""
    replayed: str = ""
    """How a replay differs from an eager call on the same inputs."""
    refused: str = ""
    """A typed refusal to allocate during capture."""
    error: BaseException | None = None
    """What the target raised otherwise; the boot ends there."""


@dataclass
class OrderLog:
    """The notes of one boot, in order."""

    case: OrderCase
    notes: list[Note] = field(default_factory=list)
    missing: frozenset[str] = frozenset()
    """Kinds (split, meta) of operations the target does not have: steps that need one were left out."""
    declined: str = ""
    """Why the target does none of those it has, so that a boot without an error shows nothing."""

    @property
    def error(self) -> BaseException | None:
        """What ended the boot, if something did."""
        return self.notes[-1].error if self.notes else None

    def program(self, upto: int) -> str:
        """The steps up to one, as a program on one line."""
        return "; ".join(str(note.step) for note in self.notes[: upto + 1])


@dataclass
class _Captured:
    graph: Graph
    pool: Pool
    indices: torch.Tensor
    spec: IndexSpec
    destination: StorageWeakRef
    view: tuple[int, int]
    """Byte offset and row stride of the destination."""


class Boot:
    """A target being booted: its pool, its graphs, the metadata buffers of its engine."""

    def __init__(self, target: Target, case: OrderCase) -> None:
        self.target, self.case = target, case
        self.pool: Pool | None = None
        self.graphs: list[_Captured] = []
        self.steps: list[CapturedStep] = []
        self._metadata: Buffers | None = None
        self.keys: dict[str, tuple[int, int]] = {}  # key -> (storage address, rows)
        self.serial = 0
        self.addresses: dict[str, int] = {}  # of persistent tensors, at the last probe
        self.support = {kind: self.asked(kind) for kind in ("split", "meta")}

    def new_log(self) -> OrderLog:
        """A log without notes yet."""
        missing = frozenset(k for k, answer in self.support.items() if answer.missing)
        declined = [answer.reason for k, answer in self.support.items() if k not in missing]
        served = any(self.support.values())
        return OrderLog(self.case, [], missing, "" if served or not declined else declined[0])

    def asked(self, kind: str, layout: PageLayout = DSV4, scope: str = "") -> Support:
        """Whether the target has the operation a step needs."""
        return self.target.supports(_Asked(kind, layout.name, scope, self.case.page_size), None)

    def take(self, do: str, step: Step) -> dict[str, Any]:
        """Do what a step does; what the target does not have is left out, what it declines raises."""
        kind = _NEEDS.get(do)
        if kind is None or self.support[kind]:
            return _STEPS[do](self, step)
        if not self.support[kind].missing:
            raise UnavailableError(f"step {do}", self.support[kind].reason, "Judge another case.")
        if kind == "split":
            getattr(self.target, "touch", lambda: None)()  # what else a run of the model allocates
        return {}

    def loaded(self) -> Pool:
        if self.pool is None:
            self.pool = self.make(2)
        return self.pool

    def metadata(self) -> Buffers:
        """The engine's buffers for C128A rows, allocated once."""
        if self._metadata is None:
            with torch.inference_mode(False):
                self._metadata = make_buffers(ROWS, capacity(self.case.max_model_len), self.case.seed)
        return self._metadata

    def make(self, pages: int, layout: PageLayout = DSV4) -> Pool:
        self.serial += 1
        with torch.inference_mode(False):  # the pool is the engine's, made when it loads
            return make_pool(layout, self.case.page_size, pages, seed=self.case.seed + self.serial)

    def spec(self, arg: int) -> IndexSpec:
        case = self.case
        return IndexSpec(rows=case.rows, width=case.width, kinds=("valid", "minus_one"), seed=arg + case.seed)

    def indices(self, pool: Pool, arg: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return indices_of(self.spec(arg), pool.geometry.tokens, self.case.page_size)

    def split(self, pool: Pool, indices: torch.Tensor | None, scope: str = "") -> torch.Tensor:
        return self.target.split(
            pool.view, self.case.page_size, indices, None, layout=pool.geometry.layout, scope=scope
        )

    def check(self, pool: Pool, indices: torch.Tensor | None, rows: torch.Tensor) -> str:
        """Wrong bytes of touched sub-pages, or "". ``rows`` is the destination, ``[n, stride]``."""
        geometry, plain = pool.geometry, pool.bytes.cpu()
        if indices is None:
            touched = set(range(geometry.sub_pages))
        else:
            touched = reference.touched_sub_pages(indices.cpu(), None, geometry.pages, geometry.page_size)
        want = reference.split(plain, geometry)
        diff = compare_sub_pages(geometry.layout, geometry.page_size, rows.cpu(), want, touched)
        return "" if diff is None else str(diff)

    def keyed(self, key: str, result: torch.Tensor) -> tuple[str, ...]:
        """Complaints about what memory this key uses, against what the others use."""
        address = result.untyped_storage().data_ptr()
        rows = result.untyped_storage().nbytes()
        complaints = [
            f"{key} uses the memory of {other}"
            for other, (taken, _) in self.keys.items()
            if other != key and taken == address
        ]
        mine = self.keys.get(key)
        if mine is not None and mine[0] != address and mine[1] >= rows and mine[1] >= result.shape[0]:
            complaints.append(f"{key} moved to other memory without growing")
        self.keys[key] = (address, rows)
        return tuple(complaints)

    def do(self, number: int, step: Step) -> Note:
        """Take one step, and note what is seen after it."""
        seen: dict[str, Any] = {}
        try:
            with torch.inference_mode(step.inference), self.target.pretend_device(self.case.capability):
                seen = self.take(step.do, step)
        except Exception as error:
            seen = {"refused": str(error)} if type(error).__name__ == REFUSED else {"error": error}
        return Note(number, step, **(_probe(self) | seen))

    def close(self) -> None:
        """Drop every graph."""
        for graph in [*(held.graph for held in self.graphs), *(held.graph for held in self.steps)]:
            graph.drop()
        self.graphs.clear()
        self.steps.clear()


@last_only
def run_order(target: Target, case: OrderCase) -> OrderLog:
    """Boot the target along ``case.steps``; stops after a step in which it raises."""
    target.reset()
    boot = Boot(target, case)
    log = boot.new_log()
    try:
        for number, step in enumerate(case.steps):
            log.notes.append(boot.do(number, step))
            if log.error is not None:
                break
    finally:
        boot.close()
    return log


def _probe(boot: Boot) -> dict[str, Any]:
    """What is asked of every persistent tensor and every live graph, changing no byte."""
    tensors = dict(boot.target.persistent())
    unwritable = []
    for name, tensor in tensors.items():
        try:
            with torch.inference_mode(False):
                tensor[:0].zero_()
        except RuntimeError as error:
            unwritable.append((name, str(error).split(".")[0]))
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if boot.graphs and addresses != boot.addresses:
        _collect()
    boot.addresses = addresses
    freed = []
    for n, held in enumerate(boot.graphs):
        if held.destination.expired():
            freed.append(f"the split destination of graph {n}")
        freed += [
            f"{a.nbytes:,} bytes that {a.step} of graph {n} recorded"
            for a in held.graph.addresses() or ()
            if not a.alive
        ]
    return {
        "inference": tuple(name for name, tensor in tensors.items() if tensor.is_inference()),
        "unwritable": tuple(unwritable),
        "persistent": len(tensors),
        "freed": tuple(freed),
    }


_frozen = False


def _collect() -> None:
    """Break the reference cycles in which the interpreter leaves the storages of a launch.

    Only then does freed memory count as freed. What exists at the first call is set aside: later collections
    look at this boot's objects only.
    """
    global _frozen
    gc.collect()
    if not _frozen:
        _frozen = True
        gc.freeze()
        atexit.register(gc.unfreeze)  # what is frozen at exit would be reported as leaked


def _load(boot: Boot, step: Step) -> dict[str, Any]:
    boot.pool = boot.make(1 + step.arg % 4)
    return {}


def _split(boot: Boot, step: Step) -> dict[str, Any]:
    pool = boot.loaded()
    indices = boot.indices(pool, step.arg)
    result = boot.split(pool, indices)
    rows = frame_of(result).rows()
    return {"wrong": boot.check(pool, indices, rows), "shared": boot.keyed("the first scope", result)}


def _autotune(boot: Boot, step: Step) -> dict[str, Any]:
    """What a dummy run touches: the split, and a metadata build."""
    return boot.take("build", step) | boot.take("split", step)


def _grow(boot: Boot, step: Step) -> dict[str, Any]:
    pages = boot.loaded().geometry.pages + 1 + step.arg % 3
    boot.pool = boot.make(pages)
    return _split(boot, step)


def _torch_write(boot: Boot, step: Step) -> dict[str, Any]:
    for tensor in boot.target.persistent().values():
        tensor[:0].zero_()
    return {}


def _reserve(boot: Boot, step: Step) -> dict[str, Any]:
    pool = boot.loaded()
    boot.target.reserve_split(pool.view, boot.case.page_size, layout=pool.geometry.layout)
    return {}


def _capture(boot: Boot, step: Step) -> dict[str, Any]:
    pool = boot.loaded()
    indices = boot.indices(pool, step.arg)
    before = {name: t.data_ptr() for name, t in boot.target.persistent().items()}
    made: list[tuple[StorageWeakRef, tuple[int, int]]] = []

    def work() -> None:
        result = boot.split(pool, indices)
        frame = frame_of(result)
        made.append((StorageWeakRef(result.untyped_storage()), (frame.start, frame.stride)))

    graph = boot.target.capture(work)
    after = boot.target.persistent()
    moved = tuple(name for name, t in after.items() if before.get(name) != t.data_ptr() and t.numel())
    weak, view = made[-1]
    boot.graphs.append(_Captured(graph, pool, indices, boot.spec(step.arg), weak, view))
    return {"allocated_in_capture": moved}


def _replay(boot: Boot, step: Step) -> dict[str, Any]:
    if not boot.graphs:
        return {}
    held = boot.graphs[step.arg % len(boot.graphs)]
    storage = torch.UntypedStorage._new_with_weak_ptr(held.destination.cdata)
    if storage is None:
        return {}  # the probe says so; replaying would write into freed memory
    boot.serial += 1
    pool = held.pool
    pool.bytes.copy_(
        noise(pool.bytes.numel(), boot.case.seed + boot.serial, pool.bytes.device).view(pool.bytes.shape)
    )
    spec = held.spec.model_copy(update={"seed": step.arg + boot.serial})
    held.indices.copy_(indices_of(spec, pool.geometry.tokens, boot.case.page_size))
    raw = torch.empty(0, dtype=torch.uint8, device=pool.bytes.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
    start, stride = held.view
    count = (raw.numel() - start) // stride
    rows = raw[start : start + count * stride].view(count, stride)
    rows[:, : SUB_PAGE * pool.geometry.layout.bytes_per_token] = 0
    held.graph.replay()
    wrong = boot.check(pool, held.indices, rows)
    extra = _more_than_touched(held, rows.cpu()) if getattr(boot.target, "splits_touched", True) else ""
    return {"wrong": wrong, "replayed": wrong or extra}


def _more_than_touched(held: _Captured, rows: torch.Tensor) -> str:
    """Sub-pages a replay wrote that an eager call on the same inputs leaves alone."""
    geometry = held.pool.geometry
    pages = reference.touched_pages(held.indices.cpu(), None, geometry.pages, geometry.page_size)
    ratio = geometry.sub_pages_per_page
    written = rows[:, : geometry.layout.payload(SUB_PAGE)].any(dim=1).nonzero().flatten().tolist()
    extra = [sub for sub in written if sub // ratio not in pages]
    return f"the replay split sub-pages {first(extra)}, of pages its indices do not touch" if extra else ""


def _drop_graph(boot: Boot, step: Step) -> dict[str, Any]:
    held: list[_Captured | CapturedStep] = [*boot.graphs, *boot.steps]
    if held:
        chosen = held[step.arg % len(held)]
        boot.graphs = [g for g in boot.graphs if g is not chosen]
        boot.steps = [s for s in boot.steps if s is not chosen]
        chosen.graph.drop()
    return {}


def _second(key: str, layout: PageLayout = DSV4, scope: str = "") -> Callable[[Boot, Step], dict[str, Any]]:
    def step_(boot: Boot, step: Step) -> dict[str, Any]:
        pool = boot.make(1 + step.arg % 2, layout)
        pretend: Any = contextlib.nullcontext()
        if key == "the second device":
            pretend = boot.target.second_device()
            if pretend is None:
                return {}
        with pretend:
            if not boot.asked("split", layout, scope):
                return {}
            indices = boot.indices(pool, step.arg)
            result = boot.split(pool, indices, scope)
            rows = frame_of(result).rows()
            return {"wrong": boot.check(pool, indices, rows), "shared": boot.keyed(key, result)}

    return step_


@dataclass(frozen=True)
class _Asked:
    """What a step needs: a target is asked whether it has it, and not about any one case."""

    kind: str
    layout: str
    scope: str
    page_size: int


def _restart(boot: Boot, step: Step) -> dict[str, Any]:
    boot.close()
    boot.keys.clear()
    boot.target.reset()
    return {}


_STEPS: dict[str, Callable[[Boot, Step], dict[str, Any]]] = {
    "load": _load,
    "split": _split,
    "warm_up": _split,
    "torch_write": _torch_write,
    "reserve": _reserve,
    "capture": _capture,
    "replay": _replay,
    "grow": _grow,
    "drop_graph": _drop_graph,
    "second_device": _second("the second device"),
    "second_layout": _second("the second layout", DSV41_FOOTER),
    "second_scope": _second("the second scope", scope="second"),
    "restart": _restart,
    "autotune": _autotune,
    **META_STEPS,
}

_NEEDS = {
    **dict.fromkeys(("split", "warm_up", "grow", "reserve", "capture"), "split"),
    **dict.fromkeys(("second_device", "second_layout", "second_scope"), "split"),
    **dict.fromkeys(META_STEPS, "meta"),
}
"""The kind of case a target must serve for a step; ``autotune`` takes one of each."""
