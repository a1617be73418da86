"""sparse_mla and its drop-in: edges, refusals before anything is written, outputs, choice of a backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sm120_mla import attention, device
from sm120_mla.attention import (
    BACKENDS,
    Route,
    choose,
    explain,
    flash_mla_with_kvcache_sm120,
    sparse_mla,
)
from sm120_mla.attention_checks import MAX_HEADS, check
from sm120_mla.backends.base import AttentionCall, AttentionShape, Support
from sm120_mla.backends.reference import ReferenceBackend
from sm120_mla.buffers import PersistentBuffers, default_buffers
from sm120_mla.codec import pack_pages
from sm120_mla.errors import ArgumentError, IndexValueError, LayoutError, UnavailableError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4, DSV32, DSV41_FOOTER
from sm120_mla.placement import share_memory
from sm120_mla.testing.derive import run_device

DEVICE = run_device()
T, H, K, PAGES, SIZE = 3, 4, 6, 3, 16
NEVER = float("-inf")
Arguments = dict[str, Any]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cache(seed: int = 1, pages: int = PAGES, size: int = SIZE) -> torch.Tensor:
    return pack_pages(torch.randn(pages, size, 512, generator=generator(seed))).to(DEVICE)


def query(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(device=DEVICE, dtype=torch.bfloat16)


def rows(tokens: int = T, width: int = K, seed: int = 3, bound: int = PAGES * SIZE) -> torch.Tensor:
    return torch.randint(-1, bound, (tokens, width), generator=generator(seed), dtype=torch.int32).to(DEVICE)


def vector(*values: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def sinks(*values: float) -> torch.Tensor:
    return vector(*values, dtype=torch.float32)


@pytest.fixture
def call() -> Arguments:
    """A good call with every argument, on the reference backend."""
    return {
        "q": query(T, H, 512),
        "kv_cache": cache(),
        "indices": rows(),
        "topk_length": vector(4, 0, 6),
        "attn_sink": sinks(0.5, -1.0, 2.0, NEVER),
        "softmax_scale": 0.05,
        "page_size": SIZE,
        "extra_kv_cache": cache(7, 5, 2),
        "extra_indices": rows(width=3, seed=8, bound=10),
        "extra_topk_length": vector(3, 1, 2),
        "extra_page_size": 2,
        "backend": "reference",
    }


@pytest.fixture
def plain() -> Arguments:
    """The same without what may be left out."""
    return {
        "q": query(T, H, 512),
        "kv_cache": cache(),
        "indices": rows(),
        "page_size": SIZE,
        "backend": "reference",
    }


def both(arguments: Arguments, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sparse_mla(**{**arguments, **changed}, return_lse=True)
    return out, lse


class Fake:
    """A backend that says what it is told to and remembers its calls."""

    def __init__(self, name: str, available: Support | None = None, supports: Support | None = None) -> None:
        self.name = name
        self._available = Support(True) if available is None else available
        self._supports = Support(True) if supports is None else supports
        self.calls: list[AttentionCall] = []
        self.asked: list[tuple[AttentionShape, Any]] = []

    def available(self) -> Support:
        return self._available

    def supports(self, shape: AttentionShape, capability: Any) -> Support:
        self.asked.append((shape, capability))
        return self._supports

    def run(self, call: AttentionCall) -> None:
        self.calls.append(call)
        ReferenceBackend().run(call)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Fake]]:
    """Put fake backends in place; ``triton=Support(False, ...)`` makes one that serves nothing."""
    monkeypatch.delenv("SM120_MLA_BACKEND", raising=False)
    monkeypatch.delenv("SGLANG_SM120_FLASHMLA_BACKEND", raising=False)

    def put(missing: tuple[str, ...] = (), **supports: Support) -> dict[str, Fake]:
        made = {
            name: Fake(name, Support(False, f"no {name} here", "Install it.") if name in missing else None)
            for name in BACKENDS
        }
        for name, answer in supports.items():
            made[name]._supports = answer
        for name, fake in made.items():
            monkeypatch.setitem(attention._instances, name, fake)
        return made

    return put


# ---- the result and its shapes


def test_out_alone_or_with_the_lse(call: Arguments) -> None:
    out = sparse_mla(**call)
    again, lse = both(call)

    assert isinstance(out, torch.Tensor)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((T, H, 512), torch.bfloat16, True)
    assert (lse.shape, lse.dtype) == ((T, H), torch.float32)
    assert torch.equal(out, again)
    assert bool(out.any())


def test_every_argument_changes_the_result(call: Arguments) -> None:
    base = sparse_mla(**call)
    others = {
        "topk_length": vector(4, 2, 6),
        "attn_sink": sinks(0.5, -1.0, 2.0, 0.0),
        "softmax_scale": 0.5,
        "extra_kv_cache": cache(17, 5, 2),
        "extra_indices": call["extra_indices"].roll(1, 0),
        "extra_topk_length": vector(3, 3, 2),
    }

    for name, value in others.items():
        assert not torch.equal(sparse_mla(**{**call, name: value}), base), name


def test_what_is_left_out_has_its_default(plain: Arguments) -> None:
    out, lse = both(plain)

    full = torch.full((T,), K, dtype=torch.int64, device=DEVICE)
    same, same_lse = both(
        plain, topk_length=full, attn_sink=sinks(*[NEVER] * H), softmax_scale=512**-0.5, layout=DSV4
    )
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)


def test_a_head_axis_of_one_is_kept_and_indices_may_have_it(call: Arguments) -> None:
    out, lse = both(call)
    changed = {
        "q": call["q"][:, None],
        "indices": call["indices"][:, None],
        "topk_length": call["topk_length"][:, None].long(),
        "extra_indices": call["extra_indices"][:, None].long(),
    }

    wide, wide_lse = both(call, **changed)

    assert wide.shape == (T, 1, H, 512)
    assert torch.equal(wide[:, 0], out)
    assert torch.equal(wide_lse, lse)


def test_any_view_of_the_cache_gives_the_same(plain: Arguments) -> None:
    pool = plain["kv_cache"]
    views = [
        pool.view(torch.float8_e4m3fn),
        torch.as_strided(pool, (PAGES, SIZE, 584), (pool.stride(0), 584, 1)),
        torch.as_strided(pool, (PAGES, SIZE, 1, 584), (pool.stride(0), 584, 584, 1)),
        torch.as_strided(pool, (PAGES, 1, SIZE, 584), (pool.stride(0), SIZE * 584, 584, 1)),
    ]
    want = sparse_mla(**plain)

    for view in views:
        size = SIZE if view.dim() == 2 else None
        assert torch.equal(sparse_mla(**{**plain, "kv_cache": view, "page_size": size}), want)


def test_strided_q_and_index_rows_are_read_where_they_lie(call: Arguments) -> None:
    fused = query(T, 2 * H + 1, 512, seed=40)
    q = fused[:, H:-1]
    wide = rows(width=K + 5, seed=41)

    out, lse = both(call, q=q, indices=wide[:, :K])

    want, want_lse = both(call, q=q.contiguous(), indices=wide[:, :K].contiguous())
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_main_and_extra_may_be_exchanged(call: Arguments) -> None:
    swapped = {
        name.removeprefix("extra_") if name.startswith("extra_") else f"extra_{name}": call[name]
        for name in ("kv_cache", "indices", "topk_length", "page_size")
        for name in (name, f"extra_{name}")
    }

    out, lse = both(call)
    other, other_lse = both({**call, **swapped})

    assert torch.allclose(out.float(), other.float(), rtol=2**-7, atol=1e-6)
    assert torch.allclose(lse, other_lse)


@pytest.mark.parametrize("heads", [1, 3, 128])
def test_any_head_count(plain: Arguments, heads: int) -> None:
    q = query(T, heads, 512)

    assert sparse_mla(**{**plain, "q": q}).shape == (T, heads, 512)


def test_a_layout_without_rope_is_served(plain: Arguments) -> None:
    pool = pack_pages(torch.randn(2, 8, 512, generator=generator(1)), DSV41_FOOTER).to(DEVICE)

    out = sparse_mla(
        **{**plain, "kv_cache": pool, "indices": rows(bound=16), "page_size": 8, "layout": DSV41_FOOTER}
    )

    assert bool(out.any())


# ---- edges that have a defined result


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_no_rows_give_nothing(call: Arguments, backend: str | None) -> None:
    none = {
        "q": query(0, 1, H, 512),
        "indices": rows(0),
        "topk_length": vector(),
        "extra_indices": rows(0, 1, 3),
        "extra_topk_length": None,
    }

    out, lse = both(call, **none, backend=backend)

    assert out.shape == (0, 1, H, 512)
    assert lse.shape == (0, H)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("sink", [None, 0.0, math.inf, NEVER])
def test_no_columns_give_empty_rows_without_a_launch(
    plain: Arguments, backend: str | None, sink: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_route", None)  # nothing is chosen, so nothing can run
    attn_sink = None if sink is None else sinks(*[sink] * H)

    out, lse = both(plain, indices=rows(T, 0), attn_sink=attn_sink, backend=backend)

    assert bool((out == 0).all())
    assert bool((lse == NEVER).all())


def test_an_empty_pool_counts_nothing(plain: Arguments) -> None:
    out, lse = both(plain, kv_cache=cache()[:0], indices=torch.full_like(rows(), -1))

    assert not out.any()
    assert bool((lse == NEVER).all())


@pytest.mark.parametrize("empty", ["columns", "pages"])
@pytest.mark.parametrize("which", ["main", "extra"])
def test_an_empty_cache_beside_a_full_one_is_left_out(call: Arguments, empty: str, which: str) -> None:
    prefix = "extra_" if which == "extra" else ""
    other = "" if which == "extra" else "extra_"
    changed: Arguments = {f"{prefix}topk_length": None}
    if empty == "columns":
        changed[f"{prefix}indices"] = rows(T, 0)
    else:
        changed[f"{prefix}kv_cache"] = call[f"{prefix}kv_cache"][:0]
        changed[f"{prefix}indices"] = torch.full_like(call[f"{prefix}indices"], -1)
    alone = {k: v for k, v in call.items() if not k.startswith("extra_")}
    for name in ("kv_cache", "indices", "topk_length", "page_size"):
        alone[name] = call[f"{other}{name}"]

    out, lse = both(call, **changed)

    want, want_lse = both(alone)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_out_of_range_entries_count_as_no_token_where_values_are_not_checked(plain: Arguments) -> None:
    index = torch.tensor([[3, PAGES * SIZE, -7, 2**31 - 1]] * T, dtype=torch.int64, device=DEVICE)
    index[0, 2] = 3 + (1 << 32)
    length = vector(99, -5, 1)

    out, lse = both(plain, indices=index, topk_length=length, validate="metadata")

    want, want_lse = both(plain, indices=vector(3).expand(T, 1).contiguous(), topk_length=vector(1, 0, 1))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


# ---- refusals, before anything is written


def wrong(**changed: Any) -> Callable[[Arguments], Arguments]:
    return lambda call: {k: v(call) if callable(v) else v for k, v in changed.items()}


REFUSALS: dict[str, tuple[Callable[[Arguments], Arguments], str, type[ArgumentError]]] = {
    "q not a tensor": (wrong(q=3), "q", ArgumentError),
    "q of rank 2": (wrong(q=lambda c: c["q"][0]), "q.shape", ArgumentError),
    "q with two in the middle": (wrong(q=lambda c: query(T, 2, H, 512)), "q.shape", ArgumentError),
    "head dim 576": (wrong(q=lambda c: query(T, H, 576)), "q.shape[-1]", ArgumentError),
    "no heads": (wrong(q=lambda c: query(T, 0, 512)), "q.shape[-2]", ArgumentError),
    "too many heads": (wrong(q=lambda c: query(T, MAX_HEADS + 1, 512)), "q.shape[-2]", ArgumentError),
    "q in fp16": (wrong(q=lambda c: c["q"].half()), "q.dtype", ArgumentError),
    "q not dense": (wrong(q=lambda c: query(T, H, 1024)[..., ::2]), "q.stride(-1)", ArgumentError),
    "cache not a tensor": (wrong(kv_cache="pool"), "kv_cache", ArgumentError),
    "cache in fp32": (wrong(kv_cache=lambda c: c["kv_cache"].float()), "kv_cache.dtype", LayoutError),
    "cache elsewhere": (wrong(kv_cache=lambda c: c["kv_cache"].to("meta")), "kv_cache.device", ArgumentError),
    "cache without page size": (wrong(page_size=None), "kv_cache.shape", LayoutError),
    "page size 0": (wrong(page_size=0), "page_size", LayoutError),
    "page size too large": (wrong(page_size=17), "kv_cache.shape[1]", LayoutError),
    "pages that overlap": (
        wrong(kv_cache=lambda c: c["kv_cache"][:1].expand(PAGES, -1)),
        "kv_cache.stride(0)",
        LayoutError,
    ),
    "extra page size 0": (wrong(extra_page_size=0), "extra_page_size", LayoutError),
    "extra page size missing": (wrong(extra_page_size=None), "extra_kv_cache.shape", LayoutError),
    "page size against the view": (
        wrong(
            extra_kv_cache=lambda c: torch.as_strided(c["extra_kv_cache"], (5, 2, 584), (1728, 584, 1)),
            extra_page_size=3,
        ),
        "extra_page_size",
        LayoutError,
    ),
    "indices not a tensor": (wrong(indices=[[1]]), "indices", ArgumentError),
    "indices of rank 1": (wrong(indices=lambda c: c["indices"][0]), "indices.shape", ArgumentError),
    "indices [T, 2, k]": (
        wrong(indices=lambda c: c["indices"][:, None].expand(T, 2, K)),
        "indices.shape",
        ArgumentError,
    ),
    "a row too few": (wrong(indices=lambda c: c["indices"][1:]), "indices.shape[0]", ArgumentError),
    "indices in fp32": (wrong(indices=lambda c: c["indices"].float()), "indices.dtype", ArgumentError),
    "indices in int16": (wrong(indices=lambda c: c["indices"].short()), "indices.dtype", ArgumentError),
    "indices elsewhere": (wrong(indices=lambda c: c["indices"].to("meta")), "indices.device", ArgumentError),
    "index rows not dense": (
        wrong(indices=lambda c: rows(width=2 * K)[:, ::2]),
        "indices.stride(-1)",
        ArgumentError,
    ),
    "lengths of another shape": (wrong(topk_length=vector(1, 2)), "topk_length.shape", ArgumentError),
    "lengths as a matrix": (
        wrong(topk_length=lambda c: torch.zeros((T, 2), dtype=torch.int32, device=DEVICE)),
        "topk_length.shape",
        ArgumentError,
    ),
    "lengths in fp32": (wrong(topk_length=sinks(1, 2, 3)), "topk_length.dtype", ArgumentError),
    "lengths as a list": (wrong(topk_length=[1, 2, 3]), "topk_length", ArgumentError),
    "extra lengths of another shape": (
        wrong(extra_topk_length=vector(1)),
        "extra_topk_length.shape",
        ArgumentError,
    ),
    "extra indices of another T": (
        wrong(extra_indices=rows(T + 1, 3)),
        "extra_indices.shape[0]",
        ArgumentError,
    ),
    "extra cache alone": (wrong(extra_indices=None), "extra_kv_cache", ArgumentError),
    "extra indices alone": (
        wrong(extra_kv_cache=None, extra_topk_length=None, extra_page_size=None),
        "extra_indices",
        ArgumentError,
    ),
    "extra lengths alone": (
        wrong(extra_kv_cache=None, extra_indices=None, extra_page_size=None),
        "extra_topk_length",
        ArgumentError,
    ),
    "extra page size alone": (
        wrong(extra_kv_cache=None, extra_indices=None, extra_topk_length=None),
        "extra_page_size",
        ArgumentError,
    ),
    "sink as a number": (wrong(attn_sink=0.5), "attn_sink", ArgumentError),
    "sink of another H": (wrong(attn_sink=sinks(1, 2)), "attn_sink.shape", ArgumentError),
    "sink in bf16": (wrong(attn_sink=lambda c: c["attn_sink"].bfloat16()), "attn_sink.dtype", ArgumentError),
    "sink not dense": (wrong(attn_sink=lambda c: sinks(1.0).expand(H)), "attn_sink.stride(0)", ArgumentError),
    "sink elsewhere": (
        wrong(attn_sink=lambda c: c["attn_sink"].to("meta")),
        "attn_sink.device",
        ArgumentError,
    ),
    "sink NaN": (wrong(attn_sink=sinks(0, 0, math.nan, 0)), "attn_sink[2]", ArgumentError),
    "scale 0": (wrong(softmax_scale=0.0), "softmax_scale", ArgumentError),
    "scale NaN": (wrong(softmax_scale=math.nan), "softmax_scale", ArgumentError),
    "scale inf": (wrong(softmax_scale=math.inf), "softmax_scale", ArgumentError),
    "scale negative": (wrong(softmax_scale=-0.1), "softmax_scale", ArgumentError),
    "scale 0 in fp32": (wrong(softmax_scale=1e-60), "softmax_scale", ArgumentError),
    "scale inf in fp32": (wrong(softmax_scale=1e60), "softmax_scale", ArgumentError),
    "scale as a tensor": (wrong(softmax_scale=lambda c: sinks(1.0)), "softmax_scale", ArgumentError),
    "scale True": (wrong(softmax_scale=True), "softmax_scale", ArgumentError),
    "an index past the end": (
        wrong(indices=lambda c: torch.full_like(c["indices"], PAGES * SIZE)),
        "indices[0, 0]",
        IndexValueError,
    ),
    "an extra index past the end": (
        wrong(extra_indices=vector(-1, 3, 10).expand(T, 3)),
        "extra_indices[0, 2]",
        IndexValueError,
    ),
    "a layout of 576": (wrong(layout=DSV32), "layout", LayoutError),
    "a layout by name": (wrong(layout="dsv4"), "layout", ArgumentError),
    "an unknown backend": (wrong(backend="cutlass"), "backend", ArgumentError),
    "an unknown level": (wrong(validate="all"), "validate", ArgumentError),
    "out of another shape": (wrong(out=lambda c: query(T, 1, H, 512)), "out.shape", ArgumentError),
    "out in fp32": (wrong(out=lambda c: torch.zeros(T, H, 512, device=DEVICE)), "out.dtype", ArgumentError),
    "out expanded": (wrong(out=lambda c: query(1, H, 512).expand(T, H, 512)), "out.stride()", ArgumentError),
    "out elsewhere": (wrong(out=lambda c: c["q"].to("meta")), "out.device", ArgumentError),
    "out not a tensor": (wrong(out=[]), "out", ArgumentError),
    "lse of another shape": (
        wrong(lse=lambda c: torch.zeros(T, H, 1, device=DEVICE)),
        "lse.shape",
        ArgumentError,
    ),
    "lse in bf16": (wrong(lse=lambda c: query(T, H)), "lse.dtype", ArgumentError),
    "lse expanded": (wrong(lse=lambda c: sinks(0.0).expand(T, H)), "lse.stride()", ArgumentError),
    "lse elsewhere": (
        wrong(lse=lambda c: torch.zeros(T, H, device="meta")),
        "lse.device",
        ArgumentError,
    ),
    "out is q": (wrong(out=lambda c: c["q"]), "out", ArgumentError),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_by_name_and_nothing_is_written(call: Arguments, name: str) -> None:
    changes, argument, error = REFUSALS[name]
    out, lse = (
        torch.full((T, H, 512), 7.0, dtype=torch.bfloat16, device=DEVICE),
        torch.full((T, H), 7.0, device=DEVICE),
    )
    before = call["q"].clone()
    arguments = {"out": out, "lse": lse, "validate": "values", **call}
    arguments.update(changes(call))

    with pytest.raises(ArgumentError) as caught:
        sparse_mla(**arguments)

    assert type(caught.value) is error
    assert caught.value.argument == argument
    assert caught.value.remedy
    assert bool((out == 7).all())
    assert bool((lse == 7).all())
    assert torch.equal(call["q"], before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_is_refused_alike_whichever_backend_was_named(call: Arguments, backend: str) -> None:
    with pytest.raises(ArgumentError, match=r"q\.dtype = torch\.float16"):
        sparse_mla(**{**call, "q": call["q"].half(), "backend": backend})


def test_values_are_checked_only_where_asked(call: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    call["indices"] = torch.full_like(call["indices"], PAGES * SIZE)
    sparse_mla(**call, validate="metadata")
    levels = []
    monkeypatch.setattr(device, "validate_values", lambda level: levels.append(level))

    sparse_mla(**call)
    sparse_mla(**call, validate="values")

    assert levels == [None, "values"]


def test_columns_past_the_length_may_hold_anything(call: Arguments) -> None:
    call["indices"] = torch.where(
        torch.arange(K, device=DEVICE) < call["topk_length"][:, None], call["indices"], 2**31 - 1
    )

    sparse_mla(**call, validate="values")


def test_an_index_past_the_end_is_seen_where_a_cache_is_empty(plain: Arguments) -> None:
    with pytest.raises(IndexValueError, match=r"indices\[0, 0\] = 0: expected a token index below 0"):
        sparse_mla(
            **{**plain, "kv_cache": cache()[:0], "indices": torch.zeros_like(rows())}, validate="values"
        )


# ---- memory


def test_a_strided_out_is_written_where_it_lies(call: Arguments) -> None:
    want, want_lse = both(call)
    room = torch.full((T + 1, 2 * H, 1536), 7.0, dtype=torch.bfloat16, device=DEVICE)
    lse_room = torch.full((2 * T, 3 * H), 7.0, device=DEVICE)
    outs = [
        room[:T, ::2, 512:1024],  # rows and heads apart
        room[1:, H:, :1024:2],  # elements apart
        torch.full((512, H, T), 7.0, dtype=torch.bfloat16, device=DEVICE).permute(2, 1, 0),
    ]
    for out in outs:
        lse = lse_room[::2, ::3]

        got, got_lse = both(call, out=out, lse=lse)

        assert got is out
        assert got_lse is lse
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    assert int((room != 7).sum()) <= 2 * want.numel()
    assert int((lse_room != 7).sum()) <= want_lse.numel()


@pytest.mark.parametrize("empty", ["main", "extra"])
def test_backends_are_never_handed_an_empty_cache(
    call: Arguments, fakes: Callable[..., dict[str, Fake]], empty: str
) -> None:
    triton = fakes()["triton"]
    prefix = "extra_" if empty == "extra" else ""
    call[f"{prefix}kv_cache"] = call[f"{prefix}kv_cache"][:0]
    call[f"{prefix}indices"] = torch.full_like(call[f"{prefix}indices"], -1)

    sparse_mla(**{**call, "backend": "triton"})

    (given,) = triton.calls
    assert given.extra is None
    assert given.shape.extra is None
    assert given.main.pool is call["kv_cache" if empty == "extra" else "extra_kv_cache"]
    assert given.shape.main.page_size == (SIZE if empty == "extra" else 2)


def test_backends_are_handed_dense_rows(call: Arguments, fakes: Callable[..., dict[str, Fake]]) -> None:
    triton = fakes()["triton"]
    for out in (
        torch.empty((T, 2 * H, 512), dtype=torch.bfloat16, device=DEVICE)[:, ::2],
        torch.empty((T, H, 1024), dtype=torch.bfloat16, device=DEVICE)[..., ::2],
    ):
        lse = torch.empty((T, 2 * H), device=DEVICE)[:, ::2]

        sparse_mla(**{**call, "backend": "triton"}, out=out, lse=lse)

        given = triton.calls[-1]
        assert given.out.stride(-1) == 1
        assert given.lse.is_contiguous()
        assert (given.out.data_ptr() == out.data_ptr()) == (out.stride(-1) == 1)


def test_lse_is_written_without_being_returned(call: Arguments) -> None:
    lse = torch.full((T, H), 7.0, device=DEVICE)

    out = sparse_mla(**call, lse=lse)

    assert isinstance(out, torch.Tensor)
    assert torch.equal(lse, both(call)[1])


def test_out_of_rank_4_is_returned_as_it_is(call: Arguments) -> None:
    call["q"] = call["q"][:, None]
    out = torch.empty((T, 1, H, 512), dtype=torch.bfloat16, device=DEVICE)

    assert sparse_mla(**call, out=out) is out
    assert torch.equal(out, sparse_mla(**call))


@pytest.mark.parametrize(
    "victim", ["q", "kv_cache", "indices", "topk_length", "attn_sink", "extra_kv_cache", "extra_indices"]
)
@pytest.mark.parametrize("output", ["out", "lse"])
def test_an_output_in_an_inputs_memory_is_refused(call: Arguments, output: str, victim: str) -> None:
    """Both carved from one allocation whose owner neither knows."""
    shape, dtype = ((T, H, 512), torch.bfloat16) if output == "out" else ((T, H), torch.float32)
    size = torch.Size(shape).numel() * dtype.itemsize
    given = call[victim]
    storage = torch.zeros(size + given.untyped_storage().nbytes() + 64, dtype=torch.uint8, device=DEVICE)
    target = storage[:size].view(dtype).view(shape)
    # Its last 4 bytes are the input's first.
    moved = storage[size - 4 :][: given.untyped_storage().nbytes()].view(given.dtype)
    moved = torch.as_strided(moved, given.shape, given.stride(), moved.storage_offset())
    moved.copy_(given)
    before = storage.clone()

    with pytest.raises(ArgumentError, match=f"memory shared with {victim}") as caught:
        sparse_mla(**{**call, victim: moved, output: target})

    assert caught.value.argument == output
    assert torch.equal(storage, before)


def test_out_and_lse_must_not_meet(plain: Arguments) -> None:
    storage = torch.zeros(T * H * 512, dtype=torch.bfloat16, device=DEVICE)

    with pytest.raises(ArgumentError, match="lse = memory shared with out"):
        sparse_mla(**plain, out=storage.view(T, H, 512), lse=storage.view(torch.float32)[: T * H].view(T, H))


def test_slices_of_one_fused_row_do_not_meet(plain: Arguments) -> None:
    fused = query(T, H, 1024)
    plain["q"] = fused[..., :512]
    want = sparse_mla(**plain)

    out = sparse_mla(**plain, out=fused[..., 512:])

    assert torch.equal(out, want)


def strided(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.as_strided(torch.empty(0, dtype=torch.uint8).set_(MEMORY), size, stride, offset)


MEMORY = torch.zeros(4096, dtype=torch.uint8).untyped_storage()


@pytest.mark.parametrize("seed", range(300))
def test_sharing_is_never_overlooked(seed: int) -> None:
    """Against the byte sets themselves; and what is told apart really is."""
    gen = generator(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=gen))

    sets, views = [], []
    step = draw(4, 40)
    for _ in range(2):
        size = (draw(1, 4), draw(1, 3), draw(1, 6))
        stride = (step * draw(1, 3), draw(0, step), draw(1, 2))
        offset = draw(0, 200)
        views.append(strided(offset, size, stride))
        a, b, c = (torch.arange(n) * s for n, s in zip(size, stride, strict=True))
        sets.append(set((offset + a[:, None, None] + b[:, None] + c).flatten().tolist()))

    meets = bool(sets[0] & sets[1])

    assert share_memory(*views) or not meets
    assert share_memory(*views) == share_memory(*views[::-1])


@pytest.mark.parametrize(
    ("a", "b", "meets"),
    [
        (((0, (4, 8), (16, 1))), ((8, (4, 8), (16, 1))), False),
        (((0, (4, 9), (16, 1))), ((8, (4, 8), (16, 1))), True),
        (((0, (4, 8), (16, 1))), ((24, (2, 8), (32, 1))), False),
        (((12, (4, 8), (16, 1))), ((4, (5, 8), (16, 1))), False),
        (((0, (8,), (1,))), ((8, (8,), (1,))), False),
        (((0, (8,), (1,))), ((7, (8,), (1,))), True),
        (((0, (0, 8), (8, 1))), ((0, (8,), (1,))), False),
    ],
)
def test_interleaved_views_are_told_apart(a: Any, b: Any, meets: bool) -> None:
    assert share_memory(strided(*a), strided(*b)) is meets


def test_what_is_returned_is_no_scratch(call: Arguments) -> None:
    registry = PersistentBuffers()
    first, first_lse = both(call, buffers=registry)
    kept, kept_lse = first.clone(), first_lse.clone()

    both(call, buffers=registry, q=query(T, H, 512, seed=50))

    assert torch.equal(first, kept)
    assert torch.equal(first_lse, kept_lse)
    for name, tensor in registry.tensors().items():
        assert not share_memory(first, tensor), name


def test_gradients_are_not_recorded(plain: Arguments) -> None:
    plain["q"].requires_grad_(True)

    assert not sparse_mla(**plain).requires_grad


# ---- what a backend is handed


def test_a_backend_gets_the_call_as_numbers_and_views(
    call: Arguments, fakes: Callable[..., dict[str, Fake]]
) -> None:
    triton, registry = fakes()["triton"], PersistentBuffers()

    with device.pretend_device((9, 0)):
        sparse_mla(**{**call, "q": call["q"][:, None], "backend": "triton"}, buffers=registry, scope="mine")

    (given,) = triton.calls
    assert given.q.data_ptr() == call["q"].data_ptr()
    assert given.q.shape == (T, H, 512)
    assert (given.buffers, given.scope, given.scale) == (registry, "mine", 0.05)
    assert given.sink is call["attn_sink"]
    assert given.lse is None
    assert given.main.pool is call["kv_cache"]
    assert given.main.geometry.page_size == SIZE
    assert given.extra is not None
    assert given.extra.lengths is call["extra_topk_length"]
    shape = given.shape
    assert triton.asked == [(shape, (9, 0))]
    assert (shape.layout, shape.tokens, shape.heads, shape.has_sink) == ("dsv4", T, H, True)
    assert (shape.return_lse, shape.capturing) == (False, False)
    assert shape.main.index_dtype == "int32"
    assert (shape.main.page_size, shape.main.pages, shape.main.width) == (SIZE, PAGES, K)
    assert shape.main.page_stride == call["kv_cache"].stride(0)
    assert shape.extra is not None
    assert (shape.extra.page_size, shape.extra.width) == (2, 3)
    assert shape.main.lane_bytes == given.main.geometry.lane_bytes(call["kv_cache"].data_ptr())


def test_scratch_comes_from_the_registry_of_the_process_by_default(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]]
) -> None:
    triton = fakes()["triton"]

    sparse_mla(**{**plain, "backend": "triton"}, lse=torch.empty((T, H), device=DEVICE))

    assert triton.calls[0].buffers is default_buffers()
    assert triton.calls[0].shape.return_lse
    assert triton.calls[0].lse is not None


# ---- the choice of a backend


def test_an_argument_is_an_order(plain: Arguments, fakes: Callable[..., dict[str, Fake]]) -> None:
    made = fakes()

    for name in BACKENDS:
        sparse_mla(**{**plain, "backend": name})
        assert len(made[name].calls) == 1
        assert explain(**{**plain, "backend": name}) == Route(name, "argument", f"backend={name}")


def test_the_environment_is_an_order_and_the_argument_goes_first(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fakes()
    monkeypatch.setenv("SM120_MLA_BACKEND", "flashinfer")
    del plain["backend"]

    sparse_mla(**plain)
    sparse_mla(**plain, backend="triton")

    assert [len(made[name].calls) for name in BACKENDS] == [1, 1, 0]
    assert explain(**plain) == Route("flashinfer", "environment", "SM120_MLA_BACKEND=flashinfer")
    assert explain(**plain, backend="auto").source == "capability"


@pytest.mark.parametrize("name", ["cutlass", "torch", "Triton"])
def test_an_invalid_name_gets_the_list_of_valid_ones(
    plain: Arguments, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(ArgumentError, match="flashinfer, triton, reference"):
        sparse_mla(**{**plain, "backend": name})
    monkeypatch.setenv("SM120_MLA_BACKEND", name)
    del plain["backend"]
    with pytest.raises(ArgumentError, match=r"SM120_MLA_BACKEND.*flashinfer, triton, reference"):
        sparse_mla(**plain)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_an_order_that_cannot_be_served_is_refused_and_nothing_else_runs(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    made = fakes(missing=("flashinfer",), triton=Support(False, "H = 4 has no kernel", "Pad q to 8 heads."))
    out = torch.full((T, H, 512), 7.0, dtype=torch.bfloat16, device=DEVICE)
    del plain["backend"]

    def attend(name: str) -> None:
        if by == "environment":
            monkeypatch.setenv("SM120_MLA_BACKEND", name)
        sparse_mla(**plain, out=out, **({"backend": name} if by == "argument" else {}))

    with pytest.raises(ArgumentError, match=r"H = 4 has no kernel\. Pad q to 8 heads\.") as refused:
        attend("triton")
    with pytest.raises(UnavailableError, match=r"flashinfer.*no flashinfer here\. Install it\.") as missing:
        attend("flashinfer")

    where = "backend" if by == "argument" else "SM120_MLA_BACKEND"
    assert refused.value.argument == where
    assert where in missing.value.what
    assert not any(fake.calls for fake in made.values())
    assert bool((out == 7).all())


@pytest.mark.parametrize(
    ("capability", "chosen"), [((12, 0), "flashinfer"), ((12, 1), "flashinfer"), ((9, 0), "triton")]
)
def test_capability_chooses_and_says_why(
    plain: Arguments,
    fakes: Callable[..., dict[str, Fake]],
    capability: tuple[int, int],
    chosen: str,
) -> None:
    made = fakes()
    del plain["backend"]

    with device.pretend_device(capability):
        sparse_mla(**plain)
        route = explain(**plain)

    assert len(made[chosen].calls) == 1
    assert (route.backend, route.source, route.passed_over) == (chosen, "capability", ())
    assert f"capability {capability[0]}.{capability[1]}" in route.reason


def test_what_was_passed_over_is_told(plain: Arguments, fakes: Callable[..., dict[str, Fake]]) -> None:
    fakes(flashinfer=Support(False, "no width 6", "Pad it."))
    del plain["backend"]

    with device.pretend_device((12, 0)):
        route = explain(**plain)

    assert route.backend == "triton"
    assert route.passed_over == (("flashinfer", "no width 6"),)
    assert str(route).endswith("; flashinfer passed over: no width 6")


def test_a_gpu_never_falls_back_to_the_specification(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]]
) -> None:
    made = fakes(missing=("flashinfer",), triton=Support(False, "broken", "Mend it."))
    del plain["backend"]

    with (
        device.pretend_device((12, 0)),
        pytest.raises(UnavailableError, match="flashinfer: no flashinfer here; triton: broken"),
    ):
        sparse_mla(**plain)

    assert not made["reference"].calls


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_without_a_gpu_the_interpreter_runs_the_kernels(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes()
    del plain["backend"]

    interpreted = explain(**plain)
    fakes(missing=("triton",))
    without = explain(**plain)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    compiled = explain(**plain)

    assert (interpreted.backend, without.backend, compiled.backend) == ("triton", "reference", "reference")
    assert "interpreter" in interpreted.reason
    assert without.passed_over == (("triton", "no triton here"),)
    assert "cpu" in compiled.reason


def test_kernels_are_not_chosen_for_tensors_they_cannot_reach(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fakes()
    from sm120_mla.kernels import runtime

    monkeypatch.setattr(runtime, "INTERPRETED", not INTERPRETED)

    for name in ("triton", "flashinfer"):
        with pytest.raises(UnavailableError, match=r"q\.device"):
            sparse_mla(**{**plain, "backend": name})
    sparse_mla(**plain)

    assert [len(made[name].calls) for name in BACKENDS] == [0, 0, 1]


def test_a_backend_that_cannot_be_imported_is_unavailable(
    plain: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, package: str | None) -> None:
        raise ImportError(f"no module {name} of {package}")

    monkeypatch.setattr(attention, "_instances", {})
    monkeypatch.setattr(attention, "importlib", SimpleNamespace(import_module=fail))

    with pytest.raises(UnavailableError, match=r"no module \.backends\.triton of sm120_mla"):
        sparse_mla(**{**plain, "backend": "triton"})
    assert attention._instances == {}


def test_a_backend_is_made_once(plain: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_instances", {})

    sparse_mla(**plain)
    made = attention._instances["reference"]
    sparse_mla(**plain)

    assert attention._instances == {"reference": made}
    assert isinstance(made, ReferenceBackend)


def test_explain_raises_as_the_call_would_and_runs_nothing(
    call: Arguments, fakes: Callable[..., dict[str, Fake]]
) -> None:
    made = fakes(reference=Support(False, "tired", "Wait."))
    with pytest.raises(ArgumentError, match="tired"):
        explain(**call)
    with pytest.raises(ArgumentError, match=r"q\.dtype"):
        explain(**{**call, "q": call["q"].half()})

    route = explain(**{**call, "backend": "triton"}, return_lse=True)

    assert route.backend == "triton"
    assert made["triton"].asked[-1][0].return_lse
    explain(**{**call, "backend": "triton"}, lse=torch.empty((T, H), device=DEVICE))
    assert made["triton"].asked[-1][0].return_lse
    explain(**{**call, "backend": "triton"})
    assert not made["triton"].asked[-1][0].return_lse
    assert not made["triton"].calls


def test_explain_of_a_call_without_work(call: Arguments) -> None:
    call.update(q=query(0, H, 512), indices=rows(0), extra_indices=rows(0, 3))
    call.update(topk_length=None, extra_topk_length=None)

    route = explain(**call)

    assert (route.backend, route.source) == ("", "shape")
    assert str(route).startswith("no backend, by shape: ")


def test_a_route_of_numbers_alone(call: Arguments, fakes: Callable[..., dict[str, Fake]]) -> None:
    fakes()
    del call["backend"]
    shape = check(**call).shape(False)

    with device.pretend_device((12, 0)):
        assert choose(shape, call["q"]) == explain(**call)
        assert choose(shape, call["q"], "triton").backend == "triton"


def test_the_route_of_a_call_is_logged(
    plain: Arguments, fakes: Callable[..., dict[str, Fake]], caplog: pytest.LogCaptureFixture
) -> None:
    fakes()
    del plain["backend"]

    with caplog.at_level(logging.DEBUG, logger="sm120_mla.attention"), device.pretend_device((9, 0)):
        sparse_mla(**plain)
        want = str(explain(**plain))

    assert [record.getMessage() for record in caplog.records] == [want]


# ---- sglang's function


@pytest.fixture
def theirs(call: Arguments) -> Arguments:
    """The same call as sglang makes it."""
    main, extra = call["kv_cache"], call["extra_kv_cache"]
    return {
        "q": call["q"][:, None],
        "k_cache": torch.as_strided(main, (PAGES, SIZE, 1, 584), (main.stride(0), 584, 584, 1)).view(
            torch.float8_e4m3fn
        ),
        "indices": call["indices"][:, None],
        "topk_length": call["topk_length"],
        "attn_sink": call["attn_sink"],
        "head_dim_v": 512,
        "softmax_scale": call["softmax_scale"],
        "extra_k_cache": torch.as_strided(extra, (5, 2, 1, 584), (extra.stride(0), 584, 584, 1)),
        "extra_indices_in_kvcache": call["extra_indices"],
        "extra_topk_length": call["extra_topk_length"],
    }


@pytest.fixture
def as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_FLASHMLA_BACKEND", "torch")


@pytest.mark.usefixtures("as_torch")
def test_the_drop_in_returns_what_sparse_mla_does(call: Arguments, theirs: Arguments) -> None:
    want, want_lse = both(call)

    out, lse = flash_mla_with_kvcache_sm120(
        **theirs, tile_scheduler_metadata=None, is_fp8_kvcache=True, causal=False, backend="nonsense"
    )

    assert (out.shape, lse.shape) == ((T, 1, H, 512), (T, H, 1))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out[:, 0], want)
    assert torch.equal(lse[..., 0], want_lse)


@pytest.mark.usefixtures("as_torch")
def test_the_drop_in_needs_little(call: Arguments, theirs: Arguments) -> None:
    out, lse = flash_mla_with_kvcache_sm120(q=theirs["q"], k_cache=theirs["k_cache"], indices=call["indices"])

    few = {"q": call["q"], "kv_cache": call["kv_cache"], "indices": call["indices"], "page_size": SIZE}
    want, want_lse = both({**few, "backend": "reference"})
    assert torch.equal(out[:, 0], want)
    assert torch.equal(lse[..., 0], want_lse)


@pytest.mark.usefixtures("as_torch")
@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"q": None}, "q"),
        ({"k_cache": None}, "k_cache"),
        ({"indices": None}, "indices"),
        ({"q": query(T, H, 512)}, "q.shape"),
        ({"head_dim_v": 448}, "head_dim_v"),
        ({"k_cache": torch.zeros(2, 2)}, "k_cache.dtype"),
        ({"extra_k_cache": None, "extra_topk_length": None}, "extra_indices_in_kvcache"),
        ({"extra_indices_in_kvcache": None}, "extra_k_cache"),
        ({"extra_indices_in_kvcache": torch.zeros(T, 2)}, "extra_indices_in_kvcache.dtype"),
        ({"extra_topk_length": torch.zeros(T)}, "extra_topk_length.dtype"),
        ({"topk_length": torch.zeros(T)}, "topk_length.dtype"),
    ],
)
def test_the_drop_in_refuses_under_its_own_names(
    theirs: Arguments, changes: Arguments, argument: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        flash_mla_with_kvcache_sm120(**{**theirs, **changes})

    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [("torch", "reference"), ("triton", "triton"), ("flashinfer", "flashinfer"), (None, "triton")],
)
def test_sglangs_variable_is_an_order_for_the_drop_in_only(
    plain: Arguments,
    theirs: Arguments,
    fakes: Callable[..., dict[str, Fake]],
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    chosen: str,
) -> None:
    made = fakes()
    monkeypatch.setenv("SM120_MLA_BACKEND", "triton")
    if variable is not None:
        monkeypatch.setenv("SGLANG_SM120_FLASHMLA_BACKEND", variable)
    del plain["backend"]

    flash_mla_with_kvcache_sm120(**theirs)

    assert {name for name, fake in made.items() if fake.calls} == {chosen}
    assert explain(**plain).backend == "triton"


def test_a_wrong_value_of_sglangs_variable_is_refused(
    theirs: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SM120_FLASHMLA_BACKEND", "reference")

    with pytest.raises(ArgumentError, match="flashinfer, triton, torch"):
        flash_mla_with_kvcache_sm120(**theirs)


def test_the_drop_in_never_falls_back_either(
    theirs: Arguments, fakes: Callable[..., dict[str, Fake]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fakes(missing=("flashinfer",))
    monkeypatch.setenv("SGLANG_SM120_FLASHMLA_BACKEND", "flashinfer")

    with pytest.raises(UnavailableError, match="SGLANG_SM120_FLASHMLA_BACKEND"):
        flash_mla_with_kvcache_sm120(**theirs)

    assert not any(fake.calls for fake in made.values())
