"""The invariants, one family per file. Importing this registers them all."""

from __future__ import annotations

from . import buffers, cache, meta, metadata, split

__all__ = ["buffers", "cache", "meta", "metadata", "split"]
