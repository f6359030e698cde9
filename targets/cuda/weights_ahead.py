"""Words of packed weights of a warp's tile, which lanes read a slab before they make operands of them."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, held, local
from llmc.targets.cuda.operands import Coded, Operands, Plain
from llmc.targets.cuda.prelude import load_now
from llmc.targets.cuda.product import Product
from llmc.targets.cuda.stream import BLOCKS, Words


class WeightsAhead:
    """Registers for the words of two slabs."""

    def __init__(self, product: Product, operands: Operands, tile: Any) -> None:
        self.product, self.operands, self.tile = product, operands, product.tiles(tile, 1)[0]
        count = len(self._places(0))
        self.now, self.later = local((count,), "uint32"), local((count,), "uint32")

    def _places(self, slab: Any) -> list[tuple[int, Any]]:
        """Which words of a slab operands are made of, in order."""
        noted = _Noted(self._words(slab))
        with IRBuilder(), T.prim_func():  # what is made of them here is thrown away
            weights = self.operands.slab(noted)
            for block in range(BLOCKS):
                weights.words(block)
            if isinstance(weights, Coded):
                for at in range(self.operands.form.offsets):
                    weights.offsets(at)
            T.evaluate(0)
        return noted.places

    def _words(self, slab: Any) -> _Early:
        return _Early(self.product.pieces(), self.product.weight, self.tile, slab)

    def load(self, slab: Any) -> None:
        """Begin to read a slab."""
        words = self._words(slab)
        for i, (piece, at) in enumerate(self._places(slab)):
            T.buffer_store(self.later, words.early(piece, at), [i])

    def next(self, slab: Any) -> Plain | Coded:
        """What the slab's operands are made of; the one behind it begins to come."""
        for i in range(int(self.now.shape[0])):
            T.buffer_store(self.now, self.later[i], [i])
        self.load(T.min(slab + 1, self.product.slabs() - 1))
        return self.operands.slab(_Known(self._words(slab), self.now))


class _Early(Words):
    """Words that are read where it says so, not where they are used."""

    def early(self, piece: int, at: Any) -> Any:
        """Word `at` of a piece; of -1, of the head of a tile."""
        if piece < 0:
            return load_now(self.matrix[self.tile, at])
        place = self.pieces.starts(self.slab)[piece] + at
        found = load_now(self.pieces.at(self.matrix, self.tile, place))
        return found if self.pieces.whole else T.if_then_else(place < self.pieces.words, found, tirx.const(0, "uint32"))


class _Noted(Words):
    """Writes down which words are asked for; -1 stands for the head of a tile."""

    def __init__(self, words: Words) -> None:
        super().__init__(words.pieces, words.matrix, words.tile, words.slab)
        self.places: list[tuple[int, Any]] = []

    def word(self, piece: int, at: Any) -> Any:
        self.places.append((piece, at))
        return held(tirx.const(0, "uint32"), "uint32")

    def of_row(self, row: Any) -> Any:
        self.places.append((-1, row))
        return held(f32(0))


class _Known(Words):
    """Words that were read before, in the order in which they are asked for."""

    def __init__(self, words: Words, found: Any) -> None:
        super().__init__(words.pieces, words.matrix, words.tile, words.slab)
        self.found, self.count = found, 0

    def word(self, piece: int, at: Any) -> Any:
        self.count += 1
        return self.found[self.count - 1]

    def of_row(self, row: Any) -> Any:
        return T.reinterpret("float32", held(self.word(-1, row), "uint32"))
