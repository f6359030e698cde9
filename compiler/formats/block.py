"""Block formats: a few bits a weight, and a scale for every 16, 32 or 64 columns of a row.

    w = scale of its block * value(code) + offset of its block

What a rotated format stores is the matrix with every 64 columns rotated (activations.py, `rotate_rows`), and rows that
are multiplied with it are rotated likewise: products stay what they are.

A `BlockFormat` is data: how many bits a code has, what a code stands for, how scales and offsets are stored. The
quantizers (minmax.py, search.py) make a `Quantized`; layout.py lays it out in memory; kernels read that.

Letters: N = output rows, K = input columns padded to whole records, B = K / block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats.activations import BLOCK, ROTATED, rotate_rows
from llmc.compiler.formats.plain import F32, TILE, Array, ceil_to, pieces, tiles

_ROTATED_AT_ONCE = 1 << 22  # numbers: a rotated matrix is never whole in memory

U8 = NDArray[np.uint8]
Quantizer = Callable[[F32, "BlockFormat", "F32 | None"], "Quantized"]


@dataclass(frozen=True)
class Quantized:
    """The numbers of a block-quantized matrix, in natural order, before any layout.

    `codes` (N, K) holds one code a column, or (N, K / 2) when a code stands for a pair of columns: code 4g + p of a
    row is for columns 8g + p and 8g + 4 + p. `tables` has, by the format's `scale` and `offset`:

    - "f16": scale (N, B) float16; with "minimum": minimum (N, B) float16; with "zero": zero (N, B) float16
    - "super": scale (N, K / 256) float16, sub_scale (N, B) int8, whose scale is scale * sub_scale * `factor`; with
      "minimum": minimum (N, K / 256) float16 and sub_minimum (N, B) uint8, which are subtracted
    - "row": row_scale (N,) float32, sub_scale (N, B) int8, whose scale is row_scale * sub_scale * |sub_scale|: a byte
      reaches from 1 to 16129, so that one outlier of a row does not take the precision of its other blocks
    """

    codes: U8
    tables: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockFormat:
    """One way to store a matrix in blocks.

    `planes`: a code's bits in pieces, low first, each 1, 2, 4, 6, 7 or 8 bits (layout.py says where they stand).
    `values`: what a code stands for, uint8 (entries,) or (entries, 2) for pairs; None: the code itself.
    `offset`: "minimum" (stored), "zero" (stored, times -scale) or a whole number (times -scale).
    """

    name: str
    planes: tuple[int, ...]
    block: int  # columns that share a scale
    scale: Literal["f16", "super", "row"]
    offset: Literal["minimum", "zero"] | int
    quantizer: Quantizer | None  # None: only keeps what a checkpoint has quantized already
    columns: int = 64  # a record's: scales and codes stand together
    rotated: bool = False
    pair: bool = False  # a code stands for two columns
    values: U8 | None = None
    sub_bits: int = 8  # of sub_scale and sub_minimum: 4 puts both in a byte
    factor: float = 1  # of "super" scales, a power of two that their float16 would not always have room for
    activation: str = "i8"
    dtype: str = "int32"

    @property
    def unit(self) -> int:
        """Columns of 8 groups of 4 codes: what the planes are laid out for."""
        return 64 if self.pair else 32

    @property
    def code_bits(self) -> float:
        """Bits of one weight, scales not counted."""
        return sum(self.planes) / (2 if self.pair else 1)

    @property
    def top(self) -> int:
        """The greatest code."""
        return len(self.values) - 1 if self.values is not None else (1 << sum(self.planes)) - 1

    @property
    def base(self) -> int:
        """n where a code's pair of values are its two digits in base n, the low one first; 0 where they are not."""
        if self.values is None or not self.pair:
            return 0
        base, codes = int(self.values.max()) + 1, np.arange(len(self.values))
        digits = np.stack([codes % base, codes // base], axis=1)
        return base if np.array_equal(self.values, digits) else 0

    @property
    def whole(self) -> bool:
        """Whether its offset is a whole number, so that dots with int8 have it in them."""
        return isinstance(self.offset, int)

    @property
    def left_block(self) -> int:
        """Columns of int8 activations that share a scale."""
        return ROTATED if self.rotated else BLOCK

    def left(self, quantized: Sequence[Any]) -> list[Any]:
        """Of what rows are as int8 what a product with this format reads: codes, scales, and sums or starts.

        `quantized` are the results of quantize_rows, of a rotated format those of quantize_rotated.
        """
        if self.rotated:
            return list(quantized)
        codes, scales, sums, starts = quantized
        return [codes, scales, starts if self.whole else sums]

    @property
    def code_words(self) -> int:
        """int32 words of codes in a record: 16 words a bit of a unit."""
        return self.columns // self.unit * sum(self.planes) * TILE

    @property
    def record_words(self) -> int:
        """int32 words of a record, padded to 64 bytes."""
        return ceil_to(self.code_words + self._table_bytes // 4, TILE)

    @property
    def _table_bytes(self) -> int:
        blocks = self.columns // self.block
        if self.scale == "row":
            return 0
        if self.scale == "f16":
            return blocks * TILE * 2 * (1 if self.whole else 2)
        subs = blocks * TILE * (2 if self.offset == "minimum" and self.sub_bits == 8 else 1)
        return subs + TILE * 2 * (2 if self.offset == "minimum" else 1)

    def head_words(self, columns: int) -> int:
        """int32 words in front of a tile's records: row scales and sub-scales of the "row" kind."""
        if self.scale != "row":
            return 0
        blocks = ceil_to(columns, self.columns) // self.block
        return TILE + ceil_to(blocks * TILE, 64) // 4

    def packed_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """(T, words of a tile)."""
        records = ceil_to(columns, self.columns) // self.columns
        return (tiles(rows), self.head_words(columns) + records * self.record_words)

    def quantize(self, weight: F32, importance: F32 | None = None) -> Quantized:
        """(N, K) float32 -> codes and tables; `importance` (K,) weighs the columns' errors where a quantizer can."""
        if self.quantizer is None:
            raise LlmcError(f"{self.name} only keeps weights that a checkpoint stores in it; choose another format")
        if not self.rotated:
            return self.quantizer(weight, self, importance)
        importance = None if importance is None else spread(importance)
        rows, columns = weight.shape
        some = pieces(rows, columns, _ROTATED_AT_ONCE)
        return join([self.quantizer(rotate_rows(weight[piece]), self, importance) for piece in some])

    def pack(self, weight: F32, importance: F32 | None = None) -> Array:
        """(N, K) float32 -> the packed tensor; `importance` as for `quantize`."""
        from llmc.compiler.formats.layout import encode

        return encode(self, self.quantize(weight, importance), *weight.shape)

    def unpack(self, packed: Array, rows: int, columns: int) -> F32:
        """The packed tensor -> (N, K) float32."""
        from llmc.compiler.formats.layout import decode

        return np.ascontiguousarray(dequantize(self, decode(self, packed, rows, columns))[:, :columns])

    def stored(self, packed: Array, rows: int, columns: int) -> F32:
        """`unpack`, but of a rotated format the rotated matrix: what rows are multiplied with."""
        from llmc.compiler.formats.layout import decode

        return np.ascontiguousarray(_stored(self, decode(self, packed, rows, columns))[:, :columns])


def spread(importance: F32) -> F32:
    """(K,) -> (P,): how much errors of rotated columns count, which are all of them mixed."""
    padded = np.zeros(ceil_to(len(importance), ROTATED), np.float32)
    padded[: len(importance)] = importance
    return np.repeat(padded.reshape(-1, ROTATED).mean(1), ROTATED).astype(np.float32)


def join(parts: list[Quantized]) -> Quantized:
    """Matrices of as many columns, one under another."""
    if len(parts) == 1:
        return parts[0]
    tables = {name: np.concatenate([part.tables[name] for part in parts]) for name in parts[0].tables}
    return Quantized(np.concatenate([part.codes for part in parts]), tables)


def blocks_of(weight: F32, format: BlockFormat) -> F32:
    """(N, K) -> (N, B, block), zeros added up to whole records."""
    rows, columns = weight.shape
    out = np.zeros((rows, ceil_to(columns, format.columns)), np.float32)
    out[:, :columns] = weight
    return out.reshape(rows, -1, format.block)


def over_block(most: np.ufunc, blocks: F32) -> F32:
    """np.minimum or np.maximum over the last axis: half by half, in a sixth of the time that NumPy takes row by row."""
    while blocks.shape[-1] > 1 and blocks.shape[-1] % 2 == 0:
        blocks = most(blocks[..., ::2], blocks[..., 1::2])
    found: F32 = most.reduce(blocks, axis=-1)
    return found


def scales(format: BlockFormat, tables: dict[str, Array]) -> tuple[F32, F32]:
    """Scale and offset of every block, (N, B) float32 each."""
    t = {name: table.astype(np.float32) for name, table in tables.items()}
    if format.scale == "f16":
        scale = t["scale"]
    elif format.scale == "super":
        supers = t["scale"] * np.float32(format.factor)
        scale = np.repeat(supers, format.columns // format.block, axis=1) * t["sub_scale"]
    else:
        scale = t["row_scale"][:, None] * (t["sub_scale"] * np.abs(t["sub_scale"]))
    if format.offset == "minimum" and format.scale == "super":
        return scale, -np.repeat(t["minimum"], format.columns // format.block, axis=1) * t["sub_minimum"]
    if format.offset == "minimum":
        return scale, t["minimum"]
    return scale, -scale * (t["zero"] if format.offset == "zero" else np.float32(format.offset))


def values_of(format: BlockFormat, codes: U8) -> U8:
    """What codes stand for, one number a column: (N, K) or (N, K / 2) pairs -> (N, K)."""
    if format.values is None:
        return codes
    looked_up = format.values[codes]
    if not format.pair:
        return looked_up
    rows = codes.shape[0]
    return np.ascontiguousarray(looked_up.reshape(rows, -1, 4, 2).transpose(0, 1, 3, 2)).reshape(rows, -1)


def dequantize(format: BlockFormat, quantized: Quantized) -> F32:
    """(N, K) float32."""
    values = _stored(format, quantized)
    return rotate_rows(values) if format.rotated else values


def _stored(format: BlockFormat, quantized: Quantized) -> F32:
    scale, offset = scales(format, quantized.tables)
    values = values_of(format, quantized.codes).astype(np.float32)
    blocks = values.reshape(*scale.shape, format.block)
    blocks *= scale[..., None]
    blocks += offset[..., None]
    return blocks.reshape(values.shape)
