"""Where 128 columns of a tile of packed weights stand, and two ways to read them: as they are, or copied ahead.

A warp that copies ahead has memory of its own for some slabs of its tiles, which are on their way while it multiplies
those before: how much is in flight does not depend on how many registers there are.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import FORMATS, TILE, BlockFormat
from llmc.targets.cuda.launch import held, u32
from llmc.targets.cuda.prelude import COPIED, commit_copies, copy_async, sync_warp, wait_copies
from llmc.targets.cuda.target import WARP

BLOCK = 32  # columns
BLOCKS = 4  # in a slab: one for each lane of the four that share a row
SLAB = BLOCK * BLOCKS


class Pieces:
    """The parts of a tile that have a slab, each of neighbouring words: codes and tables of records, or numbers."""

    def __init__(self, name: str, columns: int, words: int) -> None:
        format = FORMATS[name]
        self.words = words  # of a tile
        self.whole = columns % SLAB == 0
        self.format = format if isinstance(format, BlockFormat) else None
        self.head = 0 if self.format is None else self.format.head_words(columns)
        self.per_word = 1 if name == "f32" else 2  # columns, where there are no codes
        self.lengths = self._lengths()

    def _lengths(self) -> list[int]:
        format = self.format
        if format is None:
            return [SLAB // self.per_word * TILE]
        if format.columns > SLAB:
            return [format.code_words * SLAB // format.columns, format.record_words - format.code_words]
        records, subs = SLAB // format.columns * format.record_words, SLAB // format.block * TILE // 4
        return [records, subs] if format.scale == "row" else [records]

    @property
    def joined(self) -> bool:
        """Whether pieces of neighbouring slabs are neighbours."""
        return self.format is None or self.format.columns <= SLAB

    def at(self, matrix: Any, tile: Any, word: Any) -> Any:
        """A word of a tile. Numbers have a row of their own for each of their columns, or two."""
        if self.format is not None:
            return matrix[tile, word]
        return matrix[tile, T.floordiv(word, TILE), T.floormod(word, TILE)]

    def starts(self, slab: Any) -> list[Any]:
        """The first word of each piece in its tile."""
        format = self.format
        if format is None:
            return [slab * self.lengths[0]]
        if format.columns > SLAB:
            slabs = format.columns // SLAB
            record = self.head + T.floordiv(slab, slabs) * format.record_words
            return [record + slab % slabs * self.lengths[0], record + format.code_words]
        return [first + slab * length for first, length in zip((self.head, TILE), self.lengths, strict=False)]


class Words:
    """A slab of one tile, out of the packed matrix; words beyond the tile's last one are zeros."""

    def __init__(self, pieces: Pieces, matrix: Any, tile: Any, slab: Any) -> None:
        self.pieces, self.matrix, self.tile, self.slab = pieces, matrix, tile, slab

    def word(self, piece: int, at: Any) -> Any:
        """Word `at` of a piece, as uint32."""
        place = self.pieces.starts(self.slab)[piece] + at
        dtype = str(self.matrix.dtype)
        if self.pieces.whole:
            return held(T.reinterpret("uint32", held(self.pieces.at(self.matrix, self.tile, place), dtype)), "uint32")
        nothing = T.cast(0, dtype)
        found = T.if_then_else(place < self.pieces.words, self.pieces.at(self.matrix, self.tile, place), nothing)
        return held(T.reinterpret("uint32", held(found, dtype)), "uint32")

    def pair(self, piece: int, at: Any) -> list[Any]:
        """Words `at`, an even number, and the one after it."""
        return [self.word(piece, at + i) for i in range(2)]

    def of_row(self, row: Any) -> Any:
        """What the head of a tile has for a row, as float32."""
        return T.reinterpret("float32", self.matrix[self.tile, row])


class Copied(Words):
    """A slab of one tile that has been copied to shared memory: number `own` of so many `together` from `first` on.

    head: what the head of the tile has for the lane's two rows, if that was read before.
    """

    def __init__(
        self, pieces: Pieces, matrix: Any, tile: Any, slab: Any, shared: Any, first: Any, own: Any = 0,
        together: int = 1, head: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(pieces, matrix, tile, slab)
        self.shared, self.first, self.own, self.together = shared, first, own, together
        self.head, self.asked = head, 0

    def word(self, piece: int, at: Any) -> Any:
        """Word `at` of a piece, as uint32."""
        place = self.together * sum(self.pieces.lengths[:piece]) + self.own * self.pieces.lengths[piece]
        return held(self.shared[self.first + place + at], "uint32")

    def of_row(self, row: Any) -> Any:
        """What the head of a tile has for a row, as float32; lanes ask for their two in order."""
        if self.head is None:
            return super().of_row(row)
        self.asked += 1
        return self.head[self.asked - 1]


class Stream:
    """A warp's memory for `stages` slabs of its tiles, a power of two, from word `first` of shared memory on."""

    def __init__(self, pieces: Pieces, matrix: Any, tiles: list[Any], shared: Any, first: Any, stages: int) -> None:
        self.pieces, self.matrix, self.tiles = pieces, matrix, tiles
        self.shared, self.first, self.stages = shared, first, stages

    @staticmethod
    def words(pieces: Pieces, tiles: int) -> int:
        """Of shared memory that a stage takes."""
        return sum(pieces.lengths) * tiles

    def begin(self, slab: Any, count: Any, lane: Any) -> None:
        """Let the first slabs come, `count` of them in all from `slab` on."""
        self.slab, self.count, self.lane = slab, count, lane
        for stage in range(self.stages - 1):
            self._copy(stage)

    def next(self, i: Any) -> list[Copied]:
        """Slab `i` of them, of each tile, for all lanes to read; a later one comes in place of the one before."""
        wait_copies(self.stages - 2)
        sync_warp()
        self._copy(i + self.stages - 1)
        first = self.first + (i & (self.stages - 1)) * self.words(self.pieces, len(self.tiles))
        step = sum(self.pieces.lengths)
        return [
            Copied(self.pieces, self.matrix, tile, self.slab + i, self.shared, first + own * step)
            for own, tile in enumerate(self.tiles)
        ]

    def _copy(self, i: Any) -> None:
        """Slab `i`, where there is one."""
        stage = self.first + (i & (self.stages - 1)) * self.words(self.pieces, len(self.tiles))
        for own, tile in enumerate(self.tiles):
            place = (self.shared, stage + own * sum(self.pieces.lengths))
            for start, length in zip(self.pieces.starts(self.slab + i), self.pieces.lengths, strict=True):
                copy_words(self.pieces, self.matrix, tile, start, place, (length, i < self.count), self.lane)
                place = (self.shared, place[1] + length)
        commit_copies()


def copy_words(
    pieces: Pieces, matrix: Any, tile: Any, start: Any, place: tuple[Any, Any], count: tuple[int, Any], lane: Any
) -> None:  # fmt: skip
    """Begin to copy words of a tile to a place, shared memory and a word, by lanes in turn, 16 bytes each.

    count: how many, and whether they are there at all.
    """
    (shared, stage), (length, there) = place, count
    with T.unroll(0, -(-length // (COPIED * WARP))) as turn:
        own = (turn * WARP + lane) * COPIED
        inside = there if length % (COPIED * WARP) == 0 else there & (own < length)
        with T.If(inside), T.Then():
            word, kept = start + own, u32(4 * COPIED)
            if not pieces.whole:
                kept = T.Select(word < pieces.words, kept, u32(0))
                word = T.min(word, pieces.words - COPIED)
            copy_async(shared[stage + own], pieces.at(matrix, tile, word), kept)
