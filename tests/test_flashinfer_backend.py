"""The FlashInfer backend on every generation of kernels that it serves: emulated, and as installed."""

from __future__ import annotations

import contextlib
import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer_cases import CacheSpec, CallSpec, again, counted, exact, geometry_of, make, poison
from flashinfer_emulation import WildGather
from flashinfer_standin import Record, Unmet, direct, installed

from sm120_mla import device, graphs
from sm120_mla.backends import flashinfer_api
from sm120_mla.backends.base import AttentionCall
from sm120_mla.backends.flashinfer import FlashInferBackend
from sm120_mla.buffers import PersistentBuffers
from sm120_mla.envelopes import ARITHMETIC, ENVELOPES, by_name
from sm120_mla.errors import ArgumentError, CaptureError, GrowthDuringCaptureError, UnavailableError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")

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


@pytest.fixture(params=GENERATIONS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


@pytest.fixture(params=[name for name in GENERATIONS if by_name(name).gathers_slot_zero])
def older(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


@pytest.fixture
def sm120(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flashinfer_api, "reachable", lambda: True)
    with device.pretend_device((12, 0)):
        yield


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


# ---- refusals


@pytest.mark.parametrize(
    ("name", "spec", "argument"),
    [
        ("A", CallSpec(65, 8, MAIN), "query heads = 8"),
        ("A", CallSpec(1, 12, MAIN), "query heads = 12"),
        ("B", CallSpec(65, 12, MAIN), "query heads = 12"),
        ("C", CallSpec(65, 12, MAIN), "query heads = 12"),
        ("A", CallSpec(1, 8, replace(MAIN, width=1025)), "indices width = 1025"),
        ("B", CallSpec(65, 16, replace(MAIN, width=129), C4), "indices width = 129"),
        ("B", CallSpec(65, 16, MAIN, replace(C4, page_size=4)), "extra_kv_cache page size = 4"),
        ("B", CallSpec(1, 16, replace(MAIN, page_size=32, pages=9)), "kv_cache page size = 32"),
    ],
)
def test_a_shape_that_is_not_served_is_refused_before_anything_happens(
    name: str, spec: CallSpec, argument: str, sm120: None
) -> None:
    bench, call = bench_of(name), make(spec)
    before = call.out.clone()
    with pytest.raises(ArgumentError, match=argument) as raised:
        bench.run(call)
    assert "Nearest that works" in raised.value.remedy
    assert call.out.equal(before)
    assert len(call.buffers) == 0
    assert bench.record.launches == []
    said = bench.backend.supports(call.shape, (12, 0))
    assert not said
    assert argument in said.reason
    assert said.remedy == raised.value.remedy


def test_what_is_refused_would_have_failed(sm120: None) -> None:
    """The tables are no narrower than the kernels: the stand-in's own checks refuse the same shapes."""
    for name, rows, heads, width in (("A", 65, 8, 128), ("A", 1, 8, 192), ("B", 1, 12, 128)):
        bench = bench_of(name)
        call = make(CallSpec(rows, heads, MAIN))
        found = bench.backend._installed()
        loose = replace(
            found.envelope,
            decode_heads=None,
            prefill_heads=(8, 12),
            decode_widths=(width,),
            prefill_widths=(width,),
        )
        bench.backend._found = replace(found, envelope=loose)
        with pytest.raises(RuntimeError, match="Check failed"):
            bench.run(call)


@pytest.mark.parametrize("scale", [-0.04, 1e-30])
def test_a_scale_that_undoes_the_mask(bench: Bench, scale: float) -> None:
    call = replace(make(CallSpec(2, 8, MAIN, sink=False)), scale=scale)
    if by_name(bench.generation).masks_before_scale:
        with pytest.raises(ArgumentError, match="softmax_scale"):
            bench.run(call)
    else:
        agrees(bench.run(call))


# ---- availability


def test_importing_the_backend_imports_no_flashinfer() -> None:
    code = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "from sm120_mla.backends.flashinfer import FlashInferBackend as B\n"
        "assert not B().available(); sys.modules.pop('flashinfer')\n"
        "assert not any(name.startswith('flashinfer') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_api.importlib.util, "find_spec", lambda name: None)
    backend, call = FlashInferBackend(), make(CallSpec(1, 8, MAIN))
    said = backend.available()
    assert not said
    assert said.reason == "flashinfer-python is not installed"
    assert said.remedy == "Run: pip install 'sm120-mla[flashinfer]'."
    assert backend.supports(call.shape, (12, 0)) == said
    with pytest.raises(UnavailableError, match="not installed"):
        backend.run(call)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_api, "reachable", lambda: False)
    said = bench_of("C").backend.available()
    assert not said
    assert "no CUDA GPU" in said.reason


@pytest.mark.parametrize(
    ("capability", "yes"), [((12, 0), True), ((12, 1), True), ((9, 0), False), (None, False)]
)
def test_capability(bench: Bench, sm120: None, capability: tuple[int, int] | None, yes: bool) -> None:
    said = bench.backend.supports(make(CallSpec(1, 8, MAIN)).shape, capability)
    assert bool(said) is yes
    assert yes or "capability 12.x" in said.reason


def test_a_known_defect_is_told(sm120: None) -> None:
    shape = make(CallSpec(1, 8, MAIN)).shape
    assert "3700" in bench_of("A").backend.supports(shape, (12, 0)).reason
    assert bench_of("B").backend.supports(shape, (12, 0)).reason == ""


class Wrapper:
    def __init__(self, device: object = None) -> None: ...

    def run(
        self,
        q: Any,
        *,
        topk_length: Any = None,
        attn_sink: Any = None,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        extra_topk_length: Any = None,
        out_lse: Any = None,
        mid_out: Any = None,
        mid_lse: Any = None,
        lse_scale: float = 1.0,
    ) -> None: ...


class NoLseScale:
    def run(self, q: Any, *, topk_length: Any = None) -> None: ...


def config(**changed: object) -> SimpleNamespace:
    base = {"d_qk": 512, "bytes_per_token": 584, "max_num_tokens": 64, "head_counts": None}
    return SimpleNamespace(**(base | {"topk_is_runtime": True, "page_block_size_is_runtime": True} | changed))


def function(
    q: Any,
    *,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    out_lse: Any = None,
    mid_out: Any = None,
    mid_lse: Any = None,
) -> None: ...


def old_module(widths: tuple[int, ...]) -> dict[str, object]:
    return {
        "_DECODE_DSV4_DISPATCH": frozenset((h, k) for h in (8, 16, 32, 64, 128) for k in widths),
        "_DECODE_MAX_TOKENS": 64,
        "_DECODE_DSV4_PAGE_BLOCK_SIZE": 64,
        "_sparse_mla_sm120_paged_attention": function,
    }


def new_module(wrapper: type, answer: SimpleNamespace) -> dict[str, object]:
    return {
        "SparseMLASm120Wrapper": wrapper,
        "supported_sparse_mla_sm120_configs": lambda: {"dsv4": answer},
    }


@contextlib.contextmanager
def pretend_package(
    monkeypatch: pytest.MonkeyPatch, version: str, mla: dict[str, object], private: dict[str, object] | None
) -> Iterator[None]:
    """A flashinfer of that version made of these objects; ``private`` None: it has no such module."""
    modules = {"flashinfer": {}, "flashinfer.mla": mla, "flashinfer.mla._sparse_mla_sm120": private}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        for key, value in (content or {}).items():
            setattr(module, key, value)
        if content is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_api.importlib.metadata, "version", lambda name: version)
    yield


A_WIDTHS, B_WIDTHS = (128, 512, 1024), (128, 192, 256, 512, 1024)


@pytest.mark.parametrize(
    ("version", "mla", "private", "name"),
    [
        ("0.6.14", {}, old_module(A_WIDTHS), "A"),
        ("0.6.18", {}, old_module(B_WIDTHS), "B"),
        ("0.7.4", new_module(Wrapper, config()), {}, "C"),
        # what it offers decides, not its number
        ("0.6.15+vendor", {}, old_module(B_WIDTHS), "B"),
        ("9.9", new_module(Wrapper, config()), {}, "C"),
    ],
)
def test_generations_are_told_by_what_they_offer(
    monkeypatch: pytest.MonkeyPatch, version: str, mla: Any, private: Any, name: str
) -> None:
    with pretend_package(monkeypatch, version, mla, private):
        found = flashinfer_api.probe()
    assert isinstance(found, flashinfer_api.Installed)
    assert (found.version, found.envelope.name) == (version, name)


@pytest.mark.parametrize(
    ("version", "mla", "private", "reason"),
    [
        ("0.6.13", {}, None, "0.6.13 has no SM120 kernels"),
        (
            "0.7.0",
            new_module(Wrapper, config(page_block_size_is_runtime=False)),
            {},
            "lies between",
        ),
        ("0.7.9", new_module(NoLseScale, config()), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(topk_is_runtime=False)), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(bytes_per_token=528)), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(max_num_tokens=32)), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(head_counts=frozenset({8}))), {}, "offers neither"),
        ("0.7.9", {**new_module(Wrapper, config()), "SparseMLASm120Wrapper": 3}, {}, "raised AttributeError"),
        ("0.6.19", {}, old_module((128, 2048)), "offers neither"),
        ("0.6.19", {}, {**old_module(A_WIDTHS), "_DECODE_MAX_TOKENS": 32}, "offers neither"),
        ("0.6.19", {}, {**old_module(A_WIDTHS), "_DECODE_DSV4_PAGE_BLOCK_SIZE": 256}, "offers neither"),
    ],
)
def test_what_is_not_known_is_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str, mla: Any, private: Any, reason: str
) -> None:
    with pretend_package(monkeypatch, version, mla, private):
        said = FlashInferBackend().available()
    assert not said
    assert reason in said.reason
    assert "0.7.4" in said.remedy


@pytest.mark.parametrize("error", [AssertionError("no CUDA"), RuntimeError("driver"), ImportError("torch_c")])
def test_an_import_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(flashinfer_api.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_api.importlib, "import_module", fail)
    said = FlashInferBackend().available()
    assert not said
    assert "cannot be imported" in said.reason
    assert str(error) in said.reason


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
    from flashinfer_emulation import OLD, Section, attend

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


def distance(call: AttentionCall) -> tuple[float, float, float]:
    """Relative RMS error, smallest row cosine, and the largest LSE error in units of its deviation."""
    out, lse = exact(call)
    got = call.out.double()
    used = ~lse.isneginf()
    rms = float((got - out).norm() / out.norm())
    cosine = float(torch.nn.functional.cosine_similarity(got, out, dim=-1)[used].min())
    assert call.lse is not None
    # |q|_4 |k|_4 bounds the root of the sum of squares of the products.
    spread = call.q.double()[..., :448].pow(4).sum(-1).pow(0.25) * 448**0.25 * 3**0.25 * call.scale
    lse_error = float(((call.lse.double() - lse)[used].abs() / spread[used]).max())
    return rms, cosine, lse_error


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
    rms, cosine, lse = distance(call)
    assert rms < ARITHMETIC.out_rms
    assert cosine > ARITHMETIC.row_cosine
    assert lse < 6 * ARITHMETIC.score
    assert rms > ARITHMETIC.out_rms / 5  # of the order of the errors there are


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
