"""Triton's interpreter with three of its errors corrected, for kernels that are not ours to change.

Our own kernels avoid what the interpreter gets wrong (``testing/interp_facts.py``). A foreign kernel does
not: ``tl.dot`` of bf16 operands multiplies their bit patterns, fp32 -> bf16 truncates, and the two NaN of
e4m3 read as +-480. Within ``corrected`` they do what hardware does: bf16 products are exact and summed in
fp32, the conversion rounds to nearest even, NaN is NaN. The kernel's own text is not touched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..errors import UnavailableError
from ..kernels.runtime import INTERPRETED, tl, triton

__all__ = ["corrected"]


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Within it, launches are interpreted with these corrections. Does nothing where kernels are compiled.

    Raises ``UnavailableError`` where this Triton's interpreter does not take them: what then relies on
    them cannot be judged.
    """
    if not INTERPRETED:
        yield
        return
    _proved()
    with _patched(), _patched_once_a_launch():
        yield


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    names = ("create_dot", "cast_impl", "create_fp_to_fp")
    before = {name: vars(Builder)[name] for name in names if name in vars(Builder)}
    if "create_dot" in before:
        Builder.create_dot = _dot(before["create_dot"])
    for name in names[1:]:
        if name in before:
            setattr(Builder, name, _cast(before[name]))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Builder, name, method)


@contextlib.contextmanager
def _patched_once_a_launch() -> Iterator[None]:
    """Triton patches its language anew at every call of a device function (``tl.max``), though the launch
    around it has done so: a third of the time of a launch that calls many."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    patched: set[int] = set()

    def patch_lang(function: Any) -> Any:
        languages = {id(v) for v in function.__globals__.values() if v is tl or v is tl.core}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope, outermost = original(function), not patched
        patched.update(languages)
        if outermost:
            undo = scope.restore

            def restore() -> None:
                patched.clear()
                undo()

            scope.restore = restore
        return scope

    if not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    interpreter._patch_lang = patch_lang
    try:
        yield
    finally:
        interpreter._patch_lang = original


def _handle(like: Any, data: Any, dtype: Any) -> Any:
    return type(like)(data, dtype)


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest, **named)

    return create_dot


def _widened(handle: Any) -> Any:
    """bf16 as fp32: the same number."""
    if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
        return handle
    return _handle(handle, (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cast(self: Any, src: Any, dst_type: Any, *rest: Any, **named: Any) -> Any:
        way = (src.dtype.scalar, dst_type.scalar)
        if way == (tl.float32, tl.bfloat16) and not any("RTZ" in str(mode) for mode in rest):
            return _handle(src, _nearest_bf16(src.data), tl.bfloat16)
        if way == (tl.bfloat16, tl.float32):
            return _widened(src)
        if way == (tl.float8e4nv, tl.float32) and src.data.dtype == np.uint8:
            return _handle(src, _e4m3_numbers()[src.data], tl.float32)
        return original(self, src, dst_type, *rest, **named)

    return cast


@functools.cache
def _e4m3_numbers() -> Any:
    """fp32 ``[256]``: what each e4m3fn code stands for."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _nearest_bf16(data: Any) -> Any:
    """fp32 as the bits of the nearest bf16, ties to even; NaN stays NaN."""
    array = np.ascontiguousarray(data, dtype=np.float32)
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits >> 16) | 0x40
    return np.where(np.isnan(array), nan, rounded).astype(np.uint16).reshape(np.shape(data))


@functools.cache
def _proved() -> None:
    """Ask the interpreter's builder once, in numbers; a Triton whose insides moved does not pass."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        builder = InterpreterBuilder()
        one_up = np.float32(1 + 2.0**-8 + 2.0**-12)  # nearest is 1 + 2^-7, truncated 1
        with _patched():
            cast = builder.cast_impl(TensorHandle(np.array([one_up]), tl.float32), tl.bfloat16)
            made = builder.create_fp_to_fp(TensorHandle(np.array([one_up]), tl.float32), tl.bfloat16, None)
            code = builder.create_fp_to_fp(
                TensorHandle(np.array([0x7F], np.uint8), tl.float8e4nv), tl.float32, None
            )
            half = TensorHandle(np.full((16, 16), 0x3F00, np.uint16), tl.bfloat16)  # 0.5
            zero = TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
            dot = builder.create_dot(half, half, zero, None, 0)
        right = (
            int(cast.data[0]) == 0x3F81 == int(made.data[0])
            and bool(np.isnan(code.data[0]))
            and float(dot.data[0, 0]) == 16 * 0.25
            and dot.data.dtype == np.float32
        )
        why = "" if right else "its answers are other numbers"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        raise UnavailableError(
            "a correct bf16 in Triton's interpreter",
            f"Triton {triton.__version__} does not take the correction: {why}",
            "Judge attention on a GPU, or with a Triton that was tried.",
        )
