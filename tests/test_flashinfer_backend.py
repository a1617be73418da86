"""The FlashInfer backend on every generation of kernels that it serves, emulated."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from flashinfer_bench import C4, C128, GENERATIONS, MAIN, SLIM, WHOLE, Bench, agrees, bench_of, same
from flashinfer_cases import CacheSpec, CallSpec, again, counted, exact, geometry_of, make, poison

from sm120_mla import device, graphs
from sm120_mla.backends import flashinfer_api
from sm120_mla.backends.base import AttentionCall
from sm120_mla.envelopes import by_name
from sm120_mla.errors import CaptureError, GrowthDuringCaptureError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")


@pytest.fixture(params=GENERATIONS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


@pytest.fixture(params=[name for name in GENERATIONS if by_name(name).gathers_slot_zero])
def older(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


# ---- values


@pytest.mark.parametrize(
    ("rows", "main", "extra"),
    [
        (1, MAIN, None),
        (3, replace(MAIN, page_size=64, pages=4, lengths=None, wide=True), C128),
        (2, MAIN, C128),
        (2, MAIN, WHOLE),
        (66, SLIM, C4),
        (65, replace(MAIN, page_size=64, pages=3, width=130, lengths="long"), None),
    ],
    ids=["one row", "native pages", "c128", "split extra", "prefill, two caches", "prefill"],
)
@pytest.mark.parametrize(("sink", "lse"), [(True, True), (True, False), (False, True)])
def test_values(
    bench: Bench, rows: int, main: CacheSpec, extra: CacheSpec | None, sink: bool, lse: bool
) -> None:
    call = bench.run(make(CallSpec(rows, 16, main, extra, sink, lse)))
    agrees(call)
    assert bench.record.launches == ["decode" if rows <= 64 else "prefill"]


def test_the_kernel_gets_the_sink_where_no_lse_is_wanted_and_only_there(bench: Bench) -> None:
    for lse in (False, True):
        bench.run(make(CallSpec(1, 8, MAIN, lse=lse)))
    assert [call["sink"] is None for call in bench.record.calls] == [False, True]


def test_both_sides_of_64_rows_agree(bench: Bench) -> None:
    many = make(CallSpec(65, 16, SLIM, C4))
    few = replace(
        again(many),
        q=many.q[:64],
        main=replace(many.main, indices=many.main.indices[:64], lengths=many.main.lengths[:64]),
        extra=replace(many.extra, indices=many.extra.indices[:64], lengths=many.extra.lengths[:64]),
        shape=replace(many.shape, tokens=64),
        out=torch.zeros_like(many.out[:64]),
        lse=torch.zeros_like(many.lse[:64]),
    )
    bench.run(many)
    bench.run(few)
    assert bench.record.launches == ["prefill", "decode"]
    torch.testing.assert_close(few.out, many.out[:64], rtol=2.0**-6, atol=1e-3)
    torch.testing.assert_close(few.lse, many.lse[:64], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 65])
def test_the_scale_is_passed(bench: Bench, rows: int) -> None:
    call = replace(make(CallSpec(rows, 16, SLIM)), scale=0.01)
    agrees(bench.run(call))
    assert bench.record.calls[0]["scale"] == 0.01


def test_duplicates_count_twice_and_holes_not_at_all(bench: Bench) -> None:
    call = make(CallSpec(1, 8, replace(MAIN, width=4, lengths=None), sink=False))
    once = again(call, main=replace(call.main, indices=torch.tensor([[5, -1, -1, -1]])))
    twice = again(call, main=replace(call.main, indices=torch.tensor([[-1, 5, -1, 5]])))
    bench.run(once)
    bench.run(twice)
    torch.testing.assert_close(twice.lse - once.lse, torch.full((1, 8), math.log(2.0)), rtol=0, atol=1e-5)
    torch.testing.assert_close(twice.out, once.out)


@pytest.mark.parametrize("extra", [None, C128], ids=["one cache", "two"])
def test_no_columns_and_no_pages(bench: Bench, extra: CacheSpec | None) -> None:
    agrees(bench.run(make(CallSpec(2, 8, replace(MAIN, width=0, lengths=None), extra))))
    agrees(bench.run(make(CallSpec(2, 8, replace(MAIN, pages=0), extra))))
    agrees(bench.run(make(CallSpec(2, 8, replace(MAIN, page_size=64, pages=0), extra))))
    if extra is not None:
        agrees(bench.run(make(CallSpec(2, 8, MAIN, replace(extra, width=0, lengths=None)))))
        agrees(bench.run(make(CallSpec(2, 8, MAIN, replace(extra, pages=0)))))


def test_no_rows(bench: Bench) -> None:
    call = make(CallSpec(0, 8, MAIN))
    bench.run(call)
    assert bench.record.launches == []
    assert len(call.buffers) == 0


# ---- empty rows and sinks


def emptied(call: AttentionCall) -> tuple[AttentionCall, list[int]]:
    """Rows 0 to 3 without a counted entry, in four ways, and the last with one in the second cache alone."""
    tokens = call.main.geometry.tokens
    indices, lengths = call.main.indices.clone().long(), call.main.lengths.clone().long()
    indices[0], lengths[0] = -1, indices.shape[1]
    lengths[1] = 0
    indices[2], lengths[2] = tokens, 3
    indices[3, 0], lengths[3] = -1, 1  # "length 1, index -1", as engines pad
    indices[4] = -1
    extra = call.extra
    extra_lengths = extra.lengths.clone()
    extra_lengths[:4] = torch.tensor([0, 0, -5, 0])
    extra_indices = extra.indices.clone()
    extra_indices[4], extra_lengths[4] = 3, 2
    return again(
        call,
        main=replace(call.main, indices=indices, lengths=lengths),
        extra=replace(extra, indices=extra_indices, lengths=extra_lengths),
    ), [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [6, 66])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_empty_rows(bench: Bench, rows: int, lse: bool, sink: bool) -> None:
    call, empty = emptied(make(CallSpec(rows, 16, SLIM, C4, lse=lse)))
    sinks = torch.tensor([2.0, -30.0, math.inf, -math.inf]).repeat(4) if sink else None
    call = bench.run(replace(call, sink=sinks))
    assert call.out[empty].eq(0).all()
    if call.lse is not None:
        assert call.lse[empty].isneginf().all()
        assert call.lse[4].isfinite().all()
    agrees(call)


@pytest.mark.parametrize("rows", [2, 65])
def test_a_sink_far_above_the_logits_leaves_the_lse_alone(bench: Bench, rows: int) -> None:
    call = make(CallSpec(rows, 16, replace(SLIM, lengths="full")))
    call = replace(call, sink=exact(call)[1][0].float() + 14.0)
    bench.run(call)
    _, lse = exact(call)
    torch.testing.assert_close(call.lse.double(), lse, rtol=0, atol=1e-5)


# ---- what does not count does not matter


@pytest.mark.parametrize("rows", [3, 65])
@pytest.mark.parametrize("extra", [None, WHOLE], ids=["one cache", "two"])
def test_nothing_uncounted_changes_a_bit(bench: Bench, rows: int, extra: CacheSpec | None) -> None:
    clean = make(CallSpec(rows, 16, SLIM, extra))
    dirty = make(CallSpec(rows, 16, SLIM, extra))
    for cache in (dirty.main, dirty.extra):
        if cache is not None:
            taken = cache.indices[counted(cache)].unique()
            assert 0 not in taken or rows > 3  # slot 0 is poisoned
            poison(cache.pool, cache.geometry, taken)
    assert bench.backend.preconditions(clean.shape) == ()
    bench.run(clean)
    bench.run(dirty)
    same(clean, dirty)
    assert clean.out.isfinite().all()


@pytest.mark.parametrize("rows", [3, 65])
def test_slot_0_of_a_pool_that_is_read_as_it_is_is_a_precondition(older: Bench, rows: int) -> None:
    call = make(CallSpec(rows, 16, replace(SLIM, page_size=64, pages=5), replace(C128, width=8)))
    assert older.backend.preconditions(call.shape) == ("kv_cache", "extra_kv_cache")
    older.run(call)
    agrees(call)  # finite: harmless
    call.extra.pool[0, : DSV4.token_bytes] = 0xFF
    call.main.pool[0, : DSV4.token_bytes] = 0xFF
    older.run(call)
    assert call.out.isnan().any()  # the stand-in does show it


def test_a_nan_in_a_counted_token_0_stays_in_its_row(bench: Bench) -> None:
    call = make(CallSpec(2, 8, replace(MAIN, width=2, lengths=None), sink=False))
    call = again(call, main=replace(call.main, indices=torch.tensor([[0, 1], [2, 3]])))
    other = again(call)
    bench.run(other)
    call.main.pool[0, DSV4.token_bytes - 2 : DSV4.token_bytes] = 0xFF  # a bf16 NaN in token 0
    bench.run(call)
    assert call.out[1].equal(other.out[1])


def test_scratch_may_hold_anything(bench: Bench) -> None:
    call = make(CallSpec(3, 8, MAIN, WHOLE))
    bench.run(call)
    for name, tensor in call.buffers.tensors().items():
        if "marks" not in name:  # those of the split are state, not scratch
            tensor.view(torch.uint8).fill_(0xFF)
    dirty = again(call)
    bench.run(dirty)
    same(call, dirty)


# ---- layout of the inputs and outputs


def test_strides_and_dtypes_are_honoured(bench: Bench) -> None:
    plain = make(CallSpec(3, 16, MAIN, C4))
    q = torch.zeros((3, 32, 1024), dtype=torch.bfloat16)[:, 8:24, 512:]
    q.copy_(plain.q)
    sink = torch.zeros(32)[::2]
    sink.copy_(plain.sink)

    def spread(indices: torch.Tensor) -> torch.Tensor:
        wide = torch.full((indices.shape[0], indices.shape[1] + 7), 3, dtype=torch.int64)
        wide[:, : indices.shape[1]] = indices
        return wide[:, : indices.shape[1]]

    def apart(lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([lengths, lengths + 1], 1)[:, 0]

    strided = replace(
        plain,
        q=q,
        sink=sink,
        main=replace(plain.main, indices=spread(plain.main.indices), lengths=apart(plain.main.lengths)),
        extra=replace(plain.extra, indices=spread(plain.extra.indices), lengths=apart(plain.extra.lengths)),
        out=torch.full((3, 16, 1024), 5.0, dtype=torch.bfloat16)[:, :, ::2],
        lse=torch.full((16, 3), 5.0).T,
    )
    bench.run(plain)
    bench.run(strided)
    same(plain, replace(strided, out=strided.out.contiguous(), lse=strided.lse.contiguous()))
    behind = torch.as_strided(strided.out, (3, 16, 512), strided.out.stride(), 1)
    assert behind[..., :-1].eq(5).all()


@pytest.mark.parametrize("view", ["fp8", "nhd", "hnd", "3d", "offset"])
def test_every_view_of_a_pool(bench: Bench, view: str) -> None:
    plain = make(CallSpec(2, 8, MAIN))
    pool = plain.main.pool
    if view == "offset":
        room = torch.full((pool.numel() + 4096,), 0xFF, dtype=torch.uint8)
        moved = torch.as_strided(room, pool.shape, pool.stride(), 1024)
        moved.copy_(pool)
        pool = moved
    geometry = geometry_of(pool, 256)
    stride = pool.stride(0)
    if view == "fp8":
        pool = pool.view(torch.float8_e4m3fn)
    elif view == "nhd":
        pool = torch.as_strided(pool, (2, 256, 1, 584), (stride, 584, 584, 1))
    elif view == "hnd":
        pool = torch.as_strided(pool, (2, 1, 256, 584), (stride, 584, 584, 1))
    elif view == "3d":
        pool = torch.as_strided(pool, (2, 256, 584), (stride, 584, 1))
    other = again(plain, main=replace(plain.main, pool=pool, geometry=geometry))
    bench.run(plain)
    bench.run(other)
    same(plain, other)


def test_the_pool_is_read_only(bench: Bench) -> None:
    call = make(CallSpec(2, 8, MAIN, C128))
    before = call.main.pool.clone(), call.extra.pool.clone(), call.main.indices.clone()
    bench.run(call)
    assert call.main.pool.equal(before[0])
    assert call.extra.pool.equal(before[1])
    assert call.main.indices.equal(before[2])


# ---- persistence and capture


def test_a_second_call_allocates_nothing(bench: Bench) -> None:
    call = make(CallSpec(3, 8, MAIN, C128))
    bench.run(call)
    before = {name: tensor.data_ptr() for name, tensor in call.buffers.tensors().items()}
    bench.run(again(call))
    bench.run(make(CallSpec(2, 8, SLIM, C128), call.buffers))
    assert {name: tensor.data_ptr() for name, tensor in call.buffers.tensors().items()} == before


def test_first_touch_in_inference_mode_leaves_ordinary_buffers(bench: Bench) -> None:
    with torch.inference_mode():
        call = make(CallSpec(3, 8, MAIN, C128))
        bench.run(call)
        agrees(call)
    for name, tensor in call.buffers.tensors().items():
        assert not tensor.is_inference(), name


def test_the_split_copies_what_counts_and_nothing_else(older: Bench) -> None:
    call = make(CallSpec(2, 8, replace(MAIN, width=4)))
    indices = torch.tensor([[70, 300, -1, 130], [-1, 200, 10, 11]])
    main = replace(call.main, indices=indices, lengths=torch.tensor([2, 2]))
    call = again(call, main=main)
    older.run(call)
    split = next(tensor for name, tensor in call.buffers.tensors().items() if "main-split" in name)
    split.fill_(0xEE)
    older.run(again(call))
    touched = [page for page in range(split.shape[0]) if not split[page].eq(0xEE).all()]
    assert touched == [0, 1 + 70 // 64, 1 + 200 // 64, 1 + 300 // 64]  # page 0 is ours: slot 0 is cleared


def test_scopes_share_nothing(bench: Bench) -> None:
    call = make(CallSpec(1, 8, MAIN, C128))
    bench.run(call)
    first = {tensor.data_ptr() for tensor in call.buffers.tensors().values()}
    bench.run(again(call, scope="draft"))
    scoped = [t.data_ptr() for name, t in call.buffers.tensors().items() if "[draft]" in name]
    assert len(scoped) == len(first)
    assert first.isdisjoint(scoped)


def test_a_capture_needs_the_buffers_and_a_first_run(bench: Bench) -> None:
    call = make(CallSpec(2, 8, MAIN, C128))
    out = call.out.clone()
    token = device.Capture()
    with device.capturing(token), pytest.raises(GrowthDuringCaptureError, match="the same attention"):
        bench.run(call)
    bench.run(again(call))
    fresh = bench_of(bench.generation)
    with device.capturing(token):
        if by_name(bench.generation).warm_up:
            with pytest.raises(CaptureError, match="once before the capture"):
                fresh.run(call)
            assert call.out.equal(out)
            assert fresh.record.launches == []
        else:
            fresh.run(call)
        bench.run(call)
    agrees(call)


@pytest.mark.parametrize("rows", [2, 65])
def test_a_replay_prepares_the_new_inputs(bench: Bench, rows: int) -> None:
    """The stand-in computes on the host, so the graph holds what surrounds it."""
    call = make(CallSpec(rows, 16, SLIM, WHOLE))
    bench.run(call)
    seen: list[flashinfer_api.KernelCall] = []
    attend = bench.backend._installed().attend
    bench.backend._found = replace(bench.backend._installed(), attend=seen.append)
    graph = graphs.capture(lambda: bench.backend.run(call))
    other = make(CallSpec(rows, 16, SLIM, WHOLE, seed=9))
    for mine, new in ((call.main, other.main), (call.extra, other.extra)):
        mine.pool.copy_(new.pool)
        mine.indices.copy_(new.indices)
        mine.lengths.copy_(new.lengths)
    for tensor in call.buffers.tensors().values():
        if tensor.dtype == torch.int32:
            tensor.fill_(77)
    graph.replay()
    captured = seen[0]
    results = torch.zeros_like(captured.out), torch.zeros_like(captured.lse)
    attend(replace(captured, out=results[0], lse=results[1]))
    eager = bench_of(bench.generation)
    wanted = replace(other, q=call.q, sink=None)
    eager.run(wanted)
    assert results[0].view(torch.int16).equal(wanted.out.view(torch.int16))
