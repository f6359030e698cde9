"""Reads and writes of KV pages that hold bfloat16 inside the attention kernel (compiler/kv_pages.py).

What is multiplied lies in pairs, as `vdpbf16ps` takes it: of K two elements of a token, of V an element of two tokens.
Queries and softmax weights are rounded to bfloat16 too, so that a product of pairs is one instruction where there is
one, and elsewhere the two multiplications that it stands for, with the same bits.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.attention.kv_pages import Pages
from llmc.targets.target import Target
from llmc.targets.vector import (
    DOT_BF16,
    LANES,
    dot_bf16,
    dots_bf16,
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

HIGH = -65536  # the upper half of a word: the odd one of a pair


class Bf16Pages(Pages):
    """One layer's pages (pages, 2, G, 16 E), E = D rounded up to even: K of a head as (E/2, 16, 2), V as (8, D, 2).

    With `dots` a query and a row of weights are words of two bfloat16, else numbers of their own, the odd one first.
    """

    exp = staticmethod(exp_near)
    at_once = 2

    def __init__(self, target: Target, size: int) -> None:
        self.dots, self.pairs = dots_bf16(target), -(-size // 2)
        self.functions = (DOT_BF16,) if self.dots else ()
        # A page's products are so quick then that another page, asked for all at once, would keep them waiting.
        self.fetches = PAGE // 2 if self.dots else 0
        super().__init__(size, self.pairs if self.dots else 2 * self.pairs, 2 if self.dots else 4)

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
            for half, value in enumerate(reversed(_apart(held(self._words(page, 0, head, pair * PAGE), "int32")))):
                T.buffer_store(x, value, [lanes((pair * 2 + half) * PAGE)])
        return x

    def span_of(self, side: int, head: Any) -> tuple[list[Any], int, int]:
        """What a page has of K (side 0) or V (side 1) of a head: index in the page, elements, bytes of an element."""
        return [side, head, 0], PAGE * (self.size if side else 2 * self.pairs), 2

    def query(self, x: Any, row: Any, start: Any, queries: Any, vector: Any) -> None:
        """A head of x, from column `start` on, into queries[vector * W :] as it is multiplied with `key_unit`."""
        with T.serial(0, self.size // 2) as pair:
            even, odd = (round_bf16(x[row, start + pair * 2 + half]) for half in range(2))
            self._put_pair(queries, vector, pair, even, odd)
        if self.size % 2:
            self._put_pair(queries, vector, self.pairs - 1, round_bf16(x[row, start + self.size - 1]), None)

    def _put_pair(self, queries: Any, vector: Any, pair: Any, even: Any, odd: Any) -> None:
        """Two elements of a query, bfloat16 bits; `odd` may be None, for zero."""
        at = vector * self.width
        if self.dots:
            word = even if odd is None else T.bitwise_or(even, T.shift_left(odd, i32(16)))
            T.buffer_store(queries, T.reinterpret(word, dtype="float32"), [at + pair])
            return
        for place, half in enumerate((odd, even)):
            T.buffer_store(queries, f32(0) if half is None else widened(half), [at + pair * 2 + place])

    def key_unit(self, page: Any, head: Any, unit: Any) -> list[Any]:
        """The unit-th `unit` elements of K of sixteen tokens: pairs of them in words, or one by one."""
        pairs = self.unit if self.dots else self.unit // 2
        words = [held(self._words(page, 0, head, (unit * pairs + p) * PAGE), "int32") for p in range(pairs)]
        return words if self.dots else [half for word in words for half in _apart(word)]

    def multiply(self, x: Any, y: Any, total: Any) -> Any:
        """total plus x, of a query or of weights, times what K or V has."""
        if self.dots:
            return dot_bf16(total, y, T.reinterpret(splat(x), dtype="int32x16"))
        return super().multiply(x, y, total)

    def rounded(self, weights: Any) -> Any:
        """Softmax weights of sixteen tokens as their sum and their products take them."""
        return near_bf16(weights)

    def put_weights(self, weights: Any, page: Any, head: Any, scores: Any, place: Any) -> None:
        """Softmax weights of sixteen tokens into scores[place :], as `mixed` names them."""
        if not self.dots:
            super().put_weights(weights, page, head, scores, place)
            return
        bits = T.shift_right(T.reinterpret(weights, dtype="int32x16"), splat(i32(16)))
        pairs = T.reinterpret(T.cast(bits, "uint16x16"), dtype="float32x8")
        T.buffer_store(scores, pairs, [T.ramp(place, 1, LANES // 2)])

    def column(self, register: Any) -> Any:
        """The first column of a register of a value; the last two may overlap."""
        uneven = self.size > LANES and self.size % LANES
        return T.min(register * LANES, self.size - LANES) if uneven else register * LANES

    def mixed(
        self, page: Any, head: Any, step: Any, register: Any, count: int, tokens: Any
    ) -> list[tuple[Any, list[Any]]]:
        """(index of a weight, `count` registers of values that it is multiplied with), of one step.

        The second token of the last pair, if it was never written, may be any number: zero is taken.
        """
        both = step * 2 + 1 < tokens
        words = self._value_words(page, head, step, register, count)
        if self.dots:
            mask = T.Select(both, i32(-1), i32(0xFFFF))
            return [(step, [held(T.bitwise_and(word, splat(mask)), "int32") for word in words])]
        mask = T.Select(both, i32(HIGH), i32(0))
        odd, even = zip(*(_apart(word, mask) for word in words), strict=True)
        return [(step * 2 + 1, list(odd)), (step * 2, list(even))]

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


def _apart(words: Any, mask: Any = None) -> list[Any]:
    """The odd ones of sixteen pairs, less what a mask hides, and the even ones: float32x16."""
    odd = T.bitwise_and(words, splat(i32(HIGH) if mask is None else mask))
    even = T.shift_left(words, splat(i32(16)))
    return [held(T.reinterpret(half, dtype="float32x16")) for half in (odd, even)]
