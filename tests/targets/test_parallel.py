"""Loops whose turns go to threads: every turn happens once, whoever takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

import llmc.targets.target as targets
from llmc.targets.arguments import arguments
from llmc.targets.build import compile_kernels
from llmc.targets.parallel import parallel, parallel_ranges

COUNTS = [1, 2, 3, 5, 8, 36, 127, 704, 1500]
ANY_CORE = -2  # TVM's number for threads that it does not bind


@pytest.fixture(params=[1, 2, 4])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    config = tvm.get_global_func("runtime.config_threadpool")
    config(ANY_CORE, request.param)
    yield
    config(ANY_CORE, 2)


def turns_of(counts: list[int], turn_bytes: int, known: bool) -> list[np.ndarray]:
    """How often each turn of a loop over a count happened, those of some work more than others."""
    module: dict[str, Any] = {}
    for count in counts if known else [0]:
        with IRBuilder() as builder, T.prim_func():
            shape = count if known else T.int64()
            work, seen = arguments(["int32", "int32"], [[shape], [shape]])
            many = count if known else shape
            with parallel(targets.native(), many, turn_bytes) as turn, T.serial(0, work[turn]) as more:
                T.buffer_store(seen, seen[turn] + (more + 1 - more), [turn])
        module[f"of_{count}"] = builder.get()
    functions = compile_kernels(module, targets.native())
    found = []
    for count in counts:
        work = np.random.default_rng(count).choice([1, 1, 1, 50], count).astype(np.int32)
        seen = tvm.runtime.tensor(np.zeros(count, np.int32))
        for _ in range(5):
            functions[f"of_{count if known else 0}"](tvm.runtime.tensor(work), seen)
        found.append(seen.numpy() / (5 * work))
    return found


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("turn_bytes", [4, 5000, 1 << 20])
def test_each_turn_once(turn_bytes: int, known: bool) -> None:
    for turns in turns_of(COUNTS, turn_bytes, known):
        np.testing.assert_array_equal(turns, 1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("count", [1, 3, 64, 100])
def test_ranges_cover_all(count: int) -> None:
    with IRBuilder() as builder, T.prim_func():
        (seen,) = arguments(["int32"], [[count]])
        with parallel_ranges(targets.native(), count) as (first, end), T.serial(first, end) as at:
            T.buffer_store(seen, seen[at] + 1, [at])
    seen = tvm.runtime.tensor(np.zeros(count, np.int32))
    compile_kernels({"kernel": builder.get()}, targets.native())["kernel"](seen)
    np.testing.assert_array_equal(seen.numpy(), 1)
