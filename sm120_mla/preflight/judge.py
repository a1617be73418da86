"""Each launch of a configuration, the kernel it reaches, and the smallest change where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..contract import DECODE_MAX_ROWS
from ..envelopes import ENVELOPES, NOT_SERVED, VERSIONS, Plan, for_version, plan
from ..errors import ArgumentError
from ..layout import by_name as layout_by_name
from ..own_envelopes import reference, triton, triton_programs
from . import engines
from .handed import Verdict, handed
from .launches import Cache, Launch, Setup, draft_width, launches

__all__ = ["BACKENDS", "Change", "Report", "Request", "Row", "judge", "preflight", "verdict"]

BACKENDS = {
    "flashinfer": "the engine calls FlashInfer, as it does by default",
    "sm120-mla": "the engine calls this project: FlashInfer with rows padded and pages split, else Triton",
    "triton": "this project's Triton kernel",
    "reference": "this project's reference: right and slow",
    "flashmla": "FlashMLA's CUDA kernels, which sglang and vLLM take on other GPUs",
}
"""Who runs the launches."""

_Side = tuple[str, str, bool]
"""``Launch.side``."""

_FLASHMLA_MAJORS = (9, 10)
_LANE = 16


@dataclass(frozen=True)
class Request:
    """What is asked: a configuration, the GPU it is for, and who runs its launches."""

    setup: Setup
    backend: str = "flashinfer"
    capability: tuple[int, int] = (12, 0)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ArgumentError("backend", repr(self.backend), f"one of {', '.join(BACKENDS)}", "Correct it.")
        release = self.setup.flashinfer.split("+")[0]
        if release not in NOT_SERVED:
            for_version(release)


@dataclass(frozen=True)
class Row:
    """One launch and where it goes."""

    launch: Launch
    verdict: Verdict


@dataclass(frozen=True)
class Change:
    """One change of a request. ``apply`` gives the changed request."""

    kind: str
    """``flashinfer``, ``engine``, ``width``, ``tp``, ``batch``, ``block`` or ``backend``."""
    text: str
    request: Request

    def apply(self) -> Request:
        """The request with the change made."""
        return self.request


@dataclass(frozen=True)
class Report:
    """``changes``: for each kind of launch without a route, what gives it one, smallest first; two changes
    where one is not enough. ``whole``: those that give every launch one.
    """

    request: Request
    rows: tuple[Row, ...]
    changes: tuple[tuple[tuple[str, str, bool], tuple[Change, ...]], ...]
    whole: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        """Whether every launch has a route."""
        return all(row.verdict for row in self.rows)

    def remedies(self, launch: Launch) -> tuple[Change, ...]:
        """Changes that give launches of that kind a route."""
        return dict(self.changes).get(launch.side, ())


def verdict(request: Request, launch: Launch) -> Verdict:
    """Where one launch goes."""
    setup, capability = request.setup, request.capability
    if request.backend == "triton":
        return _triton(launch, capability)
    if request.backend == "reference":
        refused = reference(launch.layout)
        if refused is None:
            return Verdict("ok", "reference")
        return Verdict("refused", "", refused.argument, str(refused.value), refused.expected)
    if request.backend == "flashmla":
        if capability[0] in _FLASHMLA_MAJORS:
            return Verdict("ok", "flashmla")
        expected = "9.0 or 10.x, for which FlashMLA is compiled (SM90a, SM100f)"
        return Verdict("refused", "", "capability", _text(capability), expected)
    if capability[0] != 12:
        if request.backend == "sm120-mla":
            return _triton(launch, capability)
        expected = "12.x, for which FlashInfer's SM120 kernels are compiled"
        return Verdict("refused", "", "capability", _text(capability), expected)
    if request.backend == "sm120-mla":
        return _own(setup, launch, capability)
    if launch.layout == "dsv32" and setup.engine.dsa_glm_only and not setup.model.glm:
        expected = "a GLM DSA model: the engine hands no other one of this layout to FlashInfer"
        return Verdict("refused", "", "model", setup.model.name, expected)
    found = handed(setup.flashinfer, launch, setup.engine.public_api and launch.layout == "dsv4")
    if found or not setup.engine.falls_back or launch.most <= DECODE_MAX_ROWS:
        return found
    return Verdict("ok", f"{setup.engine.name} triton")


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _triton(launch: Launch, capability: tuple[int, int]) -> Verdict:
    refused = triton(launch.layout, capability, triton_programs(launch.most, launch.heads))
    if refused is None:
        return Verdict("ok", "triton")
    return Verdict("refused", "", refused.argument, str(refused.value), refused.expected)


@dataclass(frozen=True)
class _CacheNumbers:
    page_size: int
    pages: int
    page_stride: int
    width: int
    lane_bytes: int = _LANE


@dataclass(frozen=True)
class _CallNumbers:
    layout: str
    tokens: int
    heads: int
    main: _CacheNumbers
    extra: _CacheNumbers | None
    scale: float = 512**-0.5


def _own(setup: Setup, launch: Launch, capability: tuple[int, int]) -> Verdict:
    """The route of ``sparse_mla``: FlashInfer where its plan serves the call, else Triton."""
    if setup.flashinfer.split("+")[0] not in NOT_SERVED and launch.layout == "dsv4":
        call = _CallNumbers(
            launch.layout,
            launch.most,
            launch.heads,
            _numbers(launch.main),
            None if launch.extra is None else _numbers(launch.extra),
        )
        served = plan(for_version(setup.flashinfer), call)
        if isinstance(served, Plan):
            padded = f", padded to {served.main_width}" if served.main_width != call.main.width else ""
            cut = ", split" if served.split_main or served.split_extra else ""
            return Verdict("ok", f"flashinfer {served.kernel}{padded}{cut}")
    return _triton(launch, capability)


def _numbers(cache: Cache) -> _CacheNumbers:
    stride = layout_by_name("dsv4").default_stride(cache.pool_page)
    return _CacheNumbers(cache.pool_page, 1, stride, max(cache.widths))


def judge(request: Request) -> tuple[Row, ...]:
    """Every launch with its verdict."""
    return tuple(Row(launch, verdict(request, launch)) for launch in launches(request.setup))


def preflight(request: Request) -> Report:
    """Every launch with its verdict, and for those without a route what gives them one."""
    rows = judge(request)
    bad = tuple(dict.fromkeys(row.launch.side for row in rows if not row.verdict))
    if not bad:
        return Report(request, rows, (), ())
    tried = list(_tried(_candidates(request)))
    if not all(any(_helps(side, after) for _, after in tried) for side in bad):
        tried += _tried(_pairs(request))
    changes = tuple((side, tuple(c for c, after in tried if _helps(side, after))) for side in bad)
    return Report(request, rows, changes, tuple(c for c, after in tried if all(after.values())))


def _tried(candidates: Iterator[Change]) -> Iterator[tuple[Change, dict[_Side, bool]]]:
    """Each change with the launches that there are after it, and whether all of a side have a route."""
    for change in candidates:
        try:
            rows = judge(change.apply())
        except ArgumentError:  # no engine starts so
            continue
        after: dict[_Side, bool] = {}
        for row in rows:
            after[row.launch.side] = after.get(row.launch.side, True) and bool(row.verdict)
        yield change, after


def _helps(side: _Side, after: dict[_Side, bool]) -> bool:
    """Whether the launches of a side have a route: where there are none left, those they have become."""
    what, layer, many = side
    return after.get(side, after.get((what, layer, not many), True))


def _pairs(request: Request) -> Iterator[Change]:
    """A later release or another backend, and one change more."""
    for first in _candidates(request):
        if first.kind in ("flashinfer", "backend"):
            for second in _candidates(first.request):
                if second.kind != first.kind:
                    yield Change(second.kind, f"{first.text} and {second.text}", second.request)


def _candidates(request: Request) -> Iterator[Change]:
    """Single changes worth trying, smallest first."""
    setup = request.setup

    def changed(kind: str, text: str, **fields: Any) -> Iterator[Change]:
        try:
            yield Change(kind, text, replace(request, setup=replace(setup, **fields)))
        except ArgumentError:
            return

    if request.backend == "flashinfer":
        for release in _newer(setup.flashinfer):
            yield from changed("flashinfer", f"FlashInfer {release}", flashinfer=release)
        for row in engines.CHANGES:
            fields = {name: after for name, _, after in row.fields}
            now = {name: getattr(setup.engine, name) for name in fields}
            if row.engine == setup.engine.name and fields != now:
                engine = replace(setup.engine, **fields)
                yield from changed("engine", f"{setup.engine.name} with {row.name}", engine=engine)
        if setup.speculation.scheme == "dspark":
            for width in _served_widths(setup.flashinfer):
                if width > draft_width(setup):
                    yield from changed("width", f"draft rows padded to {width} columns", draft_width=width)
        for tp in sorted((1, 2, 4, 8, 16), key=lambda n: (abs(n - setup.tp), n)):
            if tp != setup.tp:
                yield from changed("tp", f"TP {tp}", tp=tp)
        per = 1 + setup.speculation.tokens
        few = DECODE_MAX_ROWS // per * setup.dp
        if 0 < few < setup.max_batch:
            yield from changed("batch", f"at most {few} requests at once", max_batch=few)
        for block in (64, 128, 256):
            if block != setup.block_size:
                yield from changed("block", f"blocks of {block} tokens", block=block)
    for backend in BACKENDS:
        if backend != request.backend:
            yield Change("backend", f"backend {backend}", replace(request, backend=backend))
    for other in engines.ENGINES:
        if other.name != setup.engine.name and request.backend == "flashinfer":
            yield from changed("engine", f"{other.name} instead", engine=other)


def _newer(version: str) -> list[str]:
    """The first release of each later generation; all of them after one that is not served."""
    first = {name: next(r for r, g in VERSIONS.items() if g == name) for name in (e.name for e in ENVELOPES)}
    release = version.split("+")[0]
    now = [e.name for e in ENVELOPES].index(VERSIONS[release]) if release in VERSIONS else -1
    after = [first[e.name] for e in ENVELOPES[now + 1 :]]
    return [r for r in after if _number(r) > _number(release)]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3])


def _served_widths(version: str) -> tuple[int, ...]:
    if version.split("+")[0] not in VERSIONS:
        return ()
    return for_version(version).decode_widths or ()
