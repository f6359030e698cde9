"""Pages: exact accounting, alignment, and no memory before it is used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.cache.pages import PagePool, Sequence, pages_for
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import KvLayout

LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=16, dtype="bf16")


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
