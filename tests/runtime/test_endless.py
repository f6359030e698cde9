"""Queries without end in the engine: each gives what it gives alone, in few pages, whatever else runs and gives way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation
from llmc.runtime.loading.manifest import KvLayout
from llmc.runtime.runner import Runner
from llmc.runtime.text.tokenizer import Tokenizer

PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(0, 97, size)] for n, size in enumerate((7, 50, 90, 20))]
OPTIONS = [
    Options(max_tokens=90, endless="sinks", n_discard=4, window=40),
    Options(max_tokens=60, endless="sinks", window=48, n_keep=0, temperature=1.0, seed=3),
    Options(max_tokens=50, endless="reevaluate", window=32),
    Options(max_tokens=60, endless="shift", n_discard=3, window=32, temperature=0.7, seed=5, n=2),
    Options(max_tokens=40),
]


@pytest.fixture
def endless_engine(
    script: Callable[[str], ModuleType], make_tokenizer_json: Callable[..., bytes]
) -> Callable[..., Engine]:
    """A function `(pages, **settings) -> Engine` over the NumPy step with rope, in steps of 24 rows."""
    endless = script("tests/runtime/endless_step.py")

    def make(pages: int, **settings: str) -> Engine:
        pool = PagePool(KvLayout(endless.LAYERS, endless.GROUPS, endless.SIZE, "f32"), pages * 16)
        step, turn = endless.make_functions(endless.make_weights(), pool.layers, endless.PLACES["rope"])
        can = ("sinks", "shift", "reevaluate")
        runner = Runner(step, pool, endless.VOCAB, endless.CONTEXT, 24, turn_function=turn, endless=can)
        return Engine(runner, Tokenizer(make_tokenizer_json()), **settings)

    return make


def run(engine: Engine, numbers: list[int]) -> list[list[list[int]]]:
    """Tokens of every answer of the queries of these numbers, run together."""
    queries = [engine.add_query(PROMPTS[number % len(PROMPTS)], OPTIONS[number]) for number in numbers]
    done: dict[int, Generation] = {}
    for result in engine.follow(queries):
        assert result.error is None
        if result.done is not None:
            done[result.id] = result.done
    engine.forget_prefixes()
    engine.runner.pool.check([])
    return [[done[query].ids, *(other.ids for other in done[query].others)] for query in queries]


@pytest.mark.parametrize(("pages", "preemption"), [(40, "recompute"), (9, "recompute"), (9, "swap")])
def test_each_gives_what_it_gives_alone(endless_engine: Callable[..., Engine], pages: int, preemption: str) -> None:
    alone = [run(endless_engine(40), [number])[0] for number in range(len(OPTIONS))]
    assert [len(answers[0]) for answers in alone] == [options.max_tokens for options in OPTIONS]
    engine = endless_engine(pages, preemption=preemption)
    assert run(engine, list(range(len(OPTIONS)))) == alone
    assert (engine.stats.preempted > 0) == (pages < 40)


def test_a_text_longer_than_the_cache_goes_on(endless_engine: Callable[..., Engine]) -> None:
    engine = endless_engine(5)
    query = engine.add_query(PROMPTS[2], Options(max_tokens=200, endless="sinks"))
    assert sum(result.token is not None for result in engine.follow([query])) == 200


def test_refusals_come_before_anything_is_read(endless_engine: Callable[..., Engine]) -> None:
    engine = endless_engine(4)
    with pytest.raises(RequestError, match="the cache has room for one of 21"):
        engine.add_query([1], Options(endless="sinks", window=30))
    assert engine.stats.steps == 0
