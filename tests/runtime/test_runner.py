"""The runner against a model that is computed at once and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.runtime.errors import RequestError
from llmc.runtime.runner import Feed, Runner

MakeRunner = Callable[..., Runner]
FIXTURES_ARE_STATELESS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def prompt(seed: int, length: int, vocab: int = 97) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, length)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_prefill_in_chunks_gives_the_logits_of_the_whole(
    make_runner: MakeRunner, reference: ModuleType, chunk: int
) -> None:
    calls: list[int] = []
    runner = make_runner(calls=calls)
    ids = prompt(1, 50)
    output = runner.prefill([(runner.new_sequence(), ids)], chunk)
    wanted = reference.whole(reference.make_weights(), ids)[-1]
    np.testing.assert_allclose(output.logits, wanted[None], atol=1e-4)
    assert max(calls) <= chunk
    assert sum(calls) == 50


def test_all_rows_can_have_logits(make_runner: MakeRunner, reference: ModuleType) -> None:
    runner = make_runner()
    ids = prompt(2, 33)
    sequence = runner.new_sequence()
    runner.step([(sequence, ids[:10])])
    output = runner.step([Feed(sequence, ids[10:], "all")])
    wanted = reference.whole(reference.make_weights(), ids)[10:]
    np.testing.assert_allclose(output.logits, wanted, atol=1e-4)
    assert (output.argmax == wanted.argmax(-1)).all()


def test_rows_without_logits_give_none(make_runner: MakeRunner) -> None:
    runner = make_runner()
    output = runner.step([Feed(runner.new_sequence(), [1, 2, 3], "none")])
    assert output.logits.shape[0] == output.argmax.shape[0] == 0


@FIXTURES_ARE_STATELESS
@given(data=st.data())
def test_any_ragged_schedule_gives_what_each_sequence_gives_alone(
    make_runner: MakeRunner, reference: ModuleType, data: st.DataObject
) -> None:
    """Mixed prefill and decode rows of several sequences, in any split and any company."""
    runner = make_runner()
    texts = [prompt(seed, data.draw(st.integers(1, 40))) for seed in range(data.draw(st.integers(1, 4)))]
    sequences = [runner.new_sequence() for _ in texts]
    last: dict[int, Any] = {}
    while any(s.length < len(t) for s, t in zip(sequences, texts, strict=True)):
        open_ones = [i for i, text in enumerate(texts) if sequences[i].length < len(text)]
        chosen = data.draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, len(texts[i]) - sequences[i].length)) for i in chosen]
        feeds = [
            (sequences[i], texts[i][sequences[i].length : sequences[i].length + n])
            for i, n in zip(chosen, counts, strict=True)
        ]
        output = runner.step(feeds)
        last.update(zip(chosen, output.logits, strict=True))
    for index, text in enumerate(texts):
        wanted = reference.whole(reference.make_weights(), text)[-1]
        np.testing.assert_allclose(last[index], wanted, atol=1e-4)
    for sequence in sequences:
        runner.release(sequence)
    assert runner.pool.free_pages == runner.pool.num_pages


def test_a_failing_step_changes_nothing(make_runner: MakeRunner) -> None:
    runner = make_runner()
    sequence = runner.new_sequence()
    runner.step([(sequence, [1] * 20)])
    free, pages = runner.pool.free_pages, list(sequence.pages)
    good = runner.step_function

    def broken(*_: Any) -> Any:
        raise RuntimeError("kernel failed")

    runner.step_function = broken
    with pytest.raises(RuntimeError, match="kernel failed"):
        runner.step([(sequence, [1] * 30), (runner.new_sequence(), [5])])
    assert (sequence.length, list(sequence.pages), runner.pool.free_pages) == (20, pages, free)
    runner.step_function = good
    runner.step([(sequence, [1])])
    assert sequence.length == 21


def test_a_failing_step_of_forks_gives_copies_back(make_runner: MakeRunner) -> None:
    runner = make_runner()
    first = runner.new_sequence()
    runner.step([(first, prompt(4, 20))])
    twin = runner.fork(first)
    good, tables = runner.step_function, [list(each.pages) for each in (first, twin)]

    def broken(*arrays: Any) -> Any:
        good(*arrays)
        raise KeyboardInterrupt

    runner.step_function = broken
    with pytest.raises(KeyboardInterrupt):
        runner.step([(first, [5, 6]), (twin, [7])])
    assert [list(each.pages) for each in (first, twin)] == tables
    runner.pool.check([first, twin])
    runner.step_function = good
    runner.truncate(twin, 18)
    output = runner.step([(first, [8]), (twin, [9])])
    runner.pool.check([first, twin])
    for row, ids in enumerate([[*prompt(4, 20), 8], [*prompt(4, 20)[:18], 9]]):
        alone = runner.prefill([(runner.new_sequence(), ids)])
        np.testing.assert_allclose(output.logits[row], alone.logits[0], atol=1e-5)


@pytest.mark.parametrize("bad", [[-1], [97], [2**40], [1.5], ["a"], [[1]], [None], [2**70], []])
def test_token_ids_are_checked_before_the_call(make_runner: MakeRunner, bad: Any) -> None:
    calls: list[int] = []
    runner = make_runner(calls=calls)
    with pytest.raises(RequestError) as caught:
        runner.step([(runner.new_sequence(), bad)])
    assert "\n" not in str(caught.value)
    assert not calls


def test_what_does_not_fit_is_refused_whole(make_runner: MakeRunner) -> None:
    runner = make_runner(pages=3)
    first, second = runner.new_sequence(), runner.new_sequence()
    with pytest.raises(RequestError, match="KV cache is full"):
        runner.step([(first, [1] * 32), (second, [1] * 17)])
    assert runner.pool.free_pages == 3
    with pytest.raises(RequestError, match="context is 120"):
        runner.step([(first, [1] * 121)])
    with pytest.raises(RequestError, match="each sequence once"):
        runner.step([(first, [1]), (first, [2])])
    with pytest.raises(RequestError, match="at least one sequence"):
        runner.step([])


def test_a_hole_is_not_seen_and_positions_are_the_sequences_own(make_runner: MakeRunner, reference: ModuleType) -> None:
    """Tokens in a hole, whatever they are, change nothing; what follows is told the sequence's positions."""
    rows = []
    for hidden in (prompt(3, 12), prompt(4, 12)):
        runner = make_runner()
        sequence = runner.new_sequence()
        runner.step([(sequence, prompt(1, 4))])
        runner.step([(sequence, hidden)])
        sequence.hole, sequence.position = (4, 16), 4
        rows.append(runner.step([Feed(sequence, prompt(2, 20), "all")]).logits)
        assert (sequence.length, sequence.position) == (36, 24)
    np.testing.assert_array_equal(*rows)
    wanted = reference.whole(reference.make_weights(), prompt(1, 4) + prompt(2, 20))[4:]
    np.testing.assert_allclose(rows[0], wanted, atol=1e-4)


def test_a_step_says_the_best_of_each_row(make_runner: MakeRunner) -> None:
    runner = make_runner()
    output = runner.step([Feed(runner.new_sequence(), prompt(1, 5), "all"), (runner.new_sequence(), [3])])
    assert output.top_ids.shape == output.top_values.shape == (6, 64)
    np.testing.assert_array_equal(np.take_along_axis(output.logits, output.top_ids, 1), output.top_values)
    np.testing.assert_array_equal(output.argmax, output.logits.argmax(-1))
    logs = output.logits - output.normalizers[:, None]
    np.testing.assert_allclose(np.exp(logs).sum(1), 1, rtol=1e-5)
