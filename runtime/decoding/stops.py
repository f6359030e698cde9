"""Finds the texts that end an answer, across the borders of tokens."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes text on until one of `stops` is complete; text that may still become one is held back.

    Of stops that are complete with the same character, the longest one counts.

    >>> matcher = StopMatcher(["\\n\\n"])
    >>> [matcher.push(piece) for piece in ("one\\n", "two\\n", "\\nthree")], matcher.stopped
    (['one', '\\ntwo', ''], True)
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certain after one more piece; once `stopped`, what was before the stop, then nothing."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - self._doubtful(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was still held, when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _doubtful(self, text: str) -> int:
        """Characters at the end of the text that begin a stop."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
