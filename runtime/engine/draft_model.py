"""A second, smaller model that guesses how answers go on (a draft model, https://arxiv.org/abs/2211.17192).

It has a cache of its own, with a sequence for each answer: what is certain of the text, and behind that its own
guesses, which are taken back where the answer went on otherwise.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.cache.pages import Sequence
from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.engine.learned import Pace
from llmc.runtime.errors import CacheFull, LlmcError
from llmc.runtime.runner import Feed, Output, Runner

if TYPE_CHECKING:
    from llmc.runtime.decoding.candidates import Row
    from llmc.runtime.decoding.chooser import Chooser
    from llmc.runtime.engine.query import Answer, Query

Guess = tuple[int, float]  # a token, and the chance that the model gives it


@dataclass(eq=False)
class _Text:
    """How far an answer's text was read. fed: what was fed behind the first `certain` slots. todo: what is to be.

    chooser: foretells what is chosen from a row, once it is known; None where that is the greatest logit.
    """

    sequence: Sequence
    certain: int
    fed: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    chooser: Chooser | None = None


class DraftModel:
    """Guesses tokens of answers one by one, by a runner whose token ids mean what those of the answers mean.

    vocab: of the model that answers. keeps: whether pages of what was read are kept, for texts of the same salt that
    begin alike. pace: how long its guesses take; token_seconds: how long it reads a token of a long text. Only who has
    the engine's turn calls it. An answer that it cannot go on with, as its own context or cache is full, is given up:
    `unread` says None of it then and ever after.
    """

    def __init__(self, runner: Runner, vocab: int, keeps: bool) -> None:
        self.runner = runner
        self.vocab = vocab
        self.token_seconds = 0.0
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
        start = time.perf_counter()
        if self._feed(feeds, "none") is not None:
            self.token_seconds = (time.perf_counter() - start) / sum(map(len, feeds.values()))
        for query, answer in speakers:
            self._keep(query, answer)

    def guess(self, answers: list[Answer]) -> dict[Answer, Guess]:
        """The likeliest next token of each answer, behind those that were guessed of it since `unread`.

        Answers are left out for which there is no room.
        """
        texts = {answer: text for answer in answers if (text := self._texts[answer]) is not None}
        fit = {a: t.todo for a, t in texts.items() if t.sequence.length + len(t.todo) <= self.runner.context}
        start = time.perf_counter()
        for answer in fit:
            if not texts[answer].fed and answer.chooser is not None:
                texts[answer].chooser = answer.chooser.guesser()
        output = self._feed(fit, "last")
        if output is None:
            return {}
        found = {}
        for at, answer in enumerate(fit):
            row = output.row(at)
            guess = _foretold(texts[answer].chooser, row, self.vocab)
            if guess is not None:
                found[answer] = guess
                texts[answer].todo = [guess[0]]
            elif not math.isfinite(row.normalizer):
                self._give_up([answer])
        self.pace.took(sum(map(len, fit.values())), time.perf_counter() - start)
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


def _foretold(chooser: Chooser | None, row: Row, vocab: int) -> Guess | None:
    """What is likely to be chosen of a row; None where that is nothing that the other model knows, or no number."""
    token = int(row.ids[0])
    if chooser is not None:
        try:
            choice = chooser.choose(_resized(row, vocab))
        except LlmcError:  # no token is left, say
            return None
        chooser.accept(choice)
        token = choice.token
    if token >= min(vocab, row.vocab) or not math.isfinite(row.normalizer):
        return None
    return token, math.exp(row.logit(token) - row.normalizer)


def _resized(row: Row, vocab: int) -> Row:
    """The row as one of a vocabulary that is longer or shorter by entries that stand for nothing."""
    if row.vocab == vocab:
        return row
    more = np.full(max(0, vocab - row.vocab), -np.inf, np.float32)
    return replace(row, vocab=vocab, read=lambda: np.concatenate([row.logits[:vocab], more]))
