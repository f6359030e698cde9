"""Guesses by prompt lookup, against the slow and obvious way to make them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.decoding.lookup import MOST_AGREED, Lookup


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
