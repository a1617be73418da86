"""Index rows and lengths that the attention kernels read: host side of the index kernels.

Every builder writes into buffers of the caller's (or returns fresh ones), never synchronises unless values
are validated, never changes an input, and launches nothing where there is nothing to write.
"""

from __future__ import annotations

from .c128a import build_c128a_topk_metadata
from .padding import bind_padding
from .topk import c4a_global_indices, combine_topk_swa
from .windows import swa_window_indices, verify_window_indices

__all__ = [
    "bind_padding",
    "build_c128a_topk_metadata",
    "c4a_global_indices",
    "combine_topk_swa",
    "swa_window_indices",
    "verify_window_indices",
]
