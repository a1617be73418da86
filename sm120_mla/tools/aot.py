"""``sm120-mla aot``: every launch configuration compiled for SM120 with no GPU, and held to its budgets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from ..errors import ArgumentError, UnavailableError
from ..kernels.spec import CompileSpec
from . import aot_child, aot_report, exits
from .aot_report import Report, Row
from .suite import prepare

__all__ = ["Wanted", "judge_report", "show_aot", "toolchain"]


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for. ``format``: table, json or markdown; ``workers``: None is the cores."""

    target: str = "own"
    kernels: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    baseline: Path | None = None
    format: str = "table"
    workers: int | None = None
    timeout_s: float = 1800.0


def show_aot(wanted: Wanted) -> int:
    """Compile, judge and print; see ``judge_report`` for the exit code.

    Raises ``ArgumentError`` for a kernel or target that is none and a baseline that cannot be read,
    ``UnavailableError`` where the assembler is missing or the target has nothing to compile.
    """
    baseline = aot_report.load_baseline(wanted.baseline) if wanted.baseline else None
    prepare(None)
    from .. import targets

    target = targets.resolve(wanted.target)
    specs = choose(target.compile_specs(), wanted)
    if not specs:
        raise UnavailableError(
            f"a compile report on {target.name}", "it names no launch configuration", "Use --target own."
        )
    versions = toolchain()
    started = time.monotonic()
    rows = compile_rows(specs, target.compile_origin(), wanted)
    report = Report(target.name, versions, rows, time.monotonic() - started)
    if baseline:
        report = replace(report, gap=aot_report.gap(baseline, versions, rows, wanted_rows(wanted)))
    if wanted.format == "json":
        print(json.dumps(report.as_dict(), indent=2))
    elif wanted.format == "markdown":
        print(aot_report.markdown(report))
    else:
        aot_report.show(Console(), report)
    return judge_report(report)


def judge_report(report: Report) -> int:
    """1 if a budget is broken, else 125 if anything could not be judged, else 0."""
    if report.broken:
        return exits.VIOLATED
    return exits.NOTHING_JUDGED if report.unknown or not report.rows else exits.HELD


def wanted_rows(wanted: Wanted) -> Any:
    """Whether (configuration, kernel, function, target) is asked for."""
    archs = {_arch(arch) for arch in wanted.archs}

    def asked(name: str, kernel: str, function: str, target: str) -> bool:
        if archs and target not in {f"sm_{arch}" for arch in archs}:
            return False
        return not wanted.kernels or any(
            k in (name, kernel, function) or name.startswith(f"{k}/") or name.startswith(f"{k}.")
            for k in wanted.kernels
        )

    return asked


def _arch(text: str) -> int:
    found = re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?|(\d{1,2})\.(\d)[af]?", text)
    if found is None:
        raise ArgumentError("arch", repr(text), "a target such as sm_120", "Correct it.")
    return int(found[1] or found[2] + found[3])


def choose(specs: Sequence[CompileSpec], wanted: Wanted) -> tuple[CompileSpec, ...]:
    """The configurations asked for, each for the targets asked for, sorted by kernel.

    Raises ``ArgumentError`` where a name or a target matches none of them.
    """
    known = sorted({capability for spec in specs for capability in spec.capabilities})
    for arch in wanted.archs:
        if specs and _arch(arch) not in known:
            listed = ", ".join(f"sm_{capability}" for capability in known)
            raise ArgumentError("arch", repr(arch), f"one of {listed}", "Correct it.")
    for name in wanted.kernels:
        one = wanted_rows(replace(wanted, kernels=(name,), archs=()))
        if specs and not any(one(s.name, _kernel(s), s.function, "") for s in specs):
            listed = ", ".join(sorted({_kernel(spec) for spec in specs}))
            raise ArgumentError(
                "kernel", repr(name), f"one of {listed}, a function or a configuration", "Correct it."
            )
    asked = wanted_rows(wanted)
    chosen = []
    for spec in specs:
        targets = tuple(
            c for c in spec.capabilities if asked(spec.name, _kernel(spec), spec.function, f"sm_{c}")
        )
        if targets:
            chosen.append(replace(spec, capabilities=targets))
    return tuple(sorted(chosen, key=lambda spec: spec.module))


def _kernel(spec: CompileSpec) -> str:
    return spec.module.removeprefix("kernels.")


def compile_rows(
    specs: Sequence[CompileSpec], origin: tuple[str, str | None], wanted: Wanted
) -> tuple[Row, ...]:
    """Compile in as many processes as asked for, with a bar on a terminal, and judge each result."""
    from ..testing import compile_check

    total = sum(len(spec.capabilities) for spec in specs)
    workers = min(wanted.workers or _cores(), total)
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compile", total=total)
        results = compile_check.compile_all(
            specs,
            package=origin[0],
            path=origin[1],
            timeout_s=wanted.timeout_s,
            workers=workers,
            on_result=lambda result: bar.advance(task),
        )
    rows = []
    remaining = iter(results)
    for spec in specs:
        for _ in spec.capabilities:
            result = next(remaining)
            problems = () if result.unknown else tuple(compile_check.judge(result, spec))
            rows.append(Row(spec, result, problems))
    return tuple(rows)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def toolchain() -> dict[str, str]:
    """Versions of Triton, of the assembler it uses for SM120, and of the reader of resource usage.

    Raises ``UnavailableError`` where the assembler cannot be run: nothing could be judged.
    """
    try:
        found = {"triton": version("triton")}
    except PackageNotFoundError as error:
        raise UnavailableError("triton", "it is not installed", "Run: pip install triton.") from error
    for name in ("ptxas-blackwell", "cuobjdump"):
        path = aot_child.tool_path(name)
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            if name == "cuobjdump":  # the assembler is asked instead
                found[name] = "none"
                continue
            raise UnavailableError(
                "ptxas",
                f"{path}: {error}",
                "Reinstall triton, or set TRITON_PTXAS_BLACKWELL_PATH to a ptxas of CUDA 12.8 or later.",
            ) from error
        number = re.search(r"\bV([\d.]+)", done.stdout)
        found[name] = number[1] if number else "unknown"
    return found
