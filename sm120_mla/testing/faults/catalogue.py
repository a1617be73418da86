"""The catalogue. To add a fault: one entry here, its case in fixtures/faults, and `sm120-mla faults`."""

from __future__ import annotations

from .attention import ATTENTION_FAULTS
from .base import Fault
from .buffers import BUFFER_FAULTS
from .cache import CACHE_FAULTS
from .meta import META_FAULTS
from .metadata import METADATA_FAULTS
from .route import ROUTE_FAULTS
from .split import SPLIT_FAULTS

__all__ = ["FAULTS"]

FAULTS: tuple[Fault, ...] = (
    *SPLIT_FAULTS,
    *BUFFER_FAULTS,
    *METADATA_FAULTS,
    *ATTENTION_FAULTS,
    *CACHE_FAULTS,
    *ROUTE_FAULTS,
    *META_FAULTS,
)
