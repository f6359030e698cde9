"""Random use of the cache against a plain list of what each sequence should find in its slots."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from threading import Thread
from zlib import crc32

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc.runtime.cache.ledger import NO_PAGE
from llmc.runtime.cache.pages import PagePool, Sequence, first_seen
from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.cache.swap import Copy, put_back, swap_out
from llmc.runtime.errors import CacheFull
from llmc.runtime.loading.manifest import KvGroup, KvLayout

PAGES, TEXTS = 24, 5
GROUPS = {
    "whole": (KvGroup((0, 1)),),
    "window": (KvGroup((0, 1), 20),),
    "both": (KvGroup((1,)), KvGroup((0,), 20)),
}


class _Text:
    """A sequence, its tokens, and for each slot what its page should hold: a number made of all tokens up to there."""

    def __init__(self, sequence: Sequence, ids: list[int], salt: str) -> None:
        self.sequence, self.ids, self.salt = sequence, ids, salt
        self.marks = _marks([], ids)
        self.away: Copy | None = None


class _Cache:
    """A pool of few pages, its tree and some texts; each method is something that may happen to them."""

    def __init__(self, groups: tuple[KvGroup, ...], random: Random) -> None:
        self.random = random
        self.groups = groups
        self.pool = PagePool(KvLayout(2, 1, 1, "f32", groups), PAGES * 16)
        self.tree = PrefixTree(self.pool)
        self.texts: list[_Text] = []

    def here(self) -> _Text:
        """One of the texts that are in the pool."""
        texts = [text for text in self.texts if text.away is None]
        return self.random.choice(texts) if texts else self.begin()

    def begin(self) -> _Text:
        if len(self.texts) == TEXTS:
            self.drop()
        ids, salt = [0] * 16 + self.some_ids() + self.some_ids(), self.random.choice(["", "", "other"])
        sequence = self.tree.match(ids, salt)
        assert sequence.length % 16 == 0
        assert sequence.length < len(ids)
        text = _Text(sequence, ids[: sequence.length], salt)
        self.texts.append(text)
        self.feed({id(text): ids[sequence.length :]}, [text], fails=False)
        self.tree.insert(sequence, text.ids, salt)
        return text

    def some_ids(self) -> list[int]:
        """Few kinds, so that many texts begin alike."""
        return [self.random.randrange(2)] * self.random.choice([1, 5, 16, 32, 40])

    def grow(self) -> None:
        """A step of some texts, which may fail when it has written."""
        texts = list({id(text): text for text in (self.here() for _ in range(self.random.randrange(1, 5)))}.values())
        texts = [text for text in texts if text in self.texts]
        fails = self.random.random() < 0.3
        new = {id(text): self.some_ids()[: self.random.choice([1, 2, 40])] for text in texts}
        self.feed(new, texts, fails)

    def feed(self, new: dict[int, list[int]], texts: list[_Text], fails: bool) -> None:
        for text in texts:
            self.pool.give_back(text.sequence)
        before = [[list(table) for table in text.sequence.tables] for text in texts]
        try:
            with self.pool.reserving([(text.sequence, text.sequence.length + len(new[id(text)])) for text in texts]):
                for text in texts:
                    marks = _marks(text.ids, new[id(text)])
                    self.write(text, [-1] * len(marks) if fails else marks)
                if fails:
                    raise InterruptedError
        except (CacheFull, InterruptedError):
            assert before == [[list(table) for table in text.sequence.tables] for text in texts]
            return
        for text in texts:
            text.marks += _marks(text.ids, new[id(text)])
            text.ids += new[id(text)]
            text.sequence.length += len(new[id(text)])
            text.sequence.position += len(new[id(text)])

    def write(self, text: _Text, marks: list[int]) -> None:
        for group, table in zip(self.groups, text.sequence.tables, strict=True):
            for slot, mark in enumerate(marks, text.sequence.length):
                for layer in group.layers:
                    self.pool.layers[layer][table[slot // 16], :, 0, slot % 16] = mark

    def reserve_ahead(self) -> None:
        text, tokens = self.here(), self.random.randrange(1, 80)
        with suppress(CacheFull):
            self.pool.reserve_all([(text.sequence, text.sequence.length + tokens)])
            assert text.sequence.room >= text.sequence.length + tokens

    def fork(self) -> None:
        text = self.here()
        if len(self.texts) < TEXTS:
            free = self.pool.free_pages
            twin = _Text(self.pool.fork(text.sequence), list(text.ids), text.salt)
            twin.marks = list(text.marks)
            self.texts.append(twin)
            assert self.pool.free_pages == free

    def truncate(self) -> None:
        text = self.here()
        length = text.sequence.length
        wanted = max(0, length - self.random.choice([1, 1, 3, 16]))
        left = self.pool.truncate(text.sequence, wanted)
        assert left in ((0, wanted) if any(group.window for group in self.groups) else (wanted,))
        assert text.sequence.length == left
        del text.marks[left:], text.ids[left:]

    def own(self) -> None:
        text = self.here()
        with suppress(CacheFull):
            self.pool.own(text.sequence, 0, len(text.sequence.pages))

    def cut(self) -> None:
        """The text slides: its positions are no longer its slots, and the tree is to pass it over."""
        text, first = self.here(), self.random.randrange(3)
        if text.sequence.length < 16 * (first + 1):
            return
        tables = zip(self.groups, text.sequence.tables, strict=True)
        left = [first_seen(group.window, text.sequence.length) for group, table in tables if NO_PAGE in table]
        if all(16 * (first + 1) <= slot for slot in left):
            self.pool.cut(text.sequence, first, first + 1)
            del text.marks[16 * first : 16 * first + 16], text.ids[16 * first : 16 * first + 16]

    def swap(self) -> None:
        text = self.random.choice(self.texts)
        if text.away is None:
            text.away = swap_out(self.pool, text.sequence)
            assert not text.sequence.pages
            return
        with suppress(CacheFull):
            put_back(self.pool, text.sequence, text.away)
            text.away = None

    def insert(self) -> None:
        text = self.here()
        self.tree.insert(text.sequence, text.ids, text.salt)

    def drop(self) -> None:
        text = self.texts.pop(self.random.randrange(len(self.texts)))
        self.pool.release(text.sequence)

    def evict(self) -> None:
        free, kept, pages = self.pool.free_pages, self.tree.kept_pages, self.random.randrange(1, PAGES + 1)
        self.tree.evict([pages] * len(self.groups))
        if len(self.groups) == 1:
            assert self.pool.free_pages >= min(pages, free + kept)
        assert self.pool.free_pages >= pages or not self.tree.kept_pages

    def check(self) -> None:
        """Counts are exact, and each text finds what it wrote."""
        self.pool.check([*(text.sequence for text in self.texts), self.tree])
        for text in self.texts:
            if text.away is not None:
                continue
            assert text.sequence.length == len(text.marks)
            for group, table in zip(self.groups, text.sequence.tables, strict=True):
                slots = np.arange(first_seen(group.window, text.sequence.length), text.sequence.length)
                pages = np.array(table, int)[slots // 16]
                assert (pages != NO_PAGE).all()
                for layer in group.layers:
                    found = self.pool.layers[layer][pages, :, 0, slots % 16]
                    np.testing.assert_array_equal(found, np.array(text.marks)[slots, None].repeat(2, 1))

    def end(self) -> None:
        """Everybody leaves, and every page is free."""
        for text in self.texts:
            self.pool.release(text.sequence)
        self.tree.clear()
        assert [ledger.free for ledger in self.pool.ledgers] == [PAGES] * len(self.groups)


def _marks(ids: list[int], new: list[int]) -> list[int]:
    raw = bytes([*ids, *new])
    return [crc32(raw[: len(ids) + n + 1]) % 2**24 for n in range(len(new))]


@pytest.mark.parametrize("kind", GROUPS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=139655844)
def test_any_use_of_the_cache_keeps_every_text_and_every_count(kind: str, seed: int) -> None:
    random = Random(seed)
    cache = _Cache(GROUPS[kind], random)
    rare = [cache.reserve_ahead, cache.own, cache.cut, cache.evict, cache.drop]
    often = [cache.begin, cache.grow, cache.grow, cache.fork, cache.truncate, cache.swap, cache.insert]
    for _ in range(80):
        if cache.texts:
            random.choice(rare if random.random() < 0.12 else often)()
        else:
            cache.begin()
        cache.check()
    cache.end()


def test_threads_share_a_pool_and_end_with_every_page_free() -> None:
    """Each thread has sequences of its own; pages, tree and what is reclaimed are common."""
    pool = PagePool(KvLayout(1, 1, 1, "f32"), 16 * 24)
    tree = PrefixTree(pool)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(120):
                ids = [random.randrange(2)] * random.randrange(1, 100)
                sequence = tree.match(ids)
                with suppress(CacheFull):
                    pool.reserve_all([(sequence, len(ids))])
                    sequence.length = sequence.position = len(ids)
                    tree.insert(sequence, ids)
                    twin = pool.fork(sequence)
                    with suppress(CacheFull):
                        put_back(pool, twin, swap_out(pool, twin))
                    pool.release(twin)
                pool.release(sequence)
        except BaseException as fault:
            faults.append(fault)

    threads = [Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not faults
    assert not any(thread.is_alive() for thread in threads)
    pool.check([tree])
    tree.clear()
    assert pool.free_pages == 24
