"""Weights of a warp on CUDA that come ahead twice: into shared memory many slabs, into registers the next one.

So a warp whose products are on their way has something else to do than to wait for them.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, held, i32, local
from llmc.targets.cuda.operands import Coded, Operands, Plain
from llmc.targets.cuda.prelude import commit_copies, sync_warp, wait_copies
from llmc.targets.cuda.product import Product
from llmc.targets.cuda.stream import BLOCKS, Copied, Words, copy_words


class SlabRing:
    """A warp's memory for `stages` slabs from word `first` of shared memory on: of some tiles, one after another."""

    def __init__(self, product: Product, shared: Any, first: Any, stages: int, lane: Any) -> None:
        self.pieces, self.matrix = product.pieces(), product.weight
        self.shared, self.first, self.stages, self.lane = shared, first, stages, lane
        self.words = sum(self.pieces.lengths)

    def begin(self, tiles: tuple[Any, Any, int], turns: Any, slab: Any, count: Any) -> None:
        """Let the first slabs come: of `turns` tiles, the first, every so many-th, none behind the last one.

        Of each `count` slabs from `slab` on.
        """
        (tile, self.step, self.last), self.slab, self.count = tiles, slab, count
        self.left = local((2,), "int32")  # to copy, to read
        self.ahead, self.now = (local((3,), "int32") for _ in range(2))  # tile, which of its slabs, stage
        for i in range(2):
            T.buffer_store(self.left, T.cast(turns * count, "int32"), [i])
        for state in (self.ahead, self.now):
            for i, value in enumerate((T.cast(T.min(tile, self.last), "int32"), i32(0), i32(0))):
                T.buffer_store(state, value, [i])
        for _ in range(self.stages - 1):
            self._copy()

    def next(self) -> Copied:
        """The next slab, for all lanes to read; a later one comes in place of the one before.

        Behind the last slab it is that one again.
        """
        wait_copies(self.stages - 2)
        sync_warp()
        self._copy()
        tile, slab, stage = (held(self.now[i], "int32") for i in range(3))
        T.buffer_store(self.left, self.left[1] - 1, [1])
        with T.If(self.left[1] > 0), T.Then():
            self._go_on(self.now)
        return Copied(self.pieces, self.matrix, tile, self.slab + slab, self.shared, self.first + stage * self.words)

    def _copy(self) -> None:
        """One slab more, where there is one."""
        tile, slab, stage = (self.ahead[i] for i in range(3))
        place, there = self.first + stage * self.words, self.left[0] > 0
        for start, length in zip(self.pieces.starts(self.slab + slab), self.pieces.lengths, strict=True):
            copy_words(self.pieces, self.matrix, tile, start, (self.shared, place), (length, there), self.lane)
            place = place + length
        commit_copies()
        T.buffer_store(self.left, self.left[0] - 1, [0])
        self._go_on(self.ahead)

    def _go_on(self, state: Any) -> None:
        """To the next slab, and the next stage."""
        T.buffer_store(state, state[1] + 1, [1])
        with T.If(state[1] == self.count), T.Then():
            T.buffer_store(state, i32(0), [1])
            T.buffer_store(state, T.min(state[0] + self.step, self.last), [0])
        T.buffer_store(state, T.Select(state[2] == self.stages - 1, i32(0), state[2] + 1), [2])


class SlabsAhead:
    """Words of a ring's next slab in registers: those that operands are made of, in the order of their making."""

    def __init__(self, operands: Operands, ring: SlabRing) -> None:
        self.operands, self.ring = operands, ring
        count = len(self._places(self._words(0)))
        self.now, self.later = local((count,), "uint32"), local((count,), "uint32")

    def _words(self, slab: Any) -> Words:
        return Words(self.ring.pieces, self.ring.matrix, 0, slab)

    def _places(self, words: Words) -> list[tuple[int, Any]]:
        noted = _Noted(words)
        with IRBuilder(), T.prim_func():  # what is made of them here is thrown away
            weights = self.operands.slab(noted)
            for block in range(BLOCKS):
                weights.words(block)
            if isinstance(weights, Coded):
                for at in range(self.operands.form.offsets):
                    weights.offsets(at)
            T.evaluate(0)
        return noted.places

    def load(self) -> None:
        """Begin to read the ring's next slab."""
        words = self.ring.next()
        for i, (piece, at) in enumerate(self._places(words)):
            found = words.word(piece, at) if piece >= 0 else T.reinterpret("uint32", held(words.of_row(at)))
            T.buffer_store(self.later, found, [i])

    def take(self, slab: Any) -> Plain | Coded:
        """What operands of the slab that was read are made of; which one of its row it is."""
        for i in range(int(self.now.shape[0])):
            T.buffer_store(self.now, self.later[i], [i])
        return self.operands.slab(_Known(self._words(slab), self.now))


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
