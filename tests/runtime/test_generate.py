"""The generation loop over a NumPy model: same tokens whatever the schedule, and an end in every case."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Options

MakeEngine = Callable[..., Engine]
PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(0, 97, n)] for n in (3, 17, 40, 1)]


def run(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Generation]:
    pieces: dict[int, str] = {}
    done: dict[int, Generation] = {}
    queries = [engine.add_query(prompt, Options(**options)) for prompt in prompts]
    for result in engine.follow(queries):
        pieces[result.id] = pieces.get(result.id, "") + result.text
        if result.done is not None:
            done[result.id] = result.done
    assert engine.query_count == 0
    assert all_given_back(engine)
    assert [pieces.get(query, "") for query in queries] == [done[query].text for query in queries]
    return [done[query] for query in queries]


def all_given_back(engine: Engine) -> bool:
    """Whether only the prefix tree holds pages, and none once it is empty."""
    pool = engine.runner.pool
    pool.check([] if engine.tree is None else [engine.tree])
    engine.forget_prefixes()
    return pool.free_pages == pool.num_pages


def test_greedy_is_the_model_s_greedy(make_engine: MakeEngine, reference: ModuleType) -> None:
    for prompt in PROMPTS:
        result = run(make_engine(), [prompt], max_tokens=20)[0]
        assert result.ids == reference.greedy(reference.make_weights(), prompt, 20)
        assert result.finish_reason == "length"
        assert result.prompt_ids == prompt
        assert result.timings["prefill_tokens"] == len(prompt)
        assert result.timings["decode_tokens"] == 19


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 0.9, "top_k": 7, "seed": 1}])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_a_batch_gives_what_each_prompt_gives_alone(
    make_engine: MakeEngine, options: dict[str, Any], chunk: int | None
) -> None:
    alone = [run(make_engine(), [prompt], max_tokens=20, **options)[0].ids for prompt in PROMPTS]
    together = run(make_engine(), PROMPTS, max_tokens=20, prefill_chunk=chunk, **options)
    assert [result.ids for result in together] == alone


def test_more_prompts_than_the_cache_holds_go_in_groups(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    small = make_engine(pages=5, calls=calls)
    together = run(small, PROMPTS, max_tokens=20)
    assert [r.ids for r in together] == [run(make_engine(), [p], max_tokens=20)[0].ids for p in PROMPTS]
    assert 2 in calls  # some went together


def test_an_end_token_ends_and_is_not_text(make_engine: MakeEngine) -> None:
    free = run(make_engine(), [PROMPTS[1]], max_tokens=30)[0]
    end = free.ids[5]
    at = free.ids.index(end)
    stopped = run(make_engine(eos=(end,)), [PROMPTS[1]], max_tokens=30)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: at + 1]
    assert free.text.startswith(stopped.text)
    going = run(make_engine(eos=(end,)), [PROMPTS[1]], max_tokens=30, ignore_eos=True)[0]
    assert going.ids == free.ids


def test_the_context_ends_too(make_engine: MakeEngine) -> None:
    result = run(make_engine(), [[5] * 100], max_tokens=1000)[0]
    assert result.finish_reason == "context"
    assert len(result.ids) == 20
    result = run(make_engine(pages=2), [[5] * 30], max_tokens=1000)[0]
    assert (result.finish_reason, len(result.ids)) == ("context", 2)
    for generator, length in ((make_engine(), 120), (make_engine(pages=2), 32)):
        with pytest.raises(RequestError, match="leave no room"):
            run(generator, [[5] * length])
    with pytest.raises(RequestError, match="leave no room"):
        run(make_engine(), [[5], [5] * 10**6])


def test_one_token_is_one_step(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    assert len(run(make_engine(calls=calls), [[1, 2]], max_tokens=1)[0].ids) == 1
    assert calls == [2]


def test_streams_can_be_interleaved_and_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    options = Options(max_tokens=20)
    wanted = [run(engine, [prompt], max_tokens=20) for prompt in PROMPTS]
    streams = [engine.stream(engine.add_query(prompt, options)) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    with pytest.raises(RequestError, match="no result yet"):
        _ = streams[0].result
    streams[1].close()
    for index in (3, 0, 2):
        list(streams[index])
        assert streams[index].result.ids == wanted[index][0].ids
    assert all_given_back(engine)
    started, fresh = (engine.stream(engine.add_query(PROMPTS[0], options)) for _ in range(2))
    next(started)
    del started, fresh
    assert engine.query_count == 0
    assert all_given_back(engine)


def test_threads_share_steps(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    wanted = [run(engine, [prompt], max_tokens=20)[0].ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        stream = engine.stream(engine.add_query(PROMPTS[index], Options(max_tokens=20)))
        list(stream)
        found[index] = stream.result.ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == wanted
    assert all_given_back(engine)


@pytest.mark.parametrize("bad", [0, -1, 2**63, 1.5, "9", None, True, float("nan")])
def test_max_tokens_is_checked(bad: Any) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        Options(max_tokens=bad)


@pytest.mark.parametrize("bad", [0, -1, 2**63, 1.5, "9", True])
def test_prefill_chunk_is_checked(bad: Any) -> None:
    with pytest.raises(RequestError, match="prefill_chunk"):
        Options(prefill_chunk=bad)
