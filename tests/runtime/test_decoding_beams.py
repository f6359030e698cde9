"""Beam search against all answers there are, for a model so small that they can be listed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmc.runtime.decoding.beams import BeamSearch
from llmc.runtime.decoding.candidates import Row
from llmc.runtime.decoding.options import Options
from llmc.runtime.errors import RequestError

VOCAB, END, LIMIT = 3, 0, 4


def row(ids: tuple[int, ...], seed: int) -> Row:
    """The model: any logits, the same for the same text."""
    return Row.of(np.random.default_rng([seed, *ids]).standard_normal(VOCAB).astype(np.float32) * 2)


def everything(seed: int, penalty: float, forced: int) -> list[tuple[float, tuple[int, ...]]]:
    """All answers with their scores, best first."""
    answers = {
        ids[: ids.index(END) + 1] if END in ids else ids for ids in itertools.product(range(VOCAB), repeat=LIMIT)
    }
    scored = []
    for ids in answers:
        rows = [row(ids[:place], seed) for place in range(len(ids))]
        total = sum(float(r.logits[id_]) - r.normalizer for r, id_ in zip(rows, ids, strict=True))
        scored.append((total / (len(ids) + forced) ** penalty, ids))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("penalty", "forced"), [(1.0, 0), (0.0, 0), (2.0, 0), (2.0, 3), (-1.0, 1)])
def test_with_enough_beams_it_finds_the_best_of_all(seed: int, penalty: float, forced: int) -> None:
    options = Options(beams=60, length_penalty=penalty, early_stopping="never")
    state = BeamSearch.start(options, (), VOCAB, LIMIT, [END], (), forced)
    steps = 0
    while not state.done:
        state = state.after([row(live.ids, seed) for live in state.live])
        steps += 1
    assert steps <= LIMIT
    found = [(each.score, each.ids) for each in state.best(10)]
    wanted = everything(seed, penalty, forced)[:10]
    assert [ids for _, ids in found] == [ids for _, ids in wanted]
    np.testing.assert_allclose([score for score, _ in found], [score for score, _ in wanted], rtol=1e-6)
    assert all(each.ended == (each.ids[-1] == END) for each in state.best(10))


def test_a_state_is_never_changed() -> None:
    options = Options(beams=3, repetition_penalty=2.0)
    state = BeamSearch.start(options, [1], VOCAB, LIMIT, [END])
    first = state.after([row((), 0)])
    again = state.after([row((), 0)])
    assert [(live.parent, live.token, live.score) for live in first.live] == [
        (live.parent, live.token, live.score) for live in again.live
    ]
    rows = [row(live.ids, 0) for live in first.live]
    assert first.after(rows).found == first.after(rows).found


def test_tokens_that_are_none() -> None:
    with pytest.raises(RequestError, match="token 3 is none"):
        BeamSearch.start(Options(beams=2, banned=[3]), (), VOCAB, LIMIT)
