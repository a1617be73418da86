"""The rules of a FlashInfer release as an engine meets them, also where this project does not serve it."""

from __future__ import annotations

from dataclasses import replace

from ..envelopes import NOT_SERVED, TILE, Envelope, by_name, for_version

__all__ = ["BETWEEN", "rules"]

BETWEEN = replace(
    by_name("C"),
    name="0.7.0",
    main_page=TILE,
    prefill_extra_pages=(2, TILE),
    gathers_slot_zero=True,
    masks_before_scale=True,
    natural_lse=False,
    known=(),
)
"""0.7.0 and 0.7.0.post1: the width is a run-time argument as in 0.7.1, pages and kernels are those of 0.6.

Read in the wheel of 0.7.0: mla/_sparse_mla_sm120_plan.py (``decode_splitk_eligible``,
``prefill_mg_dual_eligible``), csrc/sparse_mla_sm120_prefill.cu (``dispatch_dsv4_dual``), prefill_common.cuh.
"""

_BETWEEN = ("0.7.0", "0.7.0.post1")


def rules(version: str) -> Envelope | None:
    """The rules of a release, without its local part; None where it has no kernels for SM120.

    Raises ``ArgumentError`` for one that no table holds.
    """
    release = version.split("+")[0]
    if release in _BETWEEN:
        return BETWEEN
    return None if release in NOT_SERVED else for_version(release)
