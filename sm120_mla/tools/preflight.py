"""``sm120-mla preflight``: which kernel each launch of a configuration reaches, or why none does."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..envelopes import NOT_SERVED, VERSIONS
from ..errors import ArgumentError
from ..preflight import engines as engine_rows
from ..preflight import matrix as many
from ..preflight import models
from ..preflight.hazards import Hazard, hazards
from ..preflight.judge import BACKENDS, Report, Request, Row, preflight
from ..preflight.launches import Cache, Launch, Setup, Speculation
from ..widths import positive
from . import exits

__all__ = ["Asked", "show_preflight"]

_LONGEST = 262_144
_NEWEST = list(VERSIONS)[-1]
_SHOWN = 3
_DIGITS = 18


@dataclass(frozen=True)
class Asked:
    """The options of the command, as typed. Lists are separated by commas; empty: the default."""

    model: str = "deepseek-v4-flash"
    engine: str = ""
    tp: str = ""
    dp: int = 1
    speculative: str = ""
    flashinfer: str = ""
    backend: str = "flashinfer"
    capability: str = "12.0"
    max_batch: int = 64
    max_model_len: int | None = None
    prefill_chunk: int = 8192
    graph_sizes: str = ""
    block_size: int | None = None
    draft_width: int | None = None
    without: tuple[str, ...] = ()
    carrying: tuple[str, ...] = ()


def show_preflight(asked: Asked, as_json: bool, matrix: bool, as_markdown: bool, listing: bool) -> int:
    """Print the table, the matrix or the list of names; 1 where a launch has no route.

    Raises ``ArgumentError`` for what cannot be asked.
    """
    if listing:
        return _show_names(as_json)
    if as_markdown and not matrix:
        raise ArgumentError("--markdown", "given", "--matrix as well", "Add --matrix.")
    return _show_matrix(asked, as_json, as_markdown) if matrix else _show_one(asked, as_json)


def _show_one(asked: Asked, as_json: bool) -> int:
    model = _model(asked.model)
    tp, speculative = _one("tp", asked.tp or "1"), asked.speculative or "none"
    engine = engine_rows.by_name(asked.engine or "vllm", asked.without, asked.carrying)
    release = asked.flashinfer or _installed()
    scheme = Speculation.parse(speculative, model)
    if asked.draft_width is not None and scheme.scheme != "dspark":
        raise ArgumentError(
            "draft-width", asked.draft_width, "--speculative dspark:K with it", "Leave it out."
        )
    request = _request(asked, model, engine, tp, scheme, release)
    report = preflight(request)
    found = hazards(request, report.rows)
    if as_json:
        print(json.dumps(_as_json(report, found), indent=2))
    else:
        _print(report, found)
    return exits.HELD if report.ok else exits.VIOLATED


def _show_matrix(asked: Asked, as_json: bool, as_markdown: bool) -> int:
    model = _model(asked.model)
    names = [asked.engine] if asked.engine else [row.name for row in engine_rows.ENGINES]
    rows = [engine_rows.by_name(name, asked.without, asked.carrying) for name in names]
    tp = tuple(positive("tp", _one("tp", part)) for part in _parts(asked.tp)) or many.TP
    schemes = tuple(Speculation.parse(part, model) for part in _parts(asked.speculative)) or many.SPECULATION
    releases = tuple(_parts(asked.flashinfer)) or many.FLASHINFER
    first = next((size for size in tp if model.heads % size == 0), 1)
    base = _request(asked, model, rows[0], first, schemes[0], releases[0])
    lines = many.matrix(base, rows, tp, schemes, releases)
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    elif as_markdown:
        print(many.markdown(lines, tp), end="")
    else:
        _print_matrix(lines, tp, base)
    states = {cell.state for line in lines for cell in line.cells}
    if "no" in states:
        return exits.VIOLATED
    return exits.HELD if "yes" in states else exits.NOTHING_JUDGED


def _request(
    asked: Asked,
    model: models.Model,
    engine: engine_rows.Engine,
    tp: int,
    speculation: Speculation,
    release: str,
) -> Request:
    longest = min(model.max_position or _LONGEST, _LONGEST)
    setup = Setup(
        model=model,
        engine=engine,
        tp=tp,
        dp=asked.dp,
        max_batch=asked.max_batch,
        max_model_len=longest if asked.max_model_len is None else asked.max_model_len,
        speculation=speculation,
        prefill_chunk=asked.prefill_chunk,
        graph_sizes=tuple(_one("graph-sizes", p) for p in _parts(asked.graph_sizes)) or None,
        block=asked.block_size,
        draft_width=asked.draft_width,
        flashinfer=release,
    )
    return Request(setup, asked.backend, _capability(asked.capability))


def _model(name: str) -> models.Model:
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return models.read_config(path)
    return models.by_name(name)


def _installed() -> str:
    """The installed release of FlashInfer, else the newest that is known."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return _NEWEST


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _one(name: str, text: str) -> int:
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise ArgumentError(
            name, repr(text), "a number", "Several need --matrix." if "," in text else "Correct it."
        )
    return int(text)


def _capability(text: str) -> tuple[int, int]:
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isdecimal() and len(part) < 4 for part in parts):
        raise ArgumentError("capability", repr(text), "a capability such as 12.0", "Correct it.")
    return int(parts[0]), int(parts[1])


# ---- what is printed


def _print(report: Report, found: tuple[Hazard, ...]) -> None:
    request, setup = report.request, report.request.setup
    title = (
        f"{setup.model.name}, {setup.engine.name}, TP {setup.tp}, {_speculation(setup)}, "
        f"FlashInfer {setup.flashinfer}, backend {request.backend}"
    )
    table = Table(
        title=escape(title), caption="a cache as columns x tokens a page (page size before the split)"
    )
    for column in ("launch", "rows", "heads", "main cache", "second cache", "route"):
        table.add_column(column, overflow="fold")
    for row in report.rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    for row in report.rows:
        if not row.verdict:
            console.print(
                f"[red]no route[/red] {escape(_fault(report, row))}", highlight=False, soft_wrap=True
            )
    console.print(escape(_summary(report)), highlight=False, soft_wrap=True)
    for hazard in found:
        text = f"{hazard.id} ({hazard.argument}; {hazard.where}): {hazard.text}. Remedy: {hazard.remedy}."
        console.print(escape(f"also {text} [{hazard.reference}]"), highlight=False, soft_wrap=True)
    unknown = models.UNKNOWN.get(setup.model.name, ())
    if unknown:
        text = f"not known of {setup.model.name}: {', '.join(unknown)}; nothing was assumed"
        console.print(text, highlight=False, soft_wrap=True)


def _speculation(setup: Setup) -> str:
    said = str(setup.speculation)
    return "no speculation" if said == "none" else said


def _cells(row: Row) -> tuple[str, ...]:
    launch, verdict = row.launch, row.verdict
    shown = (
        _name(launch),
        _rows(launch),
        str(launch.heads),
        _cache(launch.main),
        "" if launch.extra is None else _cache(launch.extra),
    )
    if verdict:
        return (*shown, f"[green]{escape(verdict.route)}[/green]")
    return (*shown, "[red]none[/red]" if verdict.state == "refused" else "[red]none: wrong bytes[/red]")


def _fault(report: Report, row: Row) -> str:
    launch, verdict = row.launch, row.verdict
    changes = " or ".join(change.text for change in report.remedies(launch)[:_SHOWN])
    wrong = "" if verdict.state == "refused" else " (else it reads wrong bytes)"
    fault = f"{verdict.argument} {verdict.value}: takes {verdict.expected}{wrong}"
    return f"{_name(launch)}, {_rows(launch)} rows: {fault}. Change: {changes or 'none known'}"


def _name(launch: Launch) -> str:
    return f"{launch.phase}: {launch.what} {launch.layer}"


def _rows(launch: Launch) -> str:
    return str(launch.least) if launch.least == launch.most else f"{launch.least}-{launch.most}"


def _cache(cache: Cache) -> str:
    least, most = min(cache.widths), max(cache.widths)
    width = str(most) if least == most else f"{least}-{most}"
    page = f"{cache.page}" if cache.page == cache.pool_page else f"{cache.page} ({cache.pool_page})"
    apart = f", rows {cache.row_stride} apart" if cache.row_stride else ""
    return f"{width} x {page}{apart}"


def _summary(report: Report) -> str:
    lacking = sum(1 for row in report.rows if not row.verdict)
    if not lacking:
        return f"all {len(report.rows)} launches have a route"
    said = f"{lacking} of {len(report.rows)} launches have no route"
    if not report.whole:
        return f"{said}; no single change gives all of them one"
    return f"{said}; any one of these gives all of them one: {'; '.join(c.text for c in report.whole)}"


def _print_matrix(lines: Sequence[many.Line], tp: Sequence[int], base: Request) -> None:
    setup = base.setup
    about = f"batch {setup.max_batch}, {setup.max_model_len:,} tokens, prefill {setup.prefill_chunk:,}"
    table = Table(title=escape(f"{setup.model.name}: {about}, backend {base.backend}"))
    for column in ("engine", "speculation", "FlashInfer", *(f"TP {size}" for size in tp)):
        table.add_column(column, overflow="fold")
    for line in lines:
        cells = [
            f"[red]{escape(str(cell))}[/red]" if cell.state == "no" else f"[green]{cell}[/green]"
            for cell in line.cells
        ]
        table.add_row(line.engine, line.speculation, line.flashinfer, *cells)
    console = Console()
    console.print(table)
    if any(cell.hangs for line in lines for cell in line.cells):
        console.print("* served, but prefill may hang: FlashInfer issue 3700, mended in 0.6.18")


def _show_names(as_json: bool) -> int:
    known = {
        "models": [model.name for model in models.MODELS],
        "engines": [engine.name for engine in engine_rows.ENGINES],
        "FlashInfer": [*VERSIONS, *NOT_SERVED],
        "backends": [f"{name}: {what}" for name, what in BACKENDS.items()],
        "--without": [f"{c.name}: {c.what}" for c in engine_rows.CHANGES if c.merged],
        "--with": [f"{c.name}: {c.what}" for c in engine_rows.CHANGES if not c.merged],
    }
    if as_json:
        print(json.dumps(known, indent=2))
        return exits.HELD
    table = Table(title="what preflight knows", show_header=False)
    for name, values in known.items():
        table.add_row(name, escape("\n".join(values)))
    Console().print(table)
    return exits.HELD


def _as_json(report: Report, found: tuple[Hazard, ...]) -> dict[str, Any]:
    request, setup = report.request, report.request.setup
    return {
        "model": setup.model.name,
        "sources": dict(setup.model.sources),
        "unknown": list(models.UNKNOWN.get(setup.model.name, ())),
        "engine": setup.engine.name,
        "tp": setup.tp,
        "dp": setup.dp,
        "speculative": str(setup.speculation),
        "flashinfer": setup.flashinfer,
        "backend": request.backend,
        "capability": ".".join(map(str, request.capability)),
        "max_batch": setup.max_batch,
        "max_model_len": setup.max_model_len,
        "ok": report.ok,
        "launches": [_launch_json(report, row.launch, row) for row in report.rows],
        "changes": [change.text for change in report.whole],
        "hazards": [asdict(hazard) for hazard in found],
    }


def _launch_json(report: Report, launch: Launch, row: Row) -> dict[str, Any]:
    verdict = row.verdict
    return {
        "phase": launch.phase,
        "what": launch.what,
        "layer": launch.layer,
        "rows": [launch.least, launch.most],
        "heads": launch.heads,
        "layout": launch.layout,
        "main": asdict(launch.main),
        "extra": None if launch.extra is None else asdict(launch.extra),
        "in_capture": launch.capturing,
        "state": verdict.state,
        "route": verdict.route,
        "argument": verdict.argument,
        "value": verdict.value,
        "expected": verdict.expected,
        "says": verdict.says,
        "changes": [] if verdict else [change.text for change in report.remedies(launch)],
    }
