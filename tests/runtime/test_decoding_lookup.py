"""Guesses by prompt lookup, against the slow and obvious way to make them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.decoding.lookup import MOST_AGREED, Lookup, Texts


def slow_guess(ids: list[int], most: int) -> tuple[list[int], int]:
    """Of all places before the end, the last of those that agree with the most tokens at the end."""
    best, place = 0, 0
    for at in range(len(ids) - 1):
        agreed = 0
        while agreed <= at and agreed < MOST_AGREED and ids[at - agreed] == ids[-1 - agreed]:
            agreed += 1
        if agreed >= best:
            best, place = agreed, at
    if best < 2 or not most:
        return [], 0
    said = list(ids)
    for number in range(most):
        said.append(said[place + 1 + number])
    return said[len(ids) :], best


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 9))
def test_the_last_place_that_agrees_most_goes_on(ids: list[int], most: int) -> None:
    assert Lookup(ids).guess(most) == slow_guess(ids, most)


@given(st.lists(st.lists(st.integers(0, 2), max_size=300), max_size=5))
def test_a_text_may_come_in_pieces(pieces: list[list[int]]) -> None:
    lookup = Lookup()
    for piece in pieces:
        lookup.extend(piece)
    whole = [id_ for piece in pieces for id_ in piece]
    assert len(lookup) == len(whole)
    assert lookup.guess(5) == Lookup(whole).guess(5)


def slow_guess_from(texts: list[list[int]], ids: list[int], most: int) -> tuple[list[int], int]:
    """Of all places in all texts, the last of those that agree with the most tokens at the end."""
    best, found = 0, list[int]()
    for text in texts:
        for at in range(len(text)):
            agreed = 0
            while agreed <= at and agreed < min(MOST_AGREED, len(ids)) and text[at - agreed] == ids[-1 - agreed]:
                agreed += 1
            if agreed >= best:
                best, found = agreed, text[at + 1 : at + 1 + most]
    return (found, best) if best >= 2 and found else ([], 0)


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4), st.lists(st.integers(0, 3), max_size=40),
       st.integers(0, 9))  # fmt: skip
def test_other_texts_say_how_one_goes_on(said: list[list[int]], ids: list[int], most: int) -> None:
    texts = Texts(1000)
    for text in said:
        texts.add(text)
    assert texts.guess(Lookup(ids).end, most) == slow_guess_from(said, ids, most)


def test_the_last_of_what_was_said_is_kept() -> None:
    texts = Texts(8)
    texts.add([1, 2, 3, 4, 5, 6])
    texts.add([7, 8, 9])
    assert texts.guess(Lookup([7, 8]).end, 5) == ([9], 2)
    assert texts.guess(Lookup([4, 5]).end, 5) == ([6], 2)
    assert texts.guess(Lookup([2, 3]).end, 5) == ([], 0)
