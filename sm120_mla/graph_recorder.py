"""The CPU model of a CUDA graph: records aten calls and interpreted launches, replays them in place.

Like a CUDA graph it freezes scalars, grids and addresses, owns what was allocated inside the capture and
nothing else, and refuses what a capturing stream refuses. Unlike one it can tell that an address it holds
is no longer anybody's: replaying then raises instead of writing into freed memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .errors import HostSyncError, StaleAddressError

__all__ = ["HeldAddress", "Recording", "record"]

# What a capturing stream refuses because the host would have to wait for a value. Names as torch has them.
_SYNC_METHODS = frozenset(
    {
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__contains__",
        "__repr__",
    }
)
_SYNC_ATEN = frozenset(
    {
        "_local_scalar_dense",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "allclose",
        "argwhere",
        "unique_dim",
        "unique_consecutive",
        "_unique",
        "_unique2",
        "bincount",
    }
)
_MASK_INDEXING = frozenset(
    ["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"]
)
_NO_WORK = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "detach",
        "set_",
    }
)


@dataclass(frozen=True)
class HeldAddress:
    """A run of memory a graph recorded. ``inside`` means allocated in the capture, so the graph's own."""

    step: str
    address: int
    nbytes: int
    inside: bool
    alive: bool


@dataclass(frozen=True)
class _TensorRef:
    """A tensor by storage and geometry. Storage from outside the capture is held weakly, as an address."""

    step: str
    address: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    weak: StorageWeakRef
    strong: torch.UntypedStorage | None

    def alive(self) -> bool:
        return self.strong is not None or not self.weak.expired()

    def tensor(self) -> torch.Tensor:
        storage = self.strong
        if storage is None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is None:
            raise StaleAddressError(
                f"{self.step} recorded {self.nbytes:,} bytes at {self.address:#x}, which have been freed "
                f"since. Keep every tensor of a captured graph alive for as long as the graph, and grow "
                f"buffers without freeing the old one."
            )
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass
class _AtenStep:
    name: str
    func: Any
    args: Any
    kwargs: Any
    outputs: list[_TensorRef | None]

    def run(self) -> None:
        args, kwargs = _resolve(self.args), _resolve(self.kwargs)
        produced, _ = tree_flatten(self.func(*args, **kwargs))
        for ref, value in zip(self.outputs, produced, strict=True):
            if ref is None:
                continue
            recorded = ref.tensor()
            if recorded.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                recorded.copy_(value)


@dataclass
class _LaunchStep:
    name: str
    call: Callable[..., Any]
    executor: Any
    grid: tuple[int, ...]
    args: Any
    kwargs: Any

    def run(self) -> None:
        grid, self.executor.grid = self.executor.grid, self.grid
        try:
            self.call(self.executor, *_resolve(self.args), **_resolve(self.kwargs))
        finally:
            self.executor.grid = grid


@dataclass
class Recording:
    """What one capture recorded, in order."""

    steps: list[_AtenStep | _LaunchStep] = field(default_factory=list)
    refs: list[_TensorRef] = field(default_factory=list)
    inside: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def replay(self) -> None:
        """Run every step on the recorded storages; raises ``StaleAddressError`` before touching any."""
        for ref in self.refs:
            ref.tensor()
        with torch.inference_mode(False), torch.no_grad():
            for step in self.steps:
                step.run()

    def addresses(self) -> list[HeldAddress]:
        """Every run of memory recorded, once per storage, in order of first use."""
        held: dict[int, HeldAddress] = {}
        for ref in self.refs:
            key = ref.weak.cdata
            if key not in held:
                inside = ref.strong is not None
                held[key] = HeldAddress(ref.step, ref.address, ref.nbytes, inside, ref.alive())
        return list(held.values())

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was allocated inside the capture."""
        return tensor.untyped_storage()._cdata in self.inside

    def hold(self, value: Any, step: str) -> Any:
        """``value`` with every tensor replaced by a reference."""

        def ref(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            storage = leaf.untyped_storage()
            made = _TensorRef(
                step=step,
                address=storage.data_ptr(),
                nbytes=storage.nbytes(),
                dtype=leaf.dtype,
                size=tuple(leaf.size()),
                stride=tuple(leaf.stride()),
                offset=int(leaf.storage_offset()),
                weak=StorageWeakRef(storage),
                strong=self.inside.get(storage._cdata),
            )
            self.refs.append(made)
            return made

        return tree_map(ref, value)


def record(fn: Callable[[], Any]) -> tuple[Any, Recording]:
    """Run ``fn`` once and record it; see the module docstring."""
    recording = Recording()
    mode = _RecordAten(recording)
    with _launches_recorded(recording, mode), _RefuseHostReads(mode), mode:
        result = fn()
    return result, recording


class _RefuseHostReads(TorchFunctionMode):
    """Methods that read a CPU tensor without an aten call, and so pass the dispatcher unseen."""

    def __init__(self, aten: _RecordAten) -> None:
        super().__init__()
        self._aten = aten

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _SYNC_METHODS and not self._aten.paused:
            raise _sync_error(f"Tensor.{name}()")
        return func(*args, **(kwargs or {}))


class _RecordAten(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        _refuse_sync(name, args, kwargs)
        before = {id_ for id_ in map(_storage_id, tree_flatten((args, kwargs))[0]) if id_ is not None}
        result = func(*args, **kwargs)
        outputs, _ = tree_flatten(result)
        fresh = [t for t in outputs if isinstance(t, torch.Tensor) and _storage_id(t) not in before]
        if name == "set_":  # re-seats a tensor on memory that somebody else owns
            fresh = []
        elif name == "lift_fresh":  # a number that became a tensor: frozen, as a CUDA graph freezes it
            fresh = [result]
        for tensor in fresh:
            storage = tensor.untyped_storage()
            self._recording.inside[storage._cdata] = storage
        aliases_only = not fresh and not func._schema.is_mutable
        if name in _NO_WORK or aliases_only:
            return result
        step = f"aten::{name}"
        self._recording.steps.append(
            _AtenStep(
                step,
                func,
                self._recording.hold(args, step),
                self._recording.hold(kwargs, step),
                [self._recording.hold(t, step) if isinstance(t, torch.Tensor) else None for t in outputs],
            )
        )
        return result


@contextlib.contextmanager
def _launches_recorded(recording: Recording, mode: _RecordAten) -> Iterator[None]:
    """Record every launch of an interpreted kernel, whoever makes it."""
    from triton.runtime import interpreter

    original = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if mode.paused:
            return original(executor, *args, **kwargs)
        name = f"kernel {getattr(executor.fn, '__name__', 'unknown')}"
        seen: list[tuple[int, ...]] = []
        wanted = executor.grid
        if callable(wanted):

            def spy(meta: Any) -> Any:
                seen.append(wanted(meta))
                return seen[-1]

            executor.grid = spy
        else:
            seen.append(tuple(wanted))
        held_args, held_kwargs = recording.hold(args, name), recording.hold(kwargs, name)
        mode.paused = True
        try:
            result = original(executor, *args, **kwargs)
        finally:
            mode.paused = False
            executor.grid = wanted
        recording.steps.append(_LaunchStep(name, original, executor, tuple(seen[-1]), held_args, held_kwargs))
        return result

    interpreter.GridExecutor.__call__ = launch
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = original


def _refuse_sync(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _SYNC_ATEN:
        raise _sync_error(f"aten::{name}")
    if name == "lift_fresh" and args[0].dim():
        raise HostSyncError(
            "aten::lift_fresh (torch.tensor of a sequence, a list as an index) copies from the host, which a "
            "capturing stream refuses. Make the tensor before the capture."
        )
    if name in _MASK_INDEXING:
        for index in args[1] or ():
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                raise _sync_error(f"aten::{name} with a boolean mask")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        raise _sync_error("aten::repeat_interleave with tensor repeats")


def _sync_error(what: str) -> HostSyncError:
    return HostSyncError(
        f"{what} needs a value on the host, which a capturing stream refuses. Move it out of the "
        f"captured function, or keep the value on the device."
    )


def _storage_id(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _resolve(value: Any) -> Any:
    leaves, spec = tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, _TensorRef))
    tensors = [leaf.tensor() if isinstance(leaf, _TensorRef) else leaf for leaf in leaves]
    return tree_unflatten(tensors, spec)
