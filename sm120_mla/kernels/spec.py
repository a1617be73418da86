"""One launch configuration of one kernel, as data: what is compiled for sm_120 without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CompileSpec"]


@dataclass(frozen=True)
class CompileSpec:
    """Everything ``triton.compile`` needs, and the budget it must stay within.

    ``signature`` maps each runtime argument to its Triton type (``*u8``, ``i64``, ...);
    ``aligned`` names the arguments known to be divisible by 16. ``shared_bytes`` is the most shared
    memory and ``spill_bytes`` the most local memory (stack and spills) per thread allowed.
    """

    name: str
    module: str
    function: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    shared_bytes: int = 101_376
    spill_bytes: int = 0
    capabilities: tuple[int, ...] = field(default=(120, 121))
