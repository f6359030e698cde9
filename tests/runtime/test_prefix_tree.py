"""Shared beginnings: what is found, for whom, and what goes first when pages are short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llmc.runtime.cache.ledger import NO_PAGE
from llmc.runtime.cache.pages import PagePool, Sequence
from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.errors import CacheFull
from llmc.runtime.loading.manifest import KvGroup, KvLayout
from llmc.runtime.runner import Runner

LAYOUT = KvLayout(2, 1, 1, "f32")
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 97, 100)]


def read(pool: PagePool, tree: PrefixTree, ids: list[int], salt: str = "") -> Sequence:
    """A sequence of `ids`, which the tree keeps."""
    sequence = tree.match(ids, salt)
    pool.reserve_all([(sequence, len(ids))])
    sequence.length = sequence.position = len(ids)
    tree.insert(sequence, ids, salt)
    return sequence


@pytest.mark.parametrize(("count", "found"), [(1, 0), (16, 0), (17, 16), (64, 48), (65, 64), (70, 64), (100, 64)])
def test_whole_pages_are_found_and_a_token_is_left_to_feed(count: int, found: int) -> None:
    pool = PagePool(LAYOUT, 320)
    tree = PrefixTree(pool)
    first = read(pool, tree, IDS[:75])
    assert len(tree) == 4
    sequence = tree.match(IDS[:count])
    assert (sequence.length, sequence.position) == (found, found)
    assert sequence.pages == first.pages[: found // 16]
    pool.check([first, sequence, tree])


def test_texts_that_part_share_up_to_the_page_before() -> None:
    pool = PagePool(LAYOUT, 320)
    tree = PrefixTree(pool)
    first = read(pool, tree, IDS[:64])
    other = read(pool, tree, [*IDS[:40], *IDS[:40]])
    assert other.pages[:2] == first.pages[:2]
    assert len(tree) == 4 + 3
    assert tree.match([*IDS[:40], *IDS[:40], 5]).pages == other.pages
    assert tree.match([*IDS[:64], 5]).pages == first.pages


def test_a_salt_keeps_texts_apart() -> None:
    pool = PagePool(LAYOUT, 320)
    tree = PrefixTree(pool)
    read(pool, tree, IDS, "one")
    assert tree.match(IDS, "other").length == tree.match(IDS).length == 0
    assert tree.match(IDS, "one").length == 96


def test_two_that_read_the_same_at_once_end_with_one_copy() -> None:
    pool = PagePool(LAYOUT, 320)
    tree = PrefixTree(pool)
    first, second = tree.match(IDS), tree.match(IDS)
    for sequence in (first, second):
        pool.reserve_all([(sequence, 100)])
        sequence.length = sequence.position = 100
    assert pool.free_pages == 20 - 14
    for sequence in (first, second):
        tree.insert(sequence, IDS)
    assert first.pages[:6] == second.pages[:6]
    assert pool.free_pages == 20 - 8
    pool.check([first, second, tree])


def test_what_was_not_wanted_for_longest_goes_first_and_from_its_end() -> None:
    pool = PagePool(LAYOUT, 160)
    tree = PrefixTree(pool)
    old, new = IDS[:48], IDS[50:98]
    for ids in (old, new):
        pool.release(read(pool, tree, ids))
    pool.release(tree.match([*old, 1]))  # wanted again: it is the newer one now
    assert (tree.kept_pages, pool.free_pages) == (6, 4)
    holder = pool.new_sequence()
    pool.reserve_all([(holder, 16 * 5)])
    assert (tree.match([*new, 1]).length, tree.match([*old, 1]).length) == (32, 48)


def test_what_a_sequence_holds_is_not_given_up() -> None:
    pool = PagePool(LAYOUT, 160)
    tree = PrefixTree(pool)
    held = read(pool, tree, IDS[:48])
    pool.release(read(pool, tree, IDS[:80]))
    assert tree.kept_pages == 2
    other = pool.new_sequence()
    with pytest.raises(CacheFull):
        pool.reserve_all([(other, 16 * 8)])
    assert (tree.kept_pages, pool.free_pages, len(tree)) == (0, 7, 3)
    pool.reserve_all([(other, 16 * 7)])
    tree.clear()
    assert len(tree) == 0
    pool.check([held, other, tree])


@pytest.mark.parametrize("kind", ["slid", "holed", "answer"])
def test_texts_whose_pages_mean_something_else_are_passed_over(kind: str) -> None:
    pool = PagePool(LAYOUT, 320)
    tree = PrefixTree(pool)
    sequence = pool.new_sequence(pool.new_sequence() if kind == "answer" else None)
    pool.reserve_all([(sequence, 40)])
    sequence.length = 40
    sequence.position = 60 if kind == "slid" else 40
    sequence.hole = (4, 16) if kind == "holed" else (0, 0)
    tree.insert(sequence, IDS[:40])
    assert len(tree) == 0


def test_a_beginning_is_found_only_with_the_pages_its_next_row_sees() -> None:
    pool = PagePool(KvLayout(2, 1, 1, "f32", (KvGroup((0,)), KvGroup((1,), 24))), 640)
    tree = PrefixTree(pool)
    late = pool.new_sequence()
    for length in (64, 96):  # pages behind the window were given back before the tree saw them
        pool.reserve_all([(late, length)])
        late.length = late.position = length
    pool.give_back(late)
    tree.insert(late, IDS[:96])
    assert tree.match(IDS[:90]).length == 0
    whole, early = tree.match(IDS[:97]), pool.new_sequence()
    assert whole.length == 96
    for length in (32, 64, 96):
        pool.reserve_all([(early, length)])
        early.length = early.position = length
        tree.insert(early, IDS[:length])
    found = tree.match(IDS[:90])
    assert found.length == 80
    assert [page == NO_PAGE for page in found.tables[1]] == [True, True, True, False, False]
    pool.check([late, whole, early, found, tree])


@pytest.mark.parametrize("window", [0, 24])
def test_what_a_text_has_left_behind_can_be_given_up_before_what_it_holds(window: int) -> None:
    pool = PagePool(KvLayout(1, 1, 1, "f32", (KvGroup((0,), window),)), 160)
    tree = PrefixTree(pool)
    sequence = read(pool, tree, IDS[:96])
    if window:
        pool.give_back(sequence)  # its next row sees slots 73 and on
    else:
        pool.cut(sequence, 0, 4)
    assert (tree.kept_pages, pool.free_pages) == (4, 4)
    other = pool.new_sequence()
    pool.reserve_all([(other, 16 * 7)])
    assert (tree.kept_pages, pool.free_pages) == (1, 0)
    pool.release(other)
    assert tree.match(IDS).length == (96 if window else 16)


def test_answers_after_a_shared_beginning_are_the_same_to_the_bit(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner()
    tree = PrefixTree(runner.pool)
    alone = runner.new_sequence()
    runner.step([(alone, IDS[:32])])
    wanted = [runner.step([(alone, IDS[32:45])]).logits, runner.step([(alone, [7])]).logits]
    tree.insert(alone, [*IDS[:45], 7])
    shared = tree.match(IDS[:45])
    assert shared.length == 32
    found = [runner.step([(shared, IDS[32:45])]).logits, runner.step([(shared, [7])]).logits]
    np.testing.assert_array_equal(found, wanted)
    runner.pool.check([alone, shared, tree])
