"""The search: over all histories of good, bad and unknown."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120_mla.errors import ArgumentError
from sm120_mla.tools.search import Answer, EndsError, Found, first_bad, most_questions

LETTERS = {"g": Answer.good, "b": Answer.bad, "u": Answer.unknown}


class Asked:
    """A history as a word of g, b and u, which counts what it is asked."""

    def __init__(self, word: str) -> None:
        self.word, self.count = word, Counter[int]()

    def __call__(self, i: int) -> Answer:
        self.count[i] += 1
        return LETTERS[self.word[i]]


def search(word: str, repeat: int = 1) -> tuple[Found, Asked]:
    asked = Asked(word)
    return first_bad(len(word), asked, repeat=repeat), asked


def check(word: str) -> None:
    """What holds of every history, whatever it looks like inside."""
    found, asked = search(word)

    assert word[found.good] == "g"
    assert word[found.bad] == "b"
    assert set(word[found.good + 1 : found.bad]) <= {"u"}, "nothing but unknown hides the transition"
    assert found.exact == (found.bad - found.good == 1)
    assert list(found.candidates) == list(range(found.good + 1, found.bad + 1))
    assert max(asked.count.values()) == 1, "no element is asked twice"
    unknown = sum(word[i] == "u" for i in asked.count)
    assert len(asked.count) <= most_questions(len(word), unknown)
    assert found.answers == {i: LETTERS[word[i]] for i in asked.count}
    assert found.flaky == ()


def monotone(word: str) -> bool:
    """Whether no good element comes after a bad one."""
    return "g" not in word[word.index("b") :]


def check_monotone(word: str) -> None:
    found, _ = search(word)

    assert found.good == word.rindex("g")
    assert found.bad == word.index("b")


@pytest.mark.parametrize("size", range(2, 10))
def test_every_short_history(size: int) -> None:
    for inside in itertools.product("gbu", repeat=size - 2):
        word = "g" + "".join(inside) + "b"
        check(word)
        if monotone(word):
            check_monotone(word)


@given(st.text("gbu", max_size=300).map(lambda inside: f"g{inside}b"))
def test_any_history(word: str) -> None:
    check(word)


@given(st.integers(1, 200), st.integers(1, 200), st.data())
def test_histories_that_turn_once(goods: int, bads: int, data: st.DataObject) -> None:
    word = list("g" * goods + "b" * bads)
    for i in data.draw(st.sets(st.integers(1, len(word) - 2))) if len(word) > 2 else ():
        word[i] = "u"

    check("".join(word))
    check_monotone("".join(word))


@given(st.integers(2, 100_000), st.data())
def test_where_all_can_be_judged_the_questions_are_a_logarithm(size: int, data: st.DataObject) -> None:
    turn = data.draw(st.integers(1, size - 1))
    asked = Counter[int]()

    def ask(i: int) -> Answer:
        asked[i] += 1
        return Answer.bad if i >= turn else Answer.good

    found = first_bad(size, ask)

    assert (found.good, found.bad, found.exact) == (turn - 1, turn, True)
    assert asked.total() <= 2 + max(size - 2, 0).bit_length()


def test_a_long_stretch_that_cannot_be_judged_is_left_quickly() -> None:
    word = "g" * 300 + "u" * 400 + "g" * 200 + "b" * 100

    found, asked = search(word)

    assert (found.good, found.bad) == (899, 900)
    assert asked.count.total() < 40, "walking through the stretch would take hundreds"


def test_unknown_elements_at_the_transition_are_candidates() -> None:
    found, _ = search("ggguubb")

    assert list(found.candidates) == [3, 4, 5]
    assert not found.exact


# ---- ends


@pytest.mark.parametrize("inside", ["", "g", "b", "gbug"])
@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("bg", "swapped"),
        ("gg", "Both are good"),
        ("bb", "Both are bad"),
        ("ub", "the first end"),
        ("gu", "the last end"),
    ],
)
def test_ends_that_are_not_good_and_bad_are_refused(ends: str, says: str, inside: str) -> None:
    asked = Asked(ends[0] + inside + ends[1])

    with pytest.raises(EndsError, match=says) as error:
        first_bad(len(asked.word), asked)

    assert set(asked.count) == {0, len(asked.word) - 1}, "nothing else was asked"
    assert (error.value.first, error.value.last) == (LETTERS[ends[0]], LETTERS[ends[1]])
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(("size", "repeat"), [(0, 1), (1, 1), (2, 0)])
def test_sizes_and_repetitions_that_make_no_sense_are_refused(size: int, repeat: int) -> None:
    def never(i: int) -> Answer:
        raise AssertionError("asked")

    with pytest.raises(ArgumentError):
        first_bad(size, never, repeat=repeat)


# ---- flaky answers


def flaky(words: list[str]) -> Callable[[int], Answer]:
    """Element i answers with the letters of its word in turn, the last one for ever."""
    turns: list[Iterator[str]] = [iter(itertools.chain(word, itertools.repeat(word[-1]))) for word in words]
    return lambda i: LETTERS[next(turns[i])]


def test_contradicting_answers_make_an_element_unknown_and_flaky() -> None:
    found = first_bad(5, flaky(["g", "g", "ggb", "b", "b"]), repeat=3)

    assert found.flaky == (2,)
    assert found.answers[2] is Answer.unknown
    assert (found.good, found.bad) == (1, 3)


def test_an_unknown_answer_contradicts_nothing() -> None:
    found = first_bad(3, flaky(["ug", "ub", "bu"]), repeat=2)

    assert (found.good, found.bad, found.flaky) == (0, 1, ())


def test_repetition_ends_with_the_contradiction() -> None:
    asked = Counter[int]()
    ask = flaky(["g", "gb", "b"])

    def counted(i: int) -> Answer:
        asked[i] += 1
        return ask(i)

    first_bad(3, counted, repeat=5)

    assert asked == {0: 5, 1: 2, 2: 5}


def test_an_end_that_contradicts_itself_is_named() -> None:
    with pytest.raises(EndsError) as error:
        first_bad(2, flaky(["gb", "b"]), repeat=2)

    assert error.value.flaky == (0,)


@given(st.lists(st.text("gbu", min_size=1, max_size=3), max_size=40), st.integers(1, 3))
def test_any_flaky_history_ends_in_a_transition(inside: list[str], repeat: int) -> None:
    found = first_bad(len(inside) + 2, flaky(["g", *inside, "b"]), repeat=repeat)

    assert found.answers[found.good] is Answer.good
    assert found.answers[found.bad] is Answer.bad
    between = range(found.good + 1, found.bad)
    assert all(found.answers[i] is Answer.unknown for i in between)
    assert all(found.answers[i] is Answer.unknown for i in found.flaky)
