"""What is learned while steps run, for drafts: how long they take, and how often guesses were right."""

from __future__ import annotations

from llmc.runtime.decoding.lookup import MOST_AGREED

FORCED = 0  # a ground: the form of the answer leaves hardly a choice
_TENTHS = 10
_MODELS = (
    MOST_AGREED + 1
)  # grounds of models: tenths of the chance, and all together, then the same where tokens are drawn
_MEMORY = 0.98  # what is left of earlier trials with each new one
_ROW = 0.12  # what a row adds to a step of one, until it is known
_KNOWN_STEPS = 400  # that what a step takes is known for
_LATEST = 0.2  # share of the latest step in what steps of its size take


def agreed_ground(tokens: int) -> int:
    """The ground of a guess where so many tokens before it agreed with those at another place."""
    return min(tokens, MOST_AGREED)


def chance_ground(chance: float, drawn: bool) -> int:
    """The ground of a token that a draft model gives this chance; drawn: for an answer whose tokens are drawn."""
    return _of_models(drawn) - _TENTHS + min(int(chance * _TENTHS), _TENTHS - 1)


class Odds:
    """How often guesses of a ground are right: FORCED, so many tokens agreed before, or a model gave such a chance.

    >>> odds = Odds()
    >>> odds.of(agreed_ground(2)) < odds.of(agreed_ground(8)) < 1
    True
    >>> before = odds.of(8), odds.of_models(drawn=False)
    >>> odds.tried(8, True)
    >>> odds.of(8) > before[0], odds.of_models(drawn=False) == before[1]
    (True, True)
    """

    def __init__(self) -> None:
        chances = [agreed / (agreed + 2) for agreed in range(MOST_AGREED + 1)]
        chances += 2 * [*((tenth + 0.5) / _TENTHS for tenth in range(_TENTHS)), 0.7]
        chances[FORCED] = 0.95
        self._tried = [4.0] * len(chances)
        self._right = [4.0 * chance for chance in chances]

    def of(self, ground: int) -> float:
        """The chance."""
        return self._right[ground] / self._tried[ground]

    def of_models(self, drawn: bool) -> float:
        """The chance of a token that a draft model is yet to guess."""
        return self.of(_of_models(drawn))

    def tried(self, ground: int, right: bool) -> None:
        """One was tried."""
        by_model = ground >= _MODELS
        for at in (ground, _of_models(ground > _of_models(False))) if by_model else (ground,):
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

    @property
    def known(self) -> bool:
        """Whether any step was timed."""
        return bool(self._known)

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


def _of_models(drawn: bool) -> int:
    return _MODELS + _TENTHS + drawn * (_TENTHS + 1)


def _guessed(rows: int) -> float:
    return 1 + _ROW * (rows - 1)
