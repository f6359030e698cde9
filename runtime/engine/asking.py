"""When a draft model is asked, and how far: a token of each answer a round, as long as that is worth its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.runtime.engine.learned import Odds, Pace, chance_ground

if TYPE_CHECKING:
    from llmc.runtime.engine.draft_model import DraftModel
    from llmc.runtime.engine.query import Answer, Query

MOST_ROWS = 16  # of a step of answers and their drafts; more of them are bound by multiplying, whatever is right
GAIN = 1.03  # what drafts must be expected to gain, for steps vary
_NEAR = 32  # tokens of a text that are read with the first guess; more of them are read before
_TRIED = 256  # the same for a trial, for which nothing is read before
_LENGTH = 128.0  # tokens of an answer, until some have ended
_LATEST = 0.1  # share of the latest answer in how long answers are, and of the latest step in what guesses save
_STEPS = 8  # of which it is known what guesses would save, before long texts are read for them


@dataclass(eq=False)
class Asked:
    """An answer to be guessed about, at most `most` tokens of it, and what was guessed.

    drawn: whether chance has a part in its tokens. odds: the chance of a token that is yet to be guessed. chance: that
    all are right that were.
    """

    query: Query
    answer: Answer
    most: int
    drawn: bool
    odds: float
    tokens: list[int] = field(default_factory=list)
    grounds: list[int] = field(default_factory=list)
    chance: float = 1.0

    def expects(self, tokens: int) -> float:
        """How many of so many tokens are right, with ordinary luck."""
        return sum(self.odds**place for place in range(1, min(tokens, self.most) + 1))


class Asking:
    """Asks a draft model. odds, pace: those of the engine."""

    def __init__(self, model: DraftModel, odds: Odds, pace: Pace) -> None:
        self.model = model
        self.odds = odds
        self.pace = pace
        self._length = _LENGTH
        self._saved = 0.0  # seconds a token, on average
        self._steps = 0

    def ask(self, asked: list[Asked], rows: int, expected: float, worth: float, trial: bool) -> list[Asked]:
        """Guess about answers, beside `rows` rows that are `expected` to give so many tokens; those that have guesses.

        worth: tokens a second that can be had without. trial: guess about those whose text is read, whatever it costs.
        """
        unread = {each: self.model.unread(each.query, each.answer) for each in asked}
        asked = [each for each in asked if unread[each] is not None]
        near = [each for each in asked if (unread[each] or 0) <= (_TRIED if trial else _NEAR)]
        best = self._best(asked, rows, expected)
        self._steps += 1
        self._saved += max(_LATEST, 1 / self._steps) * (max(0.0, 1 / worth - 1 / max(best, worth)) - self._saved)
        pays = bool(asked) and (not self.model.pace.known or best > worth * GAIN)
        if pays and self._steps >= _STEPS:
            self._read([each for each in asked if each not in near], unread)
        if pays or trial:
            self._guess(near, rows, expected)
        return [each for each in near if each.tokens]

    def leave(self, query: Query) -> None:
        """A query has ended."""
        self.model.leave(query)
        for answer in query.answers:
            self._length += _LATEST * (len(answer.ids) - self._length)

    def _best(self, asked: list[Asked], rows: int, expected: float) -> float:
        """Tokens a second with as many guesses as are best."""
        best = 0.0
        for rounds in range(1, max((each.most for each in asked), default=0) + 1):
            more = sum(min(rounds, each.most) for each in asked)
            if rows + more > MOST_ROWS and rounds > 1:
                break
            seconds = self.pace.of(min(rows + more, MOST_ROWS)) + rounds * self.model.pace.of(len(asked))
            best = max(best, (expected + sum(each.expects(rounds) for each in asked)) / seconds)
        return best

    def _read(self, far: list[Asked], unread: dict[Asked, int | None]) -> None:
        """Have the model read on in texts, if that takes less time than guesses will save."""
        left = sum(min(self._length, each.query.options.max_tokens - len(each.answer.ids)) for each in far)
        if far and self.model.token_seconds * sum(unread[each] or 0 for each in far) <= left * self._saved:
            self.model.read([(each.query, each.answer) for each in far])

    def _guess(self, asked: list[Asked], rows: int, expected: float) -> None:
        """A token of each answer a round, until another round would give less for its time than all before."""
        seconds, first = self.pace.of(rows), rows
        while asked := [each for each in asked if len(each.tokens) < each.most][: MOST_ROWS - rows]:
            step = self.model.pace.of(len(asked)) if self.model.pace.known else 0.0
            more = step + max(0.0, self.pace.of(rows + len(asked)) - self.pace.of(rows))
            if rows > first and sum(each.odds * each.chance for each in asked) * seconds <= expected * more:
                return
            found = self.model.guess([(each.query, each.answer) for each in asked])
            asked = [each for each in asked if each.answer in found]
            for each in asked:
                token, chance = found[each.answer]
                each.tokens.append(token)
                each.grounds.append(chance_ground(chance, each.drawn))
                each.chance *= self.odds.of(each.grounds[-1])
                expected += each.chance
            rows, seconds = rows + len(asked), seconds + more
