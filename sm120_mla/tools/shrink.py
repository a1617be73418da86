"""Make a failing case smaller while it still fails. Pure but for the question asked.

Hypothesis shrinks what it drew; a stored case was drawn by nobody. A case is a dozen numbers and a few
lists, so dropping, halving and defaulting them one after another, until nothing helps, is enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["shrink"]

_STAYS = {"kind", "subject", "layout"}
"""Fields that say what the case is about, and not how large it is."""


def shrink(case: BaseModel, fails: Callable[[Any], bool], more: Callable[[], bool] = lambda: True) -> Any:
    """The smallest case found for which ``fails`` is true, as it must be for ``case`` itself.

    ``more`` is asked before each question and ends the search when false. Each step makes the case's size
    (``_weight``) strictly less, so the search ends.
    """
    best = case
    improved = True
    while improved:
        improved = False
        for document in _smaller(best.model_dump(mode="json")):
            if not more():
                return best
            try:
                smaller = type(case).model_validate(document)
            except ValidationError:
                continue
            if _weight(smaller) < _weight(best) and fails(smaller):
                best, improved = smaller, True
                break
    return best


def _weight(case: BaseModel) -> tuple[int, int, int]:
    """What is left to say, the magnitude of its numbers, and their number."""
    document = case.model_dump(mode="json", exclude_defaults=True)
    numbers = list(_numbers(document))
    return len(json.dumps(_without_numbers(document))), sum(map(abs, numbers)), len(numbers)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return 0 if isinstance(value, int) and not isinstance(value, bool) else value


def _smaller(value: Any) -> Iterator[Any]:
    """Values like this one with one thing less, large steps first."""
    if isinstance(value, dict):
        for key in value:
            if key not in _STAYS:
                yield {k: v for k, v in value.items() if k != key}  # the default, if it has one
        for key, item in value.items():
            if key not in _STAYS:
                for smaller in _smaller(item):
                    yield value | {key: smaller}
    elif isinstance(value, list):
        for size in _halves(len(value)):
            for start in range(0, len(value), size):
                yield value[:start] + value[start + size :]
        for n, item in enumerate(value):
            for smaller in _smaller(item):
                yield [*value[:n], smaller, *value[n + 1 :]]
    elif isinstance(value, bool):
        if value:
            yield False
    elif isinstance(value, int):
        yield from (n for n in dict.fromkeys((0, 1, value // 2, value - 1)) if 0 <= n < value)


def _halves(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2
