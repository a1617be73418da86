"""The exact text of violations: by hand-made verdicts, and of real faults on fixed cases.

Update with ``pytest tests/test_text.py --snapshot-update`` and read the difference.
"""

from __future__ import annotations

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from sm120_mla import device
from sm120_mla.case import (
    IndexSpec,
    MetaBatch,
    MetaCase,
    Offset64Case,
    OrderCase,
    SplitCase,
    Step,
    SubjectCase,
)
from sm120_mla.targets.own import OwnTarget
from sm120_mla.testing import faults, text, verdict
from sm120_mla.testing.check import hold
from sm120_mla.testing.verdict import violated

PATH = ".sm120/cases/EXAMPLE-0000.json"
SPLIT = SplitCase(pages=2, stride_gap=256, seed=3)
BOOT = OrderCase(
    page_size=256,
    steps=(Step(do="load", arg=2), Step(do="split", inference=True, arg=1), Step(do="capture", arg=1)),
)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As told by a machine without a GPU."""
    monkeypatch.setattr(device, "mode", lambda: "reference")


HAND_MADE = {
    "bytes": (
        "SPLIT-BYTES",
        violated(
            "",
            "page 1 -> sub-page 6, token 12, scale of tile 3 (byte 36,963 of 37,440; UE8M0)\n"
            "got 0x7f (2^0)   want 0x80 (2^1)     equals the scale of token 12 of sub-page 5\n"
            "64 of 512 scale bytes differ, all in sub-page 6; data agrees; tails untouched",
        ),
        SPLIT,
    ),
    "raised": ("SPLIT-INDEX", violated("split call 0 raised RuntimeError", "no room", raised=True), SPLIT),
    "page-size-64": ("SPLIT-FRAME", violated("the source was written"), SplitCase(page_size=64)),
    "offset64": ("SPLIT-OFFSET64", violated("pages 14340 are wrong"), Offset64Case()),
    "boot": (
        "BUF-GUARD",
        violated("buffer x is an inference tensor", "order: load; split\n  - latent"),
        BOOT,
    ),
    "metadata": (
        "META-VIEW",
        violated("the decode view is narrow", "stride (128, 1)"),
        MetaCase(builds=(MetaBatch(), MetaBatch())),
    ),
    "subject": ("INTERP-FACT", violated("a fact changed"), SubjectCase(subject="early-return")),
}


@pytest.mark.parametrize("name", HAND_MADE)
@pytest.mark.usefixtures("interpreter")
def test_hand_made(name: str, snapshot: SnapshotAssertion) -> None:
    id, found, case = HAND_MADE[name]
    assert text.render(verdict.by_id(id), found, OwnTarget(), case, PATH) == snapshot


def test_the_gpu_and_the_backend_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "mode", lambda: "sm120")
    target = OwnTarget()
    target.backend = "triton"  # type: ignore[attr-defined]

    with device.pretend_device((12, 1)):
        lines = text.render(verdict.by_id("BUF-KEY"), violated("both"), target, BOOT, PATH).splitlines()

    assert lines[1].startswith("  target own/triton (sm120, sm_121)      boot drawn: 3 steps")


REAL = {
    "scales-of-neighbour": ("SPLIT-BYTES", SPLIT),
    "stride-ignored": (
        "SPLIT-INDEX",
        SplitCase(pages=3, stride_gap=256, calls=(IndexSpec(rows=2, width=3),)),
    ),
    "length-ignored": (
        "SPLIT-TOUCHED",
        SplitCase(pages=3, calls=(IndexSpec(rows=2, width=4, lengths="zero", seed=1),)),
    ),
    "tail-overwritten": ("SPLIT-FRAME", SPLIT),
    "guard-lost-destination": ("BUF-GUARD", BOOT),
    "guards-lost": ("BUF-WRITABLE", BOOT),
}


@pytest.mark.reference
@pytest.mark.parametrize("fault", REAL)
def test_real_faults(fault: str, snapshot: SnapshotAssertion) -> None:
    id, case = REAL[fault]
    declared = next(f for f in faults.FAULTS if f.id == fault)

    with declared.target() as target, pytest.raises(AssertionError) as raised:
        hold(id, target, case)

    # The name of the case file depends on every field a case has.
    assert re.sub(r"-[0-9a-f]{4}\.json", "-0000.json", str(raised.value)) == snapshot
