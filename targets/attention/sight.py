"""What the rows of a block see of their sequence: which pages, and which tokens of a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.vector import LANES, i32, registers, splat

CHUNK = 16  # pages whose softmax is made at once; chunks begin at multiples of it, whoever looks at them


@dataclass(frozen=True)
class Places:
    """Where rows stand: `slot_of(row)` in the sequence seqs[row], seeing slots up to `end_of(row)`.

    `one_end`: that is the same for all rows of a sequence, and perhaps dear to find.
    With a window (not 0), tokens less than so many away. `holes` (S, 2) has the first slot of a sequence that none of
    its rows sees, and the one after the last; None if there are none. The pages of s are ids[indptr[s]:indptr[s + 1]].
    """

    seqs: Any
    slot_of: Callable[[Any], Any]
    end_of: Callable[[Any], Any]
    indptr: Any
    ids: Any
    window: int = 0
    holes: Any = None
    one_end: bool = False


class Sight:
    """Of `count` neighbouring rows, `first` and those after it, all of one sequence; registers for `most` of them.

    Pages that have a token outside the hole are numbered; without a hole a number is the page's index.
    """

    def __init__(self, places: Places, first: Any, count: Any, most: int) -> None:
        self.places, self.sequence = places, places.seqs[first]
        self.slots, self.ends = registers((most,), "int32"), registers((most,), "int32")
        self._whole = registers((4,), "int32")  # number of the first page and after the last, slots likewise
        self._hole = registers((4,), "int32")  # its slots, the index of its first whole page, how many of them
        common = registers((1,), "int32")
        if places.one_end:
            T.buffer_store(common, places.end_of(first), [0])
        with T.serial(0, most) as r:
            row = first + T.min(r, count - 1)  # rows that are not there are the last one again
            slot, end = places.slot_of(row), common[0] if places.one_end else places.end_of(row)
            if places.window:
                end = T.min(end, slot + (places.window - 1))
            T.buffer_store(self.slots, slot, [r])
            T.buffer_store(self.ends, end, [r])
        least, last = registers((1,), "int32"), registers((1,), "int32")
        T.buffer_store(least, self.slots[0], [0])
        T.buffer_store(last, self.ends[0], [0])
        with T.serial(1, most) as r:
            T.buffer_store(least, T.min(least[0], self.slots[r]), [0])
            T.buffer_store(last, T.max(last[0], self.ends[r]), [0])
        if places.holes is not None:
            self._find_hole()
        begin = T.floordiv(self._start(least[0]), PAGE)
        T.buffer_store(self._whole, self._number(begin), [0])
        T.buffer_store(self._whole, self._number(T.floordiv(last[0], PAGE) + 1), [1])
        T.buffer_store(self._whole, last[0] + 1, [2])

    def _find_hole(self) -> None:
        for side in range(2):
            T.buffer_store(self._hole, self.places.holes[self.sequence, side], [side])
        T.buffer_store(self._hole, T.floordiv(self._hole[0] + (PAGE - 1), PAGE), [2])
        T.buffer_store(self._hole, T.max(T.floordiv(self._hole[1], PAGE) - self._hole[2], 0), [3])

    def _start(self, slot: Any) -> Any:
        """The first slot that a row at `slot` sees."""
        return T.max(slot - (self.places.window - 1), 0) if self.places.window else i32(0)

    def _number(self, index: Any) -> Any:
        """How many pages before that index have a token outside the hole."""
        if self.places.holes is None:
            return index
        return T.min(index, T.max(self._hole[2], index - self._hole[3]))

    @property
    def begin(self) -> Any:
        """The number of the first page that one of the rows sees."""
        return self._whole[0]

    @property
    def end(self) -> Any:
        """The number after that of the last page that one of the rows sees."""
        return self._whole[1]

    @property
    def chunks(self) -> tuple[Any, Any]:
        """The first chunk that one of the rows sees, and how many there are up to the last."""
        first = T.floordiv(self.begin, CHUNK)
        return first, T.floordiv(self.end + (CHUNK - 1), CHUNK) - first

    def index(self, number: Any) -> Any:
        """The index of a page in the list of its sequence."""
        if self.places.holes is None:
            return number
        return number + T.Select(number < self._hole[2], i32(0), self._hole[3])

    def page(self, index: Any) -> Any:
        """The page with that index."""
        return self.places.ids[self.places.indptr[self.sequence] + index]

    def tokens(self, index: Any) -> Any:
        """How many tokens of a page one of the rows may see: those after them were perhaps never written."""
        return T.min(self._whole[2] - index * PAGE, i32(PAGE))

    def shows(self, r: Any, index: Any) -> Any:
        """Which of the sixteen tokens of a page the r-th row sees."""
        token = T.ramp(i32(0), 1, LANES)
        seen = token <= splat(self.ends[r] - index * PAGE)
        if self.places.window:
            seen = T.bitwise_and(seen, token > splat(self.slots[r] - index * PAGE - self.places.window))
        if self.places.holes is not None:
            first, after = (self._hole[side] - index * PAGE for side in range(2))
            seen = T.bitwise_and(seen, T.bitwise_or(token < splat(first), token >= splat(after)))
        return seen

    def sees(self, r: Any, chunk: Any) -> Any:
        """Whether pages of a chunk are among those that the r-th row reads when it is alone."""
        first = self._number(T.floordiv(self._start(self.slots[r]), PAGE))
        end = self._number(T.floordiv(self.ends[r], PAGE) + 1)
        return T.And(chunk * CHUNK < end, chunk >= T.floordiv(first, CHUNK))

    def place(self, r: Any, index: Any) -> Any:
        """How far after the r-th row the first token of a page is; a hole before the row takes its slots off that."""
        place = index * PAGE - self.slots[r]
        if self.places.holes is None:
            return place
        return place + T.Select(index * PAGE < self._hole[0], self._hole[1] - self._hole[0], i32(0))
