"""Sampling: the candidates that are left after each rule in turn, and the draw among them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.decoding.candidates import Candidates
from llmc.runtime.decoding.min_p import min_p
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.tail_free import tail_free
from llmc.runtime.decoding.temperature import draw, weights
from llmc.runtime.decoding.top_p import top_p
from llmc.runtime.decoding.typical import typical

F64 = NDArray[np.float64]
Rule = Callable[[F64], int]  # sorted probabilities -> how many of the first stay


def cuts(options: Options, vocab: int) -> bool:
    """Whether any rule can leave a token out."""
    rules = (options.min_p, options.typical_p, options.tail_free, options.max_k)
    pooled = bool(options.top_k) and options.top_k < vocab  # type: ignore[operator]  # not None there
    return pooled or (options.top_p is not None and options.top_p < 1) or any(rule is not None for rule in rules)


def pool(candidates: Candidates, k: int | None) -> Candidates | None:
    """The top k; all of them for None and 0. None where candidates are too few to say."""
    if not k:
        return candidates
    if len(candidates.ids) >= k:
        return candidates.first(k)
    return candidates if candidates.whole else None


def kept(candidates: Candidates, options: Options) -> Candidates | None:
    """Those that are left after top_k, top_p, min_p, typical_p, tail_free and max_k, in this order.

    After each rule the probabilities sum to 1 again, as in transformers. None where the candidates are not enough to
    say; the answer for a whole vocabulary is never None, and no answer differs from that one.
    """
    assert options.temperature is not None
    left = pool(candidates, options.top_k)
    p, least, typical_p, z = options.top_p, options.min_p, options.typical_p, options.tail_free
    if p is not None and p < 1:
        left = _cut(left, lambda probabilities: top_p(probabilities, p), options.temperature)
    if least is not None and least > 0:
        left = _cut(left, lambda probabilities: min_p(probabilities, least), options.temperature)
    if typical_p is not None and left is not None:
        if not left.whole:
            return None
        stay = typical(probabilities(left, options.temperature), typical_p)
        left = Candidates(left.ids[stay], left.logits[stay])
    if z is not None and left is not None:
        if not left.whole:
            return None
        left = left.first(tail_free(probabilities(left, options.temperature), z))
    if options.max_k is not None and left is not None:
        left = pool(left, options.max_k)
    return left if left is not None and left.whole else None


def probabilities(candidates: Candidates, temperature: float, others: float = 0.0) -> F64:
    """Probabilities (n,) of the candidates, if the tokens that are left out have the weight `others` together."""
    weight = weights(candidates.logits, temperature)
    return np.asarray(weight / (weight.sum() + others))


def sample(candidates: Candidates, temperature: float, uniform: float) -> int:
    """The token that a number in [0, 1) stands for, among candidates that are all there are."""
    return int(candidates.ids[draw(probabilities(candidates, temperature), uniform)])


def _cut(candidates: Candidates | None, rule: Rule, temperature: float) -> Candidates | None:
    """The candidates that a rule leaves, if it leaves the same for all weights that the other tokens can have."""
    if candidates is None or candidates.most == np.inf:
        return None
    count = rule(probabilities(candidates, temperature, candidates.least))
    if candidates.whole:
        return candidates.first(count)
    sure = count < len(candidates.ids) and count == rule(probabilities(candidates, temperature, candidates.most))
    return candidates.first(count) if sure else None
