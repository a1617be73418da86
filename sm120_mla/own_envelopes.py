"""What the Triton and the reference backend serve, as pure functions over numbers. Imports no torch.

``backends.triton`` and ``backends.reference`` answer ``supports`` from here, and so does ``preflight``.
"""

from __future__ import annotations

from .envelopes import Refusal
from .layout import DSV4, by_name

__all__ = ["MAX_PROGRAMS", "MIN_CAPABILITY", "reference", "triton", "triton_programs"]

MIN_CAPABILITY = (8, 0)
"""The first with bf16 tensor cores."""

MAX_PROGRAMS = 2**31 - 1
"""Programs of one launch: the first axis of a CUDA grid."""

_LEAST_HEADS, _MOST_SPLITS = 16, 32
_REFERENCE = "Use backend='reference'."


def triton(layout: str, capability: tuple[int, int] | None, programs: int) -> Refusal | None:
    """Why the Triton backend does not serve a call; None if it does. Any rows, heads, widths, pages."""
    if layout != DSV4.name:
        return Refusal("layout", layout, f"{DSV4.name}: only it is served", _REFERENCE)
    if capability is not None and capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        return Refusal("capability", have, "8.0 or more, as bf16 tensor cores come with it", _REFERENCE)
    if programs > MAX_PROGRAMS:
        return Refusal("programs", programs, f"at most {MAX_PROGRAMS}", "Split the batch.")
    return None


def triton_programs(tokens: int, heads: int) -> int:
    """No launch of that many rows and heads has more programs than this, whatever its configuration."""
    return tokens * -(-heads // _LEAST_HEADS) * _MOST_SPLITS


def reference(layout: str) -> Refusal | None:
    """Why the reference does not serve a call; None if it does: rows of 512, which are K and V at once."""
    if by_name(layout).head_dim != DSV4.head_dim:
        expected = f"a layout of {DSV4.head_dim}-wide rows"
        return Refusal("layout", layout, expected, "Use another attention for it.")
    return None
