"""What the device functions of targets/cuda/prelude.py mean, in NumPy, lane by lane as PTX lays operands out."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.compiler.formats import block_format, to_bf16
from llmc.targets.cuda.prelude import value_words

Array = np.ndarray[Any, Any]
LANES = 32


def bf16_pair(low: Array, high: Array) -> Array:
    """float32 (T,), (T,) -> uint32 (T,): the nearest bfloat16 of both."""
    low, high = np.broadcast_arrays(low, high)
    pairs = np.stack([to_bf16(np.ascontiguousarray(half, np.float32)) for half in (low, high)], axis=-1)
    return np.asarray(np.ascontiguousarray(pairs).view(np.uint32)[..., 0])


def bf16_add(a: Array, b: Array) -> Array:
    """uint32 pairs (T,) -> the nearest bfloat16 of both sums."""
    a, b = np.broadcast_arrays(a, b)
    return bf16_pair(*(_half(a, half) + _half(b, half) for half in range(2)))


def half(bits: Array) -> Array:
    """The float16 in the low bits of uint32 -> float32."""
    return np.ascontiguousarray(bits.astype(np.uint16)).view(np.float16).astype(np.float32)


def bytes_of(low: Array, high: Array, chosen: Array) -> Array:
    """`__byte_perm`: of eight bytes, the lowest of `low` first, those that hexadecimal digits of `chosen` name."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    found = np.zeros(both.shape, np.uint64)
    for at in range(4):
        place = np.uint64(8 * (int(chosen[0]) >> 4 * at & 15))
        found |= (both >> place & np.uint64(0xFF)) << np.uint64(8 * at)
    return found.astype(np.uint32)


def value(name: str, codes: Array) -> Array:
    """What codes of a format stand for: a pair of bfloat16."""
    format = block_format(name.removeprefix("llmc_value_"))
    return np.array(value_words(format), np.uint32)[codes]


def product(sums: Array, a: Array, b: Array) -> Array:
    """m16n8k16 of bfloat16: words of every lane, sums (4, T) float32, a (4, T) and b (2, T) uint32 -> sums (4, T).

    Products are exact and added in float64, one k after the other, so that an element has the same bits wherever in a
    product it stands. A chip adds them with a few more bits than float32 has, in an order of its own.
    """
    lane = np.arange(LANES)
    first, quarter = lane // 4, lane % 4
    warps = sums.shape[1] // LANES
    rows, columns = np.zeros((warps, 16, 16), np.float64), np.zeros((warps, 16, 8), np.float64)
    total = np.zeros((warps, 16, 8), np.float64)
    for word in range(4):
        for half in range(2):
            k = 2 * quarter + 8 * (word // 2) + half
            rows[:, first + 8 * (word % 2), k] = _half(a[word], half).reshape(warps, LANES)
            if word < 2:
                columns[:, 2 * quarter + 8 * word + half, first] = _half(b[word], half).reshape(warps, LANES)
        total[:, first + 8 * (word // 2), 2 * quarter + word % 2] = sums[word].reshape(warps, LANES)
    for k in range(16):
        total += rows[:, :, k, None] * columns[:, k, None, :]
    found = total.astype(np.float32)
    return np.stack([found[:, first + 8 * (i // 2), 2 * quarter + i % 2].reshape(-1) for i in range(4)])


def _half(words: Array, half: int) -> Array:
    """One number of each pair, as float32."""
    return np.ascontiguousarray((words >> np.uint32(16 * half)) << np.uint32(16)).view(np.float32)
