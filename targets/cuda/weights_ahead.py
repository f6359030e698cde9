"""Words of packed weights of a warp's tile, which lanes read a slab before they make operands of them.

Words of two rows stand side by side, and come together where slabs are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import sym, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, held, local
from llmc.targets.cuda.operands import Coded, Operands, Plain
from llmc.targets.cuda.prelude import load_now, load_pair_now
from llmc.targets.cuda.product import Product
from llmc.targets.cuda.stream import BLOCKS, Words


@dataclass(frozen=True)
class _Place:
    """A word of a piece, or two from there on, and the first register they have."""

    piece: int  # -1: the head of a tile
    at: Any
    width: int
    register: int


class WeightsAhead:
    """Registers for the words of two slabs."""

    def __init__(self, product: Product, operands: Operands, tile: Any) -> None:
        self.product, self.operands, self.tile = product, operands, product.tiles(tile, 1)[0]
        self.order = (noted := self._noted(0)).order
        self.now, self.later = (local((noted.count,), "uint32") for _ in range(2))

    def _noted(self, slab: Any) -> _Noted:
        """Which words of a slab operands are made of."""
        noted = _Noted(self._words(slab))
        with IRBuilder(), T.prim_func():  # what is made of them here is thrown away
            weights = self.operands.slab(noted)
            for block in range(BLOCKS):
                weights.words(block)
            if isinstance(weights, Coded):
                for at in range(self.operands.form.offsets):
                    weights.offsets(at)
            T.evaluate(0)
        return noted

    def _words(self, slab: Any) -> _Early:
        return _Early(self.product.pieces(), self.product.weight, self.tile, slab)

    def load(self, slab: Any) -> None:
        """Begin to read a slab."""
        words = self._words(slab)
        for place in self._noted(slab).places:
            words.load(place, self.later)

    def next(self, slab: Any) -> Plain | Coded:
        """What the slab's operands are made of; the one behind it begins to come."""
        for i in range(int(self.now.shape[0])):
            T.buffer_store(self.now, self.later[i], [i])
        self.load(T.min(slab + 1, self.product.slabs() - 1))
        return self.operands.slab(_Known(self._words(slab), self.now, self.order))


class _Early(Words):
    """Words that are read where it says so, not where they are used."""

    def load(self, place: _Place, to: Any) -> None:
        """Into registers of the place."""
        if place.width == 2 and self.pieces.whole:
            load_pair_now(to[place.register], self._at(place.piece, place.at))
            return
        for i in range(place.width):
            T.buffer_store(to, self._early(place.piece, place.at + i), [place.register + i])

    def _at(self, piece: int, at: Any) -> Any:
        """Where word `at` of a piece is in the matrix."""
        return self.pieces.at(self.matrix, self.tile, self.pieces.starts(self.slab)[piece] + at)

    def _early(self, piece: int, at: Any) -> Any:
        if piece < 0:
            return load_now(self.matrix[self.tile, at])
        found = load_now(self._at(piece, at))
        if self.pieces.whole:
            return found
        inside = self.pieces.starts(self.slab)[piece] + at < self.pieces.words
        return T.if_then_else(inside, found, tirx.const(0, "uint32"))


class _Noted(Words):
    """Writes down which words are asked for, each once: scales of rows beside each other may be halves of one."""

    def __init__(self, words: Words) -> None:
        super().__init__(words.pieces, words.matrix, words.tile, words.slab)
        self.places: list[_Place] = []
        self.order: list[int] = []  # the registers of what is asked for
        self.count = 0

    def word(self, piece: int, at: Any) -> Any:
        return self._note(piece, at, 1)[0]

    def pair(self, piece: int, at: Any) -> list[Any]:
        return self._note(piece, at, 2)

    def of_row(self, row: Any) -> Any:
        self._note(-1, row, 1)
        return held(f32(0))

    def _note(self, piece: int, at: Any, width: int) -> list[Any]:
        known = sym.Analyzer()
        same = (p for p in self.places if (p.piece, p.width) == (piece, width) and known.can_prove_equal(p.at, at))
        place = next(same, None)
        if place is None:
            place = _Place(piece, at, width, self.count)
            self.places.append(place)
            self.count += width
        self.order += range(place.register, place.register + width)
        return [held(tirx.const(0, "uint32"), "uint32") for _ in range(width)]


class _Known(Words):
    """Words that were read before, in the order in which they are asked for."""

    def __init__(self, words: Words, found: Any, order: list[int]) -> None:
        super().__init__(words.pieces, words.matrix, words.tile, words.slab)
        self.found, self.order = found, iter(order)

    def word(self, piece: int, at: Any) -> Any:
        return self.found[next(self.order)]

    def of_row(self, row: Any) -> Any:
        return T.reinterpret("float32", held(self.word(-1, row), "uint32"))
