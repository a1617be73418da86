"""Faults that only a compiler sees, and a change of the interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from ...targets.base import Target
from ...targets.own import OwnTarget, Patch
from .. import interp_facts
from .base import Fault

__all__ = ["META_FAULTS"]


@contextlib.contextmanager
def _interpreter_that_rounds() -> Iterator[Target]:
    """As if a new Triton had changed a fact the suite relies on."""
    facts = interp_facts.FACTS
    changed = tuple(
        dataclasses.replace(fact, probe=lambda: False) if n == 0 else fact for n, fact in enumerate(facts)
    )
    interp_facts.FACTS = changed
    try:
        yield OwnTarget()
    finally:
        interp_facts.FACTS = facts


META_FAULTS = (
    Fault(
        "spilling-configuration",
        "one warp is asked to hold a whole sub-page in registers",
        ("COMPILE-SM120",),
        ("compile-full",),
        (
            Patch(
                "kernels/page_split.py",
                "return SplitConfig(block=min(16384, 4096 * lane), num_warps=16, pieces=4)",
                "return SplitConfig(block=65536, num_warps=1, pieces=1)",
            ),
        ),
    ),
    Fault(
        "not-compiled",
        "the kernel uses what only the interpreter accepts",
        ("COMPILE-SM120",),
        ("compile-full",),
        (
            Patch(
                "kernels/page_split.py",
                "    program = tl.program_id(0).to(tl.int64)\n    _copy_sub_page(",
                "    program = tl.program_id(0).to(tl.int64)\n    assert len(str(dst)) > 0\n"
                "    _copy_sub_page(",
            ),
        ),
    ),
    Fault(
        "interpreter-changed",
        "a new Triton changes a fact that reference mode relies on",
        ("INTERP-FACT",),
        ("interp-first",),
        make=_interpreter_that_rounds,
    ),
)
