"""K and V of a chunk in shared memory: pages whose numbers are operands of tensor cores as they lie, copied as bytes.

With lane = 4 g + q, a lane reads of K elements 4 q.. of 16 for slots g and g + 8 of a page, column g of two products, and
of V slots 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 for element g of eight. Lanes of different q read rows of a page that are a
multiple of 128 bytes away from each other. So pieces of 16 bytes change places among eight: piece u of a row that
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
    """A chunk of the slots of one kv head; `memory` has `words` of it from `base` on, for all warps of the block."""

    def __init__(self, kv: Any, group: Any, size: int, memory: Any, lane: Any) -> None:
        self.kv, self.group, self.size, self.memory, self.lane = kv, group, size, memory, lane
        self.base: Any = 0
        self.page_words = PAGE * size // 2  # of K, and of V
        self.column, self.quarter = T.floordiv(lane, 4), T.floormod(lane, 4)
        # Words of a page where the lane's elements begin: of K the first of the first product, of V the first.
        self._key = held_int(self.quarter * (8 * PIECE + 2 * PIECE) + self.column)
        self._value = held_int(self.quarter * (size + 2 * PIECE) + self.column)

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
            to = self.memory[self.base + self._first(side, number) + moved * PIECE]
            copy_async(to, self.kv[page, side, self.group, piece * (2 * PIECE)], T.Select(there, u32(16), u32(0)))

    def keys(self, number: Any, step: Any, b: Any) -> None:
        """Words of two products, of eight slots of a page each, into b (4,)."""
        for product in range(2):
            for i in range(2):
                # Pieces that are 2 or 4 further on are so by a bit of their place, moved or not.
                place = (self.base + self._key) ^ ((4 * i + 2 * product) * PIECE)
                word = self.memory[self._first(KEYS, number) + step * (32 * PIECE) + place]
                T.buffer_store(b, word, [product * 2 + i])

    def values(self, number: Any, eight: Any, turn: int, b: Any) -> None:
        """Words of a product, of all slots of a page, into b (2,): of elements `turn` * TURNS + `eight`, eight each."""
        for i in range(2):
            place = (self.base + self._value) ^ (eight * EIGHT)
            word = self.memory[self._first(VALUES, number) + (turn * TURNS * EIGHT + i * PAGE // 4 * self.size) + place]
            T.buffer_store(b, word, [i])

    def clear(self, number: Any, first: Any, seen: Callable[[Any], Any]) -> None:
        """A warp puts zeros for V of slots that are not seen, of a page that begins with slot `first`."""
        words = local((PIECE,), "uint32")
        with T.serial(0, self.page_words // PIECE // WARP, unroll=False) as turn:
            piece = turn * WARP + self.lane
            slot = first + T.floordiv(piece, self.size // PIECE) * 2
            low, high = (
                T.Select(seen(slot + i), u32(mask), u32(0)) for i, mask in enumerate((0xFFFF, 0xFFFF0000))
            )
            at = T.ramp(self.base + self._first(VALUES, number) + piece * PIECE, 1, PIECE)
            T.buffer_store(words, self.memory[at], [T.ramp(0, 1, PIECE)])
            for i in range(PIECE):
                T.buffer_store(words, words[i] & (low | high), [i])
            T.buffer_store(self.memory, words[T.ramp(0, 1, PIECE)], [at])
