"""Exit codes of every command that judges. Git reads 1-124 as bad and stops at 128 and above."""

from __future__ import annotations

from typing import Any

__all__ = [
    "HELD",
    "INTERNAL",
    "INTERRUPTED",
    "MEANING",
    "NOTHING_JUDGED",
    "VIOLATED",
    "WRONG_USE",
    "verdict_code",
]

HELD = 0
VIOLATED = 1
NOTHING_JUDGED = 125
WRONG_USE = 129
INTERRUPTED = 130
INTERNAL = 131

MEANING: dict[int, str] = {
    HELD: "all held, and at least one check ran",
    VIOLATED: "a named invariant is violated",
    NOTHING_JUDGED: "nothing was judged: the target cannot be imported, is unsupported, or all was skipped",
    WRONG_USE: "wrong use: an option, an argument, a file or a folder",
    INTERRUPTED: "interrupted",
    INTERNAL: "an internal error: of this program, or of the suite",
}


def verdict_code(verdict: Any) -> int:
    """The code of one verdict: held, violated or nothing judged."""
    if verdict.violated:
        return VIOLATED
    return HELD if verdict.holds else NOTHING_JUDGED
