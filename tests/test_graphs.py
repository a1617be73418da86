"""graphs: replays do what eager calls do, and the CPU recorder refuses what a capturing stream refuses."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

from sm120_mla import device, graphs
from sm120_mla.errors import ArgumentError, CaptureError, HostSyncError, StaleAddressError
from sm120_mla.kernels.runtime import INTERPRETED, tl, triton

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Work = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this process")


@pytest.fixture(params=["cpu", "cuda"])
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU in this process")
    return str(request.param)


@pytest.fixture(params=["cpu", "cuda"])
def kernel_where(request: pytest.FixtureRequest) -> str:
    """A device that this process's kernels run on."""
    if (request.param == "cpu") is not INTERPRETED:
        pytest.skip(f"kernels are {'interpreted' if INTERPRETED else 'compiled'} in this process")
    return str(request.param)


def inputs(device_type: str, seed: int = 0) -> Inputs:
    """float32 [6, 4] twice, and int64 [6, 4] of indices below 4."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-99, 100, (6, 4), generator=g).float() for _ in range(2))
    return x.to(device_type), y.to(device_type), torch.randint(0, 4, (6, 4), generator=g).to(device_type)


@triton.jit
def scaled_add(x, y, out, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * scale + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def count_programs(counter):  # type: ignore[no-untyped-def]
    tl.atomic_add(counter, 1)


# ---- replaying agrees with calling


def in_place(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> None:
    x.mul_(2).add_(y)
    y[0] = 3.0
    y[1:3].clamp_(min=0)


def into_out(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    torch.sub(x, y, out=y)
    made = torch.empty(4, 6, device=x.device)
    return torch.mul(x.t(), 2, out=made)


def through_views(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.t()[1:].add_(1)
    torch.as_strided(y, (3,), (5,), 2).zero_()
    x.view(torch.int32)[5].bitwise_xor_(1)
    return x[::2, 1], y.unsqueeze(1).expand(6, 2, 4)


def over_scratch(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)  # to be cleared in every replay
    total[1] += y[1]
    total.add_(x.new_ones(4))
    scratch = torch.empty_like(x)
    scratch.copy_(total)
    steps = torch.arange(4, device=x.device) + torch.full((4,), 7, device=x.device)
    return scratch * steps


def with_several_outputs(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> Any:
    best, at = x.max(dim=1)
    first, second = y.split(3)
    return {"best": best, "at": at, "rest": [torch.sort(y, dim=1), (first + 1, second)]}


def by_index(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.scatter_(1, i[:, :1], y[:, :1])
    x.index_add_(0, i[0], y[:4])
    return torch.where(i > 1, x.gather(1, i), y[i[1]][:1]) + x[:, i[2]]


def over_lists(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([x, y], 2)
    return torch.cat([x, y.double().float()]) @ y.t()


def without_a_sync(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(y > 0, -1.0)
    picked = x[:, 0].repeat_interleave(torch.full((6,), 2, device=x.device), output_size=12)
    return torch.nn.functional.pad(picked, (0, 2)) + len(x)


AGREE: dict[str, Work] = {
    "arithmetic": lambda x, y, i: (x * 2 + y).relu() - i,
    "in place": in_place,
    "out=": into_out,
    "views": through_views,
    "scratch made inside": over_scratch,
    "several outputs": with_several_outputs,
    "indices": by_index,
    "lists": over_lists,
    "another dtype": lambda x, y, i: (x.bfloat16() + 1, i.to(torch.uint8), x.double().sum()),
    "what looks like a sync": without_a_sync,
    "an input returned": lambda x, y, i: x.add_(1),
    "nothing": lambda x, y, i: None,
}


def leaves(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if leaf is not None]


def check_agreement(work: Work, where: str) -> None:
    held = inputs(where)
    work(*inputs(where))
    graph = graphs.capture(lambda: work(*held), device_type=where)
    addresses = [t.data_ptr() for t in leaves(graph.result)]
    for seed in (1, 2):
        fresh = inputs(where, seed)
        for mine, new in zip(held, fresh, strict=True):
            mine.copy_(new)

        graph.replay()

        wanted = work(*fresh)
        assert tree_flatten(graph.result)[1] == tree_flatten(wanted)[1]
        for a, b in zip(leaves((graph.result, held)), leaves((wanted, fresh)), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
    assert [t.data_ptr() for t in leaves(graph.result)] == addresses
    graph.drop()


@pytest.mark.parametrize("name", AGREE)
def test_a_replay_agrees_with_an_eager_call(name: str, where: str) -> None:
    check_agreement(AGREE[name], where)


def launch(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scaled_add[(2,)](x, y, out, x.numel(), 3.0, BLOCK=16)
    return out


def launch_on_views(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> None:
    doubled = y * 2
    scaled_add[(1,)](x[2:], doubled, x[1:], 4, 1.0, BLOCK=4)
    y.add_(x)


def launch_with_computed_grid(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    scaled_add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), 2.0, BLOCK=8)
    return out.sum(dim=0)


@pytest.mark.parametrize("work", [launch, launch_on_views, launch_with_computed_grid])
def test_a_replay_of_launches_agrees_with_an_eager_call(work: Work, kernel_where: str) -> None:
    check_agreement(work, kernel_where)


def test_work_before_and_after_a_capture_is_not_part_of_it(where: str) -> None:
    x = torch.zeros(4, device=where)
    x.add_(100)
    graph = graphs.capture(lambda: x.add_(1), device_type=where)
    x.add_(10)
    x.zero_()

    graph.replay()
    graph.replay()

    assert x.tolist() == [2.0] * 4


def test_two_graphs_replay_in_any_order(where: str) -> None:
    x = torch.zeros(4, device=where)
    double = graphs.capture(lambda: x.mul_(2), device_type=where)
    increase = graphs.capture(lambda: x.add_(3), device_type=where)
    x.fill_(1)

    for graph in (increase, double, double, increase):
        graph.replay()

    assert x.tolist() == [19.0] * 4


# ---- what a graph freezes


def test_numbers_are_frozen(where: str) -> None:
    x = torch.zeros(4, device=where)
    number = [2.0]

    def work() -> None:
        x.add_(number[0])
        x[:1].fill_(number[0])

    graph = graphs.capture(work, device_type=where)
    x.zero_()
    number[0] = 50.0

    graph.replay()

    assert x.tolist() == [2.0] * 4


def test_numbers_and_grids_of_launches_are_frozen(kernel_where: str) -> None:
    x, y, out = (torch.ones(8, device=kernel_where) for _ in range(3))
    counter = torch.zeros(2, dtype=torch.int32, device=kernel_where)
    size = {"scale": 4.0, "n": 8, "programs": 3}

    def work() -> None:
        scaled_add[(1,)](x, y, out, size["n"], size["scale"], BLOCK=8)
        count_programs[(size["programs"],)](counter)
        count_programs[lambda meta: (size["programs"], 2)](counter[1:])

    work()
    graph = graphs.capture(work, device_type=kernel_where)
    counter.zero_()
    out.zero_()
    size.update(scale=9.0, n=2, programs=1)

    graph.replay()

    assert out.tolist() == [5.0] * 8
    assert counter.tolist() == [3, 6]


def test_a_replay_leaves_the_grid_of_later_launches_alone(kernel_where: str) -> None:
    counter = torch.zeros(1, dtype=torch.int32, device=kernel_where)
    programs = [4]
    launcher = count_programs[lambda meta: (programs[0],)]
    launcher(counter)
    graph = graphs.capture(lambda: launcher(counter), device_type=kernel_where)
    counter.zero_()
    programs[0] = 10

    graph.replay()
    launcher(counter)
    graph.replay()

    assert counter.tolist() == [18]


# ---- what it holds


def test_a_graph_owns_what_was_allocated_inside(where: str) -> None:
    x, before = torch.ones(4, device=where), torch.ones(4, device=where)

    graph = graphs.capture(lambda: (x + 1, x.add_(1), torch.empty(3, device=where)), device_type=where)
    after = torch.ones(4, device=where)

    added, same, empty = graph.result
    assert same.data_ptr() == x.data_ptr()
    owned = {"added": added, "a view of it": added[2:], "empty": empty}
    assert {name: graph.owns(t) for name, t in owned.items()} == dict.fromkeys(owned, True)
    others = {"x": x, "before": before, "after": after}
    assert {name: graph.owns(t) for name, t in others.items()} == dict.fromkeys(others, False)
    graph.drop()
    assert not graph.owns(after)


@interpreted
def test_addresses_name_every_run_of_memory_once() -> None:
    x, y = torch.zeros(8), torch.zeros(16)

    def work() -> torch.Tensor:
        made = x + 1
        scaled_add[(1,)](y, made, y[8:], 8, 1.0, BLOCK=8)
        return made.add_(x)

    graph = graphs.capture(work, device_type="cpu")

    held = graph.addresses()
    assert held is not None
    assert [(a.step, a.nbytes, a.inside, a.alive) for a in held] == [
        ("aten::add", 32, False, True),
        ("aten::add", 32, True, True),
        ("kernel scaled_add", 64, False, True),
    ]
    assert [a.address for a in held] == [x.data_ptr(), graph.result.data_ptr(), y.data_ptr()]


def test_memory_freed_since_is_noticed_before_anything_is_written() -> None:
    x, others = torch.zeros(4), [torch.zeros(4)]
    graph = graphs.capture(lambda: x.add_(1).add_(others[0]), device_type="cpu")
    address = others[0].data_ptr()
    x.zero_()

    others.clear()
    held = {a.address: a.alive for a in graph.addresses() or ()}

    assert held == {x.data_ptr(): True, address: False}
    with pytest.raises(StaleAddressError, match=rf"aten::add_ recorded 16 bytes at {address:#x}.* freed"):
        graph.replay()
    assert not x.any()


@interpreted
def test_memory_a_launch_recorded_and_freed_since_is_noticed() -> None:
    x, out, others = torch.zeros(4), torch.zeros(4), [torch.zeros(4)]
    graph = graphs.capture(lambda: scaled_add[(1,)](x, others[0], out, 4, 1.0, BLOCK=4), device_type="cpu")

    others.clear()
    gc.collect()  # the interpreter leaves the arguments of a launch in a cycle

    with pytest.raises(StaleAddressError, match="kernel scaled_add recorded 16 bytes"):
        graph.replay()


def test_memory_behind_a_view_lives_as_long_as_the_view() -> None:
    others = [torch.ones(8)]
    view = others[0][2:4]
    graph = graphs.capture(lambda: others[0].mul_(2), device_type="cpu")

    others.clear()
    graph.replay()

    assert view.tolist() == [4.0, 4.0]


def test_what_was_allocated_inside_outlives_its_names() -> None:
    x, out = torch.ones(4), torch.zeros(4)

    def work() -> None:
        out.copy_((x * 2) + (x + 1))

    graph = graphs.capture(work, device_type="cpu")
    gc.collect()
    x.fill_(5)

    graph.replay()

    assert out.tolist() == [16.0] * 4


def test_memory_adopted_inside_is_not_owned() -> None:
    x = torch.ones(4)

    graph = graphs.capture(lambda: torch.empty(0).set_(x.untyped_storage(), 0, (4,), (1,)), device_type="cpu")

    assert graph.result.data_ptr() == x.data_ptr()
    assert not graph.owns(x)


# ---- what is refused


def sample() -> Inputs:
    """Numbers, which of them are above 2, and indices."""
    x = torch.arange(6.0)
    return x, x > 2, torch.tensor([1, 0, 2])


SYNCS: dict[str, tuple[Work, str]] = {
    "item": (lambda x, b, i: x.sum().item(), "Tensor.item()"),
    "tolist": (lambda x, b, i: x.tolist(), "Tensor.tolist()"),
    "cpu": (lambda x, b, i: x.cpu(), "Tensor.cpu()"),
    "numpy": (lambda x, b, i: x.numpy(), "Tensor.numpy()"),
    "detach then numpy": (lambda x, b, i: x.detach().numpy(), "Tensor.numpy()"),
    "np.asarray": (lambda x, b, i: np.asarray(x), "Tensor.__array__()"),
    "float": (lambda x, b, i: float(x[0]), "Tensor.__float__()"),
    "int": (lambda x, b, i: int(x[0]), "Tensor.__int__()"),
    "complex": (lambda x, b, i: complex(x[0]), "Tensor.__complex__()"),
    "math.floor": (lambda x, b, i: math.floor(x[0]), "Tensor.__float__()"),
    "index of a list": (lambda x, b, i: [4, 5][i[0]], "Tensor.__index__()"),
    "range": (lambda x, b, i: range(i[0]), "Tensor.__index__()"),
    "bool": (lambda x, b, i: bool(b[0]), "Tensor.__bool__()"),
    "if": (lambda x, b, i: 1 if x.max() > 3 else 0, "Tensor.__bool__()"),
    "not": (lambda x, b, i: not b[0], "Tensor.__bool__()"),
    "assert": (lambda x, b, i: all(flag for flag in b), "Tensor.__bool__()"),
    "sorted": (lambda x, b, i: sorted(x), "Tensor.__bool__()"),
    "in": (lambda x, b, i: 3.0 in x, "Tensor.__contains__()"),
    "print": (lambda x, b, i: str(x), "Tensor.__repr__()"),
    "format": (lambda x, b, i: f"{x[0]:.2f}", "aten::_local_scalar_dense"),
    "slice bound": (lambda x, b, i: x[i[0] :], "aten::_local_scalar_dense"),
    "number of a fill": (lambda x, b, i: torch.full((2,), x[0]), "aten::_local_scalar_dense"),
    "number of an arange": (lambda x, b, i: torch.arange(i[2]), "aten::_local_scalar_dense"),
    "bytes of the storage": (lambda x, b, i: bytes(x.untyped_storage()), "aten::_local_scalar_dense"),
    "is_nonzero": (lambda x, b, i: torch.is_nonzero(x[0]), "aten::_local_scalar_dense"),
    "one_hot": (lambda x, b, i: torch.nn.functional.one_hot(i), "aten::_local_scalar_dense"),
    "nonzero": (lambda x, b, i: x.nonzero(), "aten::nonzero"),
    "nonzero as tuple": (lambda x, b, i: x.nonzero(as_tuple=True), "aten::nonzero"),
    "where of one argument": (lambda x, b, i: torch.where(b), "aten::nonzero"),
    "argwhere": (lambda x, b, i: torch.argwhere(x), "aten::nonzero"),
    "read by mask": (lambda x, b, i: x[b], "aten::index with a boolean mask"),
    "read by mask of rows": (lambda x, b, i: x.view(6, 1)[b, 0], "aten::index with a boolean mask"),
    "read by byte mask": (lambda x, b, i: x[b.to(torch.uint8)], "aten::index with a boolean mask"),
    "write by mask": (
        lambda x, b, i: x.__setitem__(b, x[:3].clone()),
        "aten::index_put_ with a boolean mask",
    ),
    "index_put_ by mask": (
        lambda x, b, i: x.index_put_((b,), x[:3].clone(), accumulate=True),
        "aten::index_put_ with a boolean mask",
    ),
    "index_put by mask": (lambda x, b, i: x.index_put((b,), x[:3]), "aten::index_put with a boolean mask"),
    "masked_select": (lambda x, b, i: x.masked_select(b), "aten::masked_select"),
    "combinations": (lambda x, b, i: torch.combinations(x), "aten::masked_select"),
    "unique": (lambda x, b, i: x.unique(), "aten::_unique2"),
    "unique with inverse": (lambda x, b, i: torch.unique(x, return_inverse=True), "aten::_unique2"),
    "unique rows": (lambda x, b, i: torch.unique(x.view(2, 3), dim=0), "aten::unique_dim"),
    "unique_consecutive": (lambda x, b, i: x.unique_consecutive(), "aten::unique_consecutive"),
    "bincount": (lambda x, b, i: i.bincount(), "aten::bincount"),
    "equal": (lambda x, b, i: torch.equal(x, x), "aten::equal"),
    "allclose": (lambda x, b, i: torch.allclose(x, x), "aten::allclose"),
    "repeat_interleave": (
        lambda x, b, i: i.repeat_interleave(i),
        "aten::repeat_interleave with tensor repeats",
    ),
    "torch.tensor": (lambda x, b, i: torch.tensor([1, 2]), "aten::lift_fresh"),
    "from_numpy": (lambda x, b, i: torch.from_numpy(np.ones(2)), "aten::lift_fresh"),
    "index by list": (lambda x, b, i: x[[1, 0]], "aten::lift_fresh"),
}


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.filterwarnings("ignore")
def test_a_host_sync_is_refused_by_name(name: str) -> None:
    work, op = SYNCS[name]
    work(*sample())  # outside a capture it is nobody's business
    x, b, i = sample()

    with pytest.raises(HostSyncError) as caught:
        graphs.capture(lambda: work(x, b, i), device_type="cpu")

    assert str(caught.value).startswith(op)
    assert "capturing stream refuses" in str(caught.value)
    assert torch.equal(x, sample()[0])


HARMLESS: dict[str, Work] = {
    "shape": lambda x, b, i: (x.shape[0], len(x), x.numel(), x.stride(), x.data_ptr(), x.device, x.dtype),
    "iteration over rows": lambda x, b, i: sum(row for row in x),
    "an integer index": lambda x, b, i: x[i],
    "where": lambda x, b, i: torch.where(b, x, 0.0),
    "masked_fill": lambda x, b, i: x.masked_fill(b, 0.0),
    "copy": lambda x, b, i: copy.deepcopy(x),
    "repeat_interleave of known size": lambda x, b, i: i.repeat_interleave(i, output_size=3),
    "sizes known": lambda x, b, i: torch.full((2,), 1.0) + torch.arange(2),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_needs_no_value_is_allowed(name: str) -> None:
    x, b, i = sample()
    graph = graphs.capture(lambda: HARMLESS[name](x, b, i), device_type="cpu")

    graph.replay()


@interpreted
def test_a_launch_may_read_on_the_host_what_it_likes() -> None:
    """The interpreter itself reads tensors; that is not the captured work."""
    counter = torch.zeros(1, dtype=torch.int32)

    graph = graphs.capture(lambda: count_programs[(2,)](counter), device_type="cpu")
    graph.replay()

    assert counter.tolist() == [4]
    assert [a.step for a in graph.addresses() or ()] == ["kernel count_programs"]


# ---- the state of the process


def assert_no_capture_is_left() -> None:
    assert device.current_capture() is None
    assert not device.is_capturing()
    x = torch.arange(3.0)
    assert x.sum().item() == 3.0
    assert x[x > 0].tolist() == [1.0, 2.0]
    graph = graphs.capture(lambda: x.add_(1), device_type="cpu")
    graph.replay()
    assert x.tolist() == [2.0, 3.0, 4.0]


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (fail, ZeroDivisionError),
        (lambda: torch.ones(3).tolist(), HostSyncError),
        (lambda: torch.ones(3).nonzero(), HostSyncError),
        (lambda: torch.ones(3) @ torch.ones(7), RuntimeError),
        (lambda: graphs.capture(fail, device_type="cpu"), CaptureError),
    ],
)
def test_a_failed_capture_leaves_no_state(work: Callable[[], Any], error: type[Exception]) -> None:
    from triton.runtime import interpreter

    original = interpreter.GridExecutor.__call__

    with pytest.raises(error):
        graphs.capture(work, device_type="cpu")

    assert interpreter.GridExecutor.__call__ is original
    assert_no_capture_is_left()


@interpreted
def test_a_kernel_that_fails_in_a_capture_leaves_no_state() -> None:
    with pytest.raises(TypeError):
        graphs.capture(lambda: scaled_add[(1,)](torch.ones(1)), device_type="cpu")

    assert_no_capture_is_left()


def test_a_capture_in_a_capture_is_refused(where: str) -> None:
    x = torch.zeros(2, device=where)

    def work() -> None:
        with pytest.raises(CaptureError, match="already in progress"):
            graphs.capture(lambda: x.add_(100), device_type=where)
        x.add_(1)

    graph = graphs.capture(work, device_type=where)
    x.zero_()
    graph.replay()

    assert x.tolist() == [1.0, 1.0]


def test_a_capture_somebody_else_started_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_capturing", lambda: True)

    with pytest.raises(CaptureError, match="already in progress"):
        graphs.capture(lambda: None, device_type="cpu")


def test_during_a_capture_its_token_is_the_current_one() -> None:
    seen: list[device.Capture | None] = []

    graph = graphs.capture(lambda: seen.append(device.current_capture()), device_type="cpu")

    assert isinstance(seen[0], device.Capture)
    assert device.current_capture() is None
    graph.replay()
    assert len(seen) == 1


def test_on_replay_is_called_after_each_replay(where: str) -> None:
    x = torch.zeros(1, device=where)
    seen: list[tuple[str, float]] = []

    def work() -> None:
        x.add_(1)
        token = device.current_capture()
        assert token is not None
        token.on_replay += [lambda: seen.append(("a", x.item())), lambda: seen.append(("b", x.item()))]

    graph = graphs.capture(work, device_type=where)
    x.zero_()
    assert seen == []

    graph.replay()
    graph.replay()

    assert seen == [("a", 1.0), ("b", 1.0), ("a", 2.0), ("b", 2.0)]


def test_a_replay_that_is_refused_calls_nobody() -> None:
    held, seen = [torch.zeros(2)], []

    def work() -> None:
        held[0].add_(1)
        token = device.current_capture()
        assert token is not None
        token.on_replay.append(lambda: seen.append(1))

    graph = graphs.capture(work, device_type="cpu")

    held.clear()

    with pytest.raises(StaleAddressError):
        graph.replay()
    assert seen == []


# ---- dropping


def test_a_dropped_graph_replays_no_more(where: str) -> None:
    x = torch.zeros(2, device=where)
    graph = graphs.capture(lambda: x + 1, device_type=where)

    graph.drop()
    graph.drop()

    assert graph.result is None
    with pytest.raises(CaptureError, match="dropped"):
        graph.replay()
    with pytest.raises(CaptureError, match="dropped"):
        graph.addresses()


def test_dropping_frees_what_was_allocated_inside() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    x = torch.zeros(2)
    graph = graphs.capture(lambda: x + 1, device_type="cpu")
    inside = StorageWeakRef(graph.result.untyped_storage())
    gc.collect()
    assert not inside.expired()

    graph.drop()

    assert inside.expired()


# ---- inference mode


@pytest.mark.parametrize("at_capture", [False, True])
@pytest.mark.parametrize("at_replay", [False, True])
def test_a_replay_does_not_care_for_inference_mode(at_capture: bool, at_replay: bool, where: str) -> None:
    with torch.inference_mode():
        x = torch.zeros(3, device=where)
    y = torch.zeros(3, device=where)

    def work() -> torch.Tensor:
        y.add_(1)
        if at_capture:
            x.add_(1)
        return x + y

    with torch.inference_mode(at_capture):
        graph = graphs.capture(work, device_type=where)
    with torch.inference_mode():
        x.zero_()
    y.zero_()
    with torch.inference_mode(at_replay):
        graph.replay()

    assert y.tolist() == [1.0] * 3
    assert x.tolist() == [float(at_capture)] * 3
    assert graph.result.tolist() == [1.0 + at_capture] * 3


def test_writing_an_inference_tensor_outside_its_mode_aborts_the_capture() -> None:
    with torch.inference_mode():
        x = torch.zeros(3)

    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        graphs.capture(lambda: x.zero_(), device_type="cpu")

    assert_no_capture_is_left()


# ---- arguments


@pytest.mark.parametrize("times", [0, 1, 3])
def test_warm_up_calls_run_before_the_capture(times: int, where: str) -> None:
    x = torch.zeros(1, device=where)
    capturing: list[bool] = []

    def work() -> None:
        capturing.append(device.is_capturing())
        x.add_(1)

    graph = graphs.capture(work, device_type=where, warmup=times)

    assert capturing == [False] * times + [True]
    x.zero_()
    graph.replay()
    assert x.tolist() == [1.0]


def test_the_device_is_that_of_the_mode_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(graphs, "_CudaGraph", lambda fn: made.append("cuda"))
    monkeypatch.setattr(graphs, "_RecordedGraph", lambda fn: made.append("cpu"))

    for mode in ("reference", "cuda", "sm120"):
        monkeypatch.setattr(device, "mode", lambda mode=mode: mode)
        graphs.capture(fail)

    assert made == ["cpu", "cuda", "cuda"]


@pytest.mark.parametrize(
    ("arguments", "at_fault"), [({"device_type": "xpu"}, "device_type"), ({"warmup": -1}, "warmup")]
)
def test_bad_arguments_are_named_before_anything_runs(arguments: dict[str, Any], at_fault: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        graphs.capture(fail, **arguments)

    assert caught.value.argument == at_fault
