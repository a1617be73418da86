"""The specification of attention: DeepSeek's own results, small cases by hand, and what must not matter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sm120_mla import attention as product
from sm120_mla import graphs
from sm120_mla.attention import sparse_mla
from sm120_mla.backends import reference as backend_module
from sm120_mla.backends.reference import ReferenceBackend
from sm120_mla.case import AttnCase, CacheSpec, IndexSpec
from sm120_mla.codec import dequantise_pages, pack_pages
from sm120_mla.errors import ArgumentError
from sm120_mla.layout import DSV4, DSV41_FOOTER, DSV41_INLINE, PageLayout
from sm120_mla.pages import pool_geometry
from sm120_mla.reference import attention as specification
from sm120_mla.reference.attention import Entries, attention, counted, faithful, slabs, values
from sm120_mla.testing import attn_inputs
from sm120_mla.testing.arithmetic import REFERENCE, TRITON
from sm120_mla.testing.budgets import judge
from sm120_mla.testing.derive import run_device

GOLDEN = Path(__file__).parents[1] / "fixtures" / "attention" / "dsv4_attention.npz"
GOLDEN_CASES = ("swa", "swa_len_sink", "dual", "dual_lengths_lonely")
DEVICE = run_device()
SCALE = 512**-0.5
NEVER = float("-inf")
Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def golden(name: str) -> dict[str, torch.Tensor]:
    """One golden case on the device, its rows flattened to ``[T, ...]``, lse in this project's convention."""
    with np.load(GOLDEN) as file:
        keys = [key for key in file if key.startswith(f"{name}/")]
        found = {key.removeprefix(f"{name}/"): torch.from_numpy(file[key]) for key in keys}
    batch, steps = found["q_bf16_bits"].shape[:2]
    for key in ("q_bf16_bits", "out_bf16_bits", "indices", "extra_indices"):
        if key in found:
            found[key] = found[key].flatten(0, 1)
    for key in ("topk_length", "extra_topk_length"):
        if key in found:
            found[key] = found[key].repeat_interleave(steps)
    lse = found["lse_natural"].transpose(1, 2).reshape(batch * steps, -1)
    found["lse"] = torch.where(lse == math.inf, NEVER, lse)  # upstream says +inf of an empty row
    found["q"] = found["q_bf16_bits"].view(torch.bfloat16)
    found["out"] = found["out_bf16_bits"].view(torch.bfloat16)
    return {key: value.to(DEVICE) for key, value in found.items()}


def golden_entries(case: dict[str, torch.Tensor]) -> list[Entries]:
    entries = []
    for prefix in ("", "extra_"):
        if f"{prefix}indices" in case:
            pool = case[f"{prefix}page_bytes"]
            geometry = pool_geometry(pool, int(case[f"{prefix}page_size"]), DSV4)
            entries.append(
                Entries(pool, geometry, case[f"{prefix}indices"], case.get(f"{prefix}topk_length"))
            )
    return entries


def small(seed: int, pages: int = 2, size: int = 8, layout: PageLayout = DSV4) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return pack_pages(torch.randn(pages, size, layout.head_dim, generator=gen), layout).to(DEVICE)


def queries(seed: int, tokens: int, heads: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 512, generator=gen).to(device=DEVICE, dtype=torch.bfloat16)


def entries(
    pool: torch.Tensor,
    rows: list[list[int]],
    lengths: list[int] | None = None,
    size: int = 8,
    layout: PageLayout = DSV4,
) -> Entries:
    index = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    length = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    return Entries(pool, pool_geometry(pool, size, layout), index, length)


def by_hand(
    q: torch.Tensor, keys: list[torch.Tensor], sink: float | None = None
) -> tuple[torch.Tensor, float]:
    """Out and lse of one query over a list of rows, term by term in Python's doubles."""
    if not keys:
        return torch.zeros(512, dtype=torch.float64), NEVER
    scores = [float((q.double() * key.double()).sum()) * SCALE for key in keys]
    top = max(scores)
    lse = top + math.log(sum(math.exp(s - top) for s in scores))
    total = math.exp(lse) + (0.0 if sink is None else math.exp(sink))
    out = sum(math.exp(s) / total * key.double() for s, key in zip(scores, keys, strict=True))
    return out.cpu(), lse


# ---- DeepSeek's results


def test_the_golden_file_holds_the_cases_that_are_read_here() -> None:
    with np.load(GOLDEN) as file:
        assert {key.split("/")[0] for key in file} == set(GOLDEN_CASES)


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_results_are_within_the_budget_of_bf16_arithmetic(name: str) -> None:
    case = golden(name)
    call = (case["q"], golden_entries(case), case.get("attn_sink"), SCALE)

    out, lse = attention(*call)

    assert judge(TRITON, *call, case["out"], case["lse"]).judgement.ok
    # DeepSeek's reference multiplies in fp32: a value beside a boundary of bf16 may round the other way.
    assert (out.to(torch.bfloat16) != case["out"]).double().mean() < 1e-3
    finite = lse.isfinite()
    assert torch.equal(finite, case["lse"].isfinite())
    assert float((lse - case["lse"])[finite].abs().max()) < 1e-6


@pytest.mark.parametrize("name", GOLDEN_CASES)
@pytest.mark.parametrize("form", ["fp64", "bf16", "triton"])
def test_golden_data_is_reproduced_through_the_entry_point(name: str, form: str) -> None:
    case = golden(name)
    backend = "triton" if form == "triton" else "reference"
    with pytest.MonkeyPatch.context() as patch:
        if backend == "reference":
            patch.setitem(product._instances, "reference", ReferenceBackend(form))
        out, lse = sparse_mla(
            case["q"],
            case["page_bytes"],
            case["indices"],
            page_size=int(case["page_size"]),
            topk_length=case.get("topk_length"),
            attn_sink=case.get("attn_sink"),
            extra_kv_cache=case.get("extra_page_bytes"),
            extra_indices=case.get("extra_indices"),
            extra_topk_length=case.get("extra_topk_length"),
            extra_page_size=int(case["extra_page_size"]) if "extra_page_size" in case else None,
            backend=backend,
            return_lse=True,
        )

    arithmetic = REFERENCE if form == "fp64" else TRITON
    call = (case["q"], golden_entries(case), case.get("attn_sink"), SCALE)
    assert judge(arithmetic, *call, out, lse).judgement.ok
    limit = 1e-3 + 2.01 / 128 * case["out"].abs().double()  # upstream's own tolerance
    assert bool(((out.double() - case["out"].double()).abs() <= limit).all())
    empty = case["lse"] == NEVER
    near = 1e-6 + 8.01 / 65536 * case["lse"].abs()
    assert bool(((lse - case["lse"]).abs() <= near)[~empty].all())
    assert torch.equal(lse == NEVER, empty)
    assert not out[empty].any()


def test_an_empty_row_is_among_the_golden_ones() -> None:
    assert bool((golden("dual_lengths_lonely")["lse"] == NEVER).any())


# ---- by hand


@pytest.mark.parametrize("form", [attention, faithful])
def test_one_row_over_two_caches_with_sink_by_hand(form: Form) -> None:
    main, extra = small(1), small(2, size=2)
    k, k_extra = dequantise_pages(main, DSV4, 8), dequantise_pages(extra, DSV4, 2)
    q = queries(3, 1, 2)
    sink = torch.tensor([0.5, -1.0], device=DEVICE)
    caches = [entries(main, [[9, -1, 3, 3, 16, 2]], [5]), entries(extra, [[3, 99]], size=2)]

    out, lse = form(q, caches, sink, SCALE)

    keys = [k[1, 1], k[0, 3], k[0, 3], k_extra[1, 1]]  # 16 and 99 lie past the end, 2 past the length
    for head in range(2):
        want, want_lse = by_hand(q[0, head], keys, float(sink[head]))
        assert torch.allclose(out[0, head].cpu().double(), want, rtol=1e-2, atol=2e-3)
        assert float(lse[0, head]) == pytest.approx(want_lse, abs=1e-5)
        if out.dtype == torch.float64:
            assert torch.allclose(out[0, head].cpu(), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", [attention, faithful])
@pytest.mark.parametrize(
    ("rows", "lengths"),
    [([[-1, -1]], None), ([[1, 2]], [0]), ([[1, 2]], [-3]), ([[16, -7]], [2]), ([[]], None)],
)
@pytest.mark.parametrize("sink", [None, 0.0, -math.inf, math.inf])
def test_an_empty_row_is_zero_with_and_without_sink(
    form: Form, rows: list[list[int]], lengths: list[int] | None, sink: float | None
) -> None:
    sinks = None if sink is None else torch.full((3,), sink, device=DEVICE)

    out, lse = form(queries(1, 1, 3), [entries(small(1), rows, lengths)], sinks, SCALE)

    assert bool((out == 0).all())
    assert bool((lse == NEVER).all())


@pytest.mark.parametrize("form", [attention, faithful])
def test_a_sink_divides_and_leaves_the_lse_alone(form: Form) -> None:
    q, caches = queries(1, 2, 4), [entries(small(1), [[0, 5, 9], [1, -1, 2]])]
    sink = torch.tensor([-math.inf, math.inf, 0.0, 1e4], device=DEVICE)

    plain, lse = form(q, caches, None, SCALE)
    out, same = form(q, caches, sink, SCALE)

    assert torch.equal(lse, same)
    assert torch.equal(out[:, 0], plain[:, 0])
    assert not out[:, [1, 3]].any()
    share = torch.sigmoid(lse[:, 2].double())
    assert torch.allclose(out[:, 2].double(), plain[:, 2].double() * share[:, None], rtol=8e-3)


@pytest.mark.parametrize("layout", [DSV41_FOOTER, DSV41_INLINE], ids=lambda row: row.name)
def test_layouts_without_rope_field(layout: PageLayout) -> None:
    pool = small(1, layout=layout)
    q, keys = queries(2, 1, 1), dequantise_pages(pool, layout, 8)

    out, lse = attention(q, [entries(pool, [[12, 3]], layout=layout)], None, SCALE)

    want, want_lse = by_hand(q[0, 0], [keys[1, 4], keys[0, 3]])
    assert torch.allclose(out[0, 0].cpu(), want, rtol=1e-12)
    assert float(lse) == pytest.approx(want_lse)


def test_int64_indices_are_compared_in_64_bits() -> None:
    cache = entries(small(1), [[3]])
    wide = Entries(cache.pool, cache.geometry, cache.indices.long() + (1 << 32), None)

    assert counted(cache).tolist() == [[True]]
    assert counted(wide).tolist() == [[False]]


def test_a_cache_without_pages_counts_nothing() -> None:
    pool = small(1)
    none = pool[:0]
    empty = Entries(none, pool_geometry(none, 8, DSV4), torch.zeros((1, 3), dtype=torch.int32, device=DEVICE))
    q, full = queries(1, 1, 2), entries(pool, [[2, 9]])

    both, lse = attention(q, [empty, full], None, SCALE)

    alone, lse_alone = attention(q, [full], None, SCALE)
    # Another shape is another matrix product: on a GPU its sums may be taken in another order.
    assert torch.allclose(both, alone, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse, lse_alone, rtol=1e-12, atol=1e-12)


def test_tokens_are_told_apart_over_both_caches() -> None:
    pool = small(1)
    caches = [entries(pool, [[3, -1, 3]]), entries(pool, [[3, 16, 4]])]

    (slab,) = slabs(queries(1, 1, 1), caches, None, SCALE)

    assert slab.token.tolist() == [[3, -1, 3, 16 + 3, -1, 16 + 4]]


def test_the_bf16_form_rounds_its_weights_and_only_where_asked() -> None:
    q, caches = queries(1, 3, 4), [entries(small(1), [[0, 5, 9, 14, 2]] * 3)]
    want, _ = attention(q, caches, None, SCALE)

    rounded, _ = faithful(q, caches, None, SCALE)
    exact, _ = faithful(q, caches, None, SCALE, p_bf16=False)

    assert (exact != want.to(torch.bfloat16)).double().mean() < 1e-3
    assert (rounded != exact).double().mean() > 0.05


# ---- what must not matter


@pytest.mark.parametrize("form", [attention, faithful])
def test_bytes_of_uncounted_tokens_change_no_bit(form: Form) -> None:
    index = IndexSpec(rows=3, width=12, kinds=("valid", "minus_one", "past_end"), lengths="random", seed=5)
    spec = CacheSpec(pages=2, stride_gap=8, index=index)
    case = AttnCase(tokens=3, heads=4, main=spec, extra=spec.model_copy(update={"page_size": 2}), seed=11)
    results = []
    for n, kind in enumerate(("noise", "nan", "inf")):
        call = attn_inputs.call_of(case.model_copy(update={"poison": kind}), poison_seed=n)
        results.append(form(call.q, attn_inputs.entries_of(call), call.sink, call.scale))

    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_a_counted_nan_reaches_its_row_and_no_other() -> None:
    pool = small(1)
    pool[0, 3 * 576] = 0x7F  # token 3: NaN as e4m3fn
    q, caches = queries(1, 2, 2), [entries(pool, [[3, 4], [4, 5]])]

    out, lse = attention(q, caches, None, SCALE)

    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_slabs_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    call = attn_inputs.call_of(
        AttnCase(tokens=5, heads=3, main=CacheSpec(index=IndexSpec(rows=5, width=7)), sink="random", seed=3)
    )
    arguments = (call.q, attn_inputs.entries_of(call), call.sink, call.scale)
    whole = attention(*arguments)
    assert len(list(slabs(*arguments))) == 1

    monkeypatch.setattr(specification, "_SLAB_ELEMENTS", 2 * 7 * 515)

    assert [(s.begin, s.end) for s in slabs(*arguments)] == [(0, 2), (2, 4), (4, 5)]
    for a, b in zip(whole, attention(*arguments), strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=0)


@pytest.mark.parametrize("splits", [2, 3, 16])
def test_the_merge_of_splits_is_the_whole_within_bf16(splits: int) -> None:
    q = queries(1, 2, 4)
    caches = [entries(small(1), [[0, 5, 9, 14, 2], [-1, -1, -1, -1, 7]])]
    sink = torch.zeros(4, device=DEVICE)

    out, lse = faithful(q, caches, sink, SCALE, splits=splits)

    assert judge(TRITON, q, caches, sink, SCALE, out, lse).judgement.ok


def test_values_read_pools_of_either_dtype_with_offset_and_stride() -> None:
    pool = small(4)
    storage = torch.zeros(3 * 8000 + 64, dtype=torch.uint8, device=DEVICE)
    view = torch.as_strided(storage, (2, 8 * 584), (8000, 1), 64)
    view.copy_(pool[:, : 8 * 584])
    want = values(entries(pool, [[1, 15, -1]]))
    as_fp8 = torch.as_strided(storage.view(torch.float8_e4m3fn), (2, 8, 1, 584), (8000, 584, 584, 1), 64)

    for seen in (view, as_fp8):
        cache = entries(seen, [[1, 15, -1]])
        assert cache.geometry.page_stride == 8000
        assert torch.equal(values(cache), want)
    assert bool((want[0, 2] == 0).all())
    assert bool(want[0, :2].any())


# ---- the backend


def test_the_backend_can_be_captured_and_replayed() -> None:
    pool = small(1)
    q, index = queries(1, 2, 2), torch.tensor([[0, 5], [9, -1]], dtype=torch.int32, device=DEVICE)
    out, lse = torch.empty_like(q), torch.empty((2, 2), device=DEVICE)

    def attend() -> None:
        sparse_mla(q, pool, index, page_size=8, backend="reference", out=out, lse=lse)

    graph = graphs.capture(attend)
    q.copy_(queries(2, 2, 2))
    index.copy_(torch.tensor([[3, -1], [-1, -1]]))
    graph.replay()

    want, want_lse = attention(q, [entries(pool, [[3, -1], [-1, -1]])], None, SCALE)
    assert torch.equal(out, want.to(torch.bfloat16))
    assert torch.equal(lse, want_lse.float())


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("run_inside", [False, True])
def test_outputs_may_be_inference_tensors(made_inside: bool, run_inside: bool) -> None:
    pool, q = small(1), queries(1, 1, 2)
    index = torch.tensor([[4, -1]], dtype=torch.int32, device=DEVICE)
    with torch.inference_mode(made_inside):
        out, lse = torch.full_like(q, 7.0), torch.full((1, 2), 7.0, device=DEVICE)
    with torch.inference_mode(run_inside):
        for k in (2, 0):
            sparse_mla(q, pool, index[:, :k], page_size=8, backend="reference", out=out, lse=lse)

    assert bool((out == 0).all())
    assert bool((lse == NEVER).all())


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ArgumentError, match="fp64, bf16"):
        ReferenceBackend("fp32")


def test_the_backend_hands_over_both_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(backend_module, "attention", lambda *a: (seen.append(a), attention(*a))[1])
    pool = small(1)
    index = torch.tensor([[4, -1]], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([1], dtype=torch.int32, device=DEVICE)

    sparse_mla(
        queries(1, 1, 2),
        pool,
        index,
        page_size=8,
        extra_kv_cache=pool,
        extra_page_size=8,
        extra_indices=index,
        extra_topk_length=length,
        backend="reference",
    )

    main, extra = seen[0][1]
    assert main.lengths is None
    assert extra.lengths is length
