"""Weight formats: how a matrix (N, K) is stored, and what the stored bytes mean.

Every format keeps the matrix in tiles of `TILE` = 16 output rows, so that one vector register holds one input column
of a tile and a thread that owns a range of tiles reads one sequential stream, scales included.
The layout is the same for every CPU variant of an artifact; only the kernels that read it differ.

Letters: N = output rows, K = input columns, T = ceil(N / 16) tiles, B = 32 columns a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError

TILE = 16  # output rows a tile: float32 lanes of a 512-bit register
BLOCK = 32  # input columns that share a scale
GROUP = 64  # input columns a record of a block format holds: keeps records a multiple of 64 bytes

Array = NDArray[np.generic]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """One way to store a weight matrix.

    `activation` names what the kernel wants on its left side: "f32", "bf16" (rounded pairs) or "i8" (blocks of 32).
    """

    name: str
    activation: str
    dtype: str  # element type of the packed tensor
    packed_shape: Callable[[int, int], tuple[int, ...]]
    pack: Callable[[F32], Array]
    unpack: Callable[[Array, int, int], F32]


def ceil_to(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def _padded(weight: F32, column_multiple: int) -> F32:
    """Zero rows and columns added: (N, K) -> (T * 16, ceil(K))."""
    rows, columns = weight.shape
    out = np.zeros((_tiles(rows) * TILE, ceil_to(columns, column_multiple)), np.float32)
    out[:rows, :columns] = weight
    return out


# --- f32: (T, K, 16) -------------------------------------------------------------------------


def _pack_f32(weight: F32) -> Array:
    padded = _padded(weight, 1)
    return np.ascontiguousarray(padded.reshape(-1, TILE, padded.shape[1]).transpose(0, 2, 1))


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
    padded = to_bf16(_padded(weight, 2))
    pairs = padded.reshape(-1, TILE, padded.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(pairs).view(np.int32)[..., 0]


def _unpack_bf16(packed: Array, rows: int, columns: int) -> F32:
    pairs = np.ascontiguousarray(packed).view(np.uint16).reshape(*packed.shape, 2)
    flat = pairs.transpose(0, 2, 1, 3).reshape(packed.shape[0] * TILE, -1)
    return np.ascontiguousarray(from_bf16(flat)[:rows, :columns])


# --- block formats: records of 64 columns x 16 rows, two blocks of 32 each ----------------------
# A record is [block 0 codes][block 1 codes][scales 2 x 16 fp16]([minima 2 x 16 fp16]) as int32 words. Codes are ordered
# [group of 4 columns][row][column in group]: one 64-byte load feeds one u8 x s8 dot of four columns for 16 rows.


def _blocks(weight: F32) -> F32:
    """(N, K) -> (T, 16, K / 32, 32)."""
    padded = _padded(weight, GROUP)
    return padded.reshape(-1, TILE, padded.shape[1] // BLOCK, BLOCK)


def _fp16(values: F32, what: str) -> NDArray[np.float16]:
    limit = float(np.finfo(np.float16).max)
    if values.size and float(np.abs(values).max()) > limit:
        raise LlmcError(
            f"weights too large for a {what} in fp16: got {np.abs(values).max():g}, wanted at most {limit:g}; "
            "use --quant f32 or bf16"
        )
    return values.astype(np.float16)


def _quantize(values: F32, scale: F32, zero: F32, top: int) -> NDArray[np.uint8]:
    safe = np.where(scale == 0, np.float32(1), scale)[..., None]
    codes = np.rint((values - zero[..., None]) / safe)
    return np.clip(codes, 0, top, out=codes).astype(np.uint8)


def _by_group(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(T, 16, b, 32) -> (T, b, 8 groups, 16 rows, 4 columns)."""
    tiles, rows, blocks, _ = codes.shape
    return codes.reshape(tiles, rows, blocks, 8, 4).transpose(0, 2, 3, 1, 4)


def _from_groups(grouped: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(T, b, 8, 16, 4) -> (T, 16, b, 32)."""
    tiles, blocks = grouped.shape[:2]
    return grouped.transpose(0, 3, 1, 2, 4).reshape(tiles, TILE, blocks, BLOCK)


def _records(codes: NDArray[np.uint8], *tables: NDArray[np.float16]) -> Array:
    """codes (T, b, bytes) and fp16 tables (T, 16, b) -> (T, b / 2, words) int32."""
    tiles, blocks, width = codes.shape
    parts = [codes.reshape(tiles, blocks // 2, 2 * width)]
    for table in tables:
        by_block = np.ascontiguousarray(table.transpose(0, 2, 1))
        parts.append(by_block.view(np.uint8).reshape(tiles, blocks // 2, 2 * 2 * TILE))
    return np.ascontiguousarray(np.concatenate(parts, axis=2)).view(np.int32)


def _split_records(packed: Array, code_bytes: int) -> tuple[NDArray[np.uint8], list[F32]]:
    """The inverse of `_records`: codes (T, b, code_bytes) and float32 tables (T, 16, b)."""
    raw = np.ascontiguousarray(packed).view(np.uint8)
    tiles, pairs, _ = raw.shape
    codes = raw[:, :, : 2 * code_bytes].reshape(tiles, pairs * 2, code_bytes)
    tables = []
    for start in range(2 * code_bytes, raw.shape[2], 4 * TILE):
        table = np.ascontiguousarray(raw[:, :, start : start + 4 * TILE]).view(np.float16)
        tables.append(table.reshape(tiles, pairs * 2, TILE).transpose(0, 2, 1).astype(np.float32))
    return codes, tables


def _matrix(values: F32, rows: int, columns: int) -> F32:
    """(T, 16, b, 32) -> (N, K)."""
    flat = values.reshape(values.shape[0] * TILE, -1)
    return np.ascontiguousarray(flat[:rows, :columns])


def _pack_q8(weight: F32) -> Array:
    """w = scale * (code - 128), scale = max|w| / 127 in fp16 (GGUF's Q8_0 with an offset)."""
    blocks = _blocks(weight)
    scale = _fp16(np.abs(blocks).max(-1) / np.float32(127), "block scale")
    codes = _quantize(blocks, scale.astype(np.float32), -128 * scale.astype(np.float32), 255)
    grouped = _by_group(codes).reshape(*scale.transpose(0, 2, 1).shape[:2], 8 * 64)
    return _records(grouped, scale)


def _unpack_q8(packed: Array, rows: int, columns: int) -> F32:
    codes, (scale,) = _split_records(packed, 512)
    signed = _from_groups(codes.reshape(*codes.shape[:2], 8, TILE, 4)).astype(np.float32) - 128
    return _matrix(signed * scale[..., None], rows, columns)


def _pack_q4(weight: F32) -> Array:
    """w = scale * code + minimum, code in 0..15 (lead seed Eq. 1-2: step = range / (2^k - 1)).

    Byte (g, row, i) holds group g in its low half and group g + 4 in its high half.
    """
    blocks = _blocks(weight)
    low = blocks.min(-1)
    scale = _fp16((blocks.max(-1) - low) / np.float32(15), "block scale")
    minimum = _fp16(low, "block minimum")
    codes = _quantize(blocks, scale.astype(np.float32), minimum.astype(np.float32), 15)
    grouped = _by_group(codes)
    nibbles = np.bitwise_or(grouped[:, :, :4], np.left_shift(grouped[:, :, 4:], np.uint8(4)), dtype=np.uint8)
    return _records(nibbles.reshape(*nibbles.shape[:2], 4 * 64), scale, minimum)


def _unpack_q4(packed: Array, rows: int, columns: int) -> F32:
    nibbles, (scale, minimum) = _split_records(packed, 256)
    halves = nibbles.reshape(*nibbles.shape[:2], 4, TILE, 4)
    codes = _from_groups(np.concatenate([halves & 15, halves >> 4], axis=2)).astype(np.float32)
    return _matrix(codes * scale[..., None] + minimum[..., None], rows, columns)


def _records_shape(words: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda rows, columns: (_tiles(rows), ceil_to(columns, GROUP) // GROUP, words)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("f32", "f32", "float32", lambda n, k: (_tiles(n), k, TILE), _pack_f32, _unpack_f32),
        Format("bf16", "bf16", "int32", lambda n, k: (_tiles(n), ceil_to(k, 2) // 2, TILE), _pack_bf16, _unpack_bf16),
        Format("q8", "i8", "int32", _records_shape(272), _pack_q8, _unpack_q8),
        Format("q4", "i8", "int32", _records_shape(160), _pack_q4, _unpack_q4),
    )
}


# --- activations -----------------------------------------------------------------------------


def quantize_rows(x: F32) -> tuple[NDArray[np.int8], F32, F32]:
    """x (M, K) -> int8 codes (M, K64), scales (M, K64 / 32), scale * sum of codes, K64 = K padded to 64.

    x is about scale * code with scale = max|x| / 127 of each block of 32 (as llama.cpp's Q8_1 activations).
    """
    rows, columns = x.shape
    padded = np.zeros((rows, ceil_to(columns, GROUP)), np.float32)
    padded[:, :columns] = x
    blocks = padded.reshape(rows, -1, BLOCK)
    top = np.abs(blocks).max(-1)
    scale = (top / np.float32(127)).astype(np.float32)
    inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0).astype(np.float32)
    codes = np.rint(blocks * inverse[..., None]).astype(np.int8)
    sums = codes.sum(-1, dtype=np.int32).astype(np.float32) * scale
    return codes.reshape(rows, -1), scale, sums
