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

Speaker = tuple["Query", "Answer"]
Guess = tuple[int, float]  # a token, and the chance that the model gives it


@dataclass(eq=False)
class _Text:
    """How far an answer's text was read. fed: what was fed behind the first `certain` slots.

    guess: the latest, which is to be fed before the next. chooser: foretells what is chosen from a row, once it is
    known; None where that is the greatest logit.
    """

    sequence: Sequence
    certain: int
    fed: list[int] = field(default_factory=list)
    guess: int | None = None
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
        if answer not in self._texts:
            self._texts[answer] = self._begin(query, answer)
        text, length = self._texts[answer], len(query.opening) + len(answer.ids)
        if text is None:
            return None
        if length >= self.runner.context:
            self._give_up([answer])
            return None
        said = _said(query, answer, text.certain, len(text.fed))
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text.fed, said, strict=False)))
        # A step that was interrupted has not fed what it was to feed.
        slots = min(text.certain + right, text.sequence.length, length - 1)
        text.certain, text.fed, text.guess = self.runner.truncate(text.sequence, slots), [], None
        return length - text.certain

    def read(self, speakers: list[Speaker]) -> None:
        """Read what is unread of these answers, but for the last token of each, as much as goes into a step."""
        room = self.runner.prefill_chunk
        feeds: dict[Answer, list[int]] = {}
        for query, answer in speakers:
            text = self._texts[answer]
            if text is not None and not text.sequence.length:  # others may have read what it begins with
                text = self._texts[answer] = self._begin(query, answer)
            if text is None:
                continue
            ids = _said(query, answer, text.certain, room)
            if text.certain + len(ids) == len(query.opening) + len(answer.ids):
                ids.pop()
            if ids:
                feeds[answer] = ids
                room -= len(ids)
        start = time.perf_counter()
        if self._feed(feeds, "none") is None:
            return
        self.token_seconds = (time.perf_counter() - start) / sum(map(len, feeds.values()))
        for query, answer in speakers:
            self._keep(query, answer)

    def guess(self, speakers: list[Speaker]) -> dict[Answer, Guess]:
        """The likeliest next token of each answer, behind those that were guessed of it since `unread`.

        Answers are left out for which there is no room.
        """
        start = time.perf_counter()
        feeds = {}
        for query, answer in speakers:
            text = self._texts.get(answer)
            if text is None or (text.fed and text.guess is None):
                continue
            if text.guess is None:
                text.chooser = None if answer.chooser is None else answer.chooser.guesser()
            ids = _said(query, answer, text.certain) if text.guess is None else [text.guess]
            if text.sequence.length + len(ids) <= self.runner.context:
                feeds[answer] = ids
        output = self._feed(feeds, "last")
        if output is None:
            return {}
        found = {}
        for row, answer in zip(map(output.row, range(len(feeds))), list(feeds), strict=True):
            text = self._texts[answer]
            assert text is not None
            guess = _foretold(text.chooser, row, self.vocab)
            if guess is not None:
                found[answer] = guess
                text.guess = guess[0]
            elif not math.isfinite(row.normalizer):
                self._give_up([answer])
        self.pace.took(sum(map(len, feeds.values())), time.perf_counter() - start)
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
        """Feed these tokens to the texts of answers; None where there are none.

        Answers with a token that it does not know are given up. Where its cache is full, others have their texts read
        anew some time, and if that is not enough, these are given up.
        """
        unknown = [answer for answer, ids in feeds.items() if max(ids) >= self.runner.vocab]
        self._give_up(unknown)
        for answer in unknown:
            del feeds[answer]
        texts = {answer: text for answer in feeds if (text := self._texts[answer]) is not None}
        if not texts:
            return None
        for answer, text in texts.items():
            text.fed += feeds[answer]
            text.guess = None
        batch = [Feed(text.sequence, feeds[answer], logits) for answer, text in texts.items()]
        try:
            return self.runner.step(batch)
        except CacheFull:
            others = [answer for answer, text in self._texts.items() if text is not None and answer not in feeds]
            self._give_up(others)
            for answer in others:
                del self._texts[answer]
        try:
            return self.runner.step(batch)
        except CacheFull:
            self._give_up(list(feeds))
            return None

    def _begin(self, query: Query, answer: Answer) -> _Text:
        """A text with what is kept of its beginning."""
        if self.tree is None:
            return _Text(self.runner.new_sequence(), 0)
        sequence = self.tree.match(query.opening + answer.ids, query.salt)
        return _Text(sequence, sequence.length)

    def _keep(self, query: Query, answer: Answer) -> None:
        """Keep the pages of what was read of a text, none of it a guess, for others that begin alike."""
        text = self._texts.get(answer)
        if text is not None and self.tree is not None:
            self.tree.insert(text.sequence, query.opening + answer.ids, query.salt)

    def _give_up(self, answers: list[Answer]) -> None:
        for answer in answers:
            text, self._texts[answer] = self._texts[answer], None
            if text is not None:
                self.runner.release(text.sequence)


def _said(query: Query, answer: Answer, slot: int, most: int | None = None) -> list[int]:
    """What an answer's text says from a slot on, `most` tokens of it."""
    behind = slot - len(query.opening)
    end = None if most is None else slot + most
    if behind >= 0:
        return answer.ids[behind : None if most is None else behind + most]
    return (query.opening[slot:end] + answer.ids)[:most]


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
