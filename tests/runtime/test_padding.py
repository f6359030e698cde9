"""Index arrays that are filled up for a device: the step gives its rows what it gives them without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.cache.pages import pages_for
from llmc.runtime.cuda.padding import SPARE_PAGES, fill, pages_size, size_for, sizes_of
from llmc.runtime.index_arrays import aligned
from llmc.runtime.runner import Feed, Runner

WISHES = ("last", "all", "none")


@given(count=st.integers(1, 5000))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_sizes_hold_what_they_are_for(count: int) -> None:
    assert count <= size_for(count) <= max(2 * count, 1)
    assert size_for(count) - count < 16 * SPARE_PAGES
    assert count <= pages_size(count) <= max(2 * count, 64)


@given(rows=st.integers(1, 1200), part=st.floats(0, 1))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_size_tells_rows_from_rows_with_logits(rows: int, part: float) -> None:
    wanted = max(1, round(part * rows))
    arrays = [np.zeros(count, np.int32) for count in (rows, rows, rows, rows)]
    arrays += [np.zeros((1, 2), np.int32), np.array([0, pages_for(rows)], np.int32)]
    arrays += [np.zeros(pages_for(rows), np.int32), np.zeros(wanted, np.int32)]
    sizes, plain = sizes_of(arrays, 1, apart=True), sizes_of(arrays, 1)
    assert (sizes.rows == sizes.wanted) == (plain.rows == plain.wanted and rows == wanted)
    assert sizes.rows == plain.rows
    assert sizes.wanted >= wanted


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_computed_as_they_would_be_alone(seed: int, make_runner: Callable[..., Runner]) -> None:
    plain, filled = make_runner(pages=120), make_runner(pages=120)
    spare = filled.pool.num_pages - SPARE_PAGES  # pages are handed out lowest first
    step, random, counts = filled.step_function, np.random.default_rng(seed), set[int]()

    def padded(*arrays: np.ndarray[Any, Any]) -> list[Any]:
        sizes = sizes_of(list(arrays), 1)
        (into,) = aligned([sizes.places[-1]])
        into[:] = -7
        fill(into, list(arrays), sizes, spare)
        places = zip(sizes.places, sizes.shapes, strict=False)
        counts.add(sizes.rows - len(arrays[0]))
        given = [into[at : at + int(np.prod(shape))].reshape(shape) for at, shape in places]
        given[6] = given[6][: given[5][-1]]  # the NumPy step wants no page beyond the last one's
        found = step(*given)
        return [each[: len(arrays[-1])] for each in found]

    filled.step_function = padded
    for _ in range(3):
        feeds = [(int(random.integers(1, 41)), str(random.choice(WISHES))) for _ in range(random.integers(1, 10))]
        ids = [random.integers(0, plain.vocab, count).tolist() for count, _ in feeds]
        outputs = []
        for runner in (plain, filled):
            batch = [Feed(runner.new_sequence(), own, wish) for own, (_, wish) in zip(ids, feeds, strict=True)]
            outputs.append(runner.step(batch))
        np.testing.assert_allclose(outputs[1].logits, outputs[0].logits, atol=1e-5)
        np.testing.assert_array_equal(outputs[1].top_ids, outputs[0].top_ids)
    assert max(counts) > 0
