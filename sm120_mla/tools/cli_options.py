"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["Backend", "BackendOption", "JsonFlag", "Mode", "ModeOption", "Profile", "TargetOption"]


class Mode(StrEnum):
    """Choices of ``--mode``."""

    auto = "auto"
    reference = "reference"
    cuda = "cuda"
    sm120 = "sm120"


class Profile(StrEnum):
    """Choices of ``--profile``."""

    dev = "dev"
    ci = "ci"
    nightly = "nightly"
    replay = "replay"
    text = "text"


class Backend(StrEnum):
    """Choices of ``--backend``."""

    auto = "auto"
    flashinfer = "flashinfer"
    triton = "triton"
    reference = "reference"


ModeOption = Annotated[
    Mode | None, typer.Option(help="What runs the kernels (default: SM120_MLA_MODE, or auto).")
]
TargetOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Implementation under test (default: SM120_MLA_TARGET, or own)."),
]
BackendOption = Annotated[
    Backend | None,
    typer.Option(help="Attention backend of the target own (default: SM120_MLA_BACKEND; auto is triton)."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
