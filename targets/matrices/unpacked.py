"""Weights of a block format as pairs of bfloat16, for products on tiles of bfloat16 (targets/tiles.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from llmc.targets.matrices.codes import CHUNK, Tile
from llmc.targets.narrow import constant
from llmc.targets.vector import f32, fma, held, i32, splat

PAIRS = CHUNK // 2  # of a chunk
# Weights are made larger by so much and then cut to bfloat16: what lies between two of these goes to the nearer one,
# give or take a sixth of their distance, and what is one stays. Adding half of a distance would be an instruction more.
LARGER = 1 + 2 / 3 / 256

# Bytes 2 and 3 of each word of `low` over bytes 0 and 1 of `high`, in one instruction; LLVM would take three.
JOIN = """
define <16 x i32> @llmc_join(<16 x i32> %high, <16 x i32> %low, <16 x i32> %places) alwaysinline {
  %r = call <16 x i32> asm "vpshufb $3, $2, $0 {$4}", "=v,0,v,v,^Yk"
    (<16 x i32> %high, <16 x i32> %low, <16 x i32> %places, i64 3689348814741910323)
  ret <16 x i32> %r
}
"""
_PLACES = np.tile(np.add.outer(np.arange(0, 16, 4), [2, 3, 0, 0]).astype(np.uint8).reshape(-1), 4)


def pairs(reader: Tile, chunk: Any) -> Iterator[Any]:
    """32 int32x16 words, the columns of a chunk in order, the even one low, in a kernel that has JOIN.

    Emitted as they are asked for.
    """
    places = constant(_PLACES, "int32x16")
    for group, (word, at) in enumerate(reader.raw(chunk)):
        if group * 4 % reader.format.block == 0:
            block = _Block(reader, chunk, group * 4 // reader.format.block)
        for even in (0, 2):
            low, high = (T.reinterpret(block.of(word, at + 8 * byte), dtype="int32x16") for byte in (even, even + 1))
            yield T.call_extern("int32x16", "llmc_join", high, low, places)


class _Block:
    """What codes of a block stand for, made larger.

    A code in the upper bits of a fraction, under the exponent that makes its last bit 1, is a float32: the code plus a
    power of two. It is multiplied as it is, for that power is taken off the offset; so no integers are converted. Where
    the offset is a whole number scales keep 13 bits, so that it is exact, and what stands for zero is zero.
    """

    def __init__(self, reader: Tile, chunk: Any, block: int) -> None:
        self.bits = reader.raw_bits
        self.wide = self.bits > 7  # a byte does not fit into what is left of a fraction at bit 16
        scale = held(reader.scale(chunk, block))
        larger, offset = scale * splat(f32(LARGER)), None
        if reader.format.whole:
            larger = _first_bits(larger, 13)
        else:
            offset = held(reader.offset(chunk, block, scale) * splat(f32(LARGER)))
        self.scale, places = held(larger), (8,) if self.wide else (12, 16)
        self.offsets = {place: held(self._offset(place, reader.raw_zero, offset)) for place in places}

    def _offset(self, place: int, zero: int, offset: Any) -> Any:
        """What is added to products with codes at a place."""
        less = splat(f32(-_ones(place) - zero))
        return self.scale * less if offset is None else fma(self.scale, less, offset)

    def of(self, word: Any, at: int) -> Any:
        """float32x16 of the codes at bit `at` of words."""
        place = 8 if self.wide else 12 if at % 8 == 4 and at < 28 else 16
        if at > place:
            word = T.shift_right(word, splat(i32(at - place)))
        elif at < place:
            word = T.shift_left(word, splat(i32(place - at)))
        code = T.bitwise_and(word, splat(i32(((1 << self.bits) - 1) << place)))
        number = T.bitwise_or(code, splat(i32(int(np.float32(_ones(place)).view(np.int32)))))
        return fma(T.reinterpret(number, dtype="float32x16"), self.scale, self.offsets[place])


def _first_bits(x: Any, count: int) -> Any:
    """float32x16 cut to so many bits."""
    kept = T.bitwise_and(T.reinterpret(x, dtype="int32x16"), splat(i32(-(1 << (24 - count)))))
    return T.reinterpret(kept, dtype="float32x16")


def _ones(place: int) -> float:
    """The power of two of which bit `place` of a float32's fraction is 1."""
    return float(2 ** (23 - place))
