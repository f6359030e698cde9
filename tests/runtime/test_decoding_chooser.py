"""The chooser of one sequence: draws, penalties, hand-worked strategies, and that choosing alone changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.decoding.candidates import Row, candidates_of_all
from llmc.runtime.decoding.chain import kept, probabilities
from llmc.runtime.decoding.chooser import Choice, Chooser
from llmc.runtime.decoding.fsd import AntiModel
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.penalties import Penalties
from llmc.runtime.errors import LlmcError, RequestError

Logits = NDArray[np.float32]

EACH = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9},
    {"strategy": "top_k"},
    {"strategy": "top_p"},
    {"strategy": "min_p", "temperature": 1.5},
    {"strategy": "tfs", "temperature": 2.0},
    {"strategy": "typical"},
    {"strategy": "sample", "banned": [3, 4], "logit_bias": {5: 2.0}},
]


def logits_of(*shares: float) -> Logits:
    """Logits (V,) of these probabilities, up to their sum."""
    return np.log(np.array(shares)).astype(np.float32)


def say(chooser: Chooser, rows: list[Row]) -> list[int]:
    said = []
    for row in rows:
        choice = chooser.choose(row)
        chooser.accept(choice)
        said.append(choice.token)
    return said


def rows(count: int, vocab: int = 300, seed: int = 0, scale: float = 3.0) -> list[Row]:
    random = np.random.default_rng(seed)
    return [Row.of((random.standard_normal(vocab) * scale).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("rules", EACH, ids=str)
def test_draws_follow_the_distribution(rules: dict[str, Any]) -> None:
    """Chi-square of 5,000 draws; the 0.9999 quantile of 11 degrees of freedom is 37.4. `kept` has tests of its own."""
    row = Row.of(np.random.default_rng(0).standard_normal(12).astype(np.float32) * 2)
    options = Options(seed=1, **rules)
    left = kept(candidates_of_all(row, Penalties(options, (), 12, (), ()), 12, options.temperature or 1.0), options)
    assert left is not None
    wanted = np.zeros(12)
    wanted[left.ids] = probabilities(left, options.temperature or 1.0)
    count = 5000
    drawn = np.bincount(say(Chooser(options, (), 12), [row] * count), minlength=12)
    possible = wanted > 0
    assert not drawn[~possible].any()
    expected = wanted[possible] * count
    assert float(((drawn[possible] - expected) ** 2 / expected).sum()) < 37.4


SAID = [
    ({"temperature": 1.0}, [1848, 2800, 298, 2979, 1065, 1270, 2135, 1065, 1775]),
    ({"temperature": 0.7, "top_k": 40}, [2488, 2502, 1688, 510, 760, 33, 2135, 2012, 1775]),
    ({"temperature": 0.8, "top_p": 0.9}, [2522, 2502, 387, 1848, 1229, 213, 2135, 2012, 1775]),
    ({"temperature": 1.3, "top_k": 100, "top_p": 0.95}, [1403, 2849, 796, 510, 2875, 33, 2749, 396, 2766]),
]


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_says_what_it_always_said(seed: int) -> None:
    rules, said = SAID[seed]
    assert say(Chooser(Options(seed=seed + 1, **rules), (), 3000), rows(9, 3000, 5)) == said  # type: ignore[arg-type]


def test_greedy_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    row = Row.of(np.array([0, 3, 1, 3], np.float32))
    for options in (Options(), Options(temperature=0), Options(temperature=0.0, top_k=3, top_p=0.5)):
        assert Chooser(options, (), 4).choose(row).token == 1
    assert Chooser(Options(strategy="sample.greedy", banned=[1]), (), 4).choose(row).token == 3


@pytest.mark.parametrize("strategy", ["sample", "mirostat", "random_fsd", "fsd"])
def test_choosing_has_no_side_effects_and_copies_go_their_own_way(strategy: str) -> None:
    options = Options(strategy=strategy, seed=None if strategy == "fsd" else 3, repetition_penalty=1.2)
    steps = rows(15)
    calm, busy = Chooser(options, [1, 2, 3], 300), Chooser(options, [1, 2, 3], 300)
    for row in steps[:5]:
        choice = calm.choose(row)
        for other in (*steps, row):  # a failed step, then others in its place
            again = busy.choose(other)
        assert again == choice
        calm.accept(choice)
        busy.accept(again)
    fork = busy.copy()
    wanted = say(calm, steps[5:])
    assert say(fork, steps[5:]) == wanted
    assert say(busy, steps[5:]) == wanted


def test_a_seed_is_one_text_and_samples_differ() -> None:
    steps = rows(20)

    def text(seed: int | None, sample: int = 0) -> list[int]:
        return say(Chooser(Options(temperature=2.0, seed=seed), (), 300, sample=sample), steps)

    assert text(7) == text(7)
    assert text(7) != text(8)
    assert text(7, sample=1) == text(8)
    assert text(2**64 - 1, sample=1) == text(0)
    assert text(None) != text(None)


def test_penalties_are_those_of_their_definition() -> None:
    """In this order: bias, repetition (of the prompt too), presence and frequency (of the answer), bans."""
    logits = np.array([2.0, -1.0, 4.0, 0.5, 1.0, 3.0], np.float32)
    options = Options(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={2: -1.0, 5: 1.0}, banned=[4]
    )
    penalties = Penalties(options, [1, 2], 6, (), ())
    for token in (2, 3, 2):
        penalties.accept(token)
    changed = dict(zip(penalties.ids.tolist(), penalties.change(logits[penalties.ids]).tolist(), strict=True))
    assert changed == {
        1: -2.0,  # of the prompt: -1 * 2
        2: (4 - 1) / 2 - 0.25 - 2 * 0.5,
        3: 0.5 / 2 - 0.25 - 0.5,
        4: -np.inf,
        5: 4.0,
    }


def test_many_said_tokens() -> None:
    prompt = list(range(0, 2000, 3))
    logits = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    penalties = Penalties(Options(repetition_penalty=1.5), prompt, 2000, (), ())
    wanted = logits.astype(np.float64)
    wanted[prompt] = np.where(wanted[prompt] < 0, wanted[prompt] * 1.5, wanted[prompt] / 1.5)
    assert sorted(penalties.ids.tolist()) == prompt
    assert penalties.change(logits[penalties.ids]).tolist() == wanted[penalties.ids].tolist()


def test_end_tokens_wait_for_min_tokens() -> None:
    row = Row.of(logits_of(0.1, 0.6, 0.2, 0.1))
    assert say(Chooser(Options(min_tokens=2), (), 4, ends=[1]), [row] * 4) == [2, 2, 1, 1]
    assert say(Chooser(Options(min_tokens=2), (), 4, ends=[1], suppressed=[2]), [row] * 3) == [0, 0, 1]


def test_tokens_that_are_none() -> None:
    with pytest.raises(RequestError, match="token 4 is none"):
        Chooser(Options(banned=[4]), (), 4)
    with pytest.raises(RequestError, match="token 9 is none"):
        Chooser(Options(logit_bias={9: 1.0}), (), 4)
    for rules in ({"banned": [0, 1, 2, 3]}, {"banned": [0, 1, 2], "min_tokens": 1}):
        with pytest.raises(RequestError, match="no token is left"):
            Chooser(Options(**rules), (), 4, ends=[3])  # type: ignore[arg-type]
    row = Row.of(np.array([0.0, -np.inf], np.float32))
    for options in (Options(banned=[0]), Options(banned=[0], temperature=1.0), Options(banned=[0], strategy="fsd")):
        with pytest.raises(RequestError, match="no token is left"):
            Chooser(options, (), 2).choose(row)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers(bad: float) -> None:
    logits = np.full(5, bad, np.float32)
    with pytest.raises(LlmcError, match="not finite"):
        Chooser(Options(), (), 5).choose(Row(5, lambda: logits, np.arange(5, dtype=np.int32), logits, bad))


def test_logprobs_are_of_the_untouched_logits() -> None:
    row = Row.of(logits_of(1, 2, 4, 1))
    options = Options(logprobs=2, temperature=0.1, logit_bias={0: 1e4}, repetition_penalty=5.0, seed=0)
    choice = Chooser(options, [2], 4).choose(row)
    assert choice.token == 0
    assert choice.logprob == pytest.approx(math.log(1 / 8))
    assert [id_ for id_, _ in choice.top] == [2, 1]
    assert [logprob for _, logprob in choice.top] == pytest.approx([math.log(4 / 8), math.log(2 / 8)])
    chooser = Chooser(Options(logprobs=0), (), 4)
    assert chooser.choose(row).top == ()
    assert chooser.of(row, 3).logprob == pytest.approx(math.log(1 / 8))
    with pytest.raises(RequestError, match="token: got 4"):
        chooser.of(row, 4)


def test_the_anti_model_by_hand() -> None:
    """Text a b a b a, orders up to 3. After "b a" came b once; after "a" b twice; alone: a 3 times of 5, b 2 of 5."""
    a, b, c = 0, 1, 2
    anti = AntiModel(3, [a, b, a, b, a])
    left = 1 - 0.9
    assert anti.score(b, 0.9) == pytest.approx(0.9 * 1 / 2 + left * 0.9 * 2 / 3 + left * left * 2 / 5)
    assert anti.score(a, 0.9) == pytest.approx(3 / 5)  # it never followed these contexts: nothing was used up
    assert anti.score(c, 0.9) == 0
    anti.append(b)
    assert anti.score(a, 0.9) == pytest.approx(0.9 * 2 / 3 + left * 0.9 * 2 / 3 + left * left * 3 / 6)
    assert AntiModel(1, [a, a, b]).score(a, 0.9) == pytest.approx(2 / 3)
    assert AntiModel(3).score(a, 0.9) == 0


def test_fsd_by_hand() -> None:
    """Probabilities .5, .4, .1 after "0 1 0 1", where greedy would say 0.

    0 followed "0 1" once, "1" once, and is half of the text; 1 never followed "1", and is the other half. So the values
    are .25 - .25 = 0 for 0 (to two places), .2 - .25 = -.05 for 1 and .05 for 2.
    """
    row = Row.of(logits_of(0.5, 0.4, 0.1))
    chooser = Chooser(Options(strategy="fsd"), [0, 1, 0, 1], 3)
    anti = AntiModel(3, [0, 1, 0, 1])
    assert anti.score(0, 0.9) == pytest.approx(0.9 * 0.5 + 0.1 * 0.9 * 0.5 + 0.01 * 0.5)
    assert anti.score(1, 0.9) == pytest.approx(0.5)
    assert chooser.choose(row).token == 2
    assert say(Chooser(Options(strategy="fsd", fsd_k=2), [0, 1, 0, 1], 3), [row]) == [0]  # 2 is not among the best two
    assert say(Chooser(Options(strategy="fsd", fsd_alpha=0), [0, 1, 0, 1], 3), [row]) == [0]
    # From nothing: 0 is likeliest; then its own count stands against it.
    assert say(Chooser(Options(strategy="fsd"), [], 3), [row] * 3) == [0, 1, 2]


def test_randomized_fsd_is_random_at_first_only() -> None:
    steps = rows(40, 50, 1)
    options = [Options(strategy="random_fsd", seed=seed) for seed in range(6)]
    texts = [say(Chooser(each, [], 50), steps) for each in options]
    assert len({tuple(text[:10]) for text in texts}) > 1
    for text in texts:
        later = Chooser(Options(strategy="fsd"), text[:10], 50)  # from there it is the plain one
        assert text[10:] == say(later, steps[10:])
    never = Options(strategy="random_fsd", fsd_random_share=0.0, seed=1)
    assert say(Chooser(never, [], 50), steps) == say(Chooser(Options(strategy="fsd"), [], 50), steps)
    always = Options(strategy="random_fsd", fsd_random_share=1.0, fsd_random_tokens=100, seed=1)
    assert len({tuple(say(Chooser(always, [], 50), steps)), tuple(say(Chooser(never, [], 50), steps))}) == 2


def test_mirostat_by_hand() -> None:
    """Surprises 1, 2, 3 and 3 bits, tau 1.5: mu begins at 3 bits, so all may be said."""
    row = Row.of(logits_of(0.5, 0.25, 0.125, 0.125))
    chooser = Chooser(Options(strategy="mirostat", mirostat_tau=1.5001, mirostat_eta=0.5, seed=0), (), 4)
    mu = 3.0002
    for _ in range(40):
        choice = chooser.choose(row)
        surprise = {0: 1.0, 1: 2.0, 2: 3.0, 3: 3.0}[choice.token]
        assert surprise <= mu + 1e-4 or choice.token == 0
        assert choice.probability == pytest.approx(2**-surprise)
        chooser.accept(choice)
        mu -= 0.5 * (surprise - 1.5001)
        assert chooser._mu == pytest.approx(mu)


def test_mirostat_keeps_the_surprise_near_its_target() -> None:
    options = Options(strategy="mirostat", top_k=0, mirostat_tau=4.0, seed=0)
    chooser, surprises = Chooser(options, (), 500), []
    for row in rows(400, 500, 2, scale=2.5):
        choice = chooser.choose(row)
        surprises.append(-choice.logprob / math.log(2))
        chooser.accept(choice)
    assert np.mean(surprises[50:]) == pytest.approx(4.0, abs=0.1)
    free = Chooser(Options(strategy="sample", seed=0), (), 500)
    assert np.mean([-free.choose(row).logprob / math.log(2) for row in rows(400, 500, 2, scale=2.5)]) > 4.8


def test_a_caller_s_token_counts_like_one_s_own() -> None:
    steps = rows(12)
    options = Options(strategy="fsd", repetition_penalty=1.5)
    own, told = Chooser(options, [5], 300), Chooser(options, [5], 300)
    for row in steps[:6]:
        choice = own.choose(row)
        own.accept(choice)
        told.accept(told.of(row, choice.token))
    assert say(own, steps[6:]) == say(told, steps[6:])
    mirostat = Chooser(Options(strategy="mirostat", seed=1), (), 2)
    row = Row.of(np.array([0.0, -1e30], np.float32))
    mirostat.accept(mirostat.of(row, 1))  # which the model all but rules out
    assert isinstance(mirostat.choose(row), Choice)
