"""The invariants, one family per file. Importing this registers them all."""

from __future__ import annotations

from . import buffers, meta, metadata, split

__all__ = ["buffers", "meta", "metadata", "split"]
