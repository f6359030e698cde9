"""A worker of an artifact for several devices: `mpirun -n N python concurrent_case.py ARTIFACT`.

Prints, as JSON, what queries say one after another and all at once, and, where the layers are in stages, in which order
steps were begun and waited for meanwhile. It ends with steps under way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import llmc
from llmc.runtime import Options
from llmc.runtime.engine.engine import Engine
from llmc.runtime.runner import Step
from llmc.runtime.workers.attend import attend

PROMPTS = [np.random.default_rng(n).integers(3, 90, n).tolist() for n in (5, 21, 60, 2, 33, 1)]
OPTIONS = [
    {}, {"temperature": 1.0, "seed": 3}, {"strategy": "fsd"}, {"temperature": 0.8, "seed": 1, "n": 2},
    {"beams": 3}, {"endless": "sinks", "window": 24, "n_discard": 4},
]  # fmt: skip


def said(engine: Engine, numbers: list[int]) -> list[list[list[int]]]:
    """Tokens of all answers of the queries of these numbers, all at once."""
    queries = []
    for number in numbers:
        wishes: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **OPTIONS[number]}
        queries.append(engine.add_query(PROMPTS[number], Options(**wishes)))
    done = {result.id: result.done for result in engine.follow(queries) if result.done}
    return [[done[query].ids, *(other.ids for other in done[query].others)] for query in queries]


def noting(step: Step, events: list[tuple[str, int]], *arrays: Any) -> Callable[[], Any]:
    """The step, with a note of when it begins and when it is waited for."""
    number = sum(what == "begin" for what, _ in events)
    events.append(("begin", number))
    given = step(*arrays)

    def wait() -> Any:
        events.append(("wait", number))
        return given()

    return wait


def main() -> None:
    if attend(sys.argv[1], threads=1):
        return
    with llmc.load(sys.argv[1], threads=1, cache_tokens=1024, prefill_chunk=32, keep_prefixes=False) as model:
        alone = [said(model.engine, [number])[0] for number in range(len(PROMPTS))]
        events: list[tuple[str, int]] = []
        step = model.runner.step_function
        if model.runner.stages > 1:
            model.runner.step_function = partial(noting, step, events)
        together = said(model.engine, list(range(len(PROMPTS))))
        model.runner.step_function = step
        for prompt in PROMPTS:
            model.engine.add_query(prompt)
        for _ in range(3):
            model.engine.infer()
        print(json.dumps({"alone": alone, "together": together, "events": events}))


main()
