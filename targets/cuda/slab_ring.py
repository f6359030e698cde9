"""Weights that come to a warp one slab after another on CUDA, of tiles of which some may not be there."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import held, i32, local
from llmc.targets.cuda.prelude import commit_copies, sync_warp, wait_copies
from llmc.targets.cuda.product import Product
from llmc.targets.cuda.stream import Copied, copy_words


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
        self.left = local((1,), "int32")  # to copy
        self.ahead, self.now = (local((3,), "int32") for _ in range(2))  # tile, which of its slabs, stage
        T.buffer_store(self.left, T.cast(turns * count, "int32"), [0])
        for state in (self.ahead, self.now):
            for i, value in enumerate((T.cast(T.min(tile, self.last), "int32"), i32(0), i32(0))):
                T.buffer_store(state, value, [i])
        for _ in range(self.stages - 1):
            self._copy()

    def next(self) -> Copied:
        """The next slab, for all lanes to read; a later one comes in place of the one before."""
        wait_copies(self.stages - 2)
        sync_warp()
        self._copy()
        tile, slab, stage = (held(self.now[i], "int32") for i in range(3))
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
