"""The reporting half of the plugin: puts tests and workers together, and shows and writes the summary."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .report import Summary

__all__ = ["Collector"]


class Collector:
    """A plugin of the process that reports: the only one, or the one xdist workers report to."""

    def __init__(self, config: pytest.Config, summary: Summary) -> None:
        self.config, self.summary = config, summary

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: where it ran, or in the phase that ended it."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._add(report)
        elif report.when == "teardown" and report.failed:
            self.summary.errors.append({"test": report.nodeid, "text": report.longreprtext})
        if report.when == "teardown":
            self._progress("done")

    def _add(self, report: pytest.TestReport) -> None:
        outcome, detail = report.outcome, report.longreprtext
        if hasattr(report, "wasxfail"):
            outcome = "passed"
        elif outcome == "skipped" and isinstance(report.longrepr, tuple):
            detail = report.longrepr[2].removeprefix("Skipped: ")
        self.summary.add(report.nodeid, outcome, report.user_properties, detail)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """What cannot be collected was not run either."""
        if report.failed:
            self.summary.errors.append({"test": report.nodeid, "text": report.longreprtext})
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.summary.skips[f"{report.longrepr[2].removeprefix('Skipped: ')} ({report.nodeid})"] += 1

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell a waiting command line how many tests there are."""
        if session.items:
            self._progress(f"total {len(session.items)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """The same, from a worker."""
        self._progress(f"total {len(ids)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what only a worker knows: the mode as torch sees it, and the invariants there are."""
        sent = getattr(node, "workeroutput", {}).get("sm120_mla")
        if sent:
            about = json.loads(sent)
            self.summary.mode = about["mode"]
            self.summary.catalogue = [tuple(row) for row in about["catalogue"]]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table, unless the run was asked to be very quiet."""
        lines = self.summary.lines()
        if lines and self.config.get_verbosity() > -2:
            terminalreporter.section("sm120_mla")
            for line in lines:
                terminalreporter.write_line(line)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """After everything else: write the JSON, and say so where nothing was judged."""
        result = yield
        path = self.config.getoption("sm120_json")
        if path:
            self.summary.write(Path(path))
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if not self.summary.judged and terminal is not None and not self.config.option.collectonly:
            terminal.write_line("sm120_mla: no invariant was judged in this run")
        return result

    def _progress(self, line: str) -> None:
        path = self.config.getoption("sm120_progress")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
