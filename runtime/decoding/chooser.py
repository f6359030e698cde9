"""Chooses the tokens of one sequence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmc.runtime.decoding import chain
from llmc.runtime.decoding.candidates import Candidates, Row, candidates_of_all, candidates_of_top, changed_logits
from llmc.runtime.decoding.fsd import AntiModel, fsd
from llmc.runtime.decoding.mirostat import mirostat, next_mu
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.penalties import Penalties
from llmc.runtime.decoding.temperature import draw, weights
from llmc.runtime.errors import LlmcError, RequestError

if TYPE_CHECKING:
    from llmc.runtime.decoding.grammar import Grammar

_WIDE = 2048  # of a large vocabulary: candidates to try before all of it is sorted


class Choice(NamedTuple):
    """A token with its log-probability by the model's own logits, and the `logprobs` likeliest with theirs.

    probability: of the token where a strategy keeps account of it (mirostat), before its cut.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    probability: float = 1.0


class Chooser:
    """Chooses the tokens of one sequence: `choose`, then `accept`, for each.

    `choose` has no side effects, so a step can be repeated: the same row gives the same choice until one is accepted.
    prompt: ids that penalties and n-grams count as said. ends: the end tokens, barred before min_tokens. suppressed:
    never chosen. sample: which of n; it adds to the seed. grammar: what the answer is to match. Raises RequestError for
    ids that the vocabulary lacks.
    """

    def __init__(
        self, options: Options, prompt: Sequence[int], vocab: int, ends: Iterable[int] = (),
        suppressed: Iterable[int] = (), sample: int = 0, grammar: Grammar | None = None,
    ) -> None:  # fmt: skip
        self._options = options
        self._vocab = vocab
        self._grammar = grammar
        self._penalties = Penalties(options, prompt, vocab, ends, suppressed)
        seed = None if options.seed is None else (options.seed + sample) % 2**64
        self._random = None if options.kind in ("greedy", "fsd") else np.random.Generator(np.random.PCG64(seed))
        self._drawn: list[float] = []  # chances of the next token: they stay until it is accepted
        self._said = 0
        self._mu = 2 * options.mirostat_tau if options.mirostat_tau is not None else 0.0
        self._anti = None if options.fsd_n is None else AntiModel(options.fsd_n, prompt)

    @property
    def is_plain(self) -> bool:
        """Whether it chooses the greatest logit of every row there is, whatever was said."""
        return self._options.kind == "greedy" and self._grammar is None and not len(self._penalties)

    @property
    def draws(self) -> bool:
        """Whether chance has a part in its choices."""
        return self._random is not None

    def guesser(self) -> Chooser | None:
        """A copy that foretells choices by the rows of another model; None where the greatest logit says as much."""
        return None if self.is_plain or self._options.kind not in ("greedy", "sample") else self.copy()

    def choose(self, row: Row) -> Choice:
        """The next token. Raises LlmcError for logits that are not finite, RequestError if all tokens are banned."""
        if not math.isfinite(row.normalizer) or not math.isfinite(row.values[0]):
            raise LlmcError(
                "the model computed logits that are not finite; its weights may be damaged or not fit its spec"
            )
        kind = self._options.kind
        if kind == "random_fsd":
            kind = "sample" if self._by_chance() else "fsd"
        pick = {"greedy": self._greedy, "sample": self._sample, "mirostat": self._mirostat, "fsd": self._fsd}[kind]
        token, probability = pick(row if self._grammar is None else self._grammar.allowed(row))
        return Choice(token, self._logprob(row, token), self._top(row), probability)

    def of(self, row: Row, token: int) -> Choice:
        """The choice of a token that someone else chose. Raises RequestError for one that is none."""
        if not 0 <= token < self._vocab:
            raise RequestError(f"token: got {token}, wanted 0..{self._vocab - 1}")
        logprob = self._logprob(row, token)
        return Choice(token, logprob, self._top(row), max(math.exp(logprob), math.ulp(0.0)))

    def forced(self) -> list[int]:
        """Tokens that the form of the answer leaves hardly a choice but to take next."""
        return [] if self._grammar is None else self._grammar.forced()

    def accept(self, choice: Choice) -> None:
        """Go on after this token."""
        self._said += 1
        self._drawn = []
        self._penalties.accept(choice.token)
        if self._grammar is not None:
            self._grammar.accept(choice.token)
        if self._anti is not None:
            self._anti.append(choice.token)
        options = self._options
        if options.mirostat_tau is not None and options.mirostat_eta is not None:
            self._mu = next_mu(self._mu, choice.probability, options.mirostat_tau, options.mirostat_eta)

    def copy(self) -> Chooser:
        """One that goes on from here by itself, with the same chances."""
        other = copy.copy(self)
        other._penalties = self._penalties.copy()
        other._random, other._anti = copy.deepcopy(self._random), copy.deepcopy(self._anti)
        other._drawn = list(self._drawn)
        other._grammar = None if self._grammar is None else self._grammar.copy()
        return other

    def _greedy(self, row: Row) -> tuple[int, float]:
        if not len(self._penalties):
            return int(row.ids[0]), 1.0
        return self._decided(row, lambda candidates: (int(candidates.ids[0]), 1.0), 1)

    def _sample(self, row: Row) -> tuple[int, float]:
        temperature, uniform = self._temperature, self._chance(1 if self._options.kind == "random_fsd" else 0)
        if not chain.cuts(self._options, self._vocab):  # in the order of ids: nothing has to be sorted
            weight = weights(changed_logits(row, self._penalties), temperature)
            weight /= weight.sum()
            return draw(weight, uniform), 1.0

        def pick(candidates: Candidates) -> tuple[int, float] | None:
            left = chain.kept(candidates, self._options)
            return None if left is None else (chain.sample(left, temperature, uniform), 1.0)

        return self._decided(row, pick, self._options.top_k or 0)

    def _mirostat(self, row: Row) -> tuple[int, float]:
        uniform = self._chance(0)

        def pick(candidates: Candidates) -> tuple[int, float] | None:
            left = chain.pool(candidates, self._options.top_k)
            if left is None or not left.whole:
                return None
            probabilities = chain.probabilities(left, self._temperature)
            at = draw(probabilities[: mirostat(probabilities, self._mu)], uniform)
            return int(left.ids[at]), float(probabilities[at])

        return self._decided(row, pick, self._options.top_k or 0)

    def _fsd(self, row: Row) -> tuple[int, float]:
        assert self._anti is not None
        anti, (k, alpha, beta) = self._anti, self._fsd_numbers

        def pick(candidates: Candidates) -> tuple[int, float] | None:
            left = chain.pool(candidates, self._options.top_k)
            if left is None or not (left.whole or len(left.ids) >= k) or left.most == np.inf:
                return None
            scores = np.array([anti.score(token, beta) for token in left.ids[:k].tolist()])
            likely = (chain.probabilities(left, self._temperature, most)[:k] for most in (left.least, left.most))
            places = {fsd(probabilities, scores, alpha) for probabilities in likely}
            return (int(left.ids[places.pop()]), 1.0) if len(places) == 1 else None

        return self._decided(row, pick, self._options.top_k or 0)

    def _decided(
        self, row: Row, pick: Callable[[Candidates], tuple[int, float] | None], enough: int
    ) -> tuple[int, float]:
        """What `pick` says of the step's likeliest tokens or, where these are not enough, of more and then of all."""
        candidates = candidates_of_top(row, self._penalties, self._temperature, enough=enough)
        found = pick(candidates) if candidates.ids.size else None
        for count in (max(_WIDE, self._options.top_k or 0), row.vocab):
            if found is None:
                found = pick(candidates_of_all(row, self._penalties, count, self._temperature))
        assert found is not None
        return found

    @property
    def _temperature(self) -> float:
        return self._options.temperature or 1.0

    @property
    def _fsd_numbers(self) -> tuple[int, float, float]:
        k, alpha, beta = self._options.fsd_k, self._options.fsd_alpha, self._options.fsd_beta
        assert k is not None
        assert alpha is not None
        assert beta is not None
        return k, alpha, beta

    def _by_chance(self) -> bool:
        tokens, share = self._options.fsd_random_tokens, self._options.fsd_random_share
        assert tokens is not None
        assert share is not None
        return self._said < tokens and self._chance(0) < share

    def _chance(self, number: int) -> float:
        """Number 0, 1, ... of the next token's chances, in [0, 1)."""
        assert self._random is not None
        while len(self._drawn) <= number:
            self._drawn.append(float(self._random.random()))
        return self._drawn[number]

    def _logprob(self, row: Row, token: int) -> float:
        return row.logit(token) - row.normalizer

    def _top(self, row: Row) -> tuple[tuple[int, float], ...]:
        count = self._options.logprobs
        if not count:
            return ()
        likeliest = zip(row.ids[:count].tolist(), row.values[:count].tolist(), strict=True)
        return tuple((id_, value - row.normalizer) for id_, value in likeliest)
