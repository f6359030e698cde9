"""Pages that leave the pool and come back with the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.cache.swap import copy_out, put_back, swap_out
from llmc.runtime.errors import CacheFull
from llmc.runtime.loading.manifest import KvGroup, KvLayout
from llmc.runtime.runner import Runner

IDS = [int(i) for i in np.random.default_rng(3).integers(0, 97, 60)]


def test_a_text_goes_on_to_the_bit_after_it_was_away(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner()
    stayed, went = runner.new_sequence(), runner.new_sequence()
    for sequence in (stayed, went):
        runner.step([(sequence, IDS[:41])])
    away = swap_out(runner.pool, went)
    assert runner.pool.free_pages == 61
    assert (went.length, away.pages, away.nbytes) == (0, 3, 3 * 2 * 2 * 2 * 16 * 8 * 4)
    other = runner.new_sequence()
    runner.step([(other, IDS)])  # takes the pages that were given up
    put_back(runner.pool, went, away)
    assert (went.length, went.position) == (41, 41)
    here, back = (runner.step([(sequence, IDS[41:])]).logits for sequence in (stayed, went))
    np.testing.assert_array_equal(here, back)
    runner.pool.check([stayed, went, other])


def test_shared_pages_stay_with_the_others(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner(pages=8)
    first = runner.new_sequence()
    runner.step([(first, IDS[:41])])
    twin = runner.pool.fork(first)
    away = swap_out(runner.pool, twin)
    runner.pool.check([first])
    put_back(runner.pool, twin, away)
    runner.pool.check([first, twin])
    assert runner.pool.free_pages == 2
    one, two = (runner.step([(each, [5])]).logits for each in (first, twin))
    np.testing.assert_array_equal(one, two)


def test_no_room_leaves_everything_as_it_was(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner(pages=4)
    sequence, other = runner.new_sequence(), runner.new_sequence()
    runner.step([(sequence, IDS[:41])])
    away = swap_out(runner.pool, sequence)
    runner.step([(other, IDS[:20])])
    with pytest.raises(CacheFull, match="3 more pages"):
        put_back(runner.pool, sequence, away)
    assert (sequence.length, list(sequence.pages)) == (0, [])
    runner.pool.check([sequence, other])


def test_pages_behind_a_window_are_not_copied() -> None:
    pool = PagePool(KvLayout(3, 1, 8, "q8", (KvGroup((0, 2)), KvGroup((1,), 16))), 320)
    sequence = pool.new_sequence()
    pool.reserve_all([(sequence, 70)])
    sequence.length, sequence.position, sequence.hole = 70, 90, (4, 32)
    for number, layer in enumerate(pool.layers):
        layer[:5] = np.random.default_rng(number).integers(0, 256, layer[:5].shape)
    before = [layer[:5].copy() for layer in pool.layers]
    copy = copy_out(pool, sequence)
    assert [len(layer) for layer in copy.layers] == [5, 2, 5]
    assert (sequence.length, pool.free_pages) == (70, 15)
    twin = pool.new_sequence()
    put_back(pool, twin, copy)
    assert (twin.length, twin.position, twin.hole) == (70, 90, (4, 32))
    pool.check([sequence, twin])
    np.testing.assert_array_equal(pool.layers[2][list(twin.tables[0])], before[2])
    np.testing.assert_array_equal(pool.layers[1][list(twin.tables[1][3:])], before[1][3:])
