"""``sm120-mla doctor``: what this machine can run, and why not what it cannot. Fails at nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .. import __version__, settings
from . import exits

__all__ = ["Finding", "findings", "show_doctor"]

_PACKAGES = ("torch", "triton", "flashinfer-python", "hypothesis", "pytest", "pytest-xdist")
_FLASHINFER_FIRST = (0, 6, 14)
"""First release with SM120 kernels for sparse MLA (``envelopes.py``)."""

_TOOLS = {"ptxas": "assembles for sm_120 without a GPU", "cuobjdump": "reads registers and spills"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``state`` is yes, no or note."""

    topic: str
    subject: str
    state: str
    detail: str


def show_doctor(as_json: bool) -> int:
    """Print every finding; 0 whatever they are."""
    found = findings()
    if as_json:
        print(json.dumps([asdict(f) for f in found], indent=2))
        return exits.HELD
    table = Table(title=f"sm120-mla {__version__}")
    for column in ("", "what", "", "detail"):
        table.add_column(column, overflow="fold")
    marks = {"yes": "[green]yes[/green]", "no": "[red]no[/red]", "note": ""}
    topic = ""
    for finding in found:
        if topic and finding.topic != topic:
            table.add_section()
        shown = finding.topic if finding.topic != topic else ""
        table.add_row(shown, finding.subject, marks[finding.state], _plain(finding.detail))
        topic = finding.topic
    Console().print(table)
    return exits.HELD


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def findings() -> list[Finding]:
    """Everything there is to say; a topic that breaks says what broke it and stops no other."""
    topics: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("setting", _settings),  # as given: looking at the mode settles some
        ("mode", _modes),  # before all that imports torch or triton
        ("versions", _versions),
        ("GPU", _gpus),
        ("backend", _backends),
        ("kernel", _kernels),
        ("compile", _toolchain),
        ("interpreter", _facts),
    )
    found: list[Finding] = []
    for topic, look in topics:
        try:
            found += look()
        except Exception as error:
            found.append(Finding(topic, "?", "no", f"{type(error).__name__}: {error}"))
    return found


def _modes() -> Iterator[Finding]:
    from ..testing import machine

    mode = machine.expected_mode()
    gpus = machine.usable_gpus()
    if not machine.torch_has_cuda():
        lack = "no torch with CUDA is installed"
    else:
        lack = "" if gpus else "no CUDA GPU is visible"
    yield Finding("mode", "this run", "note", mode)
    yield Finding("mode", "reference", "yes", "kernels in Triton's interpreter, and compiled for sm_120")
    yield Finding("mode", "cuda", "no" if lack else "yes", lack or f"{len(gpus)} GPU(s)")
    capable = [gpu for gpu in gpus if (gpu.capability or (0, 0))[0] == 12]
    why = lack or ("" if capable else "no GPU of capability 12.x")
    yield Finding("mode", "sm120", "no" if why else "yes", why or f"{len(capable)} GPU(s)")
    machine.prepare_process()


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "Python", "note", f"{platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        number = _version(name)
        yield Finding("versions", name, "yes" if number else "no", number or "not installed")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> Iterator[Finding]:
    from ..testing import machine

    installed = machine.installed_gpus()
    for gpu in installed:
        capability = "unknown" if gpu.capability is None else ".".join(map(str, gpu.capability))
        yield Finding("GPU", gpu.id, "yes", f"{gpu.name or 'name unknown'}, capability {capability}")
    if not installed:
        yield Finding("GPU", "any", "no", "the driver lists none, and there is no device node")


def _backends() -> Iterator[Finding]:
    from .. import device

    torch, triton = _version("torch"), _version("triton")
    yield Finding(
        "backend", "reference", "yes" if torch else "no", f"torch {torch}" if torch else "needs torch"
    )
    if triton and torch:
        how = "interpreted" if device.interpreting() else "compiled for this GPU"
        yield Finding("backend", "triton", "yes", f"{triton}, {how}")
    else:
        yield Finding("backend", "triton", "no", "needs torch and triton")
    yield Finding("backend", "flashinfer", *_flashinfer())


def _flashinfer() -> tuple[str, str]:
    number = _version("flashinfer-python")
    if number is None:
        return "no", "not installed: pip install -e '.[flashinfer]'"
    first = tuple(int(part) for part in number.split(".")[:3] if part.isdecimal())
    if first < _FLASHINFER_FIRST:
        return "no", f"{number} has no SM120 kernels; the first with them is 0.6.14"
    from .. import device

    if not device.is_sm12x():
        return "no", f"{number}: its Python runs here, its SM120 kernels need a GPU of capability 12.x"
    return "yes", number


def _kernels() -> Iterator[Finding]:
    from .. import kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        try:
            found = importlib.import_module(f"{kernels.__name__}.{module.name}")
        except Exception as error:
            yield Finding("kernel", module.name, "no", f"{type(error).__name__}: {error}")
            continue
        if hasattr(found, "compile_specs"):
            yield Finding("kernel", module.name, "yes", f"{len(found.compile_specs())} launch configurations")


def _toolchain() -> Iterator[Finding]:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        yield Finding("compile", "sm_120, sm_121", "no", "triton is not installed")
        return
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    for tool, use in _TOOLS.items():
        names = sorted(path.name for path in folder.glob(f"{tool}*"))
        detail = f"{use}: {', '.join(names)}" if names else f"not beside triton; {use}"
        yield Finding("compile", tool, "yes" if names else "no", detail)


def _facts() -> Iterator[Finding]:
    from .. import device

    if not device.interpreting():
        yield Finding(
            "interpreter", "facts", "note", "kernels are compiled here; ask with SM120_MLA_MODE=reference"
        )
        return
    from ..testing import interp_facts

    standings = {fact.name: interp_facts.check(fact) for fact in interp_facts.FACTS}
    count = Counter(standing for standing, _ in standings.values())
    total = ", ".join(f"{n} {standing}" for standing, n in count.most_common())
    good = set(count) <= {"holds"}
    yield Finding("interpreter", f"{len(standings)} facts", "yes" if good else "no", total)
    for name, (standing, text) in standings.items():
        if standing != "holds":
            yield Finding("interpreter", name, "no", text)


def _settings() -> Iterator[Finding]:
    for name, value in settings.shown().items():
        yield Finding("setting", name, "note", repr(value))
