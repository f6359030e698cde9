"""The engine against a model that is computed at once and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.runtime.engine import Engine, Feed
from llmc.runtime.errors import LlmcError, RequestError

MakeEngine = Callable[..., Engine]
FIXTURES_ARE_STATELESS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def prompt(seed: int, length: int, vocab: int = 97) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, length)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_prefill_in_chunks_gives_the_logits_of_the_whole(
    make_engine: MakeEngine, reference: ModuleType, chunk: int
) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    ids = prompt(1, 50)
    output = engine.prefill([(engine.new_sequence(), ids)], chunk)
    wanted = reference.whole(reference.make_weights(), ids)[-1]
    np.testing.assert_allclose(output.logits, wanted[None], atol=1e-4)
    assert max(calls) <= chunk
    assert sum(calls) == 50


def test_all_rows_can_have_logits(make_engine: MakeEngine, reference: ModuleType) -> None:
    engine = make_engine()
    ids = prompt(2, 33)
    sequence = engine.new_sequence()
    engine.step([(sequence, ids[:10])])
    output = engine.step([Feed(sequence, ids[10:], "all")])
    wanted = reference.whole(reference.make_weights(), ids)[10:]
    np.testing.assert_allclose(output.logits, wanted, atol=1e-4)
    assert (output.argmax == wanted.argmax(-1)).all()


def test_rows_without_logits_give_none(make_engine: MakeEngine) -> None:
    engine = make_engine()
    output = engine.step([Feed(engine.new_sequence(), [1, 2, 3], "none")])
    assert output.logits.shape[0] == output.argmax.shape[0] == 0


@FIXTURES_ARE_STATELESS
@given(data=st.data())
def test_any_ragged_schedule_gives_what_each_sequence_gives_alone(
    make_engine: MakeEngine, reference: ModuleType, data: st.DataObject
) -> None:
    """Mixed prefill and decode rows of several sequences, in any split and any company."""
    engine = make_engine()
    texts = [prompt(seed, data.draw(st.integers(1, 40))) for seed in range(data.draw(st.integers(1, 4)))]
    sequences = [engine.new_sequence() for _ in texts]
    last: dict[int, Any] = {}
    while any(s.length < len(t) for s, t in zip(sequences, texts, strict=True)):
        open_ones = [i for i, text in enumerate(texts) if sequences[i].length < len(text)]
        chosen = data.draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, len(texts[i]) - sequences[i].length)) for i in chosen]
        feeds = [
            (sequences[i], texts[i][sequences[i].length : sequences[i].length + n])
            for i, n in zip(chosen, counts, strict=True)
        ]
        output = engine.step(feeds)
        last.update(zip(chosen, output.logits, strict=True))
    for index, text in enumerate(texts):
        wanted = reference.whole(reference.make_weights(), text)[-1]
        np.testing.assert_allclose(last[index], wanted, atol=1e-4)
    for sequence in sequences:
        engine.release(sequence)
    assert engine.pool.free_pages == engine.pool.num_pages


def test_a_failing_step_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.new_sequence()
    engine.step([(sequence, [1] * 20)])
    free, pages = engine.pool.free_pages, list(sequence.pages)
    good = engine.step_function

    def broken(*_: Any) -> Any:
        raise RuntimeError("kernel failed")

    engine.step_function = broken
    with pytest.raises(RuntimeError, match="kernel failed"):
        engine.step([(sequence, [1] * 30), (engine.new_sequence(), [5])])
    assert (sequence.length, list(sequence.pages), engine.pool.free_pages) == (20, pages, free)
    engine.step_function = good
    engine.step([(sequence, [1])])
    assert sequence.length == 21


@pytest.mark.parametrize("bad", [[-1], [97], [2**40], [1.5], ["a"], [[1]], [None], [2**70], []])
def test_token_ids_are_checked_before_the_call(make_engine: MakeEngine, bad: Any) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    with pytest.raises(RequestError) as caught:
        engine.step([(engine.new_sequence(), bad)])
    assert "\n" not in str(caught.value)
    assert not calls


def test_what_does_not_fit_is_refused_whole(make_engine: MakeEngine) -> None:
    engine = make_engine(pages=3)
    first, second = engine.new_sequence(), engine.new_sequence()
    with pytest.raises(RequestError, match="KV cache is full"):
        engine.step([(first, [1] * 32), (second, [1] * 17)])
    assert engine.pool.free_pages == 3
    with pytest.raises(RequestError, match="context is 120"):
        engine.step([(first, [1] * 121)])
    with pytest.raises(RequestError, match="each sequence once"):
        engine.step([(first, [1]), (first, [2])])
    with pytest.raises(RequestError, match="at least one sequence"):
        engine.step([])


def test_logits_that_are_not_finite_are_an_error(make_generator: Callable[..., Any]) -> None:
    from llmc.runtime.generate import Options

    generator = make_generator()
    generator.engine.step_function = lambda *a: (np.full((1, 97), np.nan, np.float32), np.zeros(1, np.int32))
    with pytest.raises(LlmcError, match="not finite"):
        list(generator.run([[1, 2]], [Options()], 0.0))
    assert generator.engine.pool.free_pages == generator.engine.pool.num_pages
