"""Drafts: tokens that answers may say next, guessed at little cost, which a step checks beside the one that is certain.

A step of few rows takes about as long as one of a single row, for it reads the same weights. So an answer is fed its
last token and a guess of those behind it (speculative decoding, https://arxiv.org/abs/2211.17192). Guesses come from
the text itself and what was said before (lookup.py), from the form that the answer is to have, or from a second, small
model (draft_model.py). Each row then chooses as ever, and as far as choices are the guesses they count: what an answer
says is the same, token by token, whatever is guessed. How many tokens are worth a guess is decided for all answers
together, by how long steps take and how often guesses were right (https://arxiv.org/abs/2406.14066).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmc.runtime.decoding.lookup import MOST_AGREED, Lookup, Texts
from llmc.runtime.engine.asking import GAIN, MOST_ROWS, Asked, Asking
from llmc.runtime.engine.learned import FORCED, Odds, Pace, agreed_ground

if TYPE_CHECKING:
    from llmc.runtime.decoding.candidates import Row
    from llmc.runtime.engine.draft_model import DraftModel
    from llmc.runtime.engine.query import Answer, Query
    from llmc.runtime.engine.scheduler import Portion

_KEPT_TOKENS, _KEPT_SALTS = 16_384, 64  # of what was said, of each salt
_TRY_EVERY = 32  # of the times that a guess was not worth it: one token is tried, for texts change


@dataclass(eq=False)
class Draft:
    """Tokens that were guessed, and what came of it.

    grounds: what speaks for each of them (learned.py). rows: what the step says behind each of them. right: how many
    were chosen. refuted: whether another one was chosen in place of the next.
    """

    tokens: list[int] = field(default_factory=list)
    grounds: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    right: int = 0
    refuted: bool = False

    @staticmethod
    def looked_up(tokens: list[int], agreed: int) -> Draft:
        """What followed elsewhere where so many tokens agree; with each of them that is right there is one more."""
        return Draft(tokens, [agreed_ground(agreed + place) for place in range(len(tokens))])

    def first(self, count: int) -> Draft:
        """The first tokens of it."""
        return Draft(self.tokens[:count], self.grounds[:count])


class Drafter:
    """Says what is guessed in a step, and learns from what came of it.

    most: tokens guessed for an answer at once, 0: none. keeps: whether what answers said is kept for guesses about
    others, of the same salt: so none can learn from its speed what others were told. model: what guesses where the text
    does not say enough, if anything. drafted, accepted: tokens guessed so far, and those of them that were said.
    """

    def __init__(self, most: int, keeps: bool = False, model: DraftModel | None = None) -> None:
        self.most = most
        self.keeps = keeps
        self.odds = Odds()
        self.pace = Pace()
        self.asking = None if model is None else Asking(model, self.odds, self.pace)
        self.drafted = 0
        self.accepted = 0
        self._passed = 0
        self._said: OrderedDict[str, Texts] = OrderedDict()  # by salt, from the one that was not added to for longest

    def leave(self, query: Query) -> None:
        """A query has ended: keep what its answers said."""
        if self.asking is not None:
            self.asking.leave(query)
        if not (self.most and self.keeps) or query.by_caller:
            return
        said = self._said
        for answer in query.answers:
            if len(answer.ids) > 1:
                said.setdefault(query.salt, Texts(_KEPT_TOKENS)).add(answer.ids)
                said.move_to_end(query.salt)
        if len(said) > _KEPT_SALTS:
            said.popitem(last=False)

    def forget(self) -> None:
        """Keep nothing of what was said. Any thread may call it."""
        self._said = OrderedDict()
        if self.asking is not None:
            self.asking.model.forget()

    def extend(self, going: list[Portion], beside: int) -> list[Portion]:
        """The portions of answers that go on, some with a draft. beside: rows of prompts in the same step, about."""
        if not self.most or not 0 < len(going) < MOST_ROWS:
            return going
        guesses = {number: guess for number, portion in enumerate(going) if (guess := self._guess(portion)).tokens}
        trial = self._passed % _TRY_EVERY == _TRY_EVERY - 1
        if self.asking is not None and self.pace.known and not beside:
            guesses |= self._ask(self.asking, going, guesses, trial)
        if not guesses:
            self._passed += self.asking is not None
            return going
        best = self._select(guesses, len(going), beside)
        self._passed += trial or not best.counts
        counts = best.counts or ({best.likeliest: 1} if trial else {})
        return [
            portion._replace(draft=guesses[number].first(counts[number])) if number in counts else portion
            for number, portion in enumerate(going)
        ]

    def learn(self, draft: Draft) -> None:
        """Take in what came of a draft."""
        self.drafted += len(draft.tokens)
        self.accepted += draft.right
        for ground in draft.grounds[: draft.right]:
            self.odds.tried(ground, True)
        if draft.refuted:
            self.odds.tried(draft.grounds[draft.right], False)

    def _guess(self, portion: Portion) -> Draft:
        """What is guessed of an answer for nothing."""
        query, answer = portion.query, portion.answer
        most = self._most(portion)
        if most < 1:
            return Draft()
        if answer.lookup is None:
            answer.lookup = Lookup([*query.prediction, *(query.source_ids or ()), *query.opening])
        known = len(answer.lookup) - len(query.prediction) - len(query.source_ids or ()) - len(query.opening)
        answer.lookup.extend(answer.ids[known:])
        found, agreed = answer.lookup.guess(most)
        texts = self._said.get(query.salt)
        if texts is not None and agreed < MOST_AGREED:
            other, others_agreed = texts.guess(answer.lookup.end, most)
            found, agreed = (other, others_agreed) if others_agreed > agreed else (found, agreed)
        forced = [] if answer.chooser is None else answer.chooser.forced()[:most]
        if forced != found[: len(forced)]:
            return Draft(forced, [FORCED] * len(forced))
        return Draft.looked_up(found, agreed)

    def _most(self, portion: Portion) -> int:
        """Tokens of an answer to guess at most: one less than it may still say."""
        query, said = portion.query, len(portion.answer.ids)
        room = min(query.options.max_tokens - said, query.limit - len(query.opening) - said) - 1
        return min(self.most, room) if _may_draft(query, portion.answer) else 0

    def _select(self, guesses: dict[int, Draft], rows: int, beside: int) -> _Selection:
        """How many tokens of which guesses to feed, beside `rows` rows that are fed anyway.

        A token counts by the chance that it and all before it are right. The likeliest are fed, as many as give most
        tokens for the time that the step is expected to take.
        """
        chances = []
        for number, guess in guesses.items():
            chance = 1.0
            for ground in guess.grounds:
                chance *= self.odds.of(ground)
                chances.append((chance, number))
        chances.sort(key=lambda each: -each[0])
        best = _Selection(rows, float(rows), self._cost(rows, beside), likeliest=chances[0][1] if chances else 0)
        expected, least = best.expected, GAIN
        for place, (chance, _) in enumerate(chances[: MOST_ROWS - rows], 1):
            expected += chance
            seconds = self._cost(rows + place, beside)
            if expected / seconds > best.worth * least:
                best, least = replace(best, rows=rows + place, expected=expected, seconds=seconds), 1.0
        for _, number in chances[: best.rows - rows]:
            best.counts[number] = best.counts.get(number, 0) + 1
        return best

    def _cost(self, rows: int, beside: int) -> float:
        return float(rows + beside) if beside else self.pace.of(rows)

    def _ask(
        self, asking: Asking, going: list[Portion], guesses: dict[int, Draft], trial: bool
    ) -> dict[int, Draft]:  # fmt: skip
        """What a draft model guesses of answers that nothing better is known of."""
        asked = {}
        for number, portion in enumerate(going):
            query, answer, most = portion.query, portion.answer, self._most(portion)
            drawn = answer.chooser is not None and answer.chooser.draws
            odds = self.odds.of_models(drawn)
            known = number in guesses and self.odds.of(guesses[number].grounds[0]) >= odds
            if most > 0 and not known and query.source_ids is None:
                asked[number] = Asked(query, answer, most, drawn, odds)
        without = self._select({n: guess for n, guess in guesses.items() if n not in asked}, len(going), 0)
        worth = self._select(guesses, len(going), 0).worth
        found = asking.ask(list(asked.values()), without.rows, without.expected, worth, trial)
        return {number: Draft(each.tokens, each.grounds) for number, each in asked.items() if each in found}


@dataclass
class _Selection:
    """Tokens that are worth to be fed.

    counts: of which guess how many. rows: all rows of the step. expected: tokens that it is expected to give. seconds:
    that it is expected to take. likeliest: the guess whose first token is likeliest.
    """

    rows: int
    expected: float
    seconds: float
    counts: dict[int, int] = field(default_factory=dict)
    likeliest: int = 0

    @property
    def worth(self) -> float:
        """Tokens a second."""
        return self.expected / self.seconds


def _may_draft(query: Query, answer: Answer) -> bool:
    """Whether all that an answer says is decided row by row, of a text that does not slide."""
    by_rows = query.search is None and not query.by_caller and not query.whole
    return by_rows and not query.unborn and answer.window is None and answer.row is None
