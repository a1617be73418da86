"""Boots in any order: one state machine over every step, each invariant asked after each step.

The machine draws steps as data (``case.Step``), so a failing run is an ``OrderCase`` like any other: it
prints as a program, is saved as a file, and replays.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..case import OrderCase, Step
from ..targets.base import Target
from . import check
from .invariants.buffers import OF_LOG
from .invariants.metadata import ORDER_JUDGES, of_log
from .orderings import Boot, OrderLog
from .strategies import CAPABILITIES, SEEDS
from .verdict import TargetRaised, Verdict, by_id, of_raised

__all__ = ["ASKED", "boot_machine", "verdict_of"]

ASKED = (*OF_LOG, *ORDER_JUDGES)
"""Invariants asked after every step."""

ARG = st.integers(0, 40)
BATCH = st.sampled_from((1, 2, 5, 60, 64, 65, 66))
SEQ = st.sampled_from((1, 127, 128, 300, 2_000, 16_385, 30_000, 65_536))


def verdict_of(id: str, log: OrderLog) -> Verdict:
    """One invariant's verdict on a boot so far."""
    return OF_LOG[id](log) if id in OF_LOG else of_log(id, log)


def judged(id: str, log: OrderLog) -> Verdict:
    """As ``verdict_of``, a target that raised included."""
    try:
        return verdict_of(id, log)
    except TargetRaised as raised:
        return of_raised(raised)


def boot_machine(target: Target) -> type[RuleBasedStateMachine]:
    """A state machine class over ``target``."""

    class BootMachine(RuleBasedStateMachine):
        """A boot under construction."""

        def __init__(self) -> None:
            super().__init__()
            self.boot: Boot | None = None
            self.log = OrderLog(OrderCase())
            self.ended = False

        @initialize(
            page_size=st.sampled_from((128, 192, 256)),
            capability=st.sampled_from(((12, 0), *CAPABILITIES)),
            shape=st.sampled_from(((2, 5), (1, 1), (9, 130))),
            seed=SEEDS,
        )
        def start(self, page_size: int, capability: Any, shape: tuple[int, int], seed: int) -> None:
            """A new process on a GPU of some capability."""
            target.reset()
            case = OrderCase(
                page_size=page_size, capability=capability, rows=shape[0], width=shape[1], seed=seed
            )
            self.boot, self.ended = Boot(target, case), False
            self.log = self.boot.new_log()

        def take(self, **step: Any) -> None:
            """One step, unless the boot has ended."""
            if self.boot is None or self.ended:
                return
            note = self.boot.do(len(self.log.notes), Step(**step))
            self.log.notes.append(note)
            self.ended = note.error is not None

        @rule(arg=ARG)
        def load(self, arg: int) -> None:
            self.take(do="load", arg=arg)

        @rule(arg=ARG, inference=st.booleans(), batch=BATCH, seq=SEQ)
        def autotune(self, arg: int, inference: bool, batch: int, seq: int) -> None:
            self.take(do="autotune", arg=arg, inference=inference, batch=batch, seq=seq)

        @rule(do=st.sampled_from(("warm_up", "split", "grow")), arg=ARG, inference=st.booleans())
        def work(self, do: str, arg: int, inference: bool) -> None:
            self.take(do=do, arg=arg, inference=inference)

        @rule(
            do=st.sampled_from(("build", "prefill")), arg=ARG, inference=st.booleans(), batch=BATCH, seq=SEQ
        )
        def metadata(self, do: str, arg: int, inference: bool, batch: int, seq: int) -> None:
            self.take(do=do, arg=arg, inference=inference, batch=batch, seq=seq)

        @rule(do=st.sampled_from(("reserve", "capture", "torch_write")), arg=ARG)
        def plain(self, do: str, arg: int) -> None:
            self.take(do=do, arg=arg)

        @rule(arg=ARG, batch=BATCH, seq=SEQ)
        def capture_step(self, arg: int, batch: int, seq: int) -> None:
            self.take(do="capture_step", arg=arg, batch=batch, seq=seq)

        @precondition(lambda self: self.boot is not None and self.boot.graphs)
        @rule(arg=ARG)
        def replay(self, arg: int) -> None:
            self.take(do="replay", arg=arg)

        @precondition(lambda self: self.boot is not None and self.boot.steps)
        @rule(arg=ARG, batch=BATCH, seq=SEQ)
        def serve(self, arg: int, batch: int, seq: int) -> None:
            self.take(do="serve", arg=arg, batch=batch, seq=seq)

        @precondition(lambda self: self.boot is not None and (self.boot.graphs or self.boot.steps))
        @rule(arg=ARG)
        def drop_graph(self, arg: int) -> None:
            self.take(do="drop_graph", arg=arg)

        @rule(
            do=st.sampled_from(("second_device", "second_layout", "second_scope")),
            arg=ARG,
            inference=st.booleans(),
        )
        def second(self, do: str, arg: int, inference: bool) -> None:
            self.take(do=do, arg=arg, inference=inference)

        @rule()
        def restart(self) -> None:
            self.take(do="restart")

        @invariant()
        def every_invariant_holds(self) -> None:
            """Violations end the run at once; a run that holds counts once, when it ends."""
            self.settle(violations_only=True)

        def settle(self, violations_only: bool) -> None:
            """Hand every verdict on the boot so far to the test."""
            if not self.log.notes:
                return
            steps = tuple(note.step for note in self.log.notes)
            case = self.log.case.model_copy(update={"steps": steps})
            for id in ASKED:
                found = judged(id, self.log)
                if found.violated or not violations_only:
                    check.settle(by_id(id), found, target, case)

        def teardown(self) -> None:
            """Graphs go before the next run."""
            if self.boot is not None:
                self.boot.close()
                self.settle(violations_only=False)

    return BootMachine
