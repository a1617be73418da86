"""PersistentBuffers: guards, growth, pins and keys of what outlives a call."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sm120_mla import buffers as buffers_module
from sm120_mla import device, graphs
from sm120_mla.buffers import Allocation, BufferKey, PersistentBuffers, default_buffers
from sm120_mla.errors import ArgumentError, GrowthDuringCaptureError
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4, DSV41_FOOTER, by_name

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def registry() -> PersistentBuffers:
    return PersistentBuffers()


@pytest.fixture
def like() -> torch.Tensor:
    return torch.empty(0, device=DEVICE)


def make(
    registry: PersistentBuffers, like: torch.Tensor, rows: int = 4, purpose: str = "work", **more: Any
) -> torch.Tensor:
    return registry.get(purpose, (rows, 3), torch.int32, like, **more)


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def graph_that_writes(registry: PersistentBuffers, like: torch.Tensor, rows: int = 4) -> graphs.Graph:
    return graphs.capture(lambda: make(registry, like, rows).add_(1))


# ---- guards


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("call", ["get", "reserve", "buffer"])
def test_no_allocation_is_ever_an_inference_tensor(
    inference: bool, zero: bool, call: str, registry: PersistentBuffers, like: torch.Tensor
) -> None:
    with torch.inference_mode(inference):
        made = getattr(registry, call)("work", (4, 3), torch.int32, like, zero=zero)
        getattr(registry, call)("work", (9, 3), torch.int32, like, zero=zero)  # growth is an allocation too

    assert made is not None
    (tensor,) = registry.tensors().values()
    assert tensor.shape == (9, 3)
    assert not tensor.is_inference()
    tensor.zero_()  # what an inference tensor refuses here


def test_zero_clears_when_allocated_and_only_then(registry: PersistentBuffers, like: torch.Tensor) -> None:
    first = make(registry, like, zero=True)
    assert not first.any()
    first.fill_(7)

    again = make(registry, like, zero=True)
    grown = make(registry, like, 6, zero=True)

    assert again.data_ptr() == first.data_ptr()
    assert bool((again == 7).all())
    assert not grown.any()


# ---- sizes


def test_one_tensor_is_handed_out_until_it_is_too_small(
    registry: PersistentBuffers, like: torch.Tensor
) -> None:
    first = make(registry, like, 4)

    assert make(registry, like, 2) is first
    assert make(registry, like, 4) is first
    assert make(registry, like, 0) is first
    grown = make(registry, like, 5)
    assert grown.shape == (5, 3)
    assert make(registry, like, 4) is grown
    assert len(registry) == 1


def test_an_unpinned_buffer_is_freed_when_it_grows(registry: PersistentBuffers, like: torch.Tensor) -> None:
    old = weak(make(registry, like))

    make(registry, like, 5)

    assert old.expired()
    assert [line.superseded for line in registry.report()] == [False]


def test_growth_counts_as_a_new_generation_of_the_old_buffer(
    registry: PersistentBuffers, like: torch.Tensor
) -> None:
    old = registry.buffer("work", (4, 3), torch.int32, like)
    assert old.generation == 0
    assert [old.advance(), old.advance()] == [1, 2]

    new = registry.buffer("work", (5, 3), torch.int32, like)

    assert (old.generation, new.generation) == (3, 3)
    assert new.advance() == 4
    assert old.generation == 3


def test_no_rows_at_all(registry: PersistentBuffers, like: torch.Tensor) -> None:
    assert make(registry, like, 0).shape == (0, 3)


# ---- keys


def test_a_key_is_purpose_device_layout_and_scope(registry: PersistentBuffers, like: torch.Tensor) -> None:
    base = make(registry, like)
    others = [
        make(registry, like, purpose="other"),
        make(registry, like, layout=DSV4),
        make(registry, like, layout=DSV41_FOOTER),
        make(registry, like, scope="mine"),
    ]
    with device.pretend_device_key("pretended:1"):
        others.append(make(registry, like))
        assert make(registry, like) is others[-1]

    addresses = {t.data_ptr() for t in [base, *others]}
    assert len(addresses) == len(registry) == 6
    assert make(registry, like) is base
    assert make(registry, like, layout=DSV4, scope="") is others[1]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (BufferKey("work", "cuda:1"), "work/cuda:1"),
        (BufferKey("work", "cuda:1", "dsv4"), "work/cuda:1/dsv4"),
        (BufferKey("work", "cuda:1", "dsv4", "draft"), "work/cuda:1/dsv4[draft]"),
        (BufferKey("work", "cpu", scope="draft"), "work/cpu[draft]"),
    ],
)
def test_how_a_key_reads(key: BufferKey, text: str) -> None:
    assert str(key) == text


def test_iteration_is_over_keys_in_order(registry: PersistentBuffers, like: torch.Tensor) -> None:
    for purpose in ("b", "a", "c"):
        make(registry, like, purpose=purpose)

    assert [key.purpose for key in registry] == ["a", "b", "c"]
    assert list(registry) == sorted(registry)
    assert registry.key("a", like) in list(registry)


# ---- what is refused


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 3), torch.int64), ((4, 2), torch.int32), ((4,), torch.int32), ((4, 3, 1), torch.int32)],
)
def test_one_key_has_one_dtype_and_one_row_shape(
    shape: tuple[int, ...], dtype: torch.dtype, registry: PersistentBuffers, like: torch.Tensor
) -> None:
    first = make(registry, like)
    report = registry.report()

    with pytest.raises(ArgumentError, match=r"work/.*torch\.int32 \[\*, 3\], as it was made.*scope"):
        registry.get("work", shape, dtype, like)

    assert registry.report() == report
    assert make(registry, like) is first


@pytest.mark.parametrize("shape", [(), (-1, 3), (4, -1)])
def test_a_shape_needs_sizes(shape: tuple[int, ...], registry: PersistentBuffers, like: torch.Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        registry.get("work", shape, torch.int32, like)

    assert caught.value.argument == "shape"
    assert len(registry) == 0


# ---- capture


@pytest.mark.parametrize("have", [0, 4])
def test_growth_in_a_capture_is_refused_and_its_advice_works(
    have: int, registry: PersistentBuffers, like: torch.Tensor
) -> None:
    if have:
        make(registry, like, have, layout=DSV4, scope="draft")
    report = registry.report()

    def work() -> torch.Tensor:
        return make(registry, like, 6, layout=DSV4, scope="draft", zero=True).add_(1)

    with pytest.raises(GrowthDuringCaptureError) as caught:
        graphs.capture(work)

    text = str(caught.value)
    assert f"work/{device.device_key(like)}/dsv4[draft] has {have} rows and 6 are needed" in text
    assert registry.report() == report

    advice = re.search(r"Call PersistentBuffers\.(\w+\(.*\)) before the capture\.", text)
    assert advice is not None
    eval(f"registry.{advice[1]}", {"registry": registry, "torch": torch, "like": like, "by_name": by_name})
    (reserved,) = registry.tensors().values()
    assert reserved.shape == (6, 3)
    assert have or not reserved.any()
    graphs.capture(work).replay()
    assert len(registry) == 1


def test_the_advice_may_come_from_the_caller(registry: PersistentBuffers, like: torch.Tensor) -> None:
    with pytest.raises(GrowthDuringCaptureError, match=r"Call warm_up\(3\) before the capture"):
        graphs.capture(lambda: make(registry, like, hint="warm_up(3)"))


def test_within_a_capture_what_there_is_may_be_used(registry: PersistentBuffers, like: torch.Tensor) -> None:
    reserved = registry.reserve("work", (6, 3), torch.int32, like)

    graph = graphs.capture(lambda: make(registry, like, 6))

    assert graph.result is reserved
    (line,) = registry.report()
    assert [a.capturing for a in line.allocations] == [False]


def test_a_superseded_buffer_lives_as_long_as_a_graph_that_writes_it(
    registry: PersistentBuffers, like: torch.Tensor
) -> None:
    old = make(registry, like, 4, zero=True)
    address, storage = old.data_ptr(), weak(old)
    graph = graph_that_writes(registry, like)
    del old
    start = int(next(iter(registry.tensors().values()))[0, 0])

    new = make(registry, like, 8, zero=True)

    assert new.data_ptr() != address
    assert not storage.expired()
    kept = registry.tensors()[f"work/{device.device_key(like)}@0"]
    assert kept.data_ptr() == address
    graph.replay()
    assert bool((kept == start + 1).all())
    assert not new.any()
    del kept

    graph.drop()
    del graph
    gc.collect()
    assert list(registry.tensors()) == [f"work/{device.device_key(like)}"]
    assert storage.expired()


def test_every_graph_pins_on_its_own(registry: PersistentBuffers, like: torch.Tensor) -> None:
    storage = weak(make(registry, like))
    first, second = graph_that_writes(registry, like), graph_that_writes(registry, like)
    make(registry, like, 5)

    first.drop()
    assert not storage.expired()
    make(registry, like, 6)
    assert not storage.expired()
    second.drop()

    assert [line.superseded for line in registry.report()] == [False]
    assert storage.expired()


def test_a_graph_pins_only_what_it_was_handed(registry: PersistentBuffers, like: torch.Tensor) -> None:
    make(registry, like, purpose="other")
    make(registry, like)
    graph = graph_that_writes(registry, like)

    make(registry, like, 9, purpose="other")
    make(registry, like, 9)

    assert [line.name for line in registry.report() if line.superseded] == [f"work/{device.device_key(like)}"]
    graph.drop()


def test_a_failed_capture_pins_nothing(registry: PersistentBuffers, like: torch.Tensor) -> None:
    make(registry, like)

    def work() -> None:
        make(registry, like)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        graphs.capture(work)
    gc.collect()
    make(registry, like, 5)

    assert not any(line.superseded for line in registry.report())


def test_a_capture_of_somebody_elses_pins_for_good(
    registry: PersistentBuffers, like: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(registry, like)
    with monkeypatch.context() as during:
        during.setattr(device, "is_capturing", lambda: True)  # as torch answers for a CUDA graph of its own
        make(registry, like)
        with pytest.raises(GrowthDuringCaptureError):
            make(registry, like, 5)

    make(registry, like, 5)

    gc.collect()
    assert [line.superseded for line in registry.report()] == [False, True]


# ---- the report


def test_the_report_says_what_there_is_and_how_it_came_about(
    registry: PersistentBuffers, like: torch.Tensor
) -> None:
    with torch.inference_mode():
        registry.get("work", (4, 3), torch.int16, like, layout=DSV4, scope="s")
    held = registry.buffer("work", (6, 3), torch.int16, like, layout=DSV4, scope="s")
    held.advance()

    (line,) = registry.report()

    assert line.name == f"work/{device.device_key(like)}/dsv4[s]"
    assert (line.shape, line.dtype, line.nbytes) == ((6, 3), "int16", 36)
    assert line.address == held.tensor.data_ptr()
    assert line.is_inference is False
    assert line.generation == held.generation == 2
    assert line.superseded is False
    first, second = line.allocations
    assert (first.inference_mode, second.inference_mode) == (True, False)
    assert (first.shape, second.shape) == ((4, 3), (6, 3))
    assert (first.nbytes, second.nbytes) == (24, 36)
    assert not first.capturing
    assert not second.capturing
    here = "in test_the_report_says_what_there_is_and_how_it_came_about"
    for made in (first, second):
        assert re.fullmatch(rf"test_buffers\.py:\d+ {here}", made.site)
    assert first.site != second.site


def test_the_site_is_the_nearest_caller_outside_the_registry(
    registry: PersistentBuffers, like: torch.Tensor
) -> None:
    def warm_up() -> None:
        registry.reserve("work", (1,), torch.int8, like)

    warm_up()

    assert registry.report()[0].allocations[0].site.endswith(" in warm_up")


def test_an_inference_tensor_that_came_in_shows_in_the_report(
    registry: PersistentBuffers, like: torch.Tensor
) -> None:
    held = registry.buffer("work", (4, 3), torch.int32, like)

    with torch.inference_mode():
        held.tensor = torch.empty(4, 3, dtype=torch.int32, device=DEVICE)

    assert [line.is_inference for line in registry.report()] == [True]


def test_an_allocation_is_printable_evidence() -> None:
    made = Allocation("serve.py:7 in boot", True, False, (4, 3), 48)

    assert "serve.py:7 in boot" in repr(made)
    assert "inference_mode=True" in repr(made)


# ---- clearing


def test_clear_forgets_all_but_what_graphs_hold(registry: PersistentBuffers, like: torch.Tensor) -> None:
    make(registry, like, purpose="other")
    make(registry, like, zero=True)
    graph = graph_that_writes(registry, like)

    registry.clear()

    assert len(registry) == 0
    assert list(registry.tensors()) == [f"work/{device.device_key(like)}@0"]
    assert [line.superseded for line in registry.report()] == [True]
    graph.replay()
    fresh = make(registry, like, zero=True)
    assert not fresh.any()
    graph.drop()
    registry.clear()
    assert registry.tensors() == {}


def test_the_default_registry_is_one_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "_default", None)

    first = default_buffers()

    assert first is default_buffers()
    assert isinstance(first, PersistentBuffers)
    assert len(first) == 0


@pytest.mark.parametrize("method", ["get", "buffer", "reserve"])
def test_shapes_may_be_of_any_integers(method: str, registry: PersistentBuffers, like: torch.Tensor) -> None:
    call: Callable[..., Any] = getattr(registry, method)

    call("work", torch.Size([2, 3]), torch.int32, like)

    assert next(iter(registry.tensors().values())).shape == (2, 3)
