"""Stop strings across the borders of pieces, against a search character by character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.decoding.stops import StopMatcher

TEXT = st.text("abA\n", max_size=30)
STOPS = st.lists(st.text("abA\n", min_size=1, max_size=5), max_size=4)


def definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop that is complete first, of several the longest; and whether there is one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_pieces_say_what_the_text_says(text: str, stops: list[str], cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    given_so_far = ""
    for start, end in zip(places, places[1:], strict=False):
        given_so_far += matcher.push(text[start:end])
        seen, stopped = definition(text[:end], stops)
        assert matcher.stopped == stopped
        if stopped:
            assert given_so_far == seen
            continue
        # No more is held than what may still become a stop, and no less.
        held = text[len(given_so_far) : end]
        assert text.startswith(given_so_far)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        tails = [text[at:end] for at in range(end)]
        assert not any(len(t) > len(held) and s.startswith(t) for t in tails for s in stops)
    given_so_far += matcher.finish()
    assert (given_so_far, matcher.stopped) == definition(text, stops)
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "given_out"),
    [
        (["</s>"], ["a<", "/", "s", "b", "</s>", "c"], ["a", "", "", "</sb", "", ""]),
        (["ab", "xaby"], ["xa", "b"], ["", "x"]),  # what the longer one held is given after all
        (["aab"], ["aa", "a", "b"], ["", "a", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_pieces_one_by_one(stops: list[str], pieces: list[str], given_out: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == given_out
