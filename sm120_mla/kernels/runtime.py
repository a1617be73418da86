"""How kernels of this package are decorated, and where they may run.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated, its own library included (``tl.max``), so
the mode of a process is fixed when triton is first imported. Kernel modules do
``from .runtime import INTERPRETED, tl, triton``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import device, settings
from ..errors import ArgumentError, UnavailableError

if settings.get("SM120_MLA_MODE") == "reference":
    settings.require_interpreter()

try:
    import triton
    import triton.language as tl
except ImportError as error:  # pragma: no cover - exercised in a child process
    raise UnavailableError("triton", str(error), "Run: pip install 'triton>=3.6'.") from error

if TYPE_CHECKING:
    import torch

__all__ = ["INTERPRETED", "require_device", "tl", "triton"]

INTERPRETED: bool = device.interpreting()
"""Whether the kernels of this process run in Triton's interpreter."""

if INTERPRETED and type(tl.max).__name__ == "JITFunction":
    raise UnavailableError(
        "reference mode",
        "triton was imported before TRITON_INTERPRET was set, so its own functions are compiled ones",
        "Set SM120_MLA_MODE=reference in the environment, or import sm120_mla before triton.",
    )


def require_device(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that the kernels of this process cannot reach.

    Raises ``ArgumentError`` for a CPU tensor where kernels are compiled, and for a CUDA tensor where
    they are interpreted.
    """
    kind = tensor.device.type
    if kind == "cpu" and not INTERPRETED:
        raise ArgumentError(
            f"{argument}.device",
            kind,
            "a CUDA tensor (kernels are compiled in this process)",
            "Move it to the GPU, or start the process with SM120_MLA_MODE=reference.",
        )
    if kind == "cuda" and INTERPRETED:
        raise ArgumentError(
            f"{argument}.device",
            kind,
            "a CPU tensor (kernels are interpreted in this process)",
            "Unset TRITON_INTERPRET and SM120_MLA_MODE, or pass a CPU tensor.",
        )
    if kind not in ("cpu", "cuda"):
        raise ArgumentError(f"{argument}.device", kind, "cuda or cpu", "Move the tensor.")
