"""Faults: named, realistic regressions, each of which named invariants must catch, on stored cases."""

from __future__ import annotations

from .base import Fault, FaultResult, case_names, load_case, run_fault
from .catalogue import FAULTS

__all__ = ["FAULTS", "Fault", "FaultResult", "case_names", "load_case", "run_fault"]
