"""What is under test. A Target turns a Case into bytes; ``resolve`` finds one by name."""

from __future__ import annotations

from .base import Support, Target, resolve

__all__ = ["Support", "Target", "resolve"]
