"""Pages: exact accounting, alignment, and no memory before it is used."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.cache.ledger import NO_PAGE
from llmc.runtime.cache.pages import PagePool, Sequence, pages_for
from llmc.runtime.errors import CacheFull, RequestError
from llmc.runtime.loading.manifest import KvGroup, KvLayout

LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=16, dtype="bf16")
TWO_GROUPS = KvLayout(2, 1, 1, "f32", (KvGroup((0,)), KvGroup((1,), 32)))


def grown(pool: PagePool, tokens: int, sequence: Sequence | None = None) -> Sequence:
    """A sequence that has `tokens` more tokens."""
    sequence = sequence or pool.new_sequence()
    pool.reserve_all([(sequence, sequence.length + tokens)])
    sequence.length += tokens
    sequence.position += tokens
    return sequence


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=30))
def test_every_page_has_one_owner(actions: list[tuple[int, int]]) -> None:
    pool = PagePool(LAYOUT, 320)
    sequences = [Sequence() for _ in range(4)]
    for index, tokens in actions:
        before = [list(s.pages) for s in sequences]
        try:
            if tokens == 0:
                pool.release(sequences[index])
            else:
                pool.reserve_all([(sequences[index], tokens)])
                assert sequences[index].room >= tokens
        except RequestError:
            assert before == [list(s.pages) for s in sequences]
            assert pages_for(tokens) - len(before[index]) > pool.free_pages
        held = [page for s in sequences for page in s.pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(20))
        assert len(held) + pool.free_pages == 20


def test_layers_are_aligned_and_zero() -> None:
    pool = PagePool(LAYOUT, 100)
    assert [layer.shape for layer in pool.layers] == [(7, 2, 3, 256)] * 2
    assert all(layer.ctypes.data % 64 == 0 and layer.flags.writeable for layer in pool.layers)
    assert not any(layer.any() for layer in pool.layers)


def test_a_large_pool_takes_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    pool = PagePool(KvLayout(32, 8, 128, "f32"), 100_000)
    pool.layers[3][17, 1, 2, 3] = 1
    assert resident() - before < 10_000_000
    assert sum(layer.nbytes for layer in pool.layers) > 20_000_000_000


def test_an_impossible_pool_is_refused_in_words() -> None:
    with pytest.raises(RequestError, match="smaller cache_tokens"):
        PagePool(KvLayout(2, 2**15, 2**15, "f32"), 2**31 - 1)


def test_forks_copy_only_the_page_that_is_written_and_the_longest_keeps_it() -> None:
    pool = PagePool(LAYOUT, 320)
    first = grown(pool, 40)
    others = [pool.fork(first) for _ in range(3)]
    assert pool.free_pages == 17
    pool.layers[1][first.pages[2], 0, 0, :8] = 7
    pool.truncate(others[0], 36)
    pool.reserve_all([(each, each.length + 1) for each in (first, *others)])
    assert pool.free_pages == 14  # four writers, one page each, and two pages that all of them read
    assert len({tuple(each.pages[:2]) for each in (first, *others)}) == 1
    assert len({each.pages[2] for each in (first, *others)}) == 4
    assert sum(2 in each.pages for each in (first, *others)) == 1
    assert 2 not in others[0].pages  # it fills slots that the others see
    assert all((pool.layers[1][each.pages[2], 0, 0, :8] == 7).all() for each in (first, *others))
    pool.check([first, *others])


def test_a_step_that_fails_takes_no_slot_of_a_twin_that_lost_pages_before() -> None:
    """The shorter of two then has more in the page that both are about to write to, so it must keep it."""
    pool = PagePool(LAYOUT, 320)
    first = grown(pool, 58)
    twin = pool.fork(first)
    pool.cut(twin, 1, 2)  # 42 tokens, ten of them in the page that has ten of the 58
    pool.truncate(first, 57)
    pool.layers[0][first.pages[3], :, :, 9] = 7
    with suppress(KeyError), pool.reserving([(first, 60), (twin, 44)]):
        for sequence in (first, twin):
            pool.layers[0][sequence.pages[sequence.length // 16], :, :, sequence.length % 16] = 5
        raise KeyError
    assert (pool.layers[0][twin.pages[2], :, :, 9] == 7).all()
    pool.check([first, twin])


def test_a_fork_alone_copies_while_its_twin_waits() -> None:
    pool = PagePool(LAYOUT, 64)
    first = grown(pool, 20)
    twin = pool.fork(first)
    grown(pool, 1, twin)
    assert (list(first.pages), list(twin.pages)) == ([0, 1], [0, 2])
    grown(pool, 1, first)
    assert (list(first.pages), pool.free_pages) == ([0, 1], 1)


def test_a_change_undone_gives_copies_back() -> None:
    pool = PagePool(LAYOUT, 64)
    first = grown(pool, 20)
    twin = pool.fork(first)
    with suppress(KeyError), pool.reserving([(twin, 40)]):
        assert (list(twin.pages), pool.free_pages) == ([0, 3, 2], 0)
        raise KeyError
    assert (list(twin.pages), pool.free_pages) == ([0, 1], 2)
    pool.check([first, twin])


def test_what_is_short_is_reclaimed_first_and_then_refused() -> None:
    pool = PagePool(LAYOUT, 64)
    spare, wanted = grown(pool, 33), list[list[int]]()

    def reclaim(counts: SequenceOf[int]) -> None:
        wanted.append(list(counts))
        pool.truncate(spare, 16)

    pool.reclaim = reclaim
    taken = grown(pool, 40)
    assert (wanted, len(taken.pages)) == ([[3]], 3)
    with pytest.raises(CacheFull, match="2 more pages of 16 tokens wanted, 0 of 4 free"):
        pool.reserve_all([(taken, 80)])
    assert (wanted, len(taken.pages)) == ([[3], [2]], 3)


def test_pages_behind_a_window_are_given_back_while_a_text_grows() -> None:
    pool = PagePool(TWO_GROUPS, 160)
    sequence = grown(pool, 20)
    for _ in range(140):
        grown(pool, 1, sequence)
        whole, window = sequence.tables
        assert len(whole) == len(window)
        held = [at for at, page in enumerate(window) if page != NO_PAGE]
        assert held[0] <= max(0, sequence.length - 32) // 16
        assert len(held) <= 3
        pool.check([sequence])
    assert NO_PAGE not in sequence.tables[0]
    assert [ledger.free for ledger in pool.ledgers] == [0, 8]
    pool.release(sequence)
    assert [ledger.free for ledger in pool.ledgers] == [10, 10]


def test_a_text_is_cut_back_only_where_its_windows_are_whole() -> None:
    pool = PagePool(TWO_GROUPS, 320)
    sequence = grown(pool, 1, grown(pool, 100))
    assert pool.truncate(sequence, 97) == 97  # its row sees slots 66 and on, in page 4 and on
    assert sequence.position == 97
    assert pool.truncate(sequence, 90) == 0
    assert pool.free_pages == 20


def test_a_wrong_count_is_found() -> None:
    pool = PagePool(TWO_GROUPS, 320)
    sequence, other = grown(pool, 20), grown(pool, 20)
    pool.check([sequence, other])
    for wrong in ([sequence], [sequence, other, other], []):
        with pytest.raises(AssertionError, match="wrong count"):
            pool.check(wrong)
    del other.tables[1][1]
    with pytest.raises(AssertionError, match="unequal lengths"):
        pool.check([sequence, other])


def test_slots_can_be_taken_out_of_the_middle() -> None:
    pool = PagePool(LAYOUT, 320)
    sequence = grown(pool, 70)
    twin = pool.fork(sequence)
    pool.cut(sequence, 1, 3)
    assert (list(sequence.pages), sequence.length, sequence.position) == ([0, 3, 4], 38, 70)
    pool.own(sequence, 0, 1)
    assert (list(sequence.pages), list(twin.pages)) == ([5, 3, 4], [0, 1, 2, 3, 4])
    pool.check([sequence, twin])
