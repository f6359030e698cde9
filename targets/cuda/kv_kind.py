"""What a CUDA kernel asks of a kind of KV pages: a thread reads of a token, all threads of a block write one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.fragments import COLUMNS, Parts, parted
from llmc.targets.cuda.launch import f32

Number = Callable[[Any], Any]  # element -> number


@dataclass(frozen=True)
class Token:
    """Where K and V of a token lie: in `kv`, its page and its place 0..15 there, of a kv head of so many elements."""

    kv: Any
    page: Any
    head: Any
    place: Any
    size: int

    def of(self, place: Any) -> Token:
        """Another one of the page."""
        return replace(self, place=place)


class Pages:
    """A kind of pages."""

    dtype: str
    parts = 2  # of bfloat16 in which tensor cores take a number of K or V, and what it is multiplied with
    unit = 1  # elements of K that are read together
    operands = False  # whether K and V lie as tensor cores take them, so that bytes may be copied
    rotated = False  # whether K and V lie rotated: queries are then too, and what is made of V is turned back

    def query(self, x: Any) -> Any:
        """A number of a query as it is multiplied with K, but for the rotation."""
        return x

    def keys(self, at: Token) -> Callable[[Any], list[Any]]:
        """A function that reads the i-th `unit` elements of K, for numbers of its own; the last may be beyond."""
        raise NotImplementedError

    def values(self, at: Token) -> Callable[[Any], Any]:
        """A function that reads an element of V."""
        raise NotImplementedError

    def key_words(self, at: Token, quad: Any) -> list[Parts]:
        """Of two neighbouring slots, the first even: four elements of K from 4 * quad on, zeros beyond the last."""

        def four(read: Callable[[Any], list[Any]]) -> Parts:
            units = COLUMNS // self.unit
            numbers = [number for i in range(units) for number in read(quad * units + i)]
            if at.size % COLUMNS:
                inside = [quad * COLUMNS + e < at.size for e in range(COLUMNS)]
                numbers = [T.if_then_else(*one, f32(0)) for one in zip(inside, numbers, strict=True)]
            return parted(numbers, self.parts)

        return [four(self.keys(at.of(at.place + i))) for i in range(2)]

    def value_words(self, at: Token, first: Any, count: int) -> list[list[Any]]:
        """Of so many elements of V, for each part: a word with the number of a slot, an even one, and of the next."""
        both = [self.values(at.of(at.place + i)) for i in range(2)]
        return slot_words([[read(first + d) for d in range(count)] for read in both], self.parts)

    def write(self, at: Token, key: Number, value: Number, thread: Any, threads: int) -> None:
        """K and V of a token, whose elements `key` and `value` give."""
        raise NotImplementedError

    def write_keys(self, at: Token, number: Callable[[Any, Any], Any], thread: Any, threads: int) -> None:
        """K of all tokens of a page, of which `number` gives (token, element); V stays."""
        raise NotImplementedError

    def beyond_keys(self, size: int) -> tuple[int, int]:
        """(side, first element) of a page of a kv head that `write_keys` writes nothing from."""
        raise NotImplementedError


def slot_words(numbers: list[list[Any]], parts: int) -> list[list[Any]]:
    """Float32 of two slots, as many elements of each -> for each element and part a word with both."""
    count, words = len(numbers[0]), []
    for d in range(0, count, 2):
        four = [slot[d + i] if d + i < count else f32(0) for i in range(2) for slot in numbers]
        words += [list(both) for both in zip(*parted(four, parts), strict=True)]
    return words[:count]
