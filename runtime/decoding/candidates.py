"""A row of a step's output, and the tokens of it that a strategy chooses from.

The step returns its likeliest tokens, so that most strategies never look at the whole vocabulary: `candidates_of_top`
takes them, and says how much probability the others can have; where that leaves a strategy in doubt, it gets
`candidates_of_all`. Letters: V vocabulary, K likeliest tokens that the step returns, n candidates, m changed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.decoding.penalties import Penalties
from llmc.runtime.decoding.temperature import weights
from llmc.runtime.decoding.top_k import top_k
from llmc.runtime.errors import RequestError

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_TOP = 64  # likeliest tokens that a compiled step returns
_DOUBT, _DOUBT_EACH = 1e-5, 2**-28  # of all weights: a float32 logarithm, and sums of a 16th of the tokens in float32
_SOME = 1e-300  # for a weight too small for float64, so that what is left out is not forgotten
_FAR = 600.0  # logits; exp of more would be near the end of float64


@dataclass(frozen=True)
class Row:
    """What a step says of the next token of one sequence.

    ids (K,) int32 and values (K,) float32: the likeliest, best first, of equal ones the lower id first; normalizer: the
    logarithm of the sum of exp(logits). read: gives all `vocab` logits, which may have to be fetched.
    """

    vocab: int
    read: Callable[[], NDArray[np.float32]]
    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    normalizer: float

    @cached_property
    def logits(self) -> NDArray[np.float32]:
        """(V,): a view of the step's, or a copy where these are elsewhere."""
        return self.read()

    def logit(self, token: int) -> float:
        """A token's: of one of the likeliest without fetching all."""
        likeliest = self.ids.tolist()
        return float(self.values[likeliest.index(token)] if token in likeliest else self.logits[token])

    @classmethod
    def of(cls, logits: NDArray[np.float32], top: int = _TOP) -> Row:
        """The row of these logits (V,), computed here."""
        ids = top_k(logits, min(top, logits.size))
        most = float(logits.max())
        normalizer = most + float(np.log(weights(logits, 1.0).sum()))
        return cls(logits.size, lambda: logits, ids.astype(np.int32), logits[ids], normalizer)


class Candidates(NamedTuple):
    """ids (n,) and their logits (n,) float64, best first; no token is left out that is better than the last.

    least, most: bounds of the weight that all tokens left out have together, where a token's weight is
    exp((logit - logits[0]) / temperature), for the temperature that they were made for.
    """

    ids: I64
    logits: F64
    least: float = 0.0
    most: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether no token is left out that could be chosen."""
        return self.most == 0

    def first(self, count: int) -> Candidates:
        """The best of them, and nothing else."""
        return Candidates(self.ids[:count], self.logits[:count])


def candidates_of_top(
    row: Row, penalties: Penalties, temperature: float = 1.0, shift: float = 0.0, enough: int = 0
) -> Candidates:
    """Candidates among the step's likeliest tokens and those that are changed; there may be none.

    shift: what is taken from each logit first, as a beam search does with the normalizer. enough: so many, if there are
    as many, are all that there shall be; 0 for no such number.
    """
    whole = row.ids.size == row.vocab
    if len(penalties):
        changed = penalties.change(row.logits[penalties.ids].astype(np.float64) - shift)
        above = changed > (-np.inf if whole else float(row.values[-1]) - shift)
        found = _merge(row, penalties, changed, above, shift)
        below = changed[~above]
    else:
        found, below = _unchanged(row, shift), np.zeros(0)
    if 0 < enough <= found.ids.size:
        return found.first(enough)
    if whole or not found.ids.size:
        return found
    best = float(found.logits[0])
    least, most = _others(row, penalties, below - best, best + shift, temperature)
    return Candidates(found.ids, found.logits, least, max(_SOME, most))


def candidates_of_all(
    row: Row, penalties: Penalties, count: int, temperature: float = 1.0, shift: float = 0.0
) -> Candidates:
    """The `count` best of the whole vocabulary, with the exact weight of the others; tokens at -inf are left out."""
    changed = changed_logits(row, penalties, shift) if len(penalties) or shift else row.logits
    ids = top_k(changed, min(count, changed.size))
    ids = ids[changed[ids] > -np.inf]
    logits = changed[ids].astype(np.float64)
    if ids.size < count or ids.size == changed.size:
        return Candidates(ids, logits)
    weight = weights(changed, temperature, float(logits[0]))
    others = max(_SOME, float(weight.sum() - weight[ids].sum()))
    return Candidates(ids, logits, others, others)


def changed_logits(row: Row, penalties: Penalties, shift: float = 0.0) -> F64:
    """All logits (V,) in float64, less `shift`, the changed ones changed. RequestError if no token is left."""
    logits = row.logits.astype(np.float64) - shift
    logits[penalties.ids] = penalties.change(logits[penalties.ids])
    if logits.max() == -np.inf:
        raise RequestError("banned: no token is left that may be chosen")
    return logits


def _unchanged(row: Row, shift: float) -> Candidates:
    """The step's likeliest, less those at -inf."""
    ids, logits = row.ids.astype(np.int64), row.values.astype(np.float64) - shift
    if row.values[-1] > -np.inf:
        return Candidates(ids, logits)
    possible = row.values > -np.inf
    return Candidates(ids[possible], logits[possible])


def _merge(row: Row, penalties: Penalties, changed: F64, above: NDArray[np.bool_], shift: float) -> Candidates:
    """The step's likeliest that are not changed, and those of the changed (m,) that `above` marks."""
    unchanged = _unchanged(row, shift)
    kept = penalties.places(unchanged.ids.tolist()) < 0
    ids = np.concatenate([unchanged.ids[kept], penalties.ids[above]])
    logits = np.concatenate([unchanged.logits[kept], changed[above]])
    order = np.lexsort((ids, -logits))
    return Candidates(ids[order], logits[order])


def _others(row: Row, penalties: Penalties, below: F64, best: float, temperature: float) -> tuple[float, float]:
    """Bounds of the weight of the tokens that are no candidates. `below`: the changed ones of them, less the best.

    The tokens that the step did not list have a known weight together at temperature 1, `mass`, and none of them is
    above the floor. At temperature t each weight is raised to the power a = 1 / t. Where a > 1 their sum is greatest if
    few tokens have all of the mass, mass * floor ** (a - 1), and least if all have as much (Jensen's inequality); where
    a < 1 it is the other way round.
    """
    listed = np.exp(row.values.astype(np.float64) - row.normalizer).sum()
    share, count = 1.0 - float(listed), row.vocab - row.ids.size  # of the probability by the model itself
    if len(penalties):
        unlisted = penalties.besides(row.ids.tolist())
        share -= float(np.exp(row.logits[unlisted].astype(np.float64) - row.normalizer).sum())
        count -= unlisted.size
    if row.normalizer - best > _FAR:
        return 0.0, np.inf
    everything = math.exp(row.normalizer - best)
    floor = math.exp(float(row.values[-1]) - best)
    doubt = _DOUBT + _DOUBT_EACH * row.vocab
    least = min(_raised(max(0.0, share - doubt) * everything, floor, count, 1 / temperature))
    most = max(_raised((max(0.0, share) + doubt) * everything, floor, count, 1 / temperature))
    extra = float(weights(below, temperature, 0.0).sum()) if below.size else 0.0
    return least + extra, most + extra


def _raised(mass: float, floor: float, count: int, power: float) -> tuple[float, float]:
    """The two bounds of the sum of w ** power over `count` numbers w in [0, floor] whose sum is `mass`."""
    if not mass or not count or not floor:
        return 0.0, 0.0
    return mass * floor ** (power - 1), count * min(floor, mass / count) ** power
