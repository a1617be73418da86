"""Make Triton's interpreter convert floats as a GPU does, while foreign kernels run.

This package's kernels avoid the casts the interpreter gets wrong (``testing/interp_facts.py``); a serving
engine's do not. Within ``truthful`` they round to nearest even, and saturate to e4m3fn, as the hardware's
``cvt`` does.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch

from ..codec import decode_e4m3, encode_e4m3
from ..kernels.runtime import INTERPRETED, tl, triton

__all__ = ["reason", "truthful"]


def _interpreter() -> Any:
    return importlib.import_module("triton.runtime.interpreter")


def _corrected(original: Any) -> Any:
    """The interpreter's conversion, right for the pairs that occur."""

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any = None) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            return encode_e4m3(_floats(data)).numpy().reshape(data.shape)
        if source == tl.float32 and target == tl.bfloat16:
            return _floats(data).bfloat16().view(torch.uint16).numpy().reshape(data.shape)
        if source == tl.bfloat16 and target == tl.float8e4nv:
            wide = original(data, source, tl.float32, None).view("float32")
            return encode_e4m3(_floats(wide)).numpy().reshape(data.shape)
        if source == tl.float8e4nv and target == tl.float32:
            codes = torch.from_numpy(data.view("uint8").reshape(-1).copy())
            return decode_e4m3(codes).numpy().view("uint32").reshape(data.shape)
        return original(data, source, target, rounding_mode)

    return convert


def _floats(data: Any) -> torch.Tensor:
    return torch.from_numpy(data.view("float32").reshape(-1).copy())


@contextlib.contextmanager
def truthful() -> Iterator[None]:
    """Within it, interpreted kernels convert as a GPU does; on a GPU nothing changes."""
    if not INTERPRETED:
        yield
        return
    module = _interpreter()
    with mock.patch.object(module, "_convert_float", _corrected(module._convert_float)):
        yield


if INTERPRETED:

    @triton.jit
    def _probe_kernel(x_ptr, out_ptr, back_ptr, half_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, N)
        x = tl.load(x_ptr + at)
        code = x.to(tl.float8e4nv)
        tl.store(out_ptr + at, code.to(tl.uint8, bitcast=True))
        tl.store(back_ptr + at, code.to(tl.float32))
        tl.store(half_ptr + at, x.to(tl.bfloat16))


@cache
def reason() -> str:
    """Why the interpreter of this Triton cannot be corrected, or "": found by asking it."""
    if not INTERPRETED:
        return ""
    x = torch.randn(1024, generator=torch.Generator().manual_seed(1)) * torch.exp2(
        torch.arange(1024) % 18 - 9.0
    )
    codes = torch.empty(1024, dtype=torch.uint8)
    back, half = torch.empty(1024), torch.empty(1024, dtype=torch.bfloat16)
    try:
        with truthful():
            _probe_kernel[(1,)](x, codes, back, half, N=1024)
    except Exception as error:
        return f"the interpreter's casts cannot be corrected ({type(error).__name__}: {error})"
    want = encode_e4m3(x)
    if torch.equal(codes, want) and torch.equal(back, decode_e4m3(want)) and torch.equal(half, x.bfloat16()):
        return ""
    return "the interpreter's casts stay wrong, corrected or not"
