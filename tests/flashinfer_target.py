"""Test equipment: this package as a target whose attention goes through FlashInfer, computed by the stand-in.

    pytest property_tests/test_sparse_mla.py --sm120-target flashinfer_target:Installed

with this folder on the path. ``Installed`` runs the Python of the FlashInfer that is installed; ``A``, ``B``
and ``C`` need none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from flashinfer_standin import Record, direct, installed, missing

from sm120_mla import attention, device
from sm120_mla.backends.flashinfer import FlashInferBackend
from sm120_mla.backends.flashinfer_api import Installed as Found
from sm120_mla.envelopes import by_name
from sm120_mla.errors import UnavailableError
from sm120_mla.targets.base import AttentionInputs, Support
from sm120_mla.targets.own import OwnTarget

__all__ = ["A", "B", "C", "Installed"]


class _Standing(OwnTarget):
    """On a pretended SM120, beside one FlashInfer. The kernels' own fp8 arithmetic is emulated."""

    def __init__(self, found: Found) -> None:
        super().__init__(name=f"flashinfer_target:{type(self).__name__}", backend="flashinfer")
        self._flashinfer = FlashInferBackend(found)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        before = attention._instances.get("flashinfer")
        attention._instances["flashinfer"] = self._flashinfer
        try:
            with device.pretend_device((12, 0)):
                yield
        finally:
            attention._instances.pop("flashinfer")
            if before is not None:
                attention._instances["flashinfer"] = before

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        with self._there():
            return super().attend(inputs)

    def serves(self, inputs: AttentionInputs) -> Support:
        with self._there():
            return super().serves(inputs)

    def finite_slot_zero(self, inputs: AttentionInputs) -> tuple[str, ...]:
        with self._there():
            return super().finite_slot_zero(inputs)


class _Bare(_Standing):
    def __init__(self) -> None:
        super().__init__(direct(by_name(type(self).__name__), Record(fp8=True)))


class A(_Bare):
    """0.6.14 to 0.6.17."""


class B(_Bare):
    """0.6.18."""


class C(_Bare):
    """0.7.1 on."""


class Installed(_Standing):
    """The release that is installed, its own dispatcher included."""

    def __init__(self) -> None:
        why = missing()
        if why is not None:
            raise UnavailableError("an installed FlashInfer", why, "Use tox -e reference-flashinfer074.")
        self._patched = pytest.MonkeyPatch()  # for as long as the process lives
        super().__init__(installed(self._patched, Record(fp8=True)).__enter__())
