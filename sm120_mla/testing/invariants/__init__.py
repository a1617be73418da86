"""The invariants, one family per file. Importing this registers them all."""

from __future__ import annotations

from . import attention, buffers, cache, meta, metadata, route, split

__all__ = ["attention", "buffers", "cache", "meta", "metadata", "route", "split"]
