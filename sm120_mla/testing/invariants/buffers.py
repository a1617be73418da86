"""BUF: what outlives a call stays ordinary, writable, owned, and apart where it must be."""

from __future__ import annotations

from ...case import OrderCase
from ...targets.base import AbsentError, Target
from ..orderings import INPLACE_ERROR, STALE, Note, OrderLog, run_order
from ..verdict import HOLDS, TargetRaised, Verdict, absent, invariant, unknown, violated

_ANYWHERE = ("reference", "cuda", "sm120")
_GUARD_REMEDY = (
    "remedy: allocate it under torch.inference_mode(False), or before anything runs in inference mode"
)


def rest(log: OrderLog, *needs: str) -> Verdict:
    """The verdict where a boot shows no violation: unknown if it ended early for another reason.

    ``needs`` are kinds of operations; a target that has none of them gave the boot nothing to judge.
    """
    if needs and log.missing.issuperset(needs):
        return absent(f"the target has no operation of kind {' or '.join(needs)}, and the boot left it out")
    if log.error is None:
        return (
            unknown(f"the target declines every operation of the boot: {log.declined}")
            if log.declined
            else HOLDS
        )
    if isinstance(log.error, AbsentError):
        return absent(f"{log.error}")
    return unknown(f"the boot ended early: {log.program(len(log.notes) - 1)}: {log.error}")


def _anything(log: OrderLog) -> tuple[str, ...]:
    """What a boot needs for a verdict on the buffers: any operation, unless it made some without."""
    return () if any(note.persistent for note in log.notes) else ("split", "meta")


def where(log: OrderLog, note: Note) -> str:
    return f"order: {log.program(note.number)}"


@invariant(
    "BUF-GUARD",
    "after any order of first touches, no persistent buffer is an inference tensor; checked over the "
    "registry, not by name",
    origin="sglang #30759, #32320, #33470, #35116: a first touch without inference_mode(False)",
    where=_ANYWHERE,
    cases=("order",),
)
def buf_guard(target: Target, case: OrderCase) -> Verdict:
    """Of a boot."""
    return buf_guard_of(run_order(target, case))


def buf_guard_of(log: OrderLog) -> Verdict:
    """The flag of every registered tensor after every step."""
    for note in log.notes:
        if note.inference:
            return violated(
                f"buffer {note.inference[0]} is an inference tensor after step {note.number} "
                f"({note.step.do})",
                f"{where(log, note)}\n"
                f"inference tensors: {', '.join(note.inference)}; latent until torch writes one outside "
                f"inference mode\n{_GUARD_REMEDY}",
            )
    return rest(log, *_anything(log))


@invariant(
    "BUF-WRITABLE",
    "a torch-level in-place write to any persistent buffer succeeds outside inference mode",
    origin="sglang #32320, #33470: graph capture aborts at mask.zero_()",
    where=_ANYWHERE,
    cases=("order",),
)
def buf_writable(target: Target, case: OrderCase) -> Verdict:
    """Of a boot."""
    return buf_writable_of(run_order(target, case))


def buf_writable_of(log: OrderLog) -> Verdict:
    """Ask with an empty slice after every step, and note what the target's own writes met."""
    for note in log.notes:
        if note.error is not None and INPLACE_ERROR in str(note.error):
            return violated(
                f"step {note.number} ({note.step.do}) aborts: a torch-level write met an inference tensor",
                f"{where(log, note)}\n{str(note.error).split('.')[0]}\n"
                f"inference tensors: {', '.join(note.inference) or 'none left'}\n{_GUARD_REMEDY}",
            )
        if note.unwritable:
            name, error = note.unwritable[0]
            return violated(
                f"buffer {name} refuses a torch-level write after step {note.number} ({note.step.do})",
                f"{where(log, note)}\n{error}\n{_GUARD_REMEDY}",
            )
    if log.error is not None and type(log.error).__name__ != STALE:
        raise TargetRaised(f"order {log.program(len(log.notes) - 1)}", log.error)
    return rest(log, *_anything(log))


@invariant(
    "BUF-ADDRESS",
    "an address a graph recorded stays valid and owned for as long as the graph lives, and a replay writes "
    "there, through any later growth",
    origin="rtp-llm #1259: memory allocated anew whose address a graph holds; growth frees it too",
    where=_ANYWHERE,
    cases=("order",),
)
def buf_address(target: Target, case: OrderCase) -> Verdict:
    """Of a boot."""
    return buf_address_of(run_order(target, case))


def buf_address_of(log: OrderLog) -> Verdict:
    """Whether anything a live graph recorded has been freed, and whether replays give right bytes."""
    for note in log.notes:
        if note.freed:
            return violated(
                f"{note.freed[0]} was freed at step {note.number} ({note.step.do})",
                f"{where(log, note)}\n"
                "remedy: keep a superseded buffer alive while a graph may hold its address",
            )
        if note.error is not None and type(note.error).__name__ == STALE:
            return violated(f"replay at step {note.number} reached freed memory", str(note.error))
        if note.step.do == "replay" and note.wrong:
            return violated(
                f"the replay at step {note.number} left wrong bytes", f"{where(log, note)}\n{note.wrong}"
            )
    return rest(log, "split")


@invariant(
    "BUF-CAPTURE",
    "no persistent allocation during capture: reserved before, or a clear error",
    origin="TensorRT-LLM #16290, aiter #5393, vLLM #42112: a first touch in a capture, or after start-up",
    where=_ANYWHERE,
    cases=("order",),
)
def buf_capture(target: Target, case: OrderCase) -> Verdict:
    """Of a boot."""
    return buf_capture_of(run_order(target, case))


def buf_capture_of(log: OrderLog) -> Verdict:
    """Compare the registry before and after each capture."""
    for note in log.notes:
        if note.allocated_in_capture:
            return violated(
                f"buffer {note.allocated_in_capture[0]} was allocated during the capture of step "
                f"{note.number}",
                f"{where(log, note)}\nallocated: {', '.join(note.allocated_in_capture)}\n"
                "remedy: reserve it before the capture, or refuse with what to reserve",
            )
    return rest(log, "split")


@invariant(
    "BUF-KEY",
    "layers, pools and streams of one device that run in order share a buffer of one layout; two devices, "
    "two layouts or two caller-given scopes never do",
    origin="aiter #5393: one key shared by two devices, or one that moves with the stream",
    where=_ANYWHERE,
    cases=("order",),
)
def buf_key(target: Target, case: OrderCase) -> Verdict:
    """Of a boot."""
    return buf_key_of(run_order(target, case))


def buf_key_of(log: OrderLog) -> Verdict:
    """The memory behind each key, after every split."""
    for note in log.notes:
        if note.shared:
            return violated(f"{note.shared[0]} at step {note.number} ({note.step.do})", where(log, note))
    return rest(log, "split")


OF_LOG = {
    "BUF-GUARD": buf_guard_of,
    "BUF-WRITABLE": buf_writable_of,
    "BUF-ADDRESS": buf_address_of,
    "BUF-CAPTURE": buf_capture_of,
    "BUF-KEY": buf_key_of,
}
"""How each of these invariants judges the notes of a boot."""
