"""KV page kinds in NumPy: what comes back, what a store leaves alone, and that the runtime agrees on sizes."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.compiler.kv_pages import KINDS, page_shape, rotate
from llmc.runtime.cache.pages import PagePool
from llmc.runtime.loading.manifest import KvLayout

SIZES = (7, 10, 16, 20, 64, 80, 128)
# Root mean square of the error of K and of V over that of the numbers, for a normal distribution.
ERRORS = {"f32": (0, 0), "bf16": (0.002, 0.002), "q8": (0.007, 0.007), "q4": (0.03, 0.08)}


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_comes_back(kind: str, size: int) -> None:
    pages = np.zeros((2, *page_shape(kind, 3, size)), KINDS[kind].dtype)
    k, v = _floats(32, 3, size), -3 * _floats(32, 3, size)
    for slot in range(32):
        KINDS[kind].store(pages, slot // 16, slot % 16, k[slot], v[slot])
    keys, values = KINDS[kind].load(pages, size)
    found = keys.transpose(0, 3, 1, 2).reshape(k.shape), values.transpose(0, 2, 1, 3).reshape(v.shape)
    for got, wanted, error in zip(found, (k, v), ERRORS[kind], strict=True):
        assert np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()) <= error


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_touches_its_own_bytes_only_and_the_same_ones_each_time(kind: str) -> None:
    kv, (k, v) = KINDS[kind], _floats(2, 2, 20)
    pages = np.full((3, *page_shape(kind, 2, 20)), 0x55, KINDS[kind].dtype)
    before = pages.copy()
    kv.store(pages, 1, 5, k, v)
    touched = pages != before
    assert not touched[[0, 2]].any()
    kv.store(pages, 1, 6, v, k)
    kv.store(pages, 1, 5, -v, 2 * k)
    once = np.full_like(before, 0x55)
    kv.store(once, 1, 6, v, k)
    kv.store(once, 1, 5, -v, 2 * k)
    np.testing.assert_array_equal(pages, once)


@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_numbers_that_have_no_scale_come_back_as_nothing(kind: str) -> None:
    pages = np.zeros((1, *page_shape(kind, 1, 16)), np.uint8)
    KINDS[kind].store(pages, 0, 0, np.zeros((1, 16), np.float32), np.full((1, 16), 1e-44, np.float32))
    keys, values = KINDS[kind].load(pages, 16)
    assert np.abs(keys[0, 0, :, 0]).max() < 1e-37
    assert np.abs(values[0, 0, 0]).max() < 1e-37


@pytest.mark.parametrize("size", SIZES)
def test_rotation_keeps_products_and_undoes_itself(size: int) -> None:
    a, b = _floats(5, size), _floats(4, size)
    np.testing.assert_allclose(rotate(a) @ rotate(b).T, a @ b.T, atol=1e-4)
    np.testing.assert_allclose(rotate(rotate(a)), a, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_runtime_makes_the_pages_that_the_kernels_take(kind: str, size: int) -> None:
    layout = KvLayout(layers=2, kv_heads=3, head_dim=size, dtype=kind)
    pool = PagePool(layout, 33)
    assert layout.page_shape == page_shape(kind, 3, size)
    assert [(layer.shape, layer.dtype) for layer in pool.layers] == [((3, *layout.page_shape), KINDS[kind].dtype)] * 2
    assert layout.token_bytes * 16 * 3 == sum(layer.nbytes for layer in pool.layers)
