"""The stand-in for FlashInfer sees broken contracts; the arithmetic it emulates and the budget from it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_bench import C4, GENERATIONS, MAIN, Bench, bench_of
from flashinfer_cases import CacheSpec, CallSpec, exact, make
from flashinfer_emulation import OLD, Section, WildGather, attend
from flashinfer_standin import Unmet

from sm120_mla.backends import flashinfer_api
from sm120_mla.backends.base import AttentionCall
from sm120_mla.codec import dequantise_pages
from sm120_mla.envelopes import ARITHMETIC
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")

# ---- the stand-in itself


def kernel_call(bench: Bench, call: AttentionCall) -> flashinfer_api.KernelCall:
    seen: list[flashinfer_api.KernelCall] = []
    found = bench.backend._installed()
    bench.backend._found = replace(found, attend=seen.append)
    bench.run(call)
    bench.backend._found = found
    return seen[0]


@pytest.mark.parametrize(
    ("rows", "spoil", "error"),
    [
        (2, {"lengths": lambda t: t.clone().fill_(200)}, Unmet),
        (2, {"indices": lambda t: t.long()}, Unmet),
        (2, {"indices": lambda t: torch.cat([t, t], 1)[:, :128]}, Unmet),
        (65, {"extra_indices": lambda t: torch.cat([t, t], 1)[:, :64]}, "eidx must be contiguous"),
        (65, {"lengths": lambda t: t.long()}, "Inconsistency of Tensor type: tl"),
        (2, {"mid_lse": lambda t: t[:1].clone()}, Unmet),
        (2, {"indices": lambda t: torch.full_like(t, -1)}, Unmet),
        (2, {"q": lambda t: torch.stack([t, t], 1)[:, 0]}, Unmet),
    ],
)
def test_the_stand_in_sees_broken_contracts(rows: int, spoil: dict[str, Any], error: Any) -> None:
    bench = bench_of("B")
    call = kernel_call(bench, make(CallSpec(rows, 16, MAIN, C4)))
    broken = replace(call, **{name: change(getattr(call, name)) for name, change in spoil.items()})
    attend = bench.backend._installed().attend
    attend(call)
    expected = pytest.raises(RuntimeError, match=error) if isinstance(error, str) else pytest.raises(error)
    with expected:
        attend(broken)


def test_the_stand_in_shows_the_defects_that_are_worked_around() -> None:
    """0.6: a length over nothing but -1, and a raw index past the length of a tile that is read."""
    call = kernel_call(bench_of("B"), make(CallSpec(2, 8, MAIN, sink=False)))
    one = torch.full((2, 128), -1, dtype=torch.int32)
    lengths = torch.tensor([3, 3], dtype=torch.int32)
    _, lse = attend(
        call.q,
        [Section(call.cache, 64, one, lengths)],
        call.scale,
        None,
        rules=OLD,
        prefill=False,
        fp8=False,
    )
    assert lse.lt(-1e28).all()
    assert lse.gt(-1e29).all()  # not the sentinel: it thinks that something counted
    one[:, 1] = 2**30
    one[:, 0] = 70
    lengths[:] = 1
    for prefill in (False, True):
        with pytest.raises(WildGather) if prefill else contextlib.nullcontext():
            attend(
                call.q,
                [Section(call.cache, 64, one, lengths)],
                call.scale,
                None,
                rules=OLD,
                prefill=prefill,
                fp8=False,
            )


# ---- the arithmetic of the kernels, and the budget that follows


def distance(call: AttentionCall) -> tuple[float, float]:
    """Relative RMS error and smallest row cosine of the output."""
    out, lse = exact(call)
    got, used = call.out.double(), ~lse.isneginf()
    cosine = torch.nn.functional.cosine_similarity(got, out, dim=-1)[used].min()
    return float((got - out).norm() / out.norm()), float(cosine)


@pytest.mark.parametrize("rows", [8, 65])
@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("extra", [None, C4], ids=["one cache", "two"])
def test_the_arithmetic_of_the_kernels_is_within_the_budget(
    rows: int, spread: float, extra: CacheSpec | None
) -> None:
    bench = bench_of("C", fp8=True)
    call = make(CallSpec(rows, 16, replace(MAIN, width=192), extra, sink=False))
    call = replace(call, q=(call.q * spread).contiguous())
    bench.run(call)
    rms, cosine = distance(call)
    assert ARITHMETIC.out_rms / 5 < rms < ARITHMETIC.out_rms  # a budget, and no more than there is need for
    assert 1 - (1 - ARITHMETIC.row_cosine) / 50 > cosine > ARITHMETIC.row_cosine
    assert call.lse is not None
    _, lse = exact(call)
    assert float((call.lse.double() - lse).nan_to_num(0).abs().max()) < 6 * ARITHMETIC.score * spread


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_error_of_a_decode_score(name: str) -> None:
    """Rows of one entry: their LSE is the score."""
    bench = bench_of(name, fp8=True)
    call = make(CallSpec(64, 16, replace(MAIN, page_size=64, pages=4, width=1, lengths=None, holes=0.0)))
    bench.run(replace(call, sink=None))
    _, lse = exact(call)
    pages = dequantise_pages(call.main.pool, DSV4, 64).reshape(-1, 512)
    k = pages[call.main.indices[:, 0].long()].double()[:, None, :448]
    unit = (call.q.double()[..., :448] * k).norm(dim=-1) * call.scale
    error = float(((call.lse.double() - lse) / unit).square().mean().sqrt())
    assert ARITHMETIC.score / 2 < error < ARITHMETIC.score


def test_the_prefill_of_narrow_rows_keeps_the_scores() -> None:
    bench = bench_of("C", fp8=True)
    call = make(CallSpec(65, 16, MAIN, sink=False))
    bench.run(call)
    torch.testing.assert_close(call.lse.double(), exact(call)[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 0,
        lambda out: -out,
        lambda out: out * 1.05,
        lambda out: out.roll(1, 1),
        lambda out: out.roll(1, -1),
        lambda out: torch.cat([out[..., :64] * 2, out[..., 64:]], -1),
    ],
    ids=["zero", "sign", "scaled", "heads", "columns", "one tile's scale"],
)
def test_the_budget_refuses_wrong_outputs(spoil: Any) -> None:
    bench = bench_of("C", fp8=True)
    call = make(CallSpec(8, 16, MAIN, sink=False))
    bench.run(call)
    call.out.copy_(spoil(call.out))
    assert distance(call)[0] > ARITHMETIC.out_rms
