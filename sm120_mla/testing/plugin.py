"""The pytest plugin proper: loaded by ``sm120_mla_pytest`` in runs whose configuration asks for it.

In an xdist run every worker has it as well; ``collector`` is what only the reporting process has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from .. import settings
from ..errors import ArgumentError, UnavailableError
from . import machine, profiles, report
from .collector import Collector
from .report import Summary

_SUMMARY = pytest.StashKey[Summary]()
_RECORD = pytest.StashKey[Any]()
_MODES = {"reference": ("reference",), "cuda": ("cuda", "sm120"), "sm120": ("sm120",)}
"""Marker of a test, and the modes in which it runs."""
_SHOWN_VERSIONS = ("sm120-mla", "torch", "triton", "flashinfer-python", "hypothesis", "pytest")


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile, and where tests will run, the invariants: their markers are registered here."""
    name = config.getoption("hypothesis_profile", None) or profiles.chosen()
    profiles.load(name, config.getoption("sm120_examples"))
    summary = Summary(
        mode=machine.expected_mode(), target=_shown_target(config), profile=name, versions=_versions()
    )
    config.stash[_SUMMARY] = summary
    if not _is_worker(config):
        config.pluginmanager.register(Collector(config, summary), "sm120_mla_collector")
        if config.getoption("dist", "no") != "no" and not config.option.collectonly:
            return  # it hands out tests and runs none: no torch is needed here
    from .. import device
    from . import check, verdict

    try:
        check.ask_only(config.getoption("sm120_invariant") or ())
    except ArgumentError as error:
        raise pytest.UsageError(str(error)) from error
    summary.mode = _settled(summary.mode, device.mode())
    for name, satisfied in _MODES.items():
        config.addinivalue_line("markers", f"{name}: runs in mode {' or '.join(satisfied)} only")
    for inv in verdict.all_invariants():
        config.addinivalue_line("markers", f"{inv.marker}: {inv.id}: {inv.statement}")
        summary.catalogue.append((inv.id, inv.statement, list(inv.where)))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Mode, target, profile, versions, and every variable of ours that is set: a typo shows here."""
    summary = config.stash[_SUMMARY]
    shown = " ".join(f"{name}={value!r}" for name, value in settings.shown().items())
    return [
        f"sm120_mla: mode {summary.mode}, target {summary.target}, profile {summary.profile}",
        "sm120_mla: " + ", ".join(f"{name} {number}" for name, number in summary.versions.items()),
        f"sm120_mla: {shown}",
    ]


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Any:
    """The implementation under test, from ``--sm120-target`` or SM120_MLA_TARGET."""
    from ..targets import resolve

    try:
        return resolve(_target_name(request.config))
    except UnavailableError as error:
        pytest.skip(str(error))
    except ArgumentError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def mode() -> str:
    """``reference``, ``cuda`` or ``sm120``."""
    from .. import device

    return device.mode()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note each test's invariants, where a skip keeps them too; skip what another mode decides."""
    from . import check

    summary = config.stash[_SUMMARY]
    ids = {id.replace("-", "_"): id for id, _, _ in summary.catalogue}
    for item in items:
        marks = dict.fromkeys(ids[mark.name] for mark in item.iter_markers() if mark.name in ids)
        marks = {id: None for id in marks if check.wanted(id)}
        if marks:
            item.user_properties.append((report.MARKS, " ".join(marks)))
        for name, satisfied in _MODES.items():
            if item.get_closest_marker(name) and summary.mode not in satisfied:
                item.add_marker(pytest.mark.skip(reason=f"runs in {name} mode; this run: {summary.mode}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Collect what the test asks."""
    from . import check

    with check.collecting() as record:
        item.stash[_RECORD] = record
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the record; save the cases of a failure; turn a test that judged nothing into a skip."""
    record = item.stash.get(_RECORD, None) if call.when == "call" else None
    if record is not None:
        failures = [] if call.excinfo is None else _save_failures(item.config, call.excinfo.value)
        generated = _generated(getattr(item, "hypothesis_statistics", ""))
        if record.tallies or failures or generated:
            about = report.encode(record.tallies, failures, generated)
            item.user_properties.append((report.PROPERTY, about))
    result = yield
    if record is not None and result.passed and record.nothing_judged:
        reasons = sorted({reason for tally in record.tallies.values() for reason in tally.reasons})
        path, line, _ = item.location
        result.outcome = "skipped"
        result.longrepr = (path, (line or 0) + 1, f"Skipped: nothing was judged: {'; '.join(reasons[:3])}")
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """From a worker, send what only it knows."""
    if _is_worker(session.config):
        summary = session.config.stash[_SUMMARY]
        about = {"mode": summary.mode, "catalogue": summary.catalogue}
        session.config.workeroutput["sm120_mla"] = json.dumps(about)  # type: ignore[attr-defined]


def _save_failures(config: pytest.Config, error: BaseException) -> list[dict[str, str]]:
    """The violations a test ended with, their cases written: the shrunk ones, as it is the last try."""
    from .. import case
    from . import check

    if isinstance(error, BaseExceptionGroup):
        return [found for inner in error.exceptions for found in _save_failures(config, inner)]
    if not isinstance(error, check.Violation):
        return []
    case.save(error.file, config.rootpath / check.CASES)
    where = f"{check.CASES}/{error.file.name}"
    return [{"invariant": error.invariant.id, "text": str(error), "case": where}]


def _generated(statistics: str) -> int:
    """Examples that Hypothesis says it ran: its plugin leaves no number, but this text."""
    phases = re.findall(r"during (\w+) phase.*?(\d+) passing[ a-z]*, (\d+) failing", statistics, re.DOTALL)
    return sum(int(passing) + int(failing) for phase, passing, failing in phases if phase != "shrink")


def _settled(expected: str, mode: str) -> str:
    """The mode as torch sees it. Kernels are compiled by now, so it is too late for reference mode."""
    if mode == "reference" != expected:
        raise pytest.UsageError(
            "the driver lists a CUDA GPU, but torch sees none. Use SM120_MLA_MODE=reference, or repair CUDA."
        )
    return mode


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _target_name(config: pytest.Config) -> str:
    return str(config.getoption("sm120_target") or settings.get("SM120_MLA_TARGET"))


def _shown_target(config: pytest.Config) -> str:
    """The target's name, with the attention backend where the environment names one for it."""
    name, backend = _target_name(config), settings.get("SM120_MLA_BACKEND")
    return f"{name}/{backend}" if backend != "auto" and name.split(":", 1)[0] == "own" else name


def _versions() -> dict[str, str]:
    found = {}
    for name in _SHOWN_VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
