"""Drafts: tokens that answers may say next, guessed for nothing, which a step checks beside the one that is certain.

A step of few rows takes about as long as one of a single row, for it reads the same weights. So an answer is fed its
last token and a guess of those behind it (speculative decoding, https://arxiv.org/abs/2211.17192). Guesses come from
the text itself and what was said before (lookup.py), or from the form that the answer is to have. Each row then chooses
as ever, and as far as choices are the guesses they count: what an answer says is the same, token by token, whatever is
guessed. How many tokens are worth a guess is decided for all answers together, by how long steps take and how often
guesses were right (https://arxiv.org/abs/2406.14066).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmc.runtime.decoding.lookup import MOST_AGREED, Lookup, Texts

if TYPE_CHECKING:
    from llmc.runtime.decoding.candidates import Row
    from llmc.runtime.engine.query import Answer, Query
    from llmc.runtime.engine.scheduler import Portion

FORCED = 0  # the form of the answer leaves hardly a choice
MOST_ROWS = 16  # of a step of answers and their drafts; more of them are bound by multiplying, whatever is right
_KEPT_TOKENS, _KEPT_SALTS = 16_384, 64  # of what was said, of each salt
_GAIN = 1.03  # what drafts must be expected to gain, for steps vary
_TRY_EVERY = 32  # of the times that a guess was not worth it: one token is tried, for texts change
_MEMORY = 0.98  # what is left of earlier trials with each new one
_ROW = 0.12  # what a row adds to a step of one, until it is known
_KNOWN_STEPS = 400  # that what a step takes is known for
_LATEST = 0.2  # share of the latest step in what steps of its size take


@dataclass(eq=False)
class Draft:
    """Tokens that were guessed, and what came of it.

    agreed: tokens before them that stood before the same ones earlier in the text, or FORCED. rows: what the step says
    behind each of them. right: how many were chosen. refuted: whether another one was chosen in place of the next.
    """

    tokens: list[int]
    agreed: int
    rows: list[Row] = field(default_factory=list)
    right: int = 0
    refuted: bool = False

    def ground(self, place: int) -> int:
        """What speaks for its token at a place: as many tokens as will have agreed before it, or FORCED."""
        return FORCED if self.agreed == FORCED else self.agreed + place


class Drafter:
    """Says what is guessed in a step, and learns from what came of it.

    most: tokens guessed for an answer at once, 0: none. keeps: whether what answers said is kept for guesses about
    others, of the same salt: so none can learn from its speed what others were told. drafted, accepted: tokens guessed
    so far, and those of them that were said.
    """

    def __init__(self, most: int, keeps: bool = False) -> None:
        self.most = most
        self.keeps = keeps
        self.odds = Odds()
        self.pace = Pace()
        self.drafted = 0
        self.accepted = 0
        self._passed = 0
        self._said: OrderedDict[str, Texts] = OrderedDict()  # by salt, from the one that was not added to for longest

    def remember(self, query: Query) -> None:
        """Keep what a query's answers said."""
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

    def extend(self, going: list[Portion], beside: int) -> list[Portion]:
        """The portions of answers that go on, some with a draft. beside: rows of prompts in the same step, about."""
        if not self.most or not 0 < len(going) < MOST_ROWS:
            return going
        guesses = {number: guess for number, portion in enumerate(going) if (guess := self._guess(portion)).tokens}
        if not guesses:
            return going
        counts = self._counts(guesses, len(going), beside)
        return [
            replace(portion, draft=Draft(guesses[number].tokens[: counts[number]], guesses[number].agreed))
            if counts.get(number)
            else portion
            for number, portion in enumerate(going)
        ]

    def learn(self, draft: Draft) -> None:
        """Take in what came of a draft."""
        self.drafted += len(draft.tokens)
        self.accepted += draft.right
        for place in range(draft.right):
            self.odds.tried(draft.ground(place), True)
        if draft.refuted:
            self.odds.tried(draft.ground(draft.right), False)

    def _guess(self, portion: Portion) -> Draft:
        query, answer = portion.query, portion.answer
        said = len(answer.ids)
        room = min(query.options.max_tokens - said, query.limit - len(query.opening) - said) - 1
        if room < 1 or not _may_draft(query, answer):
            return Draft([], 0)
        if answer.lookup is None:
            answer.lookup = Lookup([*query.prediction, *(query.source_ids or ()), *query.opening])
        known = len(answer.lookup) - len(query.prediction) - len(query.source_ids or ()) - len(query.opening)
        answer.lookup.extend(answer.ids[known:])
        most = min(self.most, room)
        found = Draft(*answer.lookup.guess(most))
        texts = self._said.get(query.salt)
        if texts is not None and found.agreed < MOST_AGREED:
            other = Draft(*texts.guess(answer.lookup.end, most))
            found = other if other.agreed > found.agreed else found
        forced = [] if answer.chooser is None else answer.chooser.forced()[:most]
        return Draft(forced, FORCED) if forced != found.tokens[: len(forced)] else found

    def _counts(self, guesses: dict[int, Draft], rows: int, beside: int) -> dict[int, int]:
        """How many tokens of which guesses to feed, beside `rows` rows that are fed anyway.

        A token counts by the chance that it and all before it are right. The likeliest are fed, as many as give most
        tokens for the time that the step is expected to take.
        """
        chances = []
        for number, guess in guesses.items():
            chance = 1.0
            for place in range(len(guess.tokens)):
                chance *= self.odds.of(guess.ground(place))
                chances.append((chance, number))
        chances.sort(key=lambda each: -each[0])
        expected, best, taken = float(rows), _GAIN * rows / self._cost(rows, beside), 0
        for place, (chance, _) in enumerate(chances[: MOST_ROWS - rows]):
            expected += chance
            worth = expected / self._cost(rows + place + 1, beside)
            if worth > best:
                best, taken = worth, place + 1
        if not taken:
            self._passed += 1
            taken = self._passed % _TRY_EVERY == 0
        counts: dict[int, int] = {}
        for _, number in chances[:taken]:
            counts[number] = counts.get(number, 0) + 1
        return counts

    def _cost(self, rows: int, beside: int) -> float:
        return float(rows + beside) if beside else self.pace.of(rows)


class Odds:
    """How often a token is right that was guessed where so many before it agreed, or that is FORCED.

    >>> odds = Odds()
    >>> odds.of(2) < odds.of(8) < 1
    True
    >>> before = odds.of(8)
    >>> odds.tried(8, True)
    >>> odds.of(8) > before
    True
    """

    def __init__(self) -> None:
        self._tried = [4.0] * (MOST_AGREED + 1)
        self._right = [4.0 * agreed / (agreed + 2) for agreed in range(MOST_AGREED + 1)]
        self._right[FORCED] = 3.8

    def of(self, agreed: int) -> float:
        """The chance."""
        at = min(agreed, MOST_AGREED)
        return self._right[at] / self._tried[at]

    def tried(self, agreed: int, right: bool) -> None:
        """One was tried."""
        at = min(agreed, MOST_AGREED)
        self._tried[at] = _MEMORY * self._tried[at] + 1
        self._right[at] = _MEMORY * self._right[at] + right


class Pace:
    """How long steps of so many rows take, those of answers alone.

    What was not seen for some hundreds of steps is not known any more: texts get longer, and one slow step must not
    keep all others of its size from being tried.

    >>> pace = Pace()
    >>> pace.took(1, 0.010)
    >>> pace.took(5, 0.014)
    >>> round(pace.of(3), 3), pace.of(9) > 0.014
    (0.012, True)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, int]] = {}  # rows -> seconds, the last step of them; that was oldest first
        self._steps = 0

    def took(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._steps += 1
        before, _ = self._known.pop(rows, (seconds, 0))
        self._known[rows] = before + _LATEST * (seconds - before), self._steps
        oldest, (_, last) = next(iter(self._known.items()))
        if last + _KNOWN_STEPS < self._steps:
            del self._known[oldest]

    def of(self, rows: int) -> float:
        """Seconds of such a step: measured, between two that were, or by the nearest; of any unit where none was."""
        known = self._known
        if rows in known:
            return known[rows][0]
        below = max((each for each in known if each < rows), default=0)
        above = min((each for each in known if each > rows), default=0)
        if below and above:
            return known[below][0] + (known[above][0] - known[below][0]) * (rows - below) / (above - below)
        near = below or above
        return (known[near][0] / _guessed(near) if near else 1.0) * _guessed(rows)


def _guessed(rows: int) -> float:
    return 1 + _ROW * (rows - 1)


def _may_draft(query: Query, answer: Answer) -> bool:
    """Whether all that an answer says is decided row by row, of a text that does not slide."""
    by_rows = query.search is None and not query.by_caller and not query.whole
    return by_rows and not query.unborn and answer.window is None and answer.row is None
