"""Asking for the weights of a panel (panels.py) while the one before is unpacked and rows are multiplied with it."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.targets.matrices.codes import CHUNK
from llmc.targets.matrices.panels import Panel
from llmc.targets.vector import i32, prefetch, registers

_FEW = 2  # groups of rows that are soon multiplied
_EARLY = 4  # of the lines one in so many is asked for before, then: measured with 12 to 32 rows


class NextPanel:
    """Lines of weights asked for a few at a time, with each turn of a group of rows through a panel.

    All at once, as a panel is unpacked, they wait for one another: a core waits for 16 or so, and nothing else is done.
    With few groups some are asked for so all the same, a few with each chunk: memory would do nothing at that time.
    A turn takes `together` chunks. `groups`: how many groups of rows there mostly are.
    """

    def __init__(self, panel: Panel, groups: int, together: int, tiles: int = 1) -> None:
        self.reader, self.together, self.tiles = panel.reader, together, tiles
        chunks = min(panel.chunks, self.reader.columns // CHUNK)
        self.lines = -(-self.reader.place_of(chunks) // TILE)  # of the first, which has more
        self.each = -(-self.lines // (groups * max(1, chunks // together - 1)))
        self.next, self.more = registers((1,), "int64"), registers((1,), "int32")
        self.early = registers((1,), "int32")  # lines asked for with each chunk that is unpacked
        self.most_early = -(-self.lines // (_EARLY * chunks))

    def begin(self, chunk: Any, groups: Any, chunks: Any) -> None:
        """So many groups of rows will go through `chunks` chunks, soon unpacked; the next panel begins with `chunk`.

        Behind the last chunk that is the tile which is so many on.
        """
        T.buffer_store(self.next, T.cast(self.reader.chunk_place(chunk, self.tiles), "int64"), [0])
        few = T.cast(groups, "int32") <= _FEW
        T.buffer_store(self.early, T.Select(few, i32(self.most_early), i32(0)), [0])
        left = T.max(i32(self.lines) - self.early[0] * T.cast(chunks, "int32"), 0)
        turns = T.max(T.cast(groups, "int32") * (T.cast(T.floordiv(chunks, self.together), "int32") - 1), 1)
        T.buffer_store(self.more, T.max(T.ceildiv(left, turns) - self.each, 0), [0])

    def ask_early(self) -> None:
        """Ask for the share of a chunk that has been unpacked."""
        with T.serial(0, self.early[0]) as line:
            self._ask(line)
        self._move(self.early[0])

    def ask(self) -> None:
        """Ask for a turn's share: as many lines as with so many groups as there mostly are, and more with fewer."""
        for line in range(self.each):
            self._ask(line)
        with T.serial(0, self.more[0]) as line:
            self._ask(self.each + line)
        self._move(self.more[0] + self.each)

    def _move(self, lines: Any) -> None:
        T.buffer_store(self.next, self.next[0] + T.cast(lines, "int64") * TILE, [0])

    def _ask(self, line: Any) -> None:
        prefetch(self.reader.weight.access_ptr("r", offset=self.next[0] + line * TILE), far=True)
