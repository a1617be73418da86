"""machine: which GPUs there are, without torch, and what mode a run gets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sm120_mla import settings
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.testing import machine
from sm120_mla.testing.machine import Gpu

A = Gpu("GPU-aaaa-1", "RTX PRO 6000", (12, 0))
B = Gpu("GPU-bbbb-2", "H200", (9, 0))
TOUCHED = (
    "SM120_MLA_MODE",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_XDIST_WORKER",
    "TRITON_DEFAULT_FP_FUSION",
    "OMP_NUM_THREADS",
)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which nothing is set and torch is built for CUDA, on a machine with two GPUs."""
    for name in TOUCHED:
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "installed_gpus", lambda: (A, B))
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (None, ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("", []),
        ("-1", []),
        ("1", ["1"]),
        ("1, 0", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]),
        ("GPU-cccc", []),
        ("MIG-77", ["MIG-77"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_are_what_cuda_would_show(
    text: str | None, ids: list[str], bare: pytest.MonkeyPatch
) -> None:
    if text is not None:
        bare.setenv("CUDA_VISIBLE_DEVICES", text)

    assert [gpu.id for gpu in machine.visible_gpus()] == ids


def test_an_index_keeps_what_is_known_of_the_gpu(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CUDA_VISIBLE_DEVICES", "1")

    assert machine.visible_gpus() == (Gpu("1", "H200", (9, 0)),)


@pytest.mark.parametrize(
    ("output", "nodes", "found"),
    [
        ("GPU-a, RTX 5090, 12.0\nGPU-b, RTX 5090, 12.0\n", 3, ["GPU-a", "GPU-b"]),
        ("Field is not valid\n", 2, ["0", "1"]),
        (None, 1, ["0"]),
        (None, 0, []),
    ],
)
def test_the_driver_is_asked_first_and_device_nodes_else(
    output: str | None, nodes: int, found: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [f"nvidia{n}" for n in range(nodes)] + ["nvidiactl", "nvidia-uvm", "null"]:
        (tmp_path / name).touch()

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        if output is None:
            raise subprocess.CalledProcessError(9, "nvidia-smi")
        return subprocess.CompletedProcess("nvidia-smi", 0, stdout=output)

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.setattr(machine, "_DEV", tmp_path)

    assert [gpu.id for gpu in machine.installed_gpus.__wrapped__()] == found


@pytest.mark.parametrize(
    ("built", "cuda"), [("'12.8'", True), ("None", False), (None, True)], ids=["cuda", "cpu", "no line"]
)
def test_torch_is_read_not_imported(
    built: str | None, cuda: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "" if built is None else f"cuda: Optional[str] = {built}\n"
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}hip: Optional[str] = None\n")

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: Spec)

    assert machine.torch_has_cuda.__wrapped__() is cuda


@pytest.mark.parametrize(
    ("wanted", "gpus", "mode"),
    [
        ("auto", (A, B), "sm120"),
        ("auto", (B,), "cuda"),
        ("auto", (Gpu("0"),), "cuda"),
        ("auto", (), "reference"),
        ("cuda", (A,), "cuda"),
        ("sm120", (Gpu("0"),), "sm120"),
        ("reference", (A,), "reference"),
    ],
)
def test_the_mode_expected(wanted: str, gpus: tuple[Gpu, ...], mode: str, bare: pytest.MonkeyPatch) -> None:
    bare.setattr(machine, "installed_gpus", lambda: gpus)
    bare.setenv("SM120_MLA_MODE", wanted)

    assert machine.expected_mode() == mode


def test_a_torch_without_cuda_means_reference(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(machine, "torch_has_cuda", lambda: False)

    assert machine.expected_mode() == "reference"
    bare.setenv("SM120_MLA_MODE", "cuda")
    with pytest.raises(UnavailableError, match="built without CUDA"):
        machine.expected_mode()


def test_an_interpreting_triton_means_reference(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TRITON_INTERPRET", "1")

    assert machine.expected_mode() == "reference"


@pytest.mark.parametrize(("mode", "error"), [("sm120", UnavailableError), ("gpu", ArgumentError)])
def test_a_mode_that_cannot_be_had_is_refused_unchanged(
    mode: str, error: type[Exception], bare: pytest.MonkeyPatch
) -> None:
    bare.setattr(machine, "installed_gpus", lambda: ())
    bare.setenv("SM120_MLA_MODE", mode)

    with pytest.raises(error):
        machine.prepare_process()
    assert {name: settings.raw(name) for name in TOUCHED if settings.raw(name)} == {"SM120_MLA_MODE": mode}


def test_reference_mode_interprets_and_hides_the_gpus(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(machine, "installed_gpus", lambda: ())
    bare.setenv("PYTEST_XDIST_WORKER", "gw1")

    assert machine.prepare_process() == "reference"
    assert [settings.raw(name) for name in TOUCHED[:3]] == ["reference", "1", ""]
    assert settings.raw("OMP_NUM_THREADS") == "1"
    assert settings.raw("TRITON_DEFAULT_FP_FUSION") == "1"


@pytest.mark.parametrize(
    ("visible", "worker", "pinned"),
    [
        (None, "gw0", "GPU-aaaa-1"),
        (None, "gw3", "GPU-bbbb-2"),
        ("1", "gw5", "1"),
        ("1,0", "gw1", "0"),
        ("0,1", None, "0,1"),
    ],
)
def test_a_worker_gets_one_gpu(
    visible: str | None, worker: str | None, pinned: str, bare: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("PYTEST_XDIST_WORKER", worker)):
        if value is not None:
            bare.setenv(name, value)

    machine.prepare_process()

    assert settings.raw("CUDA_VISIBLE_DEVICES") == pinned
    assert settings.raw("TRITON_INTERPRET") is None


def test_preparing_twice_changes_nothing(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("PYTEST_XDIST_WORKER", "gw1")
    machine.prepare_process()
    once = settings.shown()

    machine.prepare_process()

    assert settings.shown() == once
