"""The generation loop over a NumPy model: same tokens whatever the schedule, and an end in every case."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Generator, Options, TextStream

MakeGenerator = Callable[..., Generator]
PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(0, 97, n)] for n in (3, 17, 40, 1)]


def run(generator: Generator, prompts: list[list[int]], **options: Any) -> list[Generation]:
    pieces: dict[int, str] = {}
    for index, piece in generator.run(prompts, [Options(**options)] * len(prompts), 0.0):
        pieces[index] = pieces.get(index, "") + piece
    assert generator.runner.pool.free_pages == generator.runner.pool.num_pages
    assert [pieces.get(i, "") for i in range(len(prompts))] == [r.text for r in generator.results]
    return generator.results


def test_greedy_is_the_model_s_greedy(make_generator: MakeGenerator, reference: ModuleType) -> None:
    for prompt in PROMPTS:
        result = run(make_generator(), [prompt], max_tokens=20)[0]
        assert result.ids == reference.greedy(reference.make_weights(), prompt, 20)
        assert result.finish_reason == "length"
        assert result.prompt_ids == prompt
        assert result.timings["prefill_tokens"] == len(prompt)
        assert result.timings["decode_tokens"] == 19


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 0.9, "top_k": 7, "seed": 1}])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_a_batch_gives_what_each_prompt_gives_alone(
    make_generator: MakeGenerator, options: dict[str, Any], chunk: int | None
) -> None:
    alone = [run(make_generator(), [prompt], max_tokens=20, **options)[0].ids for prompt in PROMPTS]
    together = run(make_generator(), PROMPTS, max_tokens=20, prefill_chunk=chunk, **options)
    assert [result.ids for result in together] == alone


def test_more_prompts_than_the_cache_holds_go_in_groups(make_generator: MakeGenerator) -> None:
    calls: list[int] = []
    small = make_generator(pages=5, calls=calls)
    together = run(small, PROMPTS, max_tokens=20)
    assert [r.ids for r in together] == [run(make_generator(), [p], max_tokens=20)[0].ids for p in PROMPTS]
    assert 2 in calls  # some went together


def test_an_end_token_ends_and_is_not_text(make_generator: MakeGenerator) -> None:
    free = run(make_generator(), [PROMPTS[1]], max_tokens=30)[0]
    end = free.ids[5]
    at = free.ids.index(end)
    stopped = run(make_generator(eos=(end,)), [PROMPTS[1]], max_tokens=30)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: at + 1]
    assert free.text.startswith(stopped.text)
    going = run(make_generator(eos=(end,)), [PROMPTS[1]], max_tokens=30, ignore_eos=True)[0]
    assert going.ids == free.ids


def test_the_context_ends_too(make_generator: MakeGenerator) -> None:
    result = run(make_generator(), [[5] * 100], max_tokens=1000)[0]
    assert result.finish_reason == "context"
    assert len(result.ids) == 20
    result = run(make_generator(pages=2), [[5] * 30], max_tokens=1000)[0]
    assert (result.finish_reason, len(result.ids)) == ("context", 2)
    for generator, length in ((make_generator(), 120), (make_generator(pages=2), 32)):
        with pytest.raises(RequestError, match="leave no room"):
            run(generator, [[5] * length])
    with pytest.raises(RequestError, match="leave no room"):
        run(make_generator(), [[5], [5] * 10**6])


def test_one_token_is_one_step(make_generator: MakeGenerator) -> None:
    calls: list[int] = []
    assert len(run(make_generator(calls=calls), [[1, 2]], max_tokens=1)[0].ids) == 1
    assert calls == [2]


def test_streams_can_be_interleaved_and_dropped(make_generator: MakeGenerator) -> None:
    generator = make_generator()
    wanted = [run(generator, [prompt], max_tokens=20) for prompt in PROMPTS]
    streams = [TextStream(generator, prompt, Options(max_tokens=20), 0.0) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    with pytest.raises(RequestError, match="no result yet"):
        _ = streams[0].result
    streams[1].close()
    for index in (3, 0, 2):
        list(streams[index])
        assert streams[index].result.ids == wanted[index][0].ids
    assert generator.runner.pool.free_pages == generator.runner.pool.num_pages
    started = TextStream(generator, PROMPTS[0], Options(), 0.0)
    next(started)
    del started
    assert generator.runner.pool.free_pages == generator.runner.pool.num_pages


def test_threads_take_turns(make_generator: MakeGenerator) -> None:
    generator = make_generator()
    wanted = [run(generator, [prompt], max_tokens=20)[0].ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        stream = TextStream(generator, PROMPTS[index], Options(max_tokens=20), 0.0)
        list(stream)
        found[index] = stream.result.ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == wanted


@pytest.mark.parametrize("bad", [0, -1, 2**63, 1.5, "9", None, True, float("nan")])
def test_max_tokens_is_checked(bad: Any) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        Options(max_tokens=bad)


@pytest.mark.parametrize("bad", [0, -1, 2**63, 1.5, "9", True])
def test_prefill_chunk_is_checked(bad: Any) -> None:
    with pytest.raises(RequestError, match="prefill_chunk"):
        Options(prefill_chunk=bad)
