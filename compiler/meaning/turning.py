"""What the ops mean that turn keys in the cache, in NumPy. Letters: n pages, G kv heads, D head size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kv_pages import KINDS, PAGE

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Pages = NDArray[Any]  # (pages, *page_shape) of one layer, see kv_pages.py


def load_keys(kv: Pages, page_ids: I32, kv_heads: int, head_dim: int, kv_dtype: str) -> F32:
    """(n,) -> (16 n, G D)."""
    keys = KINDS[kv_dtype].load(kv[page_ids], head_dim)[0]  # (n, G, D, 16)
    return np.ascontiguousarray(keys.transpose(0, 3, 1, 2)).reshape(-1, kv_heads * head_dim)


def store_keys(rows: F32, kv: Pages, from_ids: I32, to_ids: I32, kv_heads: int, head_dim: int, kv_dtype: str) -> I32:
    """(16 n, G D), (n,), (n,) -> (1,), a zero; kv is written in place."""
    kind, keys = KINDS[kv_dtype], rows.reshape(-1, PAGE, kv_heads, head_dim)
    copies = kv[from_ids]
    written = copies.copy()
    for page in range(len(copies)):
        for place in range(PAGE):
            kind.store(written, page, place, keys[page, place], keys[page, place])
    kind.keys(copies, head_dim)[...] = kind.keys(written, head_dim)
    kv[to_ids] = copies
    return np.zeros(1, np.int32)


def copy_pages(kv: Pages, from_ids: I32, to_ids: I32, kv_dtype: str) -> I32:
    """(n,), (n,) -> (1,), a zero; kv is written in place."""
    kv[to_ids] = kv[from_ids]
    return np.zeros(1, np.int32)
