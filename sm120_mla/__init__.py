"""Paged fp8 KV cache kernels for DeepSeek-V4 sparse MLA on SM120/SM121, and the suite that proves them.

Importing this package imports neither torch nor triton; an operation does when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import settings as _settings

__version__ = "0.1.0"

if _settings.get("SM120_MLA_MODE") == "reference":
    _settings.require_interpreter()  # before anybody imports triton

_EXPORTS = {
    "DSV4": "layout",
    "DSV32": "layout",
    "DSV41_FOOTER": "layout",
    "DSV41_INLINE": "layout",
    "PageLayout": "layout",
    "PersistentBuffers": "buffers",
    "default_buffers": "buffers",
    "SplitPages": "pages",
    "split_pages": "pages",
    "capture": "graphs",
    "explain": "attention",
    "flash_mla_with_kvcache_sm120": "attention",
    "pretend_device": "device",
    "sparse_mla": "attention",
    "write_cache": "cache",
}
__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
