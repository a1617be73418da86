"""The measured table of docs/design.md, section 5, on a model of the split as the field ships it."""

from __future__ import annotations

import traceback

import pytest

from sm120_mla.case import OrderCase, Step
from sm120_mla.targets.own import patched
from sm120_mla.testing.faults import FAULTS, load_case
from sm120_mla.testing.field_model import FieldTarget
from sm120_mla.testing.orderings import INPLACE_ERROR, OrderLog, run_order
from sm120_mla.testing.verdict import Verdict, by_id, judge

SERVE = (Step(do="capture", arg=4), Step(do="replay"), Step(do="split", arg=5), Step(do="replay", arg=1))


def boot(*, autotune_in_inference_mode: bool, after: tuple[Step, ...] = ()) -> OrderCase:
    """Load, autotune, capture, serve."""
    autotune = Step(do="warm_up", inference=autotune_in_inference_mode, arg=3)
    return OrderCase(page_size=256, steps=(Step(do="load", arg=1), autotune, *SERVE, *after))


def field(*guarded: str) -> FieldTarget:
    return FieldTarget(frozenset(guarded))


def asked(id: str, target: FieldTarget, case: OrderCase) -> Verdict:
    return judge(by_id(id), target, case)


def boots_and_serves(log: OrderLog) -> bool:
    """Every step was taken, none was refused, and every byte of every split and replay is right."""
    return (
        len(log.notes) == len(log.case.steps)
        and log.error is None
        and not any(note.refused or note.wrong or note.freed for note in log.notes)
    )


def kinds(target: FieldTarget) -> dict[str, bool]:
    """Which of the tensors in the dict is an inference tensor."""
    return {name.split(":")[0]: tensor.is_inference() for name, tensor in target.persistent().items()}


# ---- the four rows


def test_both_guarded_makes_ordinary_tensors_that_boot_and_serve() -> None:
    target, case = field("mask", "split"), boot(autotune_in_inference_mode=True)

    log = run_order(target, case)

    assert kinds(target) == {"split": False, "mask": False}
    assert boots_and_serves(log)
    assert all(asked(id, target, case).holds for id in ("BUF-GUARD", "BUF-WRITABLE"))


def test_only_the_mask_guarded_boots_and_serves_with_a_latent_split_buffer() -> None:
    target, case = field("mask"), boot(autotune_in_inference_mode=True)

    log = run_order(target, case)

    assert kinds(target) == {"split": True, "mask": False}
    assert boots_and_serves(log), "raw kernel writes do not raise"
    assert [len(note.inference) for note in log.notes] == [0, 1, 1, 1, 1, 1]
    guard = asked("BUF-GUARD", target, case)
    assert guard.violated
    assert guard.headline.startswith("buffer split:")
    assert "after step 1 (warm_up)" in guard.headline
    assert "latent" in guard.details
    writable = asked("BUF-WRITABLE", target, case)
    assert writable.violated
    assert writable.headline.startswith("buffer split:")


def test_a_latent_split_buffer_aborts_the_first_torch_write() -> None:
    target = field("mask")
    case = boot(autotune_in_inference_mode=True, after=(Step(do="torch_write"), Step(do="replay")))

    log = run_order(target, case)

    assert log.notes[-1].step.do == "torch_write"
    assert INPLACE_ERROR in str(log.error)


def test_neither_guarded_aborts_the_capture_where_the_mask_is_cleared() -> None:
    target, case = field(), boot(autotune_in_inference_mode=True)

    log = run_order(target, case)

    assert kinds(target) == {"split": True, "mask": True}
    assert [note.step.do for note in log.notes] == ["load", "warm_up", "capture"]
    assert type(log.error) is RuntimeError
    assert str(log.error).startswith(
        "Inplace update to inference tensor outside InferenceMode is not allowed"
    )
    lines = [frame.line or "" for frame in traceback.extract_tb(log.error.__traceback__)]
    assert any("mask.zero_()" in line for line in lines)
    writable = asked("BUF-WRITABLE", target, case)
    assert writable.violated
    assert not writable.raised
    guard = asked("BUF-GUARD", target, case)
    assert guard.violated
    assert "after step 1" in guard.headline


@pytest.mark.parametrize("guarded", [(), ("mask",), ("split",), ("mask", "split")])
def test_an_autotune_outside_inference_mode_hides_any_missing_guard(guarded: tuple[str, ...]) -> None:
    target, case = field(*guarded), boot(autotune_in_inference_mode=False)

    log = run_order(target, case)

    assert kinds(target) == {"split": False, "mask": False}
    assert boots_and_serves(log)
    assert asked("BUF-GUARD", target, case).holds


# ---- around the table


def test_only_the_split_buffer_guarded_aborts_too() -> None:
    target = field("split")

    log = run_order(target, boot(autotune_in_inference_mode=True))

    assert kinds(target) == {"split": False, "mask": True}
    assert log.notes[-1].step.do == "capture"
    assert INPLACE_ERROR in str(log.error)


def test_the_model_splits_right_when_it_is_whole() -> None:
    """Otherwise the table would prove nothing: the model fails in what is removed, and in nothing else."""
    target = field("mask", "split")
    for name in ("split-full", "split-holes", "split-all-holes", "split-past-end", "split-64"):
        assert judge(by_id("SPLIT-BYTES"), target, load_case(name)).holds, name


def test_the_model_says_which_guards_it_has() -> None:
    assert field("split", "mask").name == "field model (guarded: mask, split)"
    assert field().name == "field model (guarded: neither)"


@pytest.mark.parametrize(
    ("fault", "buffer"),
    [("guard-lost-destination", "split-destination"), ("guard-lost-marks", "split-marks")],
)
def test_our_own_stack_without_a_guard_is_latent_and_named(fault: str, buffer: str) -> None:
    patches = next(f.patches for f in FAULTS if f.id == fault)
    case = boot(autotune_in_inference_mode=True)
    with patched(patches, "own without a guard") as target:
        log = run_order(target, case)
        assert boots_and_serves(log)  # only kernels write them
        inference = {name.split("/")[0] for name, t in target.persistent().items() if t.is_inference()}
        assert inference == {buffer}

        found = judge(by_id("BUF-GUARD"), target, case)

    assert found.violated
    assert found.headline.startswith(f"buffer {buffer}/")
    assert "order: load" in found.details
    assert "inference_mode" in found.details.split("order:")[1].splitlines()[0]
    assert "remedy: allocate it under torch.inference_mode(False)" in found.details


def test_our_own_stack_with_its_guards_is_ordinary() -> None:
    with patched([], "own copy") as target:
        log = run_order(target, boot(autotune_in_inference_mode=True, after=(Step(do="torch_write"),)))

        assert boots_and_serves(log)
        assert len(target.persistent()) == 2
        assert not any(tensor.is_inference() for tensor in target.persistent().values())
