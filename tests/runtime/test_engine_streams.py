"""Who waits for results: threads, event loops, and streams that are closed, dropped or never begun."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.generate import Options

MakeEngine = Callable[..., Engine]
PROMPTS = [[7, 8, 9], [10] * 20, [11, 12], [13] * 33, [14], [15, 16] * 9]
TWENTY = Options(max_tokens=20, ignore_eos=True)


def alone(make_engine: MakeEngine, prompt: list[int]) -> tuple[str, list[int]]:
    engine = make_engine()
    stream = engine.stream(engine.add_query(prompt, TWENTY))
    return "".join(stream), stream.result.ids


def empty(engine: Engine) -> bool:
    """Whether no query and no page is left."""
    engine.forget_prefixes()
    return engine.query_count == 0 and engine.runner.pool.free_pages == engine.runner.pool.num_pages


def test_event_loops(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    wanted = [alone(make_engine, prompt) for prompt in PROMPTS]

    async def one(prompt: list[int]) -> tuple[str, list[int]]:
        stream = engine.astream(engine.add_query(prompt, TWENTY))
        text = "".join([piece async for piece in stream])
        return text, stream.result.ids

    async def everything() -> list[tuple[str, list[int]]]:
        return await asyncio.gather(*map(one, PROMPTS))

    assert asyncio.run(everything()) == wanted
    assert max(calls[1:]) > 1  # they shared steps
    assert asyncio.run(everything()) == wanted  # another loop
    assert empty(engine)


def test_a_cancelled_task_cancels_its_query(make_engine: MakeEngine) -> None:
    engine = make_engine()
    wanted = alone(make_engine, PROMPTS[1])
    began = asyncio.Event

    async def endless(started: asyncio.Event) -> None:
        async for _ in engine.astream(engine.add_query(PROMPTS[0], Options(max_tokens=100, ignore_eos=True))):
            started.set()

    async def both() -> tuple[str, list[int]]:
        started = began()
        task = asyncio.create_task(endless(started))
        stream = engine.astream(engine.add_query(PROMPTS[1], TWENTY))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        text = "".join([piece async for piece in stream])
        return text, stream.result.ids

    assert asyncio.run(both()) == wanted
    assert empty(engine)


def test_an_event_loop_waits_for_a_commit_without_turning(make_engine: MakeEngine) -> None:
    calls: list[int] = []
    engine = make_engine(calls=calls)
    query = engine.add_query(PROMPTS[0], Options(max_tokens=3), choose="caller")

    async def commits() -> str:
        stream = engine.astream(query)
        pieces = asyncio.create_task(_joined(stream))
        for token in (33, 34, 35):
            drives = 0
            while not engine._queries.open[query].awaits_commit:
                await asyncio.sleep(0.001)
                drives += 1
                assert drives < 2000
            await asyncio.sleep(0.01)
            engine.commit({query: (token, False)})
        return await pieces

    assert asyncio.run(commits()) == engine._intake.tokenizer.decode([33, 34, 35])
    assert len(calls) == 3
    assert empty(engine)


async def _joined(stream: Any) -> str:
    return "".join([piece async for piece in stream])


def test_threads_and_loops_together_under_pressure(make_engine: MakeEngine) -> None:
    """A cache that is too small, some streams closed early, some dropped, some queries cancelled by others."""
    engine = make_engine(pages=9, settings={"preemption": "swap"})
    wanted = [alone(lambda **_: make_engine(pages=9), prompt) for prompt in PROMPTS]
    faults: list[str] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(6):
            index = dice.randrange(len(PROMPTS))
            stream = engine.stream(engine.add_query(PROMPTS[index], TWENTY))
            fate = dice.random()
            if fate < 0.2:
                next(stream)
                stream.close()
            elif fate < 0.3:
                del stream
            elif ("".join(stream), stream.result.ids) != wanted[index]:
                faults.append(f"{number}: prompt {index}")

    async def loop() -> None:
        for prompt, want in zip(PROMPTS, wanted, strict=True):
            stream = engine.astream(engine.add_query(prompt, TWENTY))
            if ("".join([piece async for piece in stream]), stream.result.ids) != want:
                faults.append("in the loop")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    threads.append(threading.Thread(target=lambda: asyncio.run(loop())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert faults == []
    assert empty(engine)


def test_a_follower_waits_for_another_thread_s_commit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    query = engine.add_query(PROMPTS[0], Options(max_tokens=2), choose="caller")
    stream = engine.stream(query)
    follower = threading.Thread(target=lambda: list(stream))
    follower.start()
    for token in (33, 34):
        while not engine._queries.open[query].awaits_commit:
            pass
        engine.commit({query: (token, False)})
    follower.join(timeout=60)
    assert stream.result.ids == [33, 34]


def test_a_stream_that_others_cancel_ends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    query = engine.add_query(PROMPTS[0], TWENTY)
    stream = engine.stream(query)
    first = next(stream)
    engine.cancel(query)
    assert "".join([first, *stream]) == stream.result.text
    assert stream.result.finish_reason == "cancelled"
    assert empty(engine)


def test_a_stream_in_a_cycle_is_cancelled_when_it_is_collected(make_engine: MakeEngine) -> None:
    engine = make_engine()

    class Holder:
        pass

    holder = Holder()
    holder.stream, holder.self = engine.stream(engine.add_query(PROMPTS[0], TWENTY)), holder  # type: ignore[attr-defined]
    next(holder.stream)  # type: ignore[attr-defined]
    del holder
    gc.collect()
    assert empty(engine)


def test_results_that_nobody_follows_wait_for_infer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    followed, other = (engine.add_query(prompt, Options(max_tokens=4, ignore_eos=True)) for prompt in PROMPTS[:2])
    list(engine.stream(followed))
    results = engine.infer()
    assert [result.id for result in results] == [other] * 4
    assert results[-1].done is not None
    with pytest.raises(RequestError, match="there is none"):
        engine.stream(other)
    assert empty(engine)


def test_what_is_told_before_it_is_followed_is_not_lost(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text, ids = alone(make_engine, PROMPTS[0])
    query = engine.add_query(PROMPTS[0], TWENTY)
    list(engine.stream(engine.add_query(PROMPTS[1], TWENTY)))
    stream = engine.stream(query)
    assert ("".join(stream), stream.result.ids) == (text, ids)


def test_closing_the_engine_ends_all(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(engine.add_query(PROMPTS[0], TWENTY))
    next(stream)
    engine.close()
    list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert empty(engine)
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.add_query(PROMPTS[0])


def test_an_error_comes_out_of_the_stream(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def broken(*_: Any) -> Any:
        raise RuntimeError("kernel failed")

    step, engine.runner.step_function = engine.runner.step_function, broken

    async def read() -> None:
        with pytest.raises(LlmcError, match="the step failed: RuntimeError: kernel failed"):
            async for _ in engine.astream(engine.add_query(PROMPTS[0], TWENTY)):
                pass

    asyncio.run(read())
    assert empty(engine)
    engine.runner.step_function = step
    assert alone(lambda: engine, PROMPTS[0]) == alone(make_engine, PROMPTS[0])


def test_a_closed_engine_is_freed_without_a_collection(make_engine: MakeEngine) -> None:
    engine = make_engine()
    list(engine.stream(engine.add_query(PROMPTS[0], TWENTY)))
    watched = [weakref.ref(thing) for thing in (engine, engine.runner, engine.runner.pool)]
    gc.disable()
    try:
        engine.close()
        del engine
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()
