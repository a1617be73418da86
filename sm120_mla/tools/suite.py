"""Where the suite is, and this process made ready to judge."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .. import settings
from ..errors import SuiteNotFoundError, UnavailableError

__all__ = ["SUITE", "find_suite", "prepare", "require"]

SUITE = "property_tests"
"""Folder of the property tests, below a checkout's root."""


def find_suite(start: Path) -> Path:
    """Root of the checkout that holds the suite: ``start``, a folder above it, or where this package lies.

    Raises ``SuiteNotFoundError``: the suite is part of a checkout, and not of an installed wheel.
    """
    installed = Path(__file__).resolve().parents[2]
    for folder in (start, *start.parents, installed):
        if (folder / SUITE).is_dir() and (folder / "sm120_mla" / "testing").is_dir():
            return folder
    raise SuiteNotFoundError(
        "current folder",
        start,
        f"a checkout of sm120_mla, which holds {SUITE}/",
        "Change into a checkout, or install one with pip install -e '.[test]'.",
    )


def require(*modules: str) -> None:
    """Raise ``UnavailableError`` for the first of the modules that is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise UnavailableError(name, "it is not installed", "Run: pip install -e '.[test]'.")


def prepare(mode: str | None, backend: str | None = None) -> str:
    """Fix the mode of this process, and of its children, before torch and triton are imported; returns it.

    ``backend`` is that of attention, as SM120_MLA_BACKEND has it; None leaves that as it is.

    Raises ``UnavailableError`` for a mode this machine cannot serve, or where torch or triton is missing.
    """
    from ..testing import machine

    require("torch", "triton")
    if mode is not None:
        settings.assign("SM120_MLA_MODE", mode)
    if backend is not None:
        settings.assign("SM120_MLA_BACKEND", backend)
    return machine.prepare_process()
