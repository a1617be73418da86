"""Policy of runs in this checkout. What the plugin does is in ``sm120_mla/testing/plugin.py``."""

from __future__ import annotations

import pytest

pytest_plugins = ["sm120_mla_pytest"]  # also where the package is on the path but not installed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, where no other project's options can be in the way, the short name."""
    parser.addoption("--target", dest="sm120_target", metavar="NAME", help="short for --sm120-target")
