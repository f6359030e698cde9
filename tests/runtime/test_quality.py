"""Perplexity and divergence against a slow twin, and the protocol of windows at its edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.loading.manifest import KvLayout
from llmc.runtime.quality import Evaluation, Subject, evaluate, score, score_rows, windows
from llmc.runtime.runner import Output, Runner
from llmc.runtime.text.tokenizer import Tokenizer

VOCAB, CONTEXT = 97, 120  # of reference_step.py
MakeRunner = Callable[..., Runner]


def slow_log_softmax(logits: np.ndarray) -> np.ndarray:
    """(n, V) -> float64 log probabilities, row by row."""
    rows = []
    for row in logits.astype(np.float64):
        rows.append(row - row.max() - math.log(math.fsum(np.exp(row - row.max()))))
    return np.array(rows)


def output(logits: np.ndarray) -> Output:
    return Output.with_best(logits, logits.argmax(-1).astype(np.int32))


def some_ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


@pytest.fixture
def seeded_engine(reference: ModuleType) -> MakeRunner:
    """A function `(seed=0, chunk=512, calls=None) -> Runner` over the NumPy step with weights of that seed."""

    def make(seed: int = 0, chunk: int = 512, calls: list[int] | None = None) -> Runner:
        pool = PagePool(KvLayout(reference.LAYERS, reference.KV_HEADS, reference.HEAD_DIM, "f32"), 512)
        step = reference.make_step(reference.make_weights(seed), pool.layers, calls)
        return Runner(step, pool, VOCAB, CONTEXT, chunk)

    return make


@pytest.fixture
def subject(seeded_engine: MakeRunner, make_tokenizer_json: Callable[..., bytes]) -> Callable[..., Subject]:
    """A function `(**runner) -> Subject` with one token a byte; bos is <s>, which prompts do not begin with."""
    tokenizer = Tokenizer(make_tokenizer_json("byte-level", 259))
    return lambda **runner: Subject(seeded_engine(**runner), tokenizer, 0, False)


# --- windows ---


@given(st.integers(2, 200), st.integers(2, 60), st.sampled_from([None, 7]))
def test_windows_are_the_text_in_order(length: int, size: int, bos: int | None) -> None:
    ids = some_ids(length)
    rows = windows(ids, size, bos)
    taken = size - (bos is not None)
    assert rows.dtype == np.int32
    if bos is not None:
        assert (rows[:, 0] == bos).all()
        rows = rows[:, 1:]
    flat = rows.reshape(-1).tolist()
    assert flat == ids[: len(flat)]
    if length < taken:
        assert rows.shape == (1, length)
    else:
        assert rows.shape[1] == taken
        assert len(ids) - len(flat) < taken


@pytest.mark.parametrize(
    ("length", "bos", "shape"),
    [(2, None, (1, 2)), (8, None, (2, 4)), (11, None, (2, 4)), (3, None, (1, 3)), (8, 5, (2, 4)), (2, 5, (1, 3))],
)
def test_windows_at_the_edges(length: int, bos: int | None, shape: tuple[int, int]) -> None:
    assert windows(some_ids(length), 4, bos).shape == shape


@pytest.mark.parametrize(
    ("ids", "size", "says"), [([], 4, "text: it is empty"), ([1], 4, "text: it is 1 token"), ([1, 2], 1, "window")]
)
def test_what_cannot_be_cut_is_refused(ids: list[int], size: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        windows(ids, size)


# --- numbers ---


@pytest.mark.parametrize("scale", [0.01, 1, 10, 300])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 97), (300, 97), (128, 1000), (3, 70_000)])
def test_scores_are_those_of_the_slow_twin(rows: int, vocab: int, scale: float) -> None:
    """70,000 is more than one block of values, 300 rows of 97 are one, 128 of 1000 are two."""
    random = np.random.default_rng(rows * vocab)
    other = (random.standard_normal((rows, vocab)) * scale + 40).astype(np.float32)
    mine = other + (random.standard_normal((rows, vocab)) * 0.1).astype(np.float32) * np.float32(scale)
    targets = random.integers(0, vocab, rows)
    p, q = slow_log_softmax(other), slow_log_softmax(mine)
    nll, kl = score_rows([output(mine), output(other)], targets)
    tolerance = 1e-6 * max(1, scale)  # a float32 of that size
    np.testing.assert_allclose(nll[0], -q[np.arange(rows), targets], rtol=1e-6, atol=tolerance)
    np.testing.assert_allclose(nll[1], -p[np.arange(rows), targets], rtol=1e-6, atol=tolerance)
    np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-5, atol=tolerance)
    assert (kl >= 0).all()
    alone, nothing = score_rows([output(mine)], targets)
    np.testing.assert_array_equal(alone[0], nll[0])
    assert not nothing.any()


def test_a_model_does_not_diverge_from_itself() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 97)).astype(np.float32)
    nll, kl = score_rows([output(logits), output(logits + 1024)], [3] * 50)
    np.testing.assert_allclose(nll[0], nll[1], atol=1e-3)  # 1024 takes the last bits of the logits
    assert kl.max() < 1e-6
    assert not score_rows([output(logits), output(logits)], [3] * 50)[1].any()


@pytest.mark.parametrize("chunk", [512, 16, 7])
@pytest.mark.parametrize("size", [40, 120])
def test_scores_of_windows_are_those_of_the_whole(
    seeded_engine: MakeRunner, reference: ModuleType, size: int, chunk: int
) -> None:
    calls: list[int] = []
    mine, other = seeded_engine(0, chunk, calls), seeded_engine(1)
    rows = windows(some_ids(250), size)
    nll, comparison = score(mine, rows, other)
    assert comparison is not None
    logs = [
        slow_log_softmax(np.concatenate([reference.whole(reference.make_weights(seed), ids)[:-1] for ids in rows]))
        for seed in (0, 1)
    ]
    targets = rows[:, 1:].reshape(-1)
    places = np.arange(len(targets))
    np.testing.assert_allclose(nll, -logs[0][places, targets], atol=1e-4)
    np.testing.assert_allclose(comparison.nll, -logs[1][places, targets], atol=1e-4)
    kl = (np.exp(logs[1]) * (logs[1] - logs[0])).sum(-1)
    np.testing.assert_allclose(comparison.kl, kl, atol=1e-4)
    np.testing.assert_array_equal(comparison.same, logs[0].argmax(-1) == logs[1].argmax(-1))
    assert max(calls) <= chunk
    for runner in (mine, other):
        assert runner.pool.free_pages == runner.pool.num_pages


def test_few_logits_are_held_at_once(reference: ModuleType) -> None:
    asked: list[int] = []

    def uniform(*arrays: Any) -> tuple[np.ndarray, np.ndarray]:
        asked.append(len(arrays[-1]))
        return np.zeros((len(arrays[-1]), VOCAB), np.float32), np.zeros(len(arrays[-1]), np.int32)

    runner = Runner(uniform, PagePool(KvLayout(1, 1, 8, "f32"), 1024), VOCAB, 1024)
    nll, _ = score(runner, windows(some_ids(1200), 600))
    assert asked == [128, 128, 128, 128, 87] * 2  # the last token of a window is predicted, not read
    np.testing.assert_allclose(np.exp(nll), VOCAB, rtol=1e-6)  # guessing among all tokens


def test_figures_are_what_they_say(subject: Callable[..., Subject]) -> None:
    found = evaluate(subject(), some_ids(250), 50, subject(seed=1))
    other = found.against
    assert other is not None
    figures = found.figures()
    assert (figures["tokens"], figures["windows"], figures["text_tokens"]) == (5 * 49, 5, 250)
    assert figures["perplexity"] == pytest.approx(math.exp(math.fsum(found.nll) / 245), rel=1e-12)
    assert figures["perplexity_ratio"] == pytest.approx(figures["perplexity"] / figures["against_perplexity"])
    assert figures["kl"] == pytest.approx(math.fsum(other.kl) / 245, rel=1e-12)
    assert 0 <= figures["kl_median"] <= figures["kl_99_percent"] <= figures["kl_max"] == other.kl.max()
    share = figures["top1_agreement"]
    assert share == sum(other.same) / 245
    assert figures["top1_standard_error"] == pytest.approx((share * (1 - share) / 244) ** 0.5)
    spread = math.fsum((other.kl - other.kl.mean()) ** 2) / 244
    assert figures["kl_standard_error"] == pytest.approx((spread / 245) ** 0.5)


def test_one_token_has_figures_but_no_error(subject: Callable[..., Subject]) -> None:
    figures = evaluate(subject(), [5, 6], 120, subject(seed=1)).figures()
    assert figures["tokens"] == 1
    errors = [value for name, value in figures.items() if name.endswith("standard_error")]
    assert errors == [None] * 5


def test_a_model_against_itself_agrees(subject: Callable[..., Subject]) -> None:
    this = subject()
    figures = evaluate(this, some_ids(100), 30, this).figures()
    assert (figures["kl_max"], figures["top1_agreement"], figures["perplexity_ratio"]) == (0, 1, 1)


# --- the protocol through `evaluate` ---


def test_text_is_read_without_a_first_token(subject: Callable[..., Subject]) -> None:
    this = subject()
    ids = this.tokenizer.encode("perplexity")
    assert max(ids) < VOCAB
    expected = evaluate(this, ids, 5)
    np.testing.assert_array_equal(evaluate(this, "perplexity", 5).nll, expected.nll)
    assert (expected.tokens, expected.windows, expected.bos) == (8, 2, False)


def test_a_first_token_takes_a_place_and_is_not_scored(subject: Callable[..., Subject]) -> None:
    this, ids = subject(), some_ids(8)
    yes = evaluate(this, ids, 5, bos="yes")
    assert (yes.tokens, yes.windows, yes.bos) == (8, 2, True)
    by_hand, _ = score(this.runner, np.array([[0, *ids[:4]], [0, *ids[4:]]], np.int32))
    np.testing.assert_array_equal(yes.nll, by_hand)
    np.testing.assert_array_equal(evaluate(replace(this, add_bos=True), ids, 5).nll, by_hand)
    assert evaluate(replace(this, add_bos=True), ids, 5, bos="no").tokens == evaluate(this, ids, 5).tokens == 4


def test_windows_can_be_limited_and_are_reported(subject: Callable[..., Subject]) -> None:
    this, ids = subject(), some_ids(100)
    seen: list[tuple[str, int, int]] = []
    some = evaluate(this, ids, 20, most_windows=2, progress=lambda *state: seen.append(state))
    np.testing.assert_array_equal(some.nll, evaluate(this, ids, 20).nll[:38])
    assert seen == [("score", 0, 2), ("score", 1, 2), ("score", 2, 2)]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", {}, "text: it is empty"),
        ([], {}, "text: it is empty"),
        ("a", {}, "1 token"),
        ([1, 97], {}, "token ids: got 97"),
        ("ab", {"window": 1}, "window: got 1"),
        ("ab", {"window": 2.0}, "window: got 2.0"),
        ("ab", {"window": True}, "window: got True"),
        ("ab", {"window": 121}, "window: got 121 tokens, and the model's context is 120"),
        ("ab", {"most_windows": 0}, "windows: got 0"),
        ("ab", {"bos": "perhaps"}, "bos: got 'perhaps'"),
    ],
)
def test_requests_are_refused_by_name(
    subject: Callable[..., Subject], text: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        evaluate(subject(), text, **{"window": 20, **options})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_compared(
    subject: Callable[..., Subject], make_tokenizer_json: Callable[..., bytes]
) -> None:
    this = subject()
    small = replace(this, runner=replace(this.runner, vocab=96))
    short = replace(this, runner=replace(this.runner, context=10))
    foreign = replace(this, tokenizer=Tokenizer(make_tokenizer_json("wordpiece")))
    for against, says in (
        (small, "against: that model has a vocabulary of 96 tokens, this one of 97"),
        (foreign, "against: that model's tokenizer"),
        (short, "against: window: got 20 tokens, and the model's context is 10"),
    ):
        with pytest.raises(RequestError, match=says):
            evaluate(this, some_ids(30), 20, against)
    with pytest.raises(RequestError, match="no first token"):
        evaluate(replace(this, bos=None), some_ids(30), 20, bos="yes")


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_logits_that_are_no_numbers_are_refused(subject: Callable[..., Subject], wrong: float, where: int) -> None:
    both = [subject(), subject(seed=1)]
    good = both[where].runner.step_function

    def broken(*arrays: Any) -> Any:
        logits, *top = good(*arrays)
        logits[arrays[1] == 11] = wrong  # the row at position 11 predicts token 12 (the 13th)
        return logits, *top

    both[where].runner.step_function = broken
    with pytest.raises(LlmcError, match="not finite at token 12 of window 1") as caught:
        evaluate(both[0], some_ids(60), 20, both[1])
    assert str(caught.value).startswith("against: " if where else "the model")
    for each in both:
        assert each.runner.pool.free_pages == each.runner.pool.num_pages


def test_probabilities_next_to_nothing_are_refused(subject: Callable[..., Subject]) -> None:
    this = subject()
    good = this.runner.step_function
    this.runner.step_function = lambda *arrays: [good(*arrays)[0] * np.float32(1e6), *good(*arrays)[1:]]
    with pytest.raises(LlmcError, match="window 1 are given probabilities below"):
        evaluate(this, some_ids(60), 20)


def test_ctrl_c_gives_the_cache_back(subject: Callable[..., Subject]) -> None:
    both = [subject(), subject(seed=1)]

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    both[1].runner.step_function = stop
    with pytest.raises(KeyboardInterrupt):
        evaluate(both[0], some_ids(60), 20, both[1])
    for each in both:
        assert each.runner.pool.free_pages == each.runner.pool.num_pages


@settings(max_examples=50)
@given(st.lists(st.floats(0, 20), min_size=2, max_size=30))
def test_perplexity_lies_between_the_best_and_the_worst_token(nll: list[float]) -> None:
    found = Evaluation(np.array(nll), 0, 2, len(nll), False, 1.0)
    assert math.exp(min(nll)) * 0.999 <= found.perplexity <= math.exp(max(nll)) * 1.001
    assert found.figures()["kl"] is None
