"""Sampling against its definition in float64, and parameters that make no sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmc.runtime.decoding.sampling import Sampler, Sampling, candidates
from llmc.runtime.errors import RequestError

LOGITS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-30, 30, width=32))


def definition(logits: NDArray[Any], sampling: Sampling) -> NDArray[np.float64]:
    """Probabilities of all tokens, by a full stable sort, token by token."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1)
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[: sampling.top_k or None]
    weights = {i: float(np.exp(scaled[i] - scaled.max())) for i in order}
    total, reached, kept = sum(weights.values()), 0.0, []
    for i in order:
        kept.append(i)
        reached += weights[i] / total
        if sampling.top_p is not None and sampling.top_p < 1 and reached >= sampling.top_p:
            break
    result = np.zeros(len(logits))
    result[kept] = [weights[i] for i in kept]
    return result / result.sum()


@given(
    LOGITS,
    st.floats(0.05, 5),
    st.none() | st.integers(0, 70),
    st.none() | st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_candidates_are_those_of_the_definition(
    logits: NDArray[np.float32], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    ids, probabilities = candidates(logits, sampling)
    found = np.zeros(logits.size)
    found[ids] = probabilities
    wanted = definition(logits, sampling)
    if top_p in (None, 1.0):
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        return
    # A sum that meets top_p to the last bit may keep one token more or less.
    assert abs(np.count_nonzero(found) - np.count_nonzero(wanted)) <= 1
    if (found > 0).tolist() == (wanted > 0).tolist():
        np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=1),
        Sampling(0.7, seed=2),
        Sampling(1.5, top_k=5, seed=3),
        Sampling(1.0, top_p=0.8, seed=4),
        Sampling(2.0, top_k=9, top_p=0.9, seed=5),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """Chi-square of 20,000 draws; 0.9999 quantile of 11 degrees of freedom is 37.4."""
    logits = np.random.default_rng(0).standard_normal(12).astype(np.float32) * 2
    wanted = definition(logits, sampling)
    sampler = Sampler(sampling)
    count = 20_000
    drawn = np.bincount([sampler.next_token(logits, 0) for _ in range(count)], minlength=12)
    possible = wanted > 0
    assert not drawn[~possible].any()
    expected = wanted[possible] * count
    assert float(((drawn[possible] - expected) ** 2 / expected).sum()) < 37.4


def test_greedy_takes_the_step_s_argmax() -> None:
    logits = np.zeros(4, np.float32)
    for sampling in (Sampling(), Sampling(0), Sampling(0.0, top_k=3, top_p=0.5)):
        assert Sampler(sampling).next_token(logits, 3) == 3


def test_one_seed_one_text() -> None:
    logits = np.random.default_rng(1).standard_normal(1000).astype(np.float32)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler.next_token(logits, 0) for _ in range(20)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


def test_edges() -> None:
    logits = np.array([0, 1, np.float32(-np.inf), 1], np.float32)
    assert candidates(logits, Sampling(1.0, top_k=1))[0].tolist() == [1]
    assert candidates(logits, Sampling(1e-300))[1].tolist() == [0, 0.5, 0, 0.5]
    assert candidates(logits, Sampling(1.0, top_p=1e-300))[0].tolist() == [1]
    assert candidates(logits, Sampling(1.0, top_k=2**31 - 1))[0].size == 4
    assert candidates(np.ones(1, np.float32), Sampling(3.0, top_k=5, top_p=0.2))[1].tolist() == [1]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"temperature": 1e9},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2**63},
        {"top_k": 1.5},
        {"top_k": 10**5000},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_p": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": "x"},
    ],
)
def test_parameters_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))) as caught:
        Sampling(**bad)
    assert len(str(caught.value)) < 200
