"""Faults of the persistent buffers: ours, and the field's own as its model shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from ...targets.base import Target
from ...targets.own import Patch
from ..field_model import FieldTarget
from .base import Fault

__all__ = ["BUFFER_FAULTS"]

_GUARDS = ("BUF-GUARD", "BUF-WRITABLE")
_REST = ("BUF-ADDRESS", "BUF-CAPTURE", "BUF-KEY")
_GUARD = "        with torch.inference_mode(False):\n            tensor = make("


def _buffers(old: str, new: str) -> tuple[Patch, ...]:
    return (Patch("buffers.py", old, new),)


def _unguarded(condition: str) -> tuple[Patch, ...]:
    lost = f"torch.is_inference_mode_enabled() and ({condition})"
    return _buffers(_GUARD, _GUARD.replace("False", lost))


def _field(*guarded: str) -> Callable[[], AbstractContextManager[Target]]:
    @contextlib.contextmanager
    def make() -> Iterator[Target]:
        yield FieldTarget(frozenset(guarded))

    return make


BUFFER_FAULTS = (
    Fault(
        "guard-lost-destination",
        "the split destination lost its inference_mode(False) guard: latent, only kernels write it",
        _GUARDS,
        ("boot-a",),
        _unguarded("key.purpose == 'split-destination'"),
        _REST,
    ),
    Fault(
        "guard-lost-marks",
        "the marks lost their inference_mode(False) guard: latent, only kernels write them",
        _GUARDS,
        ("boot-a",),
        _unguarded("key.purpose == 'split-marks'"),
        _REST,
    ),
    Fault(
        "guards-lost",
        "every buffer lost its guard",
        _GUARDS,
        ("boot-a",),
        _unguarded("True"),
        _REST,
    ),
    Fault(
        "field-mask-only",
        "the field's state when only the mask is guarded: boots and serves, latent",
        _GUARDS,
        ("boot-a",),
        make=_field("mask"),
        keeps=_REST,
    ),
    Fault(
        "field-neither",
        "the field's state when no buffer is guarded: capture aborts at mask.zero_()",
        _GUARDS,
        ("boot-a",),
        make=_field(),
        keeps=_REST,
    ),
    Fault(
        "field-first-touch-in-capture",
        "the field without an autotune: the buffers are born inside the capture",
        ("BUF-CAPTURE",),
        ("boot-c",),
        make=_field("mask", "split"),
        keeps=_GUARDS,
    ),
    Fault(
        "field-growth-frees",
        "the field's dict entry is rebound by a larger pool while a graph still writes the old memory",
        ("BUF-ADDRESS",),
        ("boot-grow",),
        make=_field("mask", "split"),
        keeps=(*_GUARDS, "BUF-CAPTURE"),
    ),
    Fault(
        "growth-frees",
        "a superseded buffer is dropped while a graph may hold its address",
        ("BUF-ADDRESS",),
        ("boot-grow", "boot-grow-marks"),
        _buffers("            if old.pinned:\n", "            if old.pinned and False:\n"),
        (*_GUARDS, "BUF-CAPTURE", "BUF-KEY"),
    ),
    Fault(
        "pin-forgotten",
        "handing out a buffer inside a capture does not pin it",
        ("BUF-ADDRESS",),
        ("boot-grow", "boot-grow-marks"),
        _buffers("            entry.pins.add(token)\n", "            pass\n"),
        (*_GUARDS, "BUF-CAPTURE", "BUF-KEY"),
    ),
    Fault(
        "allocates-in-capture",
        "a missing buffer is allocated although a graph is being captured",
        ("BUF-CAPTURE",),
        ("boot-c",),
        _buffers(
            "        if device.is_capturing():\n            have_rows",
            "        if device.is_capturing() and False:\n            have_rows",
        ),
        (*_GUARDS, "BUF-KEY"),
    ),
    Fault(
        "key-without-device",
        "two devices share one buffer",
        ("BUF-KEY",),
        ("boot-keys",),
        _buffers("BufferKey(purpose, device.device_key(like),", 'BufferKey(purpose, "any",'),
        (*_GUARDS, "BUF-ADDRESS", "BUF-CAPTURE"),
    ),
    Fault(
        "key-without-scope",
        "a scope of the caller's own is ignored",
        ("BUF-KEY",),
        ("boot-keys",),
        _buffers('layout.name if layout else "", scope)', 'layout.name if layout else "", "")'),
        (*_GUARDS, "BUF-ADDRESS", "BUF-CAPTURE"),
    ),
    Fault(
        "reallocates-when-smaller",
        "a smaller pool gets a buffer of its own size, so one key moves from layer to layer",
        ("BUF-KEY",),
        ("boot-shrink",),
        _buffers("if have.shape[0] >= shape[0]:", "if have.shape[0] == shape[0]:"),
        (*_GUARDS, "BUF-ADDRESS"),
    ),
)
