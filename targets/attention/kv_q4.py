"""Reads and writes of q4 KV pages inside kernels (compiler/kv_pages.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import GROUP, PAGE, TABLE, q4_key_bytes, rotated_block
from llmc.targets.attention.kv_codes import CodePages, within
from llmc.targets.vector import (
    LANES,
    butterfly,
    f32,
    fma,
    held,
    i32,
    lanes,
    reduce_max,
    reduce_sum,
    registers,
    round_bf16,
    round_int,
    splat,
    widened,
)


class Q4Pages(CodePages):
    """Rotated K in six-bit codes (W/4, 3, 16), a scale a token; rotated V in four, scale and minimum a group."""

    def __init__(self, size: int) -> None:
        super().__init__(size, -(-size // LANES) * LANES, q4_key_bytes(size))
        self.groups = -(-size // GROUP)
        self.values_at = 2 * self.groups * TABLE

    def write_value(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """V of one head, as `write_key`."""
        value = self.row(x, row, start)
        self._rotate(value)
        if self.size < self.width:
            with T.serial(self.size, self.width) as d:  # repeating the last element changes no minimum
                T.buffer_store(value, value[self.size - 1], [d])
        whole = self.size // GROUP + (self.size % GROUP > LANES)
        if whole:
            with T.serial(0, whole) as group:
                self._write_group(value, group, 16, page, head, place)
        if whole < self.groups:
            self._write_group(value, whole, 8, page, head, place)

    def write_key(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """K of one head, the columns of a row of x from `start` on, into its place in a page."""
        x = self.row(x, row, start)
        self._rotate(x)
        bits, inverse = self.scale(self.absmax(x), 1 / 31.5)
        self.put_table(bits, page, 0, head, 0, place)
        codes = registers((self.width,), "int32")
        with T.serial(0, self.width // LANES) as step:
            value = within(x[lanes(step * LANES)] * splat(inverse), -31.5, 31.5) + splat(f32(31.5))
            T.buffer_store(codes, round_int(value), [lanes(step * LANES)])
        with T.serial(0, self.width // 4) as unit:
            six = [codes[unit * 4 + e] for e in range(4)]
            for j in range(2):
                low, high = (T.bitwise_and(code, i32(15)) for code in six[2 * j : 2 * j + 2])
                self._put(T.bitwise_or(low, T.shift_left(high, i32(4))), page, 0, head, (unit * 3 + j) * PAGE + place)
            top = T.shift_right(six[0], i32(4))
            for e in range(1, 4):
                top = T.bitwise_or(top, T.shift_left(T.shift_right(six[e], i32(4)), i32(2 * e)))
            self._put(top, page, 0, head, (unit * 3 + 2) * PAGE + place)

    def _put(self, byte: Any, page: Any, side: int, head: Any, at: Any) -> None:
        """One byte of codes; `at` counts from the end of the tables."""
        start = self.values_at if side else TABLE
        T.buffer_store(self.buffer, T.cast(byte, "uint8"), self.at(page, side, head, start + at))

    def _write_group(self, x: Any, group: Any, half: int, page: Any, head: Any, place: Any) -> None:
        """The group-th group of a value: `half` bytes of two elements."""
        registers_of = [x[lanes(group * GROUP + at)] for at in range(0, 2 * half, LANES)]
        least, most, low = registers_of[0], registers_of[0], registers((2,), "float32")
        for more in registers_of[1:]:
            least, most = T.min(least, more), T.max(most, more)
        minimum = registers((1,), "int32")
        T.buffer_store(minimum, round_bf16(f32(0) - reduce_max(splat(f32(0)) - least)), [0])
        T.buffer_store(low, widened(minimum[0]), [0])
        T.buffer_store(low, reduce_max(most) - low[0], [1])
        bits, inverse = self.scale(low[1], 1 / 15)
        self.put_table(bits, page, 1, head, group, place)
        self.put_table(minimum[0], page, 1, head, self.groups + group, place)
        codes = registers((2 * half,), "int32")
        for at, value in zip(range(0, 2 * half, LANES), registers_of, strict=True):
            four = within((value - splat(low[0])) * splat(inverse), 0, 15)
            T.buffer_store(codes, round_int(four), [lanes(at)])
        with T.serial(0, half) as i:
            byte = T.bitwise_or(codes[i], T.shift_left(codes[half + i], i32(4)))
            self._put(byte, page, 1, head, place * (self.width // 2) + group * LANES + i)

    def _rotate(self, x: Any) -> None:
        """`rotate` of x (W,) in place; its padding stays zero."""
        block, steps = rotated_block(self.size), self.width // LANES
        distance = 1
        while distance < min(block, LANES):
            with T.serial(0, steps) as step:
                at = lanes(step * LANES)
                T.buffer_store(x, butterfly(x[at], distance), [at])
            distance *= 2
        while distance < block:
            _sums_and_differences(x, steps, distance // LANES)
            distance *= 2
        with T.serial(0, steps) as step:
            at = lanes(step * LANES)
            T.buffer_store(x, x[at] * splat(f32(block**-0.5)), [at])

    def keys(self, page: Any, head: Any) -> Any:
        """K (D * 16,) of one head of a page: of each element, sixteen tokens."""
        x = registers((self.width * PAGE,), "float32")
        with T.serial(0, self.width // 4) as unit:
            rows = [held(self._wide(page, 0, head, TABLE + (unit * 3 + row) * PAGE), "int32") for row in range(3)]
            for e in range(4):
                four = T.bitwise_and(T.shift_right(rows[e // 2], splat(i32(4 * (e % 2)))), splat(i32(15)))
                two = T.bitwise_and(T.shift_right(rows[2], splat(i32(2 * e))), splat(i32(3)))
                code = T.bitwise_or(four, T.shift_left(two, splat(i32(4))))
                value = (T.cast(code, "float32x16") - splat(f32(31.5))) * self.table(page, 0, head, 0)
                T.buffer_store(x, value, [lanes((unit * 4 + e) * PAGE)])
        block = rotated_block(self.size)
        distance = 1
        while distance < block:
            _sums_and_differences(x, self.size, distance)
            distance *= 2
        with T.serial(0, self.size) as d:
            T.buffer_store(x, x[lanes(d * PAGE)] * splat(f32(block**-0.5)), [lanes(d * PAGE)])
        return x

    def prepare(self, vectors: int) -> None:
        """The sum of each query, which the codes' middle is taken off by."""
        self.sums = registers((vectors,), "float32")

    def query(self, x: Any, row: Any, start: Any, queries: Any, vector: Any) -> None:
        """A head of x, from column `start` on, into queries[vector * W :] as it is multiplied with `key_unit`."""
        head, total = self.row(x, row, start), registers((LANES,), "float32")
        self._rotate(head)
        T.buffer_store(total, splat(f32(0)), [lanes(0)])
        with T.serial(0, self.width // LANES) as step:
            value = head[lanes(step * LANES)]
            T.buffer_store(queries, value, [lanes(vector * self.width + step * LANES)])
            T.buffer_store(total, total[lanes(0)] + value, [lanes(0)])
        T.buffer_store(self.sums, reduce_sum(total[lanes(0)]), [vector])

    def first_sum(self, vector: Any) -> Any:
        """Sixteen lanes that the products of a query vector are added to."""
        return splat(self.sums[vector] * f32(-31.5))

    def key_unit(self, page: Any, head: Any, unit: Any) -> Iterator[Any]:
        """The unit-th `unit` elements of K, each a float32x16 of sixteen tokens."""
        rows = [held(self._wide(page, 0, head, TABLE + (unit * 3 + row) * PAGE), "int32") for row in range(3)]
        for e in range(4):
            pair, top = rows[e // 2], rows[2]
            four = T.shift_right(pair, splat(i32(4))) if e % 2 else T.bitwise_and(pair, splat(i32(15)))
            shift = 4 - 2 * e
            if shift:
                top = (T.shift_left if shift > 0 else T.shift_right)(top, splat(i32(abs(shift))))
            six = T.bitwise_or(four, T.bitwise_and(top, splat(i32(48))))
            yield held(T.cast(six, "float32x16"))

    def spans(self, most: int) -> Iterator[tuple[int, int, int]]:
        """(first register, how many blocks, registers in a block) of what a value's W elements are summed in."""
        whole = self.size // GROUP + (self.size % GROUP > LANES)
        if whole:
            yield 0, whole, 2
        if whole < self.groups:
            yield 2 * whole, 1, 1

    def begin_span(self, vectors: int) -> None:
        """Nothing of the minimums yet."""
        self.minimums, self.scaled = (registers((vectors * LANES,), "float32") for _ in range(2))
        for vector in range(vectors):
            T.buffer_store(self.minimums, splat(f32(0)), [lanes(vector * LANES)])

    def span_weights(self, weights: list[Any], page: Any, head: Any, register: Any) -> Any:
        """What to multiply with values from `register` on, for sixteen tokens of each vector; None: weights as given.

        A token's scale is in its weight; minimums are summed over tokens first.
        """
        group, one = T.floordiv(register, 2), splat(f32(1))
        for vector, weight in enumerate(weights):
            place = lanes(vector * LANES)
            T.buffer_store(self.scaled, self.weighted(weight, page, head, group), [place])
            least = self.weighted(weight, page, head, group + self.groups)
            T.buffer_store(self.minimums, fma(least, one, self.minimums[place]), [place])
        return self.scaled

    def end_span(self, vector: int, total: Any) -> Any:
        """The sum of a vector's products in a register of a value -> the sum of weighted values."""
        return total + splat(reduce_sum(self.minimums[lanes(vector * LANES)]))

    def values(self, page: Any, head: Any, token: Any, register: Any, count: int) -> list[Any]:
        """`count` registers of a token's value."""
        start = self.values_at + token * (self.width // 2) + T.floordiv(register, 2) * LANES
        return self._four_bits(page, head, start, LANES if count == 2 else LANES // 2)

    def finish(self, x: Any) -> None:
        """Sums of rotated values become sums of values."""
        if self.size < self.width:
            with T.serial(self.size, self.width) as d:
                T.buffer_store(x, f32(0), [d])
        self._rotate(x)

    def _four_bits(self, page: Any, head: Any, at: Any, half: int) -> list[Any]:
        """float32x16 vectors of the codes in `half` bytes, low halves first."""
        if half == LANES:
            raw = held(self._wide(page, 1, head, at), "int32")
            parts = T.bitwise_and(raw, splat(i32(15))), T.shift_right(raw, splat(i32(4)))
            return [held(T.cast(part, "float32x16")) for part in parts]
        eight = T.cast(self.buffer[page, 0, head, T.ramp(self.starts[1] + at, 1, 8)], "int32x8")
        low, high = T.bitwise_and(eight, T.broadcast(i32(15), 8)), T.shift_right(eight, T.broadcast(i32(4), 8))
        return [held(T.cast(tirx.Shuffle([low, high], [i32(i) for i in range(LANES)]), "float32x16"))]

    def _wide(self, page: Any, side: int, head: Any, at: Any) -> Any:
        return T.cast(self.bytes(page, side, head, at), "int32x16")


def _sums_and_differences(x: Any, count: int, apart: int) -> None:
    """Vectors a and b that stand `apart` from each other among the `count` of x become a + b and a - b."""
    with T.serial(0, count // 2) as pair:
        first = T.floordiv(pair, apart) * (2 * apart) + T.floormod(pair, apart)
        a, b = lanes(first * LANES), lanes((first + apart) * LANES)
        both = registers((LANES,), "float32")
        T.buffer_store(both, x[a], [lanes(0)])
        T.buffer_store(x, both[lanes(0)] + x[b], [a])
        T.buffer_store(x, both[lanes(0)] - x[b], [b])
