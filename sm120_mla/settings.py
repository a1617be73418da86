"""Every environment variable this project reads, in one table. No other module reads ``os.environ``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import ArgumentError

__all__ = ["TABLE", "Setting", "assign", "environment", "get", "raw", "require_interpreter", "shown"]


@dataclass(frozen=True)
class Setting:
    """One variable: ``choices`` empty means free text; ``default`` is used when unset or empty."""

    name: str
    default: str
    choices: tuple[str, ...]
    meaning: str


TABLE: tuple[Setting, ...] = (
    Setting(
        "SM120_MLA_MODE",
        "auto",
        ("auto", "reference", "cuda", "sm120"),
        "what runs the kernels: the interpreter, any CUDA GPU, or a GPU of capability 12.x",
    ),
    Setting(
        "SM120_MLA_VALIDATE",
        "auto",
        ("auto", "metadata", "values"),
        "level of argument checks; auto checks values in reference mode only",
    ),
    Setting(
        "SM120_MLA_PROFILE",
        "dev",
        ("dev", "ci", "nightly", "replay", "text"),
        "Hypothesis profile of the suite",
    ),
    Setting(
        "SM120_MLA_BACKEND",
        "auto",
        ("auto", "flashinfer", "triton", "reference"),
        "attention backend where a call names none; auto chooses by capability",
    ),
    Setting(
        "SGLANG_SM120_FLASHMLA_BACKEND",
        "auto",
        ("auto", "flashinfer", "triton", "torch"),
        "sglang's own switch, honoured by flash_mla_with_kvcache_sm120 only; torch means reference",
    ),
    Setting("SM120_MLA_TARGET", "own", (), "implementation under test, as --target"),
    Setting(
        "TRITON_INTERPRET",
        "0",
        (),
        "Triton's own switch; set to 1 by reference mode before any kernel is decorated",
    ),
    Setting(
        "SM120_MLA_SHARED_EXAMPLES",
        "",
        (),
        "folder of a Hypothesis example database to read as well as the checkout's own",
    ),
    Setting(
        "TRITON_DEFAULT_FP_FUSION",
        "1",
        (),
        "Triton's own switch, whose default changes in 3.10; a run of the suite fixes it",
    ),
    Setting(
        "OMP_NUM_THREADS",
        "",
        (),
        "threads of one process; a run of the suite sets 1 per xdist worker in reference mode",
    ),
    Setting("PYTEST_XDIST_WORKER", "", (), "set by pytest-xdist; picks the worker's GPU"),
    Setting(
        "CUDA_VISIBLE_DEVICES",
        "",
        (),
        "a run of the suite sets it before torch: one GPU per xdist worker, none in reference mode",
    ),
    Setting("CI", "", (), "set by CI systems; selects the profile ci when none is given"),
)
_BY_NAME = {s.name: s for s in TABLE}


def get(name: str) -> str:
    """Value of a variable of ``TABLE``; raises ``ArgumentError`` on a value outside its choices."""
    setting = _BY_NAME[name]
    value = os.environ.get(name, "") or setting.default
    if setting.choices and value not in setting.choices:
        raise ArgumentError(
            name, repr(value), f"one of {', '.join(setting.choices)}", "Unset it or correct it."
        )
    return value


def raw(name: str) -> str | None:
    """Text of a variable of ``TABLE``, or None where it is unset: empty and unset differ here."""
    return os.environ.get(_BY_NAME[name].name)


def assign(name: str, value: str, *, keep: bool = False) -> None:
    """Set a variable of ``TABLE`` for this process and its children; ``keep`` leaves one that is set."""
    if not keep or raw(name) is None:
        os.environ[_BY_NAME[name].name] = value


def environment(*without: str, **changed: str) -> dict[str, str]:
    """This process's environment for a child, less some variables and with others changed."""
    return {k: v for k, v in os.environ.items() if k not in without} | changed


def shown() -> dict[str, str]:
    """The variables of ``TABLE`` that are set, for a report."""
    return {s.name: os.environ[s.name] for s in TABLE if s.name in os.environ}


def require_interpreter() -> None:
    """Ask Triton for its interpreter. Works only before a kernel is decorated."""
    os.environ["TRITON_INTERPRET"] = "1"
