"""Whole texts through the engine: what shares a step, what a vector is, which guesses are best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.encoder import best, encode_rows, pool
from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.loading.manifest import KvLayout, Pooling
from llmc.runtime.runner import Runner
from llmc.runtime.text.tokenizer import Tokenizer

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(make_tokenizer_json: Callable[..., bytes]) -> MakeEngine:
    """`_engine` with a tokenizer."""
    return lambda rows, broken=False: _engine(Tokenizer(make_tokenizer_json()), rows, broken)


def _engine(tokenizer: Tokenizer, rows: list[int], broken: bool) -> Engine:
    """An engine whose output for a token is (id, place, sequence); `rows` gets the number of rows of each step."""

    def step(tokens: Any, positions: Any, seqs: Any, *rest: Any) -> tuple[Any, Any]:
        rows.append(len(tokens))
        out = np.stack([tokens, positions, seqs], 1).astype(np.float32)
        return (out * np.nan if broken else out), out.argmax(1).astype(np.int32)

    pool = PagePool(KvLayout(1, 1, 8, "f32"), 64 * 16)
    runner = Runner(step, pool, vocab=50, context=20, prefill_chunk=12)
    return Engine(runner, tokenizer)


def test_texts_come_back_whole_and_in_few_steps(make: MakeEngine) -> None:
    texts = [[7] * 5, [1, 2], [9] * 15, [3], [4] * 10, [5, 6, 7]]
    steps: list[int] = []
    engine = make(steps)
    free = engine.runner.pool.free_pages
    found = dict(encode_rows(engine, texts))
    assert sorted(found) == list(range(len(texts)))
    for number, ids in enumerate(texts):
        assert found[number][:, 0].tolist() == ids
        assert found[number][:, 1].tolist() == list(range(len(ids)))
        assert len(set(found[number][:, 2])) == 1
    assert steps == [11, 10, 15]  # the shortest together; one longer than a step should be has its own
    assert engine.runner.pool.free_pages == free


def test_a_text_too_long_is_refused_before_any_is_read(make: MakeEngine) -> None:
    steps: list[int] = []
    with pytest.raises(RequestError, match="text 2: it has 21 tokens, and the model reads 20"):
        list(encode_rows(engine := make(steps), [[1], [2] * 21]))
    assert steps == []
    assert engine.query_count == 0  # the text that fitted was taken back


def test_outputs_that_are_no_numbers(make: MakeEngine) -> None:
    engine = make([], broken=True)
    free = engine.runner.pool.free_pages
    with pytest.raises(LlmcError, match="not finite"):
        list(encode_rows(engine, [[1]]))
    assert engine.runner.pool.free_pages == free


def test_poolings() -> None:
    rows = np.array([[1, 2], [3, 6], [8, 1]], np.float32)
    assert pool(Pooling("mean", False), rows).tolist() == [4, 3]
    assert pool(Pooling("first", False), rows).tolist() == [1, 2]
    assert pool(Pooling("last", False), rows).tolist() == [8, 1]
    np.testing.assert_allclose(pool(Pooling("mean", True), rows), [0.8, 0.6], rtol=1e-6)
    assert pool(Pooling("mean", True), np.zeros((2, 2), np.float32)).tolist() == [0, 0]


def test_best_guesses() -> None:
    found = best(np.array([0, 3, 1, 3], np.float32), 3)
    assert [id_ for id_, _ in found] == [1, 3, 2]
    whole = best(np.array([1000, 1001], np.float32), 9)
    assert sum(p for _, p in whole) == pytest.approx(1)
    assert whole[0][1] == pytest.approx(1 / (1 + np.exp(-1)))
