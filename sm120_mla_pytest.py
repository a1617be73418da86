"""Entry point of the pytest plugin. Pytest imports it in every project of the environment, so it is light,
and does nothing unless the project's configuration says ``sm120_mla_suite = true``.

It stands outside the package for the same reason: the mode of a run has to be fixed before torch or triton
is imported, and pytest must be able to ask for that first.
"""

from __future__ import annotations

import argparse

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Names of our own only: other projects have their options too."""
    group = parser.getgroup("sm120_mla", "sm120_mla: invariants of MLA kernels")
    group.addoption(
        "--sm120-target", dest="sm120_target", metavar="NAME", help="implementation under test (default: own)"
    )
    group.addoption(
        "--sm120-examples", metavar="N", type=int, help="examples per test, as the profile has it"
    )
    group.addoption(
        "--sm120-invariant",
        metavar="ID",
        action="append",
        help="judge this invariant only, also in tests that ask more; may be repeated",
    )
    group.addoption("--sm120-json", metavar="FILE", help="write what the run found as JSON")
    group.addoption("--sm120-progress", help=argparse.SUPPRESS)
    parser.addini(
        "sm120_mla_suite", type="bool", default=False, help="this project's tests judge sm120_mla invariants"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """The earliest hook there is: no conftest has been imported."""
    _prepare(early_config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load the rest. Prepares again, for a run that met this module in a conftest only."""
    if _prepare(config):
        from sm120_mla.testing import plugin

        config.pluginmanager.register(plugin, "sm120_mla_suite")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto``: a worker per visible GPU; in reference mode as many as xdist finds fit."""
    if not config.getini("sm120_mla_suite"):
        return None
    from sm120_mla.testing import machine

    return None if machine.expected_mode() == "reference" else len(machine.usable_gpus())


def _prepare(config: pytest.Config) -> bool:
    """Fix mode and profiles if the project asks for it; whether it does."""
    if not config.getini("sm120_mla_suite"):
        return False
    from sm120_mla.errors import Sm120MlaError

    try:
        from sm120_mla.testing import machine, profiles

        machine.prepare_process()
    except Sm120MlaError as error:
        raise pytest.UsageError(str(error)) from error
    profiles.register(config.rootpath)
    return True
