"""Test equipment: the backend over the stand-in of one generation, the usual calls, and the judging."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from flashinfer_cases import CacheSpec, exact
from flashinfer_standin import Record, direct

from sm120_mla.backends.base import AttentionCall
from sm120_mla.backends.flashinfer import FlashInferBackend
from sm120_mla.envelopes import ENVELOPES, by_name

GENERATIONS = [envelope.name for envelope in ENVELOPES]
MAIN = CacheSpec(page_size=256, pages=2, width=40)
SLIM = replace(MAIN, width=8)  # few enough entries at 66 rows for the split that needs no marks
C128 = CacheSpec(page_size=2, pages=40, width=70, page_stride=1728)
C4 = CacheSpec(page_size=64, pages=3, width=8)
WHOLE = CacheSpec(page_size=256, pages=2, width=8)


@dataclass
class Bench:
    """A backend over the stand-in of one generation, and what reached it."""

    backend: FlashInferBackend
    record: Record
    generation: str

    def run(self, call: AttentionCall) -> AttentionCall:
        self.backend.run(call)
        return call


def bench_of(name: str, fp8: bool = False) -> Bench:
    record, backend = Record(fp8=fp8), FlashInferBackend()
    backend._found = direct(by_name(name), record)
    return Bench(backend, record, name)


def agrees(call: AttentionCall) -> None:
    out, lse = exact(call)
    slack = 2.0**-11 * float(out.abs().max()) if out.numel() else 0.0
    torch.testing.assert_close(call.out.double(), out, rtol=2.0**-7, atol=slack)
    if call.lse is not None:
        torch.testing.assert_close(call.lse.double(), lse, rtol=1e-5, atol=1e-5)


def same(a: AttentionCall, b: AttentionCall) -> None:
    assert a.out.view(torch.int16).equal(b.out.view(torch.int16))
    assert (a.lse is None) == (b.lse is None)
    if a.lse is not None and b.lse is not None:
        assert a.lse.view(torch.int32).equal(b.lse.view(torch.int32))
