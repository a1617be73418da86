"""The launches around FlashInfer: index rows before it, the sink's share and units after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm120_mla import device
from sm120_mla.kernels import fi_finish, fi_prepare
from sm120_mla.kernels.fi_prepare import Rows
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4, SUB_PAGE

pytestmark = pytest.mark.skipif(not INTERPRETED and not device.cuda_available(), reason="needs a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"
GUARD = -777
PAGE = DSV4.default_stride(SUB_PAGE)


@dataclass(frozen=True)
class Spec:
    """Index rows of one cache; ``gap`` columns lie between two rows, ``step`` lengths between two."""

    width: int
    pad: int
    tokens: int
    wide: bool
    lengths: str
    gap: int = 0
    step: int = 1
    shift: int = 0
    zero: bool = False


def inputs(spec: Spec, rows: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.int64 if spec.wide else torch.int32
    odd = torch.tensor([-1, -1, -(2**31), 2**31 - 1, spec.tokens, max(spec.tokens - 1, 0), 0])
    if spec.wide:
        odd = torch.cat([odd, torch.tensor([2**32, 2**32 + 1, -(2**63), 2**63 - 1])])
    shape = (rows, spec.width + spec.gap)
    indices = torch.randint(0, max(spec.tokens, 1), shape, generator=generator)
    pick = torch.randint(0, len(odd), shape, generator=generator)
    indices = torch.where(torch.rand(shape, generator=generator) < 0.4, odd[pick], indices)
    indices = indices.to(kind).to(DEVICE)[:, : spec.width]
    lengths = None
    if spec.lengths != "none":
        low, high = {"any": (-3, spec.width + 4), "zero": (0, 1), "full": (spec.width, spec.width + 1)}[
            spec.lengths
        ]
        lengths = torch.randint(low, high, (rows * spec.step,), generator=generator).to(kind).to(DEVICE)
        lengths = lengths[:: spec.step]
    padded = -(-max(spec.width, 1) // 64) * 64 + 64 * spec.pad
    out = torch.full((rows * padded + 2,), GUARD, dtype=torch.int32, device=DEVICE)
    out_lengths = torch.full((rows + 1,), GUARD, dtype=torch.int32, device=DEVICE)
    return Rows(
        indices=indices,
        lengths=lengths,
        tokens=spec.tokens,
        out=out[: rows * padded].view(rows, padded),
        out_lengths=out_lengths[:rows],
        shift=spec.shift,
        zero=torch.full((PAGE,), 0xFF, dtype=torch.uint8, device=DEVICE) if spec.zero else None,
    )


def launch(main: Rows, extra: Rows | None) -> None:
    grid = fi_prepare.grid(main.indices.shape[0], extra is not None)
    fi_prepare.prepare_kernel[grid](**fi_prepare.arguments(main, extra))


def expected(part: Rows) -> tuple[list[list[int]], list[int]]:
    """Entry by entry, in plain Python."""
    rows, lengths = [], []
    for row, columns in enumerate(part.indices.tolist()):
        width = len(columns)
        length = width if part.lengths is None else max(0, min(width, int(part.lengths[row])))
        kept = [
            index + part.shift if column < length and 0 <= index < part.tokens else -1
            for column, index in enumerate(columns)
        ]
        lengths.append(max((column + 1 for column, index in enumerate(kept) if index >= 0), default=0))
        rows.append(kept + [-1] * (part.out.shape[1] - width))
    return rows, lengths


def check(part: Rows) -> None:
    rows, lengths = expected(part)
    assert part.out.tolist() == rows
    assert part.out_lengths.tolist() == lengths
    base = part.out.flatten()
    behind = torch.as_strided(base, (2,), (1,), base.storage_offset() + base.numel())
    assert behind.tolist() == [GUARD, GUARD]  # nothing is written past the last row
    after = torch.as_strided(part.out_lengths, (1,), (1,), part.out_lengths.numel())
    assert after.item() == GUARD
    if part.zero is not None:
        slot = part.zero.tolist()
        footer = SUB_PAGE * DSV4.token_bytes
        assert not any(slot[: DSV4.token_bytes])
        assert not any(slot[footer : footer + DSV4.footer_bytes])
        assert set(slot[DSV4.token_bytes : footer]) == {0xFF}
        assert set(slot[footer + DSV4.footer_bytes :]) == {0xFF}


SPECS = st.builds(
    Spec,
    width=st.one_of(st.integers(0, 130), st.sampled_from((512, 513, 600))),
    pad=st.integers(0, 2),
    tokens=st.sampled_from((0, 1, 64, 1000, 2**31 - 65)),
    wide=st.booleans(),
    lengths=st.sampled_from(("none", "any", "any", "zero", "full")),
    gap=st.integers(0, 5),
    step=st.integers(1, 2),
    shift=st.sampled_from((0, 64)),
    zero=st.booleans(),
)


@given(main=SPECS, extra=st.none() | SPECS, rows=st.sampled_from((1, 2, 5, 33)), seed=st.integers(0, 999))
def test_rows_are_what_the_contract_asks(main: Spec, extra: Spec | None, rows: int, seed: int) -> None:
    first = inputs(main, rows, seed)
    second = None if extra is None else inputs(extra, rows, seed + 1)
    launch(first, second)
    check(first)
    if second is not None:
        check(second)


def test_an_index_of_2_to_the_32_is_no_token_0() -> None:
    part = inputs(Spec(width=3, pad=0, tokens=64, wide=True, lengths="none"), 1, 0)
    part.indices.copy_(torch.tensor([[2**32, 2**32 + 5, 7]]))
    launch(part, None)
    assert part.out[0, :4].tolist() == [-1, -1, 7, -1]
    assert part.out_lengths.tolist() == [3]


def test_the_lengths_of_one_cache_do_not_touch_the_other() -> None:
    spec = Spec(width=4, pad=0, tokens=64, wide=False, lengths="zero")
    main, extra = inputs(spec, 2, 0), inputs(Spec(4, 0, 64, False, "none"), 2, 1)
    for part in (main, extra):
        part.indices.fill_(9)
    launch(main, extra)
    assert main.out_lengths.tolist() == [0, 0]
    assert extra.out_lengths.tolist() == [4, 4]
    assert extra.out[:, :4].eq(9).all()


# ---- after the kernel


def finish(out, lse, sink, *, main_lens, extra_lens=None, unit=1.0, to_out=None, to_lse=None):
    to_out = out if to_out is None else to_out
    arguments = fi_finish.arguments(
        out.view(torch.int16),
        lse,
        to_out.view(torch.int16),
        to_lse,
        sink,
        main_lens,
        extra_lens,
        lse_unit=unit,
    )
    fi_finish.finish_kernel[fi_finish.grid(*out.shape[:2])](**arguments)


def results(rows: int, heads: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn((rows, heads, 512), generator=generator).bfloat16().to(DEVICE)
    lse = (torch.randn((rows, heads), generator=generator) * 5).to(DEVICE)
    return out, lse, torch.ones(rows, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("unit", [1.0, math.log(2.0)], ids=["natural", "base2"])
@pytest.mark.parametrize("strided", [False, True])
def test_the_output_carries_the_sink_and_the_lse_does_not(unit: float, strided: bool) -> None:
    out, lse, lens = results(3, 5)
    before, natural = out.double(), lse.double() * unit
    sink = torch.tensor([0.5, -math.inf, math.inf, 40.0, -3.0], device=DEVICE)
    to_out = torch.zeros((3, 5, 1024), dtype=torch.bfloat16, device=DEVICE)[..., ::2] if strided else out
    to_lse = torch.zeros((5, 3), dtype=torch.float32, device=DEVICE).T if strided else lse
    finish(out, lse, sink, main_lens=lens, unit=unit, to_out=to_out, to_lse=to_lse)
    share = torch.sigmoid(natural - sink.double())
    torch.testing.assert_close(to_lse.double(), natural, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(to_out.double(), before * share[..., None], rtol=2.0**-8, atol=1e-30)
    assert to_out[:, 2].eq(0).all()
    assert to_out[:, 1].double().equal(before[:, 1])  # no sink: not one bit


def test_the_rounding_is_to_nearest_even() -> None:
    out, lse, lens = results(8, 4, seed=3)
    want = (out.float() * torch.sigmoid(lse)[..., None]).bfloat16()
    finish(out, lse, torch.zeros(4, device=DEVICE), main_lens=lens)
    ulps = (out.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert ulps.max() <= 1
    # The share itself may differ by an ulp of fp32; truncation would be off in half of the places.
    assert ulps.ne(0).float().mean() < 0.02


@pytest.mark.parametrize("sink", [None, 0.0, -math.inf, math.inf])
def test_a_row_without_a_counted_entry(sink: float | None) -> None:
    out, lse, lens = results(4, 2)
    lens = torch.tensor([0, 3, 0, 0], dtype=torch.int32, device=DEVICE)
    extra = torch.tensor([0, 0, 2, 0], dtype=torch.int32, device=DEVICE)
    empty, others = [0, 3], [1, 2]
    out[empty] = 0.0
    lse[empty] = -1e30
    kept = lse.clone()
    sinks = None if sink is None else torch.full((2,), sink, device=DEVICE)
    finish(out, lse, sinks, main_lens=lens, extra_lens=extra, unit=math.log(2.0), to_lse=lse)
    assert lse[empty].isneginf().all()
    assert out[empty].eq(0).all()
    torch.testing.assert_close(lse[others], kept[others] * math.log(2.0))


def test_a_nan_of_a_counted_entry_stays_a_nan() -> None:
    out, lse, lens = results(2, 2)
    out[0, 1, 17] = math.nan
    finish(out, lse, torch.zeros(2, device=DEVICE), main_lens=lens)
    assert out.isnan().nonzero().tolist() == [[0, 1, 17]]


def test_a_nan_of_every_bit_is_not_rounded_to_zero() -> None:
    """What a GPU makes of a NaN is 0x7fffffff, and adding half a unit to that overflows to -0."""
    out, lse, lens = results(1, 2)
    lse.view(torch.int32)[0, 1] = 0x7FFFFFFF
    finish(out, lse, torch.zeros(2, device=DEVICE), main_lens=lens)
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


def test_every_launch_configuration_has_all_its_arguments() -> None:
    for module, kernel in ((fi_prepare, fi_prepare.prepare_kernel), (fi_finish, fi_finish.finish_kernel)):
        for spec in module.compile_specs():
            assert [*spec.signature, *spec.constexprs] == list(kernel.arg_names), spec.name
