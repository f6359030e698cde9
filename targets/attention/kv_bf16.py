"""Reads and writes of KV pages that hold bfloat16 inside the attention kernel (compiler/kv_pages.py).

What is multiplied lies in pairs, as `vdpbf16ps` takes it: of K two elements of a token, of V an element of two tokens.
Queries and softmax weights are rounded to bfloat16 too, so that a product of pairs is one instruction where there is
one, and elsewhere the two multiplications that it stands for, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets import tiles
from llmc.targets.attention.kv_pages import Pages
from llmc.targets.target import Target
from llmc.targets.vector import (
    DOT_BF16,
    LANES,
    bf16_halves,
    dot_bf16,
    dots_bf16,
    even_bf16,
    exp_near,
    f32,
    held,
    i32,
    lanes,
    near_bf16,
    registers,
    round_bf16,
    splat,
    widened,
)


class Bf16Pages(Pages):
    """One layer's pages (pages, 2, G, 16 E), E = D rounded up to even: K of a head as (E/2, 16, 2), V as (8, D, 2).

    Where `paired` a query and a row of weights are words of two bfloat16, else numbers of their own, the odd one first.
    """

    exp = staticmethod(exp_near)
    at_once = 2

    def __init__(self, target: Target, size: int) -> None:
        self.pairs, self.tiles = -(-size // 2), tiles.are_there_for_bf16(target) and size % LANES == 0
        self.paired = self.tiles or dots_bf16(target)
        self.functions = (DOT_BF16,) if self.paired and not self.tiles else ()
        # A page's products are so quick then that another page, asked for all at once, would keep them waiting.
        self.fetches = PAGE // 2 if self.paired else 0
        super().__init__(size, self.pairs if self.paired else 2 * self.pairs, 2 if self.paired else 4)

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row into its place in its page."""
        size, place = self.size, T.floormod(slot, PAGE)
        pair, half = T.floordiv(place, 2), T.floormod(place, 2)
        with T.serial(0, groups) as head:
            self.write_key(qkv, row, (heads + head) * size, page, head, place)
            with T.serial(0, size) as d:
                value = qkv[row, (heads + groups + head) * size + d]
                self._store(round_bf16(value), page, 1, head, (pair * size + d) * 2 + half)

    def write_key(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """K of one head, the columns of a row of x from `start` on, into its place in a page."""
        with T.serial(0, self.size // 2) as pair:
            for half in range(2):
                value = x[row, start + pair * 2 + half]
                self._store(round_bf16(value), page, 0, head, (pair * PAGE + place) * 2 + half)
        if self.size % 2:
            at = ((self.pairs - 1) * PAGE + place) * 2
            self._store(round_bf16(x[row, start + self.size - 1]), page, 0, head, at)
            self._store(i32(0), page, 0, head, at + 1)

    def keys(self, page: Any, head: Any) -> Any:
        """K (E * 16,) of one head of a page: of each element, sixteen tokens."""
        x = registers((2 * self.pairs * PAGE,), "float32")
        with T.serial(0, self.pairs) as pair:
            words = held(self._words(page, 0, head, pair * PAGE), "int32")
            for half, value in enumerate(reversed(bf16_halves(words))):
                T.buffer_store(x, value, [lanes((pair * 2 + half) * PAGE)])
        return x

    def span_of(self, side: int, head: Any) -> tuple[list[Any], int, int]:
        """What a page has of K (side 0) or V (side 1) of a head: index in the page, elements, bytes of an element."""
        return [side, head, 0], PAGE * (self.size if side else 2 * self.pairs), 2

    def query(self, x: Any, row: Any, start: Any, queries: Any, vector: Any) -> None:
        """A head of x, from column `start` on, into queries[vector * W :] as it is multiplied with `key_unit`."""
        if self.paired and self.size % LANES == 0:
            with T.serial(0, self.size // LANES) as step:
                words = T.reinterpret(even_bf16(x[row, lanes(start + step * LANES)]), dtype="float32x8")
                T.buffer_store(queries, words, [T.ramp(vector * self.width + step * (LANES // 2), 1, LANES // 2)])
            return
        with T.serial(0, self.size // 2) as pair:
            even, odd = (round_bf16(x[row, start + pair * 2 + half]) for half in range(2))
            self._put_pair(queries, vector, pair, even, odd)
        if self.size % 2:
            self._put_pair(queries, vector, self.pairs - 1, round_bf16(x[row, start + self.size - 1]), None)

    def _put_pair(self, queries: Any, vector: Any, pair: Any, even: Any, odd: Any) -> None:
        """Two elements of a query, bfloat16 bits; `odd` may be None, for zero."""
        at = vector * self.width
        if self.paired:
            word = even if odd is None else T.bitwise_or(even, T.shift_left(odd, i32(16)))
            T.buffer_store(queries, T.reinterpret(word, dtype="float32"), [at + pair])
            return
        for place, half in enumerate((odd, even)):
            T.buffer_store(queries, f32(0) if half is None else widened(half), [at + pair * 2 + place])

    def key_unit(self, page: Any, head: Any, unit: Any) -> Iterator[Any]:
        """The unit-th `unit` elements of K of sixteen tokens: pairs of them in words, or one by one."""
        count = self.unit if self.paired else self.unit // 2
        for p in range(count):
            word = held(self._words(page, 0, head, (unit * count + p) * PAGE), "int32")
            if self.paired:
                yield word
            else:
                for half in bf16_halves(word):
                    yield held(half)

    def multiply(self, x: Any, y: Any, total: Any) -> Any:
        """total plus x, of a query or of weights, times what K or V has."""
        if self.paired:
            return dot_bf16(total, y, T.reinterpret(splat(x), dtype="int32x16"))
        return super().multiply(x, y, total)

    def rounded(self, weights: Any) -> Any:
        """Softmax weights of sixteen tokens as their sum and their products take them."""
        return near_bf16(weights)

    def put_weights(self, weights: Any, page: Any, head: Any, scores: Any, place: Any) -> None:
        """Softmax weights of sixteen tokens into scores[place :], as `mixed` names them."""
        if not self.paired:
            super().put_weights(weights, page, head, scores, place)
            return
        bits = T.shift_right(T.reinterpret(weights, dtype="int32x16"), splat(i32(16)))
        pairs = T.reinterpret(T.cast(bits, "uint16x16"), dtype="float32x8")
        T.buffer_store(scores, pairs, [T.ramp(place, 1, LANES // 2)])

    @property
    def tile_pairs(self) -> int:
        """Pairs of K in a tile."""
        return next(count for count in range(tiles.BF16_PAIRS, 0, -1) if self.pairs % count == 0)

    def key_tile(self, page: Any, head: Any, pair: Any) -> tuple[Any, int]:
        """Where K of sixteen tokens from a pair of elements on is in the buffer, and how far apart pairs are."""
        return self._at(page, 0, head, pair * PAGE), 2 * PAGE

    def value_tile(self, page: Any, head: Any, column: Any) -> tuple[Any, int]:
        """Where V of sixteen tokens, sixteen elements from a column on, is, and how far apart pairs of tokens are."""
        return self._at(page, 1, head, column), 2 * self.size

    def _at(self, page: Any, side: int, head: Any, word: Any) -> Any:
        heads, width = (int(n) for n in self.buffer.shape[2:])
        return T.cast(page, "int64") * self.page_elements + (side * heads + head) * width + word * 2

    def copy_values(self, page: Any, head: Any, tokens: Any, out: Any) -> None:
        """V of a page in out (8 D,) words of pairs, zeros for what is behind so many tokens: it may be any number."""
        with T.serial(0, PAGE // 2) as pair:
            left = tokens - 2 * pair
            mask = T.Select(left > 1, i32(-1), T.Select(left > 0, i32(0xFFFF), i32(0)))
            with T.serial(0, self.size // LANES) as register:
                at = pair * self.size + register * LANES
                T.buffer_store(out, T.bitwise_and(self._words(page, 1, head, at), splat(mask)), [lanes(at)])

    def column(self, register: Any) -> Any:
        """The first column of a register of a value; the last two may overlap."""
        uneven = self.size > LANES and self.size % LANES
        return T.min(register * LANES, self.size - LANES) if uneven else register * LANES

    def mixed(
        self, page: Any, head: Any, step: Any, register: Any, count: int, tokens: Any
    ) -> Iterator[tuple[Any, list[Any]]]:
        """(index of a weight, `count` registers of values that it is multiplied with), of one step.

        The second token of the last pair, if it was never written, may be any number: zero is taken. `tokens` of None:
        all of the page were written.
        """
        words = self._value_words(page, head, step, register, count)
        if tokens is not None:
            mask = splat(T.Select(step * 2 + 1 < tokens, i32(-1), i32(0xFFFF)))
            words = [held(T.bitwise_and(word, mask), "int32") for word in words]
        if self.paired:
            yield step, words
            return
        for token, halves in zip((1, 0), zip(*map(bf16_halves, words), strict=True), strict=True):
            yield step * 2 + token, [held(half) for half in halves]

    def _value_words(self, page: Any, head: Any, step: Any, register: Any, count: int) -> list[Any]:
        start = step * self.size
        if self.size >= LANES:
            places = [start + self.column(register + c) for c in range(count)]
            return [held(self._words(page, 1, head, place), "int32") for place in places]
        out = registers((LANES,), "int32")
        T.buffer_store(out, splat(i32(0)), [lanes(0)])
        with T.serial(0, self.size) as d:
            even, odd = (T.cast(self.buffer[page, 1, head, (start + d) * 2 + half], "int32") for half in range(2))
            T.buffer_store(out, T.bitwise_or(even, T.shift_left(odd, i32(16))), [d])
        return [out[lanes(0)]]

    def _words(self, page: Any, side: int, head: Any, word: Any) -> Any:
        """Sixteen pairs."""
        return T.reinterpret(self.buffer[page, side, head, T.ramp(word * 2, 1, 2 * LANES)], dtype="int32x16")

    def _store(self, bits: Any, page: Any, side: int, head: Any, at: Any) -> None:
        T.buffer_store(self.buffer, T.cast(bits, "uint16"), [page, side, head, at])
