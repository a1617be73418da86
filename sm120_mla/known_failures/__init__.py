"""Public failures of sparse MLA serving on SM120 that a line of a log gives away, as data.

One module per class. A new row needs nothing else: ``sm120-mla diagnose`` and the tests read ``FAILURES``.
"""

from __future__ import annotations

from . import arguments, buffers, devices, indices, numerics, pages, routes, suite
from .row import CLASSES, KnownFailure, Signature, Strength

__all__ = ["CLASSES", "FAILURES", "KnownFailure", "Signature", "Strength"]

FAILURES: tuple[KnownFailure, ...] = (
    *buffers.ROWS,
    *arguments.ROWS,
    *routes.ROWS,
    *pages.ROWS,
    *indices.ROWS,
    *numerics.ROWS,
    *devices.ROWS,
    *suite.ROWS,
)
"""Every row, by class."""
