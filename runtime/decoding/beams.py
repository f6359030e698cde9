"""Beam search as a pure function: rows of the live beams in, the next live beams out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llmc.runtime.decoding.candidates import Row, candidates_of_all, candidates_of_top
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.penalties import Penalties


@dataclass(frozen=True)
class Live:
    """A beam to go on with: append `token` to a fork of the beam that was number `parent` in the step before.

    ids: of the answer so far, `token` included. score: the sum of their log-probabilities.
    """

    parent: int
    token: int
    ids: tuple[int, ...]
    score: float
    penalties: Penalties


@dataclass(frozen=True)
class Found:
    """An answer: its ids, the end token included if it has one; score: what the search ranks by."""

    ids: tuple[int, ...]
    score: float
    ended: bool  # by an end token


@dataclass(frozen=True)
class BeamSearch:
    """A search between two steps. `live`: the beams to feed, one at first (its token is none: the prompt was fed).

    The engine prefills the prompt once, calls `after` with the row of each live beam, forks `live[i].parent`, drops
    those without children, feeds `live[i].token`, and so on until `done`. Equals transformers' num_beams: an answer is
    one of the best `beams` continuations of a step that ended, and its score is divided by its length to the power of
    length_penalty (https://arxiv.org/abs/1609.08144 section 7 has it with another curve).
    """

    live: tuple[Live, ...]
    found: tuple[Found, ...]  # best first, at most `beams`
    done: bool
    options: Options
    limit: int
    ends: frozenset[int]
    forced: int

    @classmethod
    def start(
        cls, options: Options, prompt: Sequence[int], vocab: int, limit: int, ends: Iterable[int] = (),
        suppressed: Iterable[int] = (), forced: int = 0,
    ) -> BeamSearch:  # fmt: skip
        """The search before its first step.

        limit: tokens of an answer at most, by max_tokens and by the context. ends: the end tokens, none if they are
        ignored. forced: tokens at the end of the prompt that count as part of the answer's length. Raises RequestError
        for ids that the vocabulary lacks.
        """
        ends = frozenset(ends)
        penalties = Penalties(options, prompt, vocab, ends, suppressed)
        return cls((Live(0, -1, (), 0.0, penalties),), (), False, options, limit, ends, forced)

    def after(self, rows: Sequence[Row]) -> BeamSearch:
        """The search after a step that gave `rows`, one for each of `live`."""
        beams = self.options.beams
        best = self._best(rows, beams * max(2, 1 + len(self.ends)))
        length = len(self.live[0].ids) + 1
        full = length >= self.limit
        live = [_said(beam) for beam in [b for b in best if not full and b.token not in self.ends][:beams]]
        ended = [beam for beam in best[:beams] if full or beam.token in self.ends]
        found = self._merged(ended, length + self.forced)
        done = not live or not self._worth_going_on(live[0].score, found, length + self.forced)
        return replace(self, live=tuple(live), found=found, done=done)

    def best(self, count: int) -> list[Found]:
        """The best answers, best first, once `done`."""
        return list(self.found[:count])

    def _best(self, rows: Sequence[Row], count: int) -> list[Live]:
        """The `count` best continuations of all live beams, best first."""
        grown = []
        for parent, (beam, row) in enumerate(zip(self.live, rows, strict=True)):
            likeliest = candidates_of_top(row, beam.penalties, shift=row.normalizer, enough=count)
            if len(likeliest.ids) < count and not likeliest.whole:
                likeliest = candidates_of_all(row, beam.penalties, count, shift=row.normalizer)
            pairs = zip(likeliest.ids[:count].tolist(), likeliest.logits[:count].tolist(), strict=True)
            grown += [(beam.score + logprob, parent, token) for token, logprob in pairs]
        grown.sort(key=lambda each: (-each[0], each[1], each[2]))
        return [
            Live(parent, token, (*self.live[parent].ids, token), score, self.live[parent].penalties)
            for score, parent, token in grown[:count]
        ]

    def _merged(self, ended: Sequence[Live], length: int) -> tuple[Found, ...]:
        """The best answers so far, those that have ended now among them."""
        beams, penalty = self.options.beams, _length_penalty(self.options)
        new = [Found(beam.ids, beam.score / length**penalty, beam.token in self.ends) for beam in ended]
        return tuple(sorted([*self.found, *new], key=lambda each: -each.score)[:beams])

    def _worth_going_on(self, best_score: float, found: Sequence[Found], length: int) -> bool:
        """Whether a live beam can still become one of the answers; by the usual guess, unless it is to be "never"."""
        if len(found) < self.options.beams:
            return True
        if self.options.early_stopping == "yes":
            return False
        penalty = _length_penalty(self.options)
        longest = self.options.early_stopping == "never" and penalty > 0
        reach = best_score / float(self.limit + self.forced if longest else length) ** penalty
        return reach > found[-1].score


def _said(beam: Live) -> Live:
    """The beam with its token counted by its penalties."""
    penalties = beam.penalties.copy()
    penalties.accept(beam.token)
    return replace(beam, penalties=penalties)


def _length_penalty(options: Options) -> float:
    return 1.0 if options.length_penalty is None else options.length_penalty
