"""A short soak of the engine on the NumPy step; tests/bench/soak.py runs the long one on a real model."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from llmc.runtime.engine.engine import Engine
from llmc.runtime.runner import Runner
from llmc.runtime.text.tokenizer import Tokenizer

QUERIES = 200


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nothing_is_left_of_queries_that_end_in_any_way(
    make_runner: Callable[..., Runner],
    make_tokenizer_json: Callable[..., bytes],
    script: Callable[[str], ModuleType],
    preemption: str,
) -> None:
    soak = script("tests/bench/soak.py")
    runner = make_runner(pages=12)
    engine = Engine(runner, Tokenizer(make_tokenizer_json()), policy="priority", preemption=preemption)
    soaked = soak.soak(engine, runner, 97, QUERIES, 1, 0.04, workers=8)
    assert sum(soaked.ends.values()) == QUERIES
    assert soaked.troubles > 5
    assert min(soaked.ends[end] for end in ("length", "closed", "cancelled")) > QUERIES // 20
    assert engine.stats.preempted > 0
    assert soak.check(engine, runner, 97, 1, soaked, every=5) > 10
