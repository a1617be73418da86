"""The invariants, one family per file. Importing this registers them all."""

from __future__ import annotations

from . import buffers, meta, split

__all__ = ["buffers", "meta", "split"]
