"""The way of a call through this package: its own launches noted, FlashInfer's replaced by a note of them.

Everything is reached through the package that is under test, which may be a patched copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from ..device import Capability
from ..errors import UnavailableError
from .base import AttentionInputs, Support
from .routes import Handed, Routed, Way

__all__ = ["finite_slot_zero", "route", "serves"]

Modules = Callable[[str], ModuleType]

_OUT, _LSE = 7.0, -7.0
"""What outputs hold before a call."""


def serves(modules: Modules, inputs: AttentionInputs, backend: str) -> Support:
    """Whether the backend takes the call; Triton's and the reference take every call."""
    if backend != "flashinfer":
        return Support(True)
    try:
        modules("attention").explain(**vars(inputs), backend=backend, return_lse=True, validate="metadata")
    except Exception as error:
        if getattr(error, "argument", "") == "backend" or hasattr(error, "what"):
            return Support.no(str(error))
        raise
    return Support(True)


def finite_slot_zero(modules: Modules, inputs: AttentionInputs, backend: str) -> tuple[str, ...]:
    """Caches whose slot 0 FlashInfer reads for columns that do not count."""
    return () if backend != "flashinfer" else _asked(modules, inputs, modules("attention")._load(backend)[0])


def _asked(modules: Modules, inputs: AttentionInputs, backend: Any, **more: Any) -> tuple[str, ...]:
    request = modules("attention_checks").check(**vars(inputs), **more, validate="metadata")
    if request.empty:
        return ()
    # A cache without pages or columns is left out, and the other one is then the main one.
    main = "kv_cache" if request.caches[0].pool is inputs.kv_cache else "extra_kv_cache"
    asked = backend.preconditions(request.shape(True))
    return tuple(main if name == "kv_cache" else "extra_kv_cache" for name in asked)


def route(
    modules: Modules,
    pretend: Callable[[Capability | None], AbstractContextManager[None]],
    inputs: AttentionInputs,
    way: Way,
) -> Routed:
    """As ``routes.Routes.route``. Raises ``UnavailableError`` where the package has no such routes."""
    try:
        machine = _Machine(modules, way)
    except (ImportError, AttributeError, TypeError) as error:
        raise UnavailableError(
            "the route of an attention call", f"{type(error).__name__}: {error}", "Judge another commit."
        ) from error
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend(way.capability))
        stack.enter_context(machine.watched())
        return machine.asked(inputs)


class _Watched:
    """A backend that notes when it runs."""

    def __init__(self, inner: Any, runs: list[str], launch: bool) -> None:
        self._inner, self._runs = inner, runs
        self._computes = launch or inner.name != "reference"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, call: Any) -> None:
        self._runs.append(self._inner.name)
        if self._computes:
            self._inner.run(call)


class _Kernel:
    """A kernel that notes its launches."""

    def __init__(self, inner: Any, note: Callable[[], None], launch: bool) -> None:
        self._inner, self._note, self._launch = inner, note, launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launched(*arguments: Any, **named: Any) -> Any:
            self._note()
            return self._inner[grid](*arguments, **named) if self._launch else None

        return launched


class _Machine:
    """The package, made ready for one call."""

    def __init__(self, modules: Modules, way: Way) -> None:
        self._modules, self._way = modules, way
        self._attention = modules("attention")
        self._runs: list[str] = []
        self._launches: list[str] = []
        self._handed: list[Handed] = []
        made = (
            modules("backends.flashinfer").FlashInferBackend(self._installed()),
            modules("backends.triton").TritonBackend(),
            modules("backends.reference").ReferenceBackend(),
        )
        self._backends = {one.name: _Watched(one, self._runs, way.launch) for one in made}
        self._instances = self._attention._instances

    def _installed(self) -> Any:
        if self._way.flashinfer is None:
            return self._modules("backends.base").Support(
                False, "flashinfer-python is not installed", "Install it."
            )
        envelope = self._modules("envelopes").by_name(self._way.flashinfer)
        installed = self._modules("backends.flashinfer_api").Installed
        return installed(f"as {envelope.name}", envelope, self._hand_over, needs_gpu=False)

    def _hand_over(self, call: Any) -> None:
        self._launches.append("flashinfer")
        names = [field.name for field in dataclasses.fields(Handed)]
        self._handed.append(Handed(**{name: getattr(call, name) for name in names}))
        if self._way.launch:
            for written in (call.out, call.lse):
                written.zero_()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, backends and kernels are watched."""
        before = dict(self._instances)
        self._instances.update(self._backends)
        replaced: list[tuple[ModuleType, str, Any]] = []
        for module in self._kernel_modules():
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel") and hasattr(kernel, "__getitem__"):
                    replaced.append((module, name, kernel))
                    said = f"{module.__name__.rpartition('.')[2]}.{name}"
                    note = _noting(self._launches, said)
                    setattr(module, name, _Kernel(kernel, note, self._way.launch))
        try:
            yield
        finally:
            for module, name, kernel in replaced:
                setattr(module, name, kernel)
            self._instances.clear()
            self._instances.update(before)

    def _kernel_modules(self) -> Sequence[ModuleType]:
        package = self._modules("kernels")
        return [self._modules(f"kernels.{found.name}") for found in pkgutil.iter_modules(package.__path__)]

    def asked(self, inputs: AttentionInputs) -> Routed:
        """First the question, then the call, into outputs and buffers of its own."""
        buffers = self._modules("buffers").PersistentBuffers()
        q = inputs.q
        out = torch.full(q.shape, _OUT, dtype=q.dtype, device=q.device)
        lse = torch.full((q.shape[0], q.shape[-2]), _LSE, dtype=torch.float32, device=q.device)
        named = {
            **vars(inputs),
            "backend": self._way.backend,
            "layout": self._modules("layout").by_name(self._way.layout.name),
            "buffers": buffers,
            "return_lse": True,
            "out": out,
            "lse": lse,
            "validate": "metadata",
        }
        said, said_error = _result(lambda: self._attention.explain(**named).backend)
        early = [f"{name}, while asked" for name in (*self._launches, *self._runs)]
        self._launches.clear()
        self._runs.clear()
        served, error = _result(lambda: self._call(named, buffers))
        changed = [
            name
            for name, tensor, value in (("out", out, _OUT), ("lse", lse, _LSE))
            if bool((tensor != value).any())
        ]
        changed += sorted(buffers.tensors())
        return Routed(
            said=said,
            said_error=said_error,
            served=served,
            error=error,
            launches=(*early, *self._launches),
            changed=tuple(changed),
            handed=self._handed[-1] if self._handed else None,
            finite_slot_zero=self._asked_of(inputs, named["layout"]) if self._handed else (),
        )

    def _call(self, named: dict[str, Any], buffers: Any) -> str:
        self._attention.sparse_mla(**named)
        if self._way.launch:
            # Again, over scratch that holds anything: what is fresh may be right by luck.
            for name, tensor in buffers.tensors().items():
                if "marks" not in name:  # those of the split are state, not scratch
                    tensor.view(torch.uint8).fill_(0xFF)
            self._runs.clear()
            self._attention.sparse_mla(**named)
        return "+".join(self._runs)

    def _asked_of(self, inputs: AttentionInputs, layout: Any) -> tuple[str, ...]:
        return _asked(self._modules, inputs, self._backends["flashinfer"], layout=layout)


def _noting(launches: list[str], name: str) -> Callable[[], None]:
    return lambda: launches.append(name)


def _result(call: Callable[[], str]) -> tuple[str | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error
