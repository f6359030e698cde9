"""Formats of plain numbers, float32 and bfloat16, and what every format has in common.

Every format keeps a matrix in tiles of `TILE` = 16 output rows, so that one vector register holds one input column
of a tile and a thread that owns a range of tiles reads one sequential stream, scales included.
The layout is the same for every CPU variant of an artifact; only the kernels that read it differ.

Letters: N = output rows, K = input columns, T = ceil(N / 16) tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE = 16  # output rows a tile: float32 lanes of a 512-bit register
_PIECE = 1 << 17  # numbers that are worked on at once: a CPU's second cache holds them and what is made of them

Array = NDArray[np.generic]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class PlainFormat:
    """Numbers without scales. `activation` is what the kernel wants on its left side: "f32", or "bf16" pairs."""

    name: str
    activation: str
    dtype: str  # element type of the packed tensor
    packed_shape: Callable[[int, int], tuple[int, ...]]  # (N, K) -> shape
    pack: Callable[[F32], Array]  # (N, K) -> packed
    unpack: Callable[[Array, int, int], F32]  # packed, N, K -> (N, K)
    code_bits: float  # bits of a weight, without padding

    @property
    def stored(self) -> Callable[[Array, int, int], F32]:
        """What rows are multiplied with: the numbers as they are."""
        return self.unpack


def ceil_to(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def tiles(rows: int) -> int:
    """Tiles that hold this many rows."""
    return -(-rows // TILE)


def pieces(rows: int, columns: int, numbers: int = 0) -> Iterator[slice]:
    """Rows of a large matrix in pieces of whole tiles, of so many numbers or a tile; 0: of what caches hold.

    >>> list(pieces(40, 1 << 13))
    [slice(0, 16, None), slice(16, 32, None), slice(32, 40, None)]
    """
    step = TILE * max(1, (numbers or _PIECE) // (TILE * max(1, columns)))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def tiles_of(piece: slice) -> slice:
    """The tiles of a piece's rows."""
    return slice(piece.start // TILE, tiles(piece.stop))


def padded(weight: F32, column_multiple: int) -> F32:
    """Zero rows and columns added: (N, K) -> (T * 16, ceil(K))."""
    rows, columns = weight.shape
    out = np.zeros((tiles(rows) * TILE, ceil_to(columns, column_multiple)), np.float32)
    out[:rows, :columns] = weight
    return out


# --- f32: (T, K, 16) -------------------------------------------------------------------------


def _pack_f32(weight: F32) -> Array:
    rows, columns = weight.shape
    out = np.empty((tiles(rows), columns, TILE), np.float32)
    for piece in pieces(rows, columns):
        out[tiles_of(piece)] = padded(weight[piece], 1).reshape(-1, TILE, columns).transpose(0, 2, 1)
    return out


def _unpack_f32(packed: Array, rows: int, columns: int) -> F32:
    flat = packed.astype(np.float32).transpose(0, 2, 1).reshape(-1, packed.shape[1])
    return np.ascontiguousarray(flat[:rows, :columns])


# --- bf16: (T, K / 2, 16) words, each a pair of neighbouring columns, the even one low ---------


def to_bf16(values: F32) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, ties to even (the rounding of AVX512-BF16 and AMX)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_bf16(weight: F32) -> Array:
    rows, columns = weight.shape
    out = np.empty((tiles(rows), ceil_to(columns, 2) // 2, TILE), np.int32)
    for piece in pieces(rows, columns):
        pairs = to_bf16(padded(weight[piece], 2)).view(np.int32)
        out[tiles_of(piece)] = pairs.reshape(-1, TILE, pairs.shape[1]).transpose(0, 2, 1)
    return out


def _unpack_bf16(packed: Array, rows: int, columns: int) -> F32:
    pairs = np.ascontiguousarray(packed).view(np.uint16).reshape(*packed.shape, 2)
    flat = pairs.transpose(0, 2, 1, 3).reshape(packed.shape[0] * TILE, -1)
    return np.ascontiguousarray(from_bf16(flat)[:rows, :columns])


F32_FORMAT = PlainFormat("f32", "f32", "float32", lambda n, k: (tiles(n), k, TILE), _pack_f32, _unpack_f32, 32)
BF16_FORMAT = PlainFormat(
    "bf16", "bf16", "int32", lambda n, k: (tiles(n), ceil_to(k, 2) // 2, TILE), _pack_bf16, _unpack_bf16, 16
)
