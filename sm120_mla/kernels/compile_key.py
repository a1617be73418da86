"""What Triton compiles anew for: the compile key of a launch, computed with no GPU.

A kernel whose key moves with the active width compiles in the middle of serving, at the first context
that crosses a power of two; counting distinct keys shows it on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnavailableError
from .runtime import INTERPRETED

__all__ = ["compile_key"]


def compile_key(kernel: Any, arguments: Mapping[str, Any], capability: int = 120) -> str:
    """The key under which Triton caches the binary of ``kernel[grid](**arguments)`` on ``sm_<capability>``.

    Equal keys share a binary. ``arguments`` are all of the kernel's, by name, with ``num_warps`` and other
    options; tensors may be on the CPU, as only dtype and address alignment count. Raises
    ``UnavailableError`` where kernels are interpreted, and where Triton has no such interface (it is
    internal; seen in 3.9).
    """
    if INTERPRETED:
        raise UnavailableError(
            "a compile key", "kernels are interpreted in this process", "Ask in a process without it."
        )
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import compute_cache_key, create_function_from_signature

        backend = make_backend(GPUTarget("cuda", capability, 32))
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(**arguments)
        return str(compute_cache_key({}, specialization, options))
    except (ImportError, AttributeError) as error:
        raise UnavailableError(
            "a compile key", f"this Triton has another interface ({error})", "Use Triton 3.9."
        ) from error
