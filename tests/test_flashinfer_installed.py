"""The FlashInfer backend through the Python of the installed FlashInfer, down to its compiled module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_bench import C4, C128, MAIN, SLIM, WHOLE, Bench, agrees, bench_of, same
from flashinfer_cases import CacheSpec, CallSpec, again, make
from flashinfer_standin import Record, installed

from sm120_mla import device
from sm120_mla.backends.flashinfer import FlashInferBackend
from sm120_mla.buffers import PersistentBuffers
from sm120_mla.errors import ArgumentError
from sm120_mla.kernels.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")

# ---- through the FlashInfer that is installed


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Bench]:
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_DIR", str(tmp_path))  # no tuning results of this machine
    record = Record()
    with installed(monkeypatch, record) as found:
        yield Bench(FlashInferBackend(), record, found.envelope.name)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("extra", [None, C4, C128], ids=["one cache", "pages of 64", "pages of 2"])
def test_the_installed_dispatcher(real: Bench, rows: int, lse: bool, extra: CacheSpec | None) -> None:
    call = make(CallSpec(rows, 16, SLIM, extra, lse=lse))
    with device.pretend_device((12, 0)):
        assert real.backend.supports(call.shape, (12, 0))
    real.run(call)
    agrees(call)
    assert real.record.launches == ["decode" if rows <= 64 else "prefill"]


def test_the_installed_dispatcher_agrees_with_the_bare_module(real: Bench) -> None:
    call = make(CallSpec(3, 8, MAIN, WHOLE))
    bare = again(call, buffers=PersistentBuffers())
    real.run(call)
    bench_of(real.generation).run(bare)
    same(call, bare)


def test_the_installed_dispatcher_keeps_to_our_buffers(real: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(CallSpec(3, 8, MAIN, C128))
    real.run(call)
    made: list[tuple[int, ...]] = []
    empty = torch.empty

    def watch(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if "flashinfer" in sys._getframe(1).f_globals["__name__"].split(".")[0]:
            made.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch, "empty", watch)
    real.run(again(call))
    real.run(make(CallSpec(65, 16, SLIM, C128)))
    assert made == []


def test_the_installed_dispatcher_in_inference_mode(real: Bench) -> None:
    with torch.inference_mode():
        call = make(CallSpec(2, 8, MAIN))
        real.run(call)
    after = again(call)
    real.run(after)
    same(call, after)


def test_the_installed_dispatcher_refuses_what_we_refuse(real: Bench) -> None:
    """Put to it all the same, a call outside the tables ends in an error of its own."""
    call = make(CallSpec(2 if real.generation != "C" else 65, 12, MAIN))
    with pytest.raises(ArgumentError, match="query heads = 12"):
        real.run(call)
    found = real.backend._installed()
    heads = (*(found.envelope.decode_heads or ()), 12)
    loose = replace(found.envelope, decode_heads=heads, prefill_heads=(*found.envelope.prefill_heads, 12))
    real.backend._found = replace(found, envelope=loose)
    with pytest.raises((RuntimeError, ValueError), match=r"no decode kernel|Unsupported|must go through"):
        real.run(call)


def test_the_installed_package_is_never_asked_to_compile(real: Bench) -> None:
    """What the stand-in replaces is what would be compiled: nothing else is built or loaded."""
    jit = importlib.import_module("flashinfer.jit.core")
    built: list[str] = []
    original = jit.JitSpec.build_and_load
    try:
        jit.JitSpec.build_and_load = lambda self, *a, **k: built.append(self.name) or original(self, *a, **k)
        real.run(make(CallSpec(1, 8, MAIN)))
    finally:
        jit.JitSpec.build_and_load = original
    assert built == []
