"""split_pages: what the handle promises, where bytes may go, and that bad input changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sm120_mla
from sm120_mla import buffers as buffers_module
from sm120_mla import device, graphs, settings
from sm120_mla.buffers import PersistentBuffers
from sm120_mla.errors import (
    ArgumentError,
    CaptureError,
    GrowthDuringCaptureError,
    IndexValueError,
    LayoutError,
    OvertakenError,
    UnavailableError,
)
from sm120_mla.kernels import runtime
from sm120_mla.kernels.page_split import MARKS_HEADER, OWNED_ENTRIES
from sm120_mla.layout import DSV4, DSV32, DSV41_FOOTER, SUB_PAGE
from sm120_mla.pages import SplitPages, owned, pool_geometry, reserve_split, split_pages
from sm120_mla.reference import split as reference
from sm120_mla.testing.derive import Pool, make_pool
from sm120_mla.testing.guards import noise

DEVICE = "cpu" if runtime.INTERPRETED else "cuda"
SIZE, PAGES = 128, 3
TOKENS, SUBS = SIZE * PAGES, SIZE * PAGES // SUB_PAGE
PAYLOAD = DSV4.payload(SUB_PAGE)
ROW = DSV4.default_stride(SUB_PAGE)


@pytest.fixture
def registry() -> PersistentBuffers:
    return PersistentBuffers()


@pytest.fixture
def pool() -> Pool:
    return make_pool(DSV4, SIZE, PAGES, seed=1)


def index(*rows: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype, device=DEVICE)


def destination(rows: int = SUBS, columns: int = ROW, seed: int = 9) -> torch.Tensor:
    return noise(rows * columns, seed, DEVICE).view(rows, columns)


def payload_of(handle: SplitPages) -> torch.Tensor:
    """uint8 ``[sub_pages, payload]`` of what a handle shows, whatever its dtype."""
    return handle.tensor.view(torch.uint8).flatten(1)


def expected(pool: Pool) -> torch.Tensor:
    return reference.split(pool.bytes, pool.geometry)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the storage a tensor lies in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def changed_rows(after: torch.Tensor, before: torch.Tensor) -> list[int]:
    return (after != before).any(dim=1).nonzero().flatten().tolist()


# ---- the handle


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn"])
def test_the_tensor_has_64_token_pages_in_the_pools_dtype(dtype: str, registry: PersistentBuffers) -> None:
    pool = make_pool(DSV4, SIZE, PAGES, dtype=dtype, view="nhd", seed=2)

    split = split_pages(pool.view, buffers=registry)

    assert (split.page_size, split.source_page_size) == (64, SIZE)
    assert split.tensor.dtype == getattr(torch, dtype)
    assert split.tensor.shape == (SUBS, 64, 1, 584)
    assert split.tensor.stride() == (ROW, 584, 584, 1)
    assert torch.equal(payload_of(split), expected(pool))


def test_every_layout_splits_into_a_buffer_of_its_own(registry: PersistentBuffers) -> None:
    for layout in (DSV4, DSV32, DSV41_FOOTER):
        pool = make_pool(layout, SIZE, PAGES, seed=3)

        split = split_pages(pool.view, SIZE, layout=layout, buffers=registry)

        assert torch.equal(payload_of(split), expected(pool))
    assert [key.layout for key in registry] == ["dsv32", "dsv4", "dsv41"]


def test_a_later_split_overtakes_an_earlier_one(pool: Pool, registry: PersistentBuffers) -> None:
    first = split_pages(pool.view, SIZE, buffers=registry)
    assert first.tensor is not None
    second = split_pages(pool.view, SIZE, index([1]), buffers=registry)

    with pytest.raises(OvertakenError, match=r"number 1 .*split-destination.*split 2.*scope= or out="):
        _ = first.tensor
    assert second.tensor.data_ptr() == second.tensor.data_ptr()


def test_pools_of_one_layout_overtake_one_another(pool: Pool, registry: PersistentBuffers) -> None:
    first = split_pages(pool.view, SIZE, buffers=registry)
    smaller = make_pool(DSV4, 256, 1, seed=4)

    second = split_pages(smaller.view, 256, buffers=registry)

    with pytest.raises(OvertakenError):
        _ = first.tensor
    assert second.tensor.shape[0] == 4
    assert torch.equal(payload_of(second), expected(smaller))


def test_growth_overtakes_what_the_old_buffer_held(pool: Pool, registry: PersistentBuffers) -> None:
    first = split_pages(pool.view, SIZE, buffers=registry)

    split_pages(make_pool(DSV4, SIZE, PAGES + 1).view, SIZE, buffers=registry)

    with pytest.raises(OvertakenError):
        _ = first.tensor


def test_scopes_do_not_overtake_one_another(pool: Pool, registry: PersistentBuffers) -> None:
    other = make_pool(DSV4, SIZE, PAGES, seed=5)

    first = split_pages(pool.view, SIZE, buffers=registry, scope="layer 1")
    second = split_pages(other.view, SIZE, buffers=registry, scope="layer 2")

    assert torch.equal(payload_of(first), expected(pool))
    assert torch.equal(payload_of(second), expected(other))


def test_a_replay_overtakes_an_eager_split_and_renews_the_captured_one(
    pool: Pool, registry: PersistentBuffers
) -> None:
    indices = index([1, -1, 300])
    reserve_split(pool.view, SIZE, buffers=registry)
    split_pages(pool.view, SIZE, indices, buffers=registry)  # compiled before the capture
    graph = graphs.capture(lambda: split_pages(pool.view, SIZE, indices, buffers=registry))
    captured = graph.result
    eager = split_pages(pool.view, SIZE, buffers=registry)
    assert torch.equal(payload_of(eager), expected(pool))
    with pytest.raises(OvertakenError):
        _ = captured.tensor

    graph.replay()

    with pytest.raises(OvertakenError):
        _ = eager.tensor
    assert captured.tensor.shape[0] == SUBS

    split_pages(pool.view, SIZE, buffers=registry)
    with pytest.raises(OvertakenError):
        _ = captured.tensor


def test_without_a_registry_the_process_wide_one_is_used(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "_default", None)

    split = split_pages(pool.view, SIZE, index([1]))

    registry = sm120_mla.default_buffers()
    assert [key.purpose for key in registry] == ["split-destination", "split-marks"]
    named = registry.tensors()["split-destination/" + device.device_key(pool.view) + "/dsv4"]
    assert named.data_ptr() == split.tensor.data_ptr()


def test_a_full_split_needs_no_marks(pool: Pool, registry: PersistentBuffers) -> None:
    split_pages(pool.view, SIZE, buffers=registry)

    assert [key.purpose for key in registry] == ["split-destination"]


# ---- page size 64


@pytest.mark.parametrize("with_indices", [False, True])
def test_64_token_pages_are_the_result_themselves(with_indices: bool, registry: PersistentBuffers) -> None:
    pool = make_pool(DSV4, 64, PAGES, seed=6)
    untouched = pool.guard.storage.clone()
    out = destination()
    kept = out.clone()

    split = split_pages(pool.view, 64, index([1, 70]) if with_indices else None, buffers=registry, out=out)

    assert split.tensor is pool.view
    assert (split.page_size, split.source_page_size) == (64, 64)
    assert len(registry) == 0
    assert torch.equal(pool.guard.storage, untouched)
    assert torch.equal(out, kept)
    reserve_split(pool.view, 64, buffers=registry)
    split_pages(pool.view, 64, buffers=registry)
    assert len(registry) == 0
    assert split.tensor is pool.view


# ---- what is written, and what is not


def test_only_touched_sub_pages_are_needed_and_tails_are_kept(pool: Pool) -> None:
    out = destination()
    before = out.clone()

    split_pages(pool.view, SIZE, index([SIZE, -1, SIZE]), out=out)

    changed = changed_rows(out, before)
    assert 2 in changed
    assert set(changed) <= {2, 3}
    assert torch.equal(out[2, :PAYLOAD], expected(pool)[2])
    assert torch.equal(out[:, PAYLOAD:], before[:, PAYLOAD:])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 1, 5), (3, 1, 0), (0, 0)])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_empty_indices_split_nothing(shape: tuple[int, ...], with_lengths: bool, pool: Pool) -> None:
    out = destination()
    before = out.clone()
    indices = torch.empty(shape, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((shape[0],), 5, device=DEVICE) if with_lengths else None

    split_pages(pool.view, SIZE, indices, topk_length=lengths, out=out)

    assert torch.equal(out, before)


@pytest.mark.parametrize("rows", [[], [[3, -1, 7]]])
def test_an_empty_pool_splits_into_nothing(rows: list[list[int]], registry: PersistentBuffers) -> None:
    pool = make_pool(DSV4, SIZE, 0)
    indices = index(*rows) if rows else None

    split = split_pages(pool.view, SIZE, indices, buffers=registry, validate="metadata")

    assert split.tensor.shape == (0, 64, 1, 584)


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [
        (torch.int32, TOKENS),
        (torch.int32, 2**31 - 1),
        (torch.int32, -(2**31)),
        (torch.int32, -1),
        (torch.int64, TOKENS + 5),
        (torch.int64, 1 << 32),  # its low half is token 0
        (torch.int64, -(1 << 32)),
        (torch.int64, 2**63 - 1),
        (torch.int64, -(2**63)),
    ],
)
@pytest.mark.parametrize("width", [3, OWNED_ENTRIES + 1])
def test_unchecked_an_entry_outside_the_pool_is_no_token(
    dtype: torch.dtype, entry: int, width: int, pool: Pool
) -> None:
    out = destination(SUBS + 6)
    before = out.clone()
    indices = torch.full((1, width), -1, dtype=dtype, device=DEVICE)
    indices[0, 1] = entry

    split_pages(pool.view, SIZE, indices, out=out, validate="metadata")

    assert torch.equal(out, before)
    assert pool.guard.stray() == []


@pytest.mark.parametrize(("length", "touched"), [(-5, False), (0, False), (1, False), (2, True), (99, True)])
@pytest.mark.parametrize("as_column", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_length_cuts_its_row_and_is_clamped(
    length: int, touched: bool, as_column: bool, dtype: torch.dtype, pool: Pool
) -> None:
    out = destination()
    before = out.clone()
    lengths = torch.tensor([3, length], dtype=dtype, device=DEVICE)

    split_pages(
        pool.view,
        SIZE,
        index([-1, -1, -1], [-1, SIZE, -1]),
        topk_length=lengths[:, None] if as_column else lengths,
        out=out,
    )

    assert (2 in changed_rows(out, before)) is touched
    assert 0 not in changed_rows(out, before)


@pytest.mark.parametrize(
    ("rows", "width", "small"),
    [
        (1, OWNED_ENTRIES, True),
        (1, OWNED_ENTRIES + 1, False),
        (3, 256, True),
        (3, 257, False),
        (5, 129, False),
    ],
)
def test_small_index_sets_keep_no_marks(
    rows: int, width: int, small: bool, pool: Pool, registry: PersistentBuffers
) -> None:
    indices = torch.full((rows, width), -1, dtype=torch.int32, device=DEVICE)
    indices[-1, -1] = 5

    split = split_pages(pool.view, SIZE, indices, buffers=registry)

    marks = next(t for name, t in registry.tensors().items() if name.startswith("split-marks"))
    assert owned(rows, width) is small
    assert int(marks[0]) == 0 if small else int(marks[0]) > 0
    assert marks.shape == (MARKS_HEADER + SUBS,)
    assert torch.equal(payload_of(split)[0], expected(pool)[0])


def test_reserving_allocates_what_a_split_will_use(pool: Pool, registry: PersistentBuffers) -> None:
    reserve_split(pool.view, SIZE, buffers=registry, scope="mine")
    reserved = {name: t.data_ptr() for name, t in registry.tensors().items()}

    split_pages(pool.view, SIZE, index([1]), buffers=registry, scope="mine")

    assert len(reserved) == 2
    assert {name: t.data_ptr() for name, t in registry.tensors().items()} == reserved


# ---- a destination of the caller's own


@pytest.mark.parametrize(("rows", "columns"), [(SUBS, PAYLOAD), (SUBS, ROW), (SUBS + 2, ROW + 13)])
def test_out_receives_the_split_and_keeps_the_rest(
    rows: int, columns: int, pool: Pool, registry: PersistentBuffers
) -> None:
    out = destination(rows, columns)
    before = out.clone()

    split = split_pages(pool.view, SIZE, buffers=registry, out=out)

    assert split.tensor.data_ptr() == out.data_ptr()
    assert torch.equal(out[:SUBS, :PAYLOAD], expected(pool))
    assert torch.equal(out[SUBS:], before[SUBS:])
    assert torch.equal(out[:, PAYLOAD:], before[:, PAYLOAD:])
    assert len(registry) == 0


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_out_may_lie_anywhere_in_its_storage(shift: int, pool: Pool) -> None:
    storage = noise(shift + SUBS * 2 * ROW, 8, DEVICE)
    before = storage.clone()
    out = storage[shift:].view(SUBS, 2 * ROW)[:, :PAYLOAD]

    split = split_pages(pool.view, SIZE, out=out)

    assert torch.equal(payload_of(split), expected(pool))
    out.copy_(before[shift:].view(SUBS, 2 * ROW)[:, :PAYLOAD])
    assert torch.equal(storage, before)


def test_a_split_into_out_is_never_overtaken(pool: Pool, registry: PersistentBuffers) -> None:
    out = destination()
    mine = split_pages(pool.view, SIZE, out=out, buffers=registry)

    split_pages(make_pool(DSV4, SIZE, PAGES, seed=7).view, SIZE, buffers=registry)

    assert torch.equal(payload_of(mine), expected(pool))


def test_out_may_share_the_pools_storage_where_it_does_not_overlap(registry: PersistentBuffers) -> None:
    stride = DSV4.default_stride(SIZE)
    storage = noise(PAGES * stride + SUBS * ROW, 3, DEVICE)
    pool = storage[: PAGES * stride].view(PAGES, stride)
    before = pool.clone()

    split = split_pages(pool, SIZE, out=storage[PAGES * stride :].view(SUBS, ROW), buffers=registry)

    assert torch.equal(pool, before)
    assert torch.equal(payload_of(split), reference.split(before, pool_geometry(pool, SIZE, DSV4)))


# ---- bad input: a typed error, and nothing has changed


def strided(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Zeros of any geometry, in a storage of one page."""
    return torch.as_strided(torch.zeros(4096, dtype=dtype, device=DEVICE), shape, stride)


def overlapping(pool: Pool) -> torch.Tensor:
    return torch.as_strided(pool.guard.storage, (SUBS, PAYLOAD), (PAYLOAD, 1), pool.guard.start + 64)


Make = Callable[[Pool], dict[str, Any]]
BAD_INPUT: dict[str, tuple[type[Exception], str, Make]] = {
    # the page size
    **{
        f"page size {size!r}": (LayoutError, "page_size", lambda pool, size=size: {"page_size": size})
        for size in (100, 65, 63, 0, -64, 256.0, "256", True)
    },
    "page size not given for a 2-D pool": (LayoutError, "pool.shape", lambda pool: {"page_size": None}),
    "page size other than the view says": (
        LayoutError,
        "page_size",
        lambda pool: {"pool": pool.bytes.view(torch.uint8).unflatten(1, (SIZE, 584)), "page_size": 64},
    ),
    "page size too large for the page": (LayoutError, "pool.shape[1]", lambda pool: {"page_size": 192}),
    # the pool
    **{
        f"pool of {dtype}": (
            LayoutError,
            "pool.dtype",
            lambda pool, dtype=dtype: {"pool": pool.bytes.view(dtype)},
        )
        for dtype in (torch.int8, torch.bool, torch.float8_e5m2, torch.int32, torch.bfloat16)
    },
    "pool of rank 1": (LayoutError, "pool.shape", lambda pool: {"pool": pool.bytes[0]}),
    "pool of rank 5": (LayoutError, "pool.shape", lambda pool: {"pool": pool.bytes[None, None, None]}),
    "pool expanded": (
        LayoutError,
        "pool.stride(0)",
        lambda pool: {"pool": pool.bytes[:1].expand(PAGES, -1)},
    ),
    "pool of overlapping pages": (
        LayoutError,
        "pool.stride(0)",
        lambda pool: {"pool": torch.as_strided(pool.guard.storage, (2, DSV4.payload(SIZE)), (4096, 1))},
    ),
    "pool of sparse bytes": (
        LayoutError,
        "pool.stride(-1)",
        lambda pool: {"pool": torch.as_strided(pool.guard.storage, (1, DSV4.payload(SIZE)), (1, 2))},
    ),
    "pool on no device": (ArgumentError, "pool.device", lambda pool: {"pool": pool.view.to("meta")}),
    "pool of another layout": (
        LayoutError,
        "pool.shape[-1]",
        lambda pool: {"pool": pool.bytes.unflatten(1, (SIZE, 584)), "page_size": None, "layout": DSV32},
    ),
    # the indices
    **{
        f"indices of {dtype}": (
            ArgumentError,
            "indices.dtype",
            lambda pool, dtype=dtype: {"indices": torch.zeros(2, 3, dtype=dtype, device=DEVICE)},
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool)
    },
    "indices on another device": (
        ArgumentError,
        "indices.device",
        lambda pool: {"indices": torch.zeros(2, 3, dtype=torch.int32, device="meta")},
    ),
    "indices with every other column": (
        ArgumentError,
        "indices.stride(-1)",
        lambda pool: {"indices": strided((2, 3), (6, 2))},
    ),
    "indices transposed": (
        ArgumentError,
        "indices.stride(-1)",
        lambda pool: {"indices": strided((2, 3), (1, 2))},
    ),
    "indices expanded along a row": (
        ArgumentError,
        "indices.stride(-1)",
        lambda pool: {"indices": strided((2, 3), (1, 0))},
    ),
    "indices of rank 3 with every other column": (
        ArgumentError,
        "indices.stride(-1)",
        lambda pool: {"indices": strided((2, 1, 3), (6, 6, 2))},
    ),
    **{
        f"indices of shape {shape}": (
            ArgumentError,
            "indices.shape",
            lambda pool, shape=shape: {"indices": torch.zeros(shape, dtype=torch.int32, device=DEVICE)},
        )
        for shape in ((), (3,), (2, 2, 3), (2, 0, 3), (2, 1, 1, 3))
    },
    "too many indices": (
        ArgumentError,
        "indices.shape",
        lambda pool: {"pool": pool.view[:0], "indices": strided((1 << 14, 1 << 10), (0, 1))},
    ),
    "an index at the pool's end": (
        IndexValueError,
        "indices[1, 2]",
        lambda pool: {"indices": index([0, -1, 5], [TOKENS - 1, -1, TOKENS]), "validate": "values"},
    ),
    "an index far past the pool's end": (
        IndexValueError,
        "indices[0, 0]",
        lambda pool: {"indices": index([1 << 40], dtype=torch.int64), "validate": "values"},
    ),
    "an index of rank 3 past the pool's end": (
        IndexValueError,
        "indices[1, 0]",
        lambda pool: {"indices": index([0], [TOKENS])[:, None], "validate": "values"},
    ),
    "an index past the end in the last counted column": (
        IndexValueError,
        "indices[0, 1]",
        lambda pool: {
            "indices": index([0, TOKENS, TOKENS]),
            "topk_length": index([2])[0],
            "validate": "values",
        },
    ),
    "an index into an empty pool": (
        IndexValueError,
        "indices[0, 0]",
        lambda pool: {"pool": pool.view[:0], "indices": index([0]), "validate": "values"},
    ),
    # the lengths
    "lengths without indices": (
        ArgumentError,
        "topk_length",
        lambda pool: {"topk_length": index([1, 2])[0]},
    ),
    **{
        f"lengths of shape {shape}": (
            ArgumentError,
            "topk_length.shape",
            lambda pool, shape=shape: {
                "indices": index([1, 2], [3, 4]),
                "topk_length": torch.ones(shape, dtype=torch.int32, device=DEVICE),
            },
        )
        for shape in ((), (1,), (3,), (1, 2), (2, 2), (2, 1, 1))
    },
    "lengths of a float dtype": (
        ArgumentError,
        "topk_length.dtype",
        lambda pool: {"indices": index([1, 2]), "topk_length": torch.ones(1, device=DEVICE)},
    ),
    "lengths on another device": (
        ArgumentError,
        "topk_length.device",
        lambda pool: {
            "indices": index([1, 2]),
            "topk_length": torch.ones(1, dtype=torch.int32, device="meta"),
        },
    ),
    # the level
    "validate unknown": (
        ArgumentError,
        "validate",
        lambda pool: {"indices": index([1]), "validate": "always"},
    ),
    "validate unknown of a full split": (ArgumentError, "validate", lambda pool: {"validate": "always"}),
    # the destination
    **{
        f"out of {dtype}": (
            ArgumentError,
            "out",
            lambda pool, dtype=dtype: {"out": destination().view(dtype)},
        )
        for dtype in (torch.int8, torch.float8_e4m3fn)
    },
    "out of rank 3": (ArgumentError, "out", lambda pool: {"out": destination()[None]}),
    "out on another device": (ArgumentError, "out", lambda pool: {"out": destination().to("meta")}),
    "out of too few rows": (ArgumentError, "out.shape", lambda pool: {"out": destination()[:-1]}),
    "out of too narrow rows": (
        ArgumentError,
        "out.shape",
        lambda pool: {"out": destination()[:, : PAYLOAD - 1]},
    ),
    "out of sparse rows": (
        ArgumentError,
        "out.shape",
        lambda pool: {"out": destination(2 * SUBS, ROW).view(SUBS, 2 * ROW)[:, ::2]},
    ),
    "out of overlapping rows": (
        ArgumentError,
        "out.stride(0)",
        lambda pool: {"out": torch.as_strided(destination(), (SUBS, PAYLOAD), (PAYLOAD - 8, 1))},
    ),
    "out expanded": (
        ArgumentError,
        "out.stride(0)",
        lambda pool: {"out": destination(1).expand(SUBS, -1)},
    ),
    "out aliasing the pool": (ArgumentError, "out", lambda pool: {"out": overlapping(pool)}),
    "out aliasing the pool from a storage of its own": (
        ArgumentError,
        "out",
        lambda pool: {"out": alias(overlapping(pool))},
    ),
    "out too small for a pool that needs no split": (
        ArgumentError,
        "out.shape",
        lambda pool: {"page_size": 64, "out": destination(PAGES - 1)},
    ),
}


def alias(view: torch.Tensor) -> torch.Tensor:
    """The same memory behind another storage, as a buffer imported from elsewhere has it."""
    if view.device.type == "cpu":
        return torch.from_numpy(view.numpy())
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(view))


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_named_and_changes_nothing(name: str, pool: Pool, registry: PersistentBuffers) -> None:
    error, argument, make = BAD_INPUT[name]
    split_pages(make_pool(DSV4, SIZE, PAGES, seed=11).view, SIZE, index([1, 200]), buffers=registry)
    arguments = {"pool": pool.bytes, "page_size": SIZE, "buffers": registry} | make(pool)
    given = [pool.guard.storage, *registry.tensors().values()]
    given += [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.device.type != "meta"]
    memory = [memory_of(t) for t in given]
    before, report = [m.clone() for m in memory], registry.report()

    with pytest.raises(error) as caught:
        split_pages(arguments.pop("pool"), **arguments)

    assert type(caught.value) is error
    assert caught.value.argument == argument
    text = str(caught.value)
    for part in (argument, str(caught.value.value), caught.value.expected, caught.value.remedy):
        assert part
        assert part in text
    assert registry.report() == report
    assert all(torch.equal(now, was) for now, was in zip(memory, before, strict=True))


@pytest.mark.parametrize("name", [n for n in BAD_INPUT if n.startswith(("page size", "pool"))])
def test_reserving_refuses_the_same_pools(name: str, pool: Pool, registry: PersistentBuffers) -> None:
    error, argument, make = BAD_INPUT[name]
    arguments = {"pool": pool.bytes, "page_size": SIZE, "buffers": registry} | make(pool)

    with pytest.raises(error) as caught:
        reserve_split(arguments.pop("pool"), **arguments)

    assert caught.value.argument == argument
    assert len(registry) == 0


@pytest.mark.parametrize(
    "indices",
    [
        [[0, -1, -(2**31)], [TOKENS - 1, -2, -1]],
        [[0, 1, TOKENS], [2, 3, 2**31 - 1]],  # past the end, in a column past the length
    ],
)
def test_values_that_count_are_all_that_is_checked(indices: list[list[int]], pool: Pool) -> None:
    out = destination()

    split_pages(pool.view, SIZE, index(*indices), topk_length=index([2, 2])[0], out=out, validate="values")

    assert torch.equal(out[0, :PAYLOAD], expected(pool)[0])


@pytest.mark.parametrize(("variable", "refused"), [("metadata", False), ("values", True)])
def test_the_level_comes_from_the_environment_where_none_is_passed(
    variable: str, refused: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_MLA_VALIDATE", variable)
    out = destination()

    if refused:
        with pytest.raises(IndexValueError):
            split_pages(pool.view, SIZE, index([TOKENS]), out=out)
    else:
        split_pages(pool.view, SIZE, index([TOKENS]), out=out)
    split_pages(pool.view, SIZE, index([TOKENS]), out=out, validate="metadata")


@pytest.mark.skipif(not runtime.INTERPRETED, reason="in cuda mode values are checked on request only")
def test_reference_mode_checks_values_by_itself(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SM120_MLA_VALIDATE", raising=False)

    with pytest.raises(IndexValueError, match=rf"below {TOKENS} \({PAGES} pages of {SIZE}\), or -1"):
        split_pages(pool.view, SIZE, index([TOKENS]))


def test_values_are_never_looked_at_in_a_capture(pool: Pool, registry: PersistentBuffers) -> None:
    indices = index([TOKENS, -1])
    reserve_split(pool.view, SIZE, buffers=registry)
    split_pages(pool.view, SIZE, indices, buffers=registry, validate="metadata")

    graph = graphs.capture(lambda: split_pages(pool.view, SIZE, indices, buffers=registry, validate="values"))

    graph.replay()
    assert graph.result.tensor.shape[0] == SUBS


def test_a_capture_without_room_is_refused_with_the_call_that_makes_room(
    pool: Pool, registry: PersistentBuffers
) -> None:
    indices = index([1])

    def work() -> SplitPages:
        return split_pages(pool.view, SIZE, indices, buffers=registry, scope="draft")

    with pytest.raises(GrowthDuringCaptureError) as caught:
        graphs.capture(work)

    assert f"a pool of {PAGES} pages ({SUBS} sub-pages)" in str(caught.value)
    assert len(registry) == 0
    advice = str(caught.value).split("Call ")[1].split(" for a pool")[0]
    assert advice == f"reserve_split(pool, page_size={SIZE}, scope='draft')"
    reserve_split(pool.view, page_size=SIZE, scope="draft", buffers=registry)
    out = split_pages(pool.view, SIZE, indices, buffers=registry, scope="other")
    assert out.tensor is not None
    graph = graphs.capture(work)
    graph.replay()
    assert torch.equal(payload_of(graph.result)[0], expected(pool)[0])


def test_clearing_in_a_capture_is_refused(pool: Pool, registry: PersistentBuffers) -> None:
    reserve_split(pool.view, SIZE, buffers=registry)

    with pytest.raises(CaptureError):
        graphs.capture(registry.clear)

    assert len(registry) == 2


# ---- what the process lacks


def test_a_cpu_tensor_where_kernels_are_compiled(
    registry: PersistentBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    pool = torch.zeros(PAGES, DSV4.payload(SIZE), dtype=torch.uint8)

    for call in (split_pages, reserve_split):
        with pytest.raises(ArgumentError, match=r"pool\.device = cpu: .*CUDA.*SM120_MLA_MODE=reference"):
            call(pool, SIZE, buffers=registry)

    assert len(registry) == 0
    assert not pool.any()


def test_a_cuda_tensor_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0))  # this machine need not have one

    with pytest.raises(ArgumentError, match=r"pool\.device = cuda: .*Unset TRITON_INTERPRET"):
        runtime.require_device("pool", tensor)


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=settings.environment("TRITON_INTERPRET", "SM120_MLA_MODE", **environment),
    )


def test_without_triton_the_package_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton':\n"
        "            raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import sm120_mla, sm120_mla.layout\n"
        "from sm120_mla.errors import UnavailableError\n"
        "try:\n"
        "    sm120_mla.split_pages\n"
        "except UnavailableError as error:\n"
        "    print('caught', error)\n"
    )

    done = child(code, SM120_MLA_MODE="reference")

    assert done.returncode == 0, done.stderr
    assert "caught triton is not available: No module named 'triton'." in done.stdout
    assert "pip install 'triton>=3.6'" in done.stdout


def test_triton_imported_before_the_mode_was_set_is_refused() -> None:
    code = (
        "import triton.language\n"
        "import sm120_mla\n"
        "try:\n"
        "    sm120_mla.split_pages\n"
        "except sm120_mla.errors.UnavailableError as error:\n"
        "    print('caught', error)\n"
    )

    done = child(code, SM120_MLA_MODE="reference")

    assert done.returncode == 0, done.stderr
    assert "caught reference mode is not available: triton was imported before" in done.stdout


def test_unavailable_errors_survive_a_process_boundary() -> None:
    import pickle

    error = UnavailableError("triton", "missing", "Install it.")

    assert str(pickle.loads(pickle.dumps(error))) == str(error)
