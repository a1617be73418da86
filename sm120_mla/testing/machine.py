"""What this machine has, asked without importing torch and without a CUDA context; and fixing a run's mode.

Triton decides at import whether kernels are interpreted, and CUDA which GPUs exist when it is first used:
a run of the suite settles both before anything imports either.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..errors import UnavailableError

__all__ = ["Gpu", "expected_mode", "prepare_process", "torch_has_cuda", "usable_gpus", "visible_gpus"]

_QUERY = ("--query-gpu=uuid,name,compute_cap", "--format=csv,noheader")
_DEV = Path("/dev")


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``id`` is what ``CUDA_VISIBLE_DEVICES`` takes; the rest the driver's tool may know."""

    id: str
    name: str = ""
    capability: tuple[int, int] | None = None


@functools.cache
def installed_gpus() -> tuple[Gpu, ...]:
    """Every GPU the driver lists, or else that has a device node; () where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=30, check=True)
            return tuple(_parse(line) for line in done.stdout.splitlines() if line.strip())
        except (OSError, subprocess.SubprocessError, ValueError):
            pass  # an old tool, or one without its driver: the device nodes decide
    nodes = [path for path in _DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(Gpu(str(n)) for n in range(len(nodes)))


def _parse(line: str) -> Gpu:
    uuid, name, capability = (part.strip() for part in line.split(","))
    major, minor = (int(part) for part in capability.split("."))
    return Gpu(uuid, name, (major, minor))


def visible_gpus() -> tuple[Gpu, ...]:
    """The installed GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order and under its names."""
    installed = installed_gpus()
    wanted = settings.raw("CUDA_VISIBLE_DEVICES")
    if wanted is None or not installed:
        return installed
    # CUDA ignores what follows the first entry that names no GPU.
    names = (name.strip() for name in wanted.split(","))
    return tuple(itertools.takewhile(lambda gpu: gpu.id, (_find(name, installed) for name in names)))


def _find(name: str, installed: tuple[Gpu, ...]) -> Gpu:
    if name.isdecimal():
        if int(name) >= len(installed):
            return Gpu("")
        gpu = installed[int(name)]
        return Gpu(name, gpu.name, gpu.capability)
    for gpu in installed:
        if name and gpu.id.startswith(name):
            return gpu
    return Gpu(name if name.startswith("MIG-") else "")


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA; read from its text, as importing it costs seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    built = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", text, re.MULTILINE)
    return built is None or built.group(1) != "None"


def usable_gpus() -> tuple[Gpu, ...]:
    """The visible GPUs, if the installed torch can use one at all."""
    return visible_gpus() if torch_has_cuda() else ()


def expected_mode() -> str:
    """``reference``, ``cuda`` or ``sm120``: what ``device.mode()`` will answer, before torch is imported.

    Raises ``UnavailableError`` for an explicit mode that this machine cannot serve, and ``ArgumentError``
    for one that does not exist.
    """
    wanted = settings.get("SM120_MLA_MODE")
    interpreted = settings.get("TRITON_INTERPRET").lower() in ("1", "true", "on", "yes")
    if wanted == "reference" or (wanted == "auto" and interpreted):
        return "reference"
    gpus = usable_gpus()
    if not gpus:
        if wanted == "auto":
            return "reference"
        why = "no CUDA GPU is visible" if torch_has_cuda() else "the installed torch is built without CUDA"
        raise UnavailableError(f"mode {wanted}", why, "Use mode reference, or auto to choose by machine.")
    if wanted != "auto":
        return wanted
    return "sm120" if (gpus[0].capability or (0, 0))[0] == 12 else "cuda"


def prepare_process() -> str:
    """Fix the mode of this process and its children; returns the mode. Call before torch and triton.

    Reference mode asks Triton for its interpreter and hides the GPUs. Elsewhere an xdist worker gets one
    GPU of its own. Raises as ``expected_mode``.
    """
    mode = expected_mode()
    worker = settings.raw("PYTEST_XDIST_WORKER")
    settings.assign("TRITON_DEFAULT_FP_FUSION", "1", keep=True)
    if mode == "reference":
        settings.assign("SM120_MLA_MODE", mode)
        settings.assign("CUDA_VISIBLE_DEVICES", "")
        settings.require_interpreter()
        if worker:
            settings.assign("OMP_NUM_THREADS", "1", keep=True)
    elif worker:
        gpus = usable_gpus()
        settings.assign("CUDA_VISIBLE_DEVICES", gpus[int(worker.removeprefix("gw")) % len(gpus)].id)
    return mode
