"""A second, smaller model that guesses how answers go on (a draft model, https://arxiv.org/abs/2211.17192).

It has a cache of its own, with a sequence for each answer: what is certain of the text, and behind that its own
guesses, which are taken back where the answer went on otherwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.cache.pages import Sequence
from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.engine.learned import Pace
from llmc.runtime.errors import CacheFull
from llmc.runtime.runner import Feed, Output, Runner

if TYPE_CHECKING:
    from llmc.runtime.engine.query import Answer, Query

Guess = tuple[int, float]  # a token, and the chance that the model gives it


@dataclass(eq=False)
class _Text:
    """How far an answer's text was read. fed: what was fed behind the first `certain` slots. todo: what is to be."""

    sequence: Sequence
    certain: int
    fed: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)


class DraftModel:
    """Guesses tokens of answers one by one, by a runner whose token ids mean what those of the answers mean.

    keeps: whether pages of what was read are kept, for texts of the same salt that begin alike. pace: how long its
    steps take. Only who has the engine's turn calls it. An answer that it cannot go on with, as its own context or
    cache is full, is given up: `unread` says None of it then and ever after.
    """

    def __init__(self, runner: Runner, keeps: bool) -> None:
        self.runner = runner
        self.pace = Pace()
        self.tree = PrefixTree(runner.pool) if keeps else None
        self._texts: dict[Answer, _Text | None] = {}

    def unread(self, query: Query, answer: Answer) -> int | None:
        """Tokens of an answer's text that were not read yet, one at least; guesses that were wrong are taken back."""
        text, length = self._text(query, answer), len(query.opening) + len(answer.ids)
        if text is None:
            return None
        said = _said(query, answer, text.certain)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text.fed, said, strict=False)))
        # A step that was interrupted has not fed what it was to feed.
        text.certain = self.runner.truncate(
            text.sequence, min(text.certain + right, text.sequence.length, length - 1)
        )  # fmt: skip
        text.fed, text.todo = [], _said(query, answer, text.certain)
        if length >= self.runner.context or max(text.todo) >= self.runner.vocab:
            self._give_up([answer])
            return None
        return len(text.todo)

    def read(self, speakers: list[tuple[Query, Answer]]) -> None:
        """Read what is unread of these answers, but for the last token of each, as much as goes into a step."""
        room = self.runner.prefill_chunk
        feeds: dict[Answer, list[int]] = {}
        for _, answer in speakers:
            text = self._texts[answer]
            if text is not None and (ids := text.todo[:-1][:room]):
                feeds[answer] = ids
                room -= len(ids)
        self._feed(feeds, "none")
        for query, answer in speakers:
            self._keep(query, answer)

    def guess(self, answers: list[Answer]) -> dict[Answer, Guess]:
        """The likeliest next token of each answer, behind those that were guessed of it since `unread`.

        Answers are left out for which there is no room.
        """
        texts = {answer: text for answer in answers if (text := self._texts[answer]) is not None}
        fit = {a: t.todo for a, t in texts.items() if t.sequence.length + len(t.todo) <= self.runner.context}
        start = time.perf_counter()
        output = self._feed(fit, "last")
        if output is None:
            return {}
        self.pace.took(sum(map(len, fit.values())), time.perf_counter() - start)
        chances = np.exp(output.top_values[:, 0] - output.normalizers)
        found = {}
        for answer, token, chance in zip(fit, output.argmax.tolist(), chances.tolist(), strict=True):
            if np.isnan(chance):
                self._give_up([answer])
            else:
                found[answer] = token, chance
                texts[answer].todo = [token]
        return found

    def leave(self, query: Query) -> None:
        """A query has ended: keep what was read of its answers, and give their pages back."""
        for answer in query.answers:
            if answer in self._texts:
                self.unread(query, answer)  # so that nothing is left of its guesses
                self._keep(query, answer)
                self._give_up([answer])
                del self._texts[answer]

    def forget(self) -> None:
        """Keep nothing of texts that have ended. Any thread may call it."""
        if self.tree is not None:
            self.tree.clear()

    def close(self) -> None:
        """Keep nothing any more."""
        if self.tree is not None:
            self.tree.close()

    def _feed(self, feeds: dict[Answer, list[int]], logits: str) -> Output | None:
        """Feed these tokens to the texts of answers; None where there are none, or no room, which gives answers up."""
        texts = {answer: text for answer in feeds if (text := self._texts[answer]) is not None}
        if not texts:
            return None
        for answer, text in texts.items():
            text.fed += feeds[answer]
            text.todo = text.todo[len(feeds[answer]) :]
        try:
            return self.runner.step([Feed(text.sequence, feeds[answer], logits) for answer, text in texts.items()])
        except CacheFull:
            self._give_up(list(feeds))
            return None

    def _text(self, query: Query, answer: Answer) -> _Text | None:
        text = self._texts.get(answer)
        if text is None and answer in self._texts:
            return None
        if text is None or (
            self.tree is not None and not text.sequence.length
        ):  # others may have read what it begins as
            ids = query.opening + answer.ids
            sequence = self.runner.new_sequence() if self.tree is None else self.tree.match(ids, query.salt)
            text = self._texts[answer] = _Text(sequence, sequence.length)
        return text

    def _keep(self, query: Query, answer: Answer) -> None:
        """Keep the pages of what was read of a text, none of it a guess, for others that begin alike."""
        text = self._texts[answer]
        if text is not None and self.tree is not None:
            self.tree.insert(text.sequence, query.opening + answer.ids, query.salt)

    def _give_up(self, answers: list[Answer]) -> None:
        for answer in answers:
            text, self._texts[answer] = self._texts[answer], None
            if text is not None:
                self.runner.release(text.sequence)


def _said(query: Query, answer: Answer, slot: int) -> list[int]:
    """What an answer's text says from a slot on."""
    behind = slot - len(query.opening)
    return answer.ids[behind:] if behind >= 0 else query.opening[slot:] + answer.ids
