"""Test equipment: puts ``flashinfer_compiled`` where FlashInfer's compiled module would be, and nothing else.

``installed`` replaces it under the FlashInfer that is installed, whose own Python then plans and dispatches;
``direct`` goes without, for machines that have none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from flashinfer_compiled import FIELDS, SHARED, SM_COUNT, CompiledNew, CompiledOld, Record, Unmet, check

from sm120_mla.backends import flashinfer_api
from sm120_mla.backends.flashinfer_api import Installed, KernelCall
from sm120_mla.envelopes import Envelope

__all__ = ["Record", "Unmet", "direct", "installed", "missing"]


def direct(envelope: Envelope, record: Record) -> Installed:
    """As ``flashinfer_api.probe`` would find it, without any FlashInfer: the bare compiled module."""
    if envelope.contract == "A/B":
        old = CompiledOld(envelope, record)

        def attend(call: KernelCall) -> None:
            caches = (call.extra_cache, call.extra_indices, call.extra_lengths)
            if call.q.shape[0] > 64:
                old.sparse_mla_sm120_paged_attention(
                    *(call.q, call.cache, call.indices, call.out, call.lse, call.scale, 1),
                    *(call.lengths, call.sink, *caches),
                )
                return
            extra = 0 if call.extra_indices is None else call.extra_indices.shape[1]
            splits = -(-call.indices.shape[1] // 64) + -(-extra // 64)
            old.sparse_mla_sm120_decode_dsv4(
                *(call.q, call.cache, call.indices, call.mid_out, call.mid_lse, call.out, call.lse),
                *(splits, call.scale, call.lengths, call.sink, *caches, -1),
            )

        return Installed(f"stand-in {envelope.name}", envelope, attend, needs_gpu=False)
    new = CompiledNew(len(FIELDS), record)

    def attend_new(call: KernelCall) -> None:
        tensors = (call.q, call.cache, call.indices, call.out, call.lengths, call.sink)
        extra = (call.extra_cache, call.extra_indices, call.extra_lengths)
        fields = new.inspect_metadata(*tensors, *extra, call.lse, call.mid_out, call.mid_lse, 1, False, 512)
        legal = new.metadata_candidates(fields, 1, SM_COUNT, SHARED)
        check(legal, "no route")
        fields[FIELDS.index("variant")] = min(legal)
        new.execute_attention(
            new.resolve_attention(fields, 1, 0, SM_COUNT, SHARED),
            *(call.q, call.cache, call.indices, call.mid_out, call.mid_lse, call.out, call.lse, call.scale),
            *(call.lengths, call.sink, *extra, math.log(2.0)),
        )

    return Installed(f"stand-in {envelope.name}", envelope, attend_new, needs_gpu=False)


@functools.cache
def missing() -> str | None:
    """Why there is no FlashInfer to run under the stand-in, or None."""
    found = flashinfer_api.probe()
    return None if isinstance(found, Installed) else found.reason


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, record: Record) -> Iterator[Installed]:
    """The installed FlashInfer with its compiled module replaced. Skips the test where there is none."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    found = flashinfer_api.probe()
    assert isinstance(found, Installed)
    old = found.envelope.contract == "A/B"
    clear = _old(monkeypatch, found, record) if old else _new(monkeypatch, record)
    monkeypatch.setattr(flashinfer_api, "reachable", lambda: True)
    for cached in clear:
        cached()
    try:
        yield found
    finally:
        for cached in clear:
            cached()


def _builds(module: object) -> Callable[[], SimpleNamespace]:
    return lambda: SimpleNamespace(build_and_load=lambda: module)


def _old(monkeypatch: pytest.MonkeyPatch, found: Installed, record: Record) -> list[Callable[[], None]]:
    sparse = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
    module = CompiledOld(found.envelope, record)
    monkeypatch.setattr(sparse, "gen_sparse_mla_sm120_module", _builds(module))
    names = ("get_sparse_mla_sm120_module", "_get_sparse_mla_decode_dsv4_module")
    names = (*names, "_decode_dsv4_runner_singleton")
    return [getattr(sparse, name).cache_clear for name in names]


def _new(monkeypatch: pytest.MonkeyPatch, record: Record) -> list[Callable[[], None]]:
    package = "flashinfer.mla._sparse_mla_sm120"
    execution = importlib.import_module(f"{package}._execution")
    prepared = importlib.import_module(f"{package}._prepared")
    policy = importlib.import_module(f"{package}._policy")
    calibration = importlib.import_module(f"{package}._calibration")
    fields = len(execution.AttentionMetadata._fields)
    monkeypatch.setattr(execution, "gen_sparse_mla_sm120_module", _builds(CompiledNew(fields, record)))
    monkeypatch.setattr(prepared, "device_caps", lambda _: (SM_COUNT, SHARED))
    monkeypatch.setattr(calibration, "_device_key", lambda _: "stand-in")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    names = ("get_sparse_mla_sm120_module", "resolve_model_type", "format_info", "metadata_candidates")
    clear = [getattr(execution, name).cache_clear for name in (*names, "main_page_sizes")]
    clear += [policy._candidates.cache_clear, policy._decode_scratch_heads.cache_clear]
    return [*clear, prepared._functional_plans.clear]
