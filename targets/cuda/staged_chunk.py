"""K and V of a chunk in shared memory: pages whose numbers are operands of tensor cores as they lie, copied as bytes.

With lane = 4 g + q, a lane reads of K elements 4 q.. of 16 for slots g and g + 8 of a page, column g of two products,
and of V slots 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 for element g of eight. Lanes of different q read rows of a page that
are a multiple of 128 bytes away from each other. So pieces of 16 bytes change places among eight: piece u of a row that
quarter q reads stands at u ^ 2 q, and lanes meet in no bank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.attention_block import EIGHT
from llmc.targets.cuda.launch import local, u32
from llmc.targets.cuda.prelude import copy_async
from llmc.targets.cuda.sight import CHUNK, held_int
from llmc.targets.cuda.target import WARP

PIECE = 4  # words that are copied together
PAGES = CHUNK // PAGE
KEYS, VALUES = 0, 1
TURNS = 4  # of eight elements of V, whose places are moved in ways of their own; after as many they come again


class StagedChunk:
    """A chunk of the slots of one kv head; `memory` has `words` of it, for all warps of the block."""

    def __init__(self, kv: Any, group: Any, size: int, memory: Any, lane: Any) -> None:
        self.kv, self.group, self.size, self.memory, self.lane = kv, group, size, memory, lane
        self.page_words = PAGE * size // 2  # of K, and of V
        self.column, self.quarter = T.floordiv(lane, 4), T.floormod(lane, 4)
        # Where in a page the lane's elements of K begin: the first two and the next, of both products.
        self._keys = [[self._key_place(i, product) for i in range(2)] for product in range(2)]

    @staticmethod
    def words(size: int) -> int:
        """Of shared memory, for heads of so many elements."""
        return CHUNK * size

    def _first(self, side: int, number: Any) -> Any:
        return (number + side * PAGES) * self.page_words

    def copy(self, side: int, number: Any, page: Any, there: Any) -> None:
        """A warp begins to copy K or V of a page, to be the chunk's `number`-th: zeros if not `there`."""
        row = 2 * PAGE // PIECE if side == KEYS else self.size // PIECE  # pieces of two pairs of elements, or of slots
        with T.unroll(0, self.page_words // PIECE // WARP) as turn:
            piece = turn * WARP + self.lane
            moved = piece ^ ((T.floordiv(piece, row) & 3) * 2)
            to = self.memory[self._first(side, number) + moved * PIECE]
            copy_async(to, self.kv[page, side, self.group, piece * (2 * PIECE)], T.Select(there, u32(16), u32(0)))

    def _key_place(self, i: int, product: int) -> Any:
        piece = (4 * i + 2 * product) ^ (self.quarter * 2)
        return held_int((self.quarter * 8 + piece) * PIECE + self.column)

    def keys(self, number: Any, step: int, b: Any) -> None:
        """Words of two products, of eight slots of a page each, into b (4,)."""
        for product in range(2):
            for i in range(2):
                at = self._first(KEYS, number) + step * (32 * PIECE) + self._keys[product][i]
                T.buffer_store(b, self.memory[at], [product * 2 + i])

    def value_place(self, eight: Any) -> Any:
        """Where in a page V of the lane's first slots stands, of the `eight`-th eight elements, below TURNS."""
        return held_int(self.quarter * self.size + (eight ^ self.quarter) * EIGHT + self.column)

    def values(self, number: Any, place: Any, turn: int, b: Any) -> None:
        """Words of a product, of all slots of a page, into b (2,): `turn` * TURNS eights beyond those of `place`."""
        for i in range(2):
            at = self._first(VALUES, number) + place + (turn * TURNS * EIGHT + i * PAGE // 4 * self.size)
            T.buffer_store(b, self.memory[at], [i])

    def clear(self, number: Any, first: Any, seen: Callable[[Any], Any]) -> None:
        """A warp puts zeros for V of slots that are not seen, of a page that begins with slot `first`."""
        words = local((PIECE,), "uint32")
        with T.serial(0, self.page_words // PIECE // WARP, unroll=False) as turn:
            piece = turn * WARP + self.lane
            slot = first + T.floordiv(piece, self.size // PIECE) * 2
            low, high = (T.Select(seen(slot + i), u32(mask), u32(0)) for i, mask in enumerate((0xFFFF, 0xFFFF0000)))
            at = T.ramp(self._first(VALUES, number) + piece * PIECE, 1, PIECE)
            T.buffer_store(words, self.memory[at], [T.ramp(0, 1, PIECE)])
            for i in range(PIECE):
                T.buffer_store(words, words[i] & (low | high), [i])
            T.buffer_store(self.memory, words[T.ramp(0, 1, PIECE)], [at])
