"""Find where an ordered history turns from good to bad, asking as little as possible. No input or output.

What the elements are (commits, wheel versions) and how one is judged is the caller's: ``ask(i)`` answers
for element ``i``, oldest first. The answer is one of three, because much of a real history cannot be judged:
it does not import, it hangs, what is looked for is not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ..errors import ArgumentError

__all__ = ["Answer", "EndsError", "Found", "first_bad", "most_questions"]


class Answer(StrEnum):
    """What is known of one element."""

    good = "good"
    bad = "bad"
    unknown = "unknown"


class EndsError(ArgumentError):
    """The ends of a search are not good and bad: there is no transition to look for between them."""

    def __init__(self, first: Answer, last: Answer, flaky: tuple[int, ...] = ()) -> None:
        self.first, self.last, self.flaky = first, last, flaky
        super().__init__(
            "ends", f"{first} and {last}", "the first good and the last bad", _remedy(first, last)
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.first, self.last, self.flaky)


def _remedy(first: Answer, last: Answer) -> str:
    if (first, last) == (Answer.bad, Answer.good):
        return "The ends are swapped, or the defect was fixed in between: exchange them."
    if Answer.unknown in (first, last):
        which = "the first end" if first is Answer.unknown else "the last end"
        return f"Nothing can be said about {which}: choose one near it that can be judged."
    if first is Answer.good:
        return "Both are good: choose a later last end, or another question."
    return "Both are bad: choose an earlier first end."


@dataclass(frozen=True)
class Found:
    """A transition: element ``good`` is good, element ``bad`` after it is bad, and all between are unknown.

    The change is one of ``candidates``; there is one unless unknown elements hide which. In a history that
    turns once this is *the* transition. In one that turns back and forth it is one of its transitions from
    good to bad. ``answers`` are in the order asked; ``flaky`` elements gave contradicting answers, and count
    as unknown.
    """

    good: int
    bad: int
    answers: dict[int, Answer] = field(default_factory=dict)
    flaky: tuple[int, ...] = ()

    @property
    def candidates(self) -> range:
        """Elements one of which is the first bad one."""
        return range(self.good + 1, self.bad + 1)

    @property
    def exact(self) -> bool:
        """Whether there is one candidate only."""
        return self.bad == self.good + 1


def most_questions(size: int, unknown: int = 0) -> int:
    """How many elements at most are asked about in a history of ``size`` with ``unknown`` unknown answers:
    both ends, one per halving, and per unknown answer itself and a step that halves less."""
    inside = max(size - 2, 0)
    return 2 + inside.bit_length() + 2 * unknown


def first_bad(size: int, ask: Callable[[int], Answer], *, repeat: int = 1) -> Found:
    """Find a transition from good to bad among elements 0..size-1, both ends being asked first.

    Each element is asked ``repeat`` times, until two answers contradict each other: it is flaky then, and
    unknown. An unknown answer contradicts nothing. No element is asked again once it is answered.
    Raises ``ArgumentError`` for fewer than two elements or repetitions below 1, and ``EndsError`` where the
    first is not good or the last not bad.
    """
    if size < 2:
        raise ArgumentError("size", size, "two elements or more", "Choose ends that differ.")
    if repeat < 1:
        raise ArgumentError("repeat", repeat, "1 or more", "Ask at least once.")
    answers: dict[int, Answer] = {}
    flaky: list[int] = []

    def judge(i: int) -> Answer:
        seen: set[Answer] = set()
        for _ in range(repeat):
            seen.add(ask(i))
            if {Answer.good, Answer.bad} <= seen:
                flaky.append(i)
                break
        definite = seen - {Answer.unknown}
        answers[i] = definite.pop() if len(definite) == 1 else Answer.unknown
        return answers[i]

    first, last = judge(0), judge(size - 1)
    if (first, last) != (Answer.good, Answer.bad):
        raise EndsError(first, last, tuple(flaky))
    good, bad = 0, size - 1
    skipped = 0
    open_ = list(range(1, size - 1))
    while open_:
        i = open_.pop(_place(len(open_), skipped))
        answer = judge(i)
        skipped = skipped + 1 if answer is Answer.unknown else 0
        if answer is Answer.good:
            good = i
        elif answer is Answer.bad:
            bad = i
        open_ = [j for j in open_ if good < j < bad]
    return Found(good, bad, answers, tuple(flaky))


def _place(size: int, skipped: int) -> int:
    """Which of ``size`` open elements to ask next: the middle one, or after ``skipped`` unknown answers in a
    row one ever further from it, on either side by turns, as what cannot be judged comes in stretches."""
    away = min(1 << min(skipped - 1, 32), size // 4) if skipped else 0
    return size // 2 + (away if skipped % 2 else -away)
