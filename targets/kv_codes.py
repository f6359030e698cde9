"""Reads and writes of KV pages that hold codes, q8 or q4, inside the attention kernel (compiler/kv_pages.py).

Scores are made of codes and scaled once, 16 tokens at a time; a token's scale of V goes into its softmax weight. The
bytes written are those of the NumPy meaning, bit for bit: a product is clamped before anything is added to it, so that
no compiler can fuse the two.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import GROUP, PAGE, SMALLEST_SCALE, TABLE, q4_key_bytes, q8_key_bytes, rotated_block
from llmc.targets.kv_plain import prefetch_element
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
    widen_bf16,
)

LINE = 64  # bytes of a cache line


def _within(x: Any, low: float, high: float) -> Any:
    return T.min(T.max(x, splat(f32(low))), splat(f32(high)))


class _CodePages:
    """What q8 and q4 share. Letters: D head size (`size`), W = D rounded up to 16 (`width`)."""

    def __init__(self, size: int, key_bytes: int) -> None:
        self.size, self.width = size, -(-size // LANES) * LANES
        self.starts = (0, key_bytes)  # of K and of V
        self.buffer: Any = None

    def _at(self, page: Any, side: int, head: Any, at: Any) -> list[Any]:
        """The place of a byte, or of several, of K (side 0) or V (side 1) of a head."""
        return [page, 0, head, self.starts[side] + at]

    def _bytes(self, page: Any, side: int, head: Any, at: Any) -> Any:
        """Sixteen bytes."""
        return self.buffer[page, 0, head, lanes(self.starts[side] + at)]

    def _table(self, page: Any, side: int, head: Any, number: Any) -> Any:
        """One float32 for each token."""
        raw = self.buffer[page, 0, head, T.ramp(self.starts[side] + number * TABLE, 1, TABLE)]
        return widen_bf16(T.reinterpret(raw, dtype="uint16x16"))

    def _put_table(self, bits: Any, page: Any, side: int, head: Any, number: Any, place: Any) -> None:
        for byte in range(2):
            part = T.cast(T.bitwise_and(T.shift_right(bits, i32(8 * byte)), i32(0xFF)), "uint8")
            T.buffer_store(self.buffer, part, self._at(page, side, head, number * TABLE + 2 * place + byte))

    def _row(self, x: Any, row: Any, start: Any) -> Any:
        """A head of x, padded to W floats with zeros."""
        out = registers((self.width,), "float32")
        if self.size >= LANES:
            with T.serial(0, self.size // LANES) as step:
                T.buffer_store(out, x[row, lanes(start + step * LANES)], [lanes(step * LANES)])
        rest = self.size % LANES
        if rest:
            T.buffer_store(out, splat(f32(0)), [lanes(self.width - LANES)])
            with T.serial(0, rest) as d:
                T.buffer_store(out, x[row, start + self.size - rest + d], [self.width - LANES + d])
        return out

    def _absmax(self, x: Any) -> Any:
        top = registers((LANES,), "float32")
        T.buffer_store(top, splat(f32(0)), [lanes(0)])
        with T.serial(0, self.width // LANES) as step:
            value = x[lanes(step * LANES)]
            T.buffer_store(top, T.max(top[lanes(0)], T.max(value, splat(f32(0)) - value)), [lanes(0)])
        return reduce_max(top[lanes(0)])

    def _scale(self, span: Any, factor: float) -> tuple[Any, Any]:
        """Registers with (span * factor as bfloat16 bits, the inverse of what they mean or 0)."""
        bits, pair = registers((1,), "int32"), registers((2,), "float32")
        T.buffer_store(bits, round_bf16(span * f32(factor)), [0])
        T.buffer_store(pair, _widened(bits[0]), [0])
        T.buffer_store(pair, T.Select(pair[0] >= f32(SMALLEST_SCALE), f32(1) / pair[0], f32(0)), [1])
        return bits[0], pair[1]

    def finish(self, acc: Any, count: int) -> None:
        """Nothing is left to do."""

    def _fetch(self, following: Any, group: Any, part: Any, parts: int) -> None:
        """Ask for the part-th of `parts` of what the following page has of a head."""
        lines = -(-int(self.buffer.shape[3]) // LINE)
        each = -(-lines // parts)
        for line in range(each):
            at = T.min(part * each + line, lines - 1) * LINE
            prefetch_element(self.buffer, following, 0, group, at)


def _widened(bits: Any) -> Any:
    """A scalar bfloat16's int32 bits -> float32."""
    return T.reinterpret(T.shift_left(bits, i32(16)), dtype="float32")


class Q8Pages(_CodePages):
    """int8 codes, one scale a token: K (D, 16), V (16, W)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, q8_key_bytes(size))

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row into its place in its page."""
        place = T.floormod(slot, PAGE)
        with T.serial(0, groups) as head:
            codes = self._encode(qkv, row, (heads + head) * self.size, page, 0, head, place)
            with T.serial(0, self.size) as d:
                at = TABLE + d * PAGE + place
                T.buffer_store(self.buffer, T.cast(codes[d], "uint8"), self._at(page, 0, head, at))
            codes = self._encode(qkv, row, (heads + groups + head) * self.size, page, 1, head, place)
            with T.serial(0, self.width) as d:
                at = TABLE + place * self.width + d
                T.buffer_store(self.buffer, T.cast(codes[d], "uint8"), self._at(page, 1, head, at))

    def _encode(self, qkv: Any, row: Any, start: Any, page: Any, side: int, head: Any, place: Any) -> Any:
        """Codes (W,) int32 of a head, its scale written."""
        x = self._row(qkv, row, start)
        bits, inverse = self._scale(self._absmax(x), 1 / 127)
        self._put_table(bits, page, side, head, 0, place)
        codes = registers((self.width,), "int32")
        with T.serial(0, self.width // LANES) as step:
            value = _within(x[lanes(step * LANES)] * splat(inverse), -127, 127)
            T.buffer_store(codes, round_int(value), [lanes(step * LANES)])
        return codes

    def queries(self, qkv: Any, row: Any, first_head: Any, count: int) -> Any:
        """`count` query heads as `scores` wants them."""
        return lambda h, d: qkv[row, (first_head + h) * self.size + d]

    def scores(self, queries: Any, page: Any, following: Any, group: Any, count: int, scores: Any) -> None:
        """scores[h] = q[h] . K for the 16 tokens of a page, while K and V of the following page are fetched."""
        for h in range(count):
            T.buffer_store(scores, splat(f32(0)), [lanes(h * LANES)])
        together = next(n for n in (4, 2, 1) if self.size % n == 0)  # elements of K between two prefetches
        with T.serial(0, self.size // together) as step:
            self._fetch(following, group, step, self.size // together)
            for one in range(together):
                d = step * together + one
                key = held(self._value(page, 0, group, TABLE + d * PAGE))
                for h in range(count):
                    total = fma(splat(queries(h, d)), key, scores[lanes(h * LANES)])
                    T.buffer_store(scores, total, [lanes(h * LANES)])
        for h in range(count):
            scaled = scores[lanes(h * LANES)] * self._table(page, 0, group, 0)
            T.buffer_store(scores, scaled, [lanes(h * LANES)])

    def accumulate(self, page: Any, group: Any, count: int, weights: Any, seen: Any, fade: Any, acc: Any) -> None:
        """acc[h] = acc[h] * fade[h] + weights[h] . V."""
        part, scaled = registers((count * LANES,), "float32"), registers((count * LANES,), "float32")
        for h in range(count):  # a place that was never written may hold any scale, NaN too
            weight = weights[lanes(h * LANES)] * self._table(page, 1, group, 0)
            T.buffer_store(scaled, T.Select(seen, weight, splat(f32(0))), [lanes(h * LANES)])
        with T.serial(0, self.width // LANES) as step:
            for h in range(count):
                T.buffer_store(part, acc[h, lanes(step * LANES)] * splat(fade[h]), [lanes(h * LANES)])
            for token in range(PAGE):
                value = held(self._value(page, 1, group, TABLE + token * self.width + step * LANES))
                for h in range(count):
                    total = fma(splat(scaled[h * LANES + token]), value, part[lanes(h * LANES)])
                    T.buffer_store(part, total, [lanes(h * LANES)])
            for h in range(count):
                T.buffer_store(acc, part[lanes(h * LANES)], [h, lanes(step * LANES)])

    def _value(self, page: Any, side: int, head: Any, at: Any) -> Any:
        codes = T.reinterpret(self._bytes(page, side, head, at), dtype="int8x16")
        return T.cast(T.cast(codes, "int32x16"), "float32x16")


class Q4Pages(_CodePages):
    """Rotated K in six-bit codes (W/4, 3, 16), a scale a token; rotated V in four, scale and minimum a group."""

    def __init__(self, size: int) -> None:
        super().__init__(size, q4_key_bytes(size))
        self.groups = -(-size // GROUP)
        self.values_at = 2 * self.groups * TABLE

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row into its place in its page."""
        place = T.floormod(slot, PAGE)
        with T.serial(0, groups) as head:
            self._write_key(qkv, row, (heads + head) * self.size, page, head, place)
            x = self._row(qkv, row, (heads + groups + head) * self.size)
            self._rotate(x)
            if self.size < self.width:
                with T.serial(self.size, self.width) as d:  # repeating the last element changes no minimum
                    T.buffer_store(x, x[self.size - 1], [d])
            whole = self.size // GROUP + (self.size % GROUP > LANES)
            if whole:
                with T.serial(0, whole) as group:
                    self._write_group(x, group, 16, page, head, place)
            if whole < self.groups:
                self._write_group(x, whole, 8, page, head, place)

    def _write_key(self, qkv: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        x = self._row(qkv, row, start)
        self._rotate(x)
        bits, inverse = self._scale(self._absmax(x), 1 / 31.5)
        self._put_table(bits, page, 0, head, 0, place)
        codes = registers((self.width,), "int32")
        with T.serial(0, self.width // LANES) as step:
            value = _within(x[lanes(step * LANES)] * splat(inverse), -31.5, 31.5) + splat(f32(31.5))
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
        T.buffer_store(self.buffer, T.cast(byte, "uint8"), self._at(page, side, head, start + at))

    def _write_group(self, x: Any, group: Any, half: int, page: Any, head: Any, place: Any) -> None:
        """The group-th group of a value: `half` bytes of two elements."""
        registers_of = [x[lanes(group * GROUP + at)] for at in range(0, 2 * half, LANES)]
        least, most, low = registers_of[0], registers_of[0], registers((2,), "float32")
        for more in registers_of[1:]:
            least, most = T.min(least, more), T.max(most, more)
        minimum = registers((1,), "int32")
        T.buffer_store(minimum, round_bf16(f32(0) - reduce_max(splat(f32(0)) - least)), [0])
        T.buffer_store(low, _widened(minimum[0]), [0])
        T.buffer_store(low, reduce_max(most) - low[0], [1])
        bits, inverse = self._scale(low[1], 1 / 15)
        self._put_table(bits, page, 1, head, group, place)
        self._put_table(minimum[0], page, 1, head, self.groups + group, place)
        codes = registers((2 * half,), "int32")
        for at, value in zip(range(0, 2 * half, LANES), registers_of, strict=True):
            four = _within((value - splat(low[0])) * splat(inverse), 0, 15)
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
            apart = distance // LANES
            with T.serial(0, steps // 2) as pair:
                first = T.floordiv(pair, apart) * (2 * apart) + T.floormod(pair, apart)
                a, b = lanes(first * LANES), lanes((first + apart) * LANES)
                both = registers((LANES,), "float32")
                T.buffer_store(both, x[a], [lanes(0)])
                T.buffer_store(x, both[lanes(0)] + x[b], [a])
                T.buffer_store(x, both[lanes(0)] - x[b], [b])
            distance *= 2
        with T.serial(0, steps) as step:
            at = lanes(step * LANES)
            T.buffer_store(x, x[at] * splat(f32(block**-0.5)), [at])

    def queries(self, qkv: Any, row: Any, first_head: Any, count: int) -> Any:
        """(rotated heads (count, W), the sum of each) as `scores` wants them."""
        q, sums = registers((count * self.width,), "float32"), registers((count + LANES,), "float32")
        for h in range(count):
            head = self._row(qkv, row, (first_head + h) * self.size)
            self._rotate(head)
            T.buffer_store(sums, splat(f32(0)), [lanes(count)])
            with T.serial(0, self.width // LANES) as step:
                value = head[lanes(step * LANES)]
                T.buffer_store(q, value, [lanes(h * self.width + step * LANES)])
                T.buffer_store(sums, sums[lanes(count)] + value, [lanes(count)])
            T.buffer_store(sums, reduce_sum(sums[lanes(count)]), [h])
        return q, sums

    def scores(self, queries: Any, page: Any, following: Any, group: Any, count: int, scores: Any) -> None:
        """scores[h] = q[h] . K for the 16 tokens of a page, while K and V of the following page are fetched."""
        q, sums = queries
        for h in range(count):
            T.buffer_store(scores, splat(sums[h] * f32(-31.5)), [lanes(h * LANES)])
        with T.serial(0, self.width // 8) as unit:
            self._fetch(following, group, unit, self.width // 8)
            rows = [held(self._wide(page, 0, group, TABLE + (unit * 6 + row) * PAGE), "int32") for row in range(6)]
            for e in range(8):
                pair, top = rows[e // 4 * 3 + e % 4 // 2], rows[e // 4 * 3 + 2]
                four = T.shift_right(pair, splat(i32(4))) if e % 2 else T.bitwise_and(pair, splat(i32(15)))
                shift = 4 - 2 * (e % 4)
                if shift:
                    top = (T.shift_left if shift > 0 else T.shift_right)(top, splat(i32(abs(shift))))
                six = T.bitwise_or(four, T.bitwise_and(top, splat(i32(48))))
                key = held(T.cast(six, "float32x16"))
                for h in range(count):
                    total = fma(splat(q[h * self.width + unit * 8 + e]), key, scores[lanes(h * LANES)])
                    T.buffer_store(scores, total, [lanes(h * LANES)])
        for h in range(count):
            scaled = scores[lanes(h * LANES)] * self._table(page, 0, group, 0)
            T.buffer_store(scores, scaled, [lanes(h * LANES)])

    def accumulate(self, page: Any, group: Any, count: int, weights: Any, seen: Any, fade: Any, acc: Any) -> None:
        """acc[h] = acc[h] * fade[h] + weights[h] . V."""
        whole = self.size // GROUP + (self.size % GROUP > LANES)
        if whole:
            with T.serial(0, whole) as part:
                self._accumulate_group(part, 16, page, group, count, weights, seen, fade, acc)
        if whole < self.groups:
            self._accumulate_group(whole, 8, page, group, count, weights, seen, fade, acc)

    def finish(self, acc: Any, count: int) -> None:
        """Sums of rotated values become sums of values."""
        for h in range(count):
            head = registers((self.width,), "float32")
            with T.serial(0, self.width // LANES) as step:
                T.buffer_store(head, acc[h, lanes(step * LANES)], [lanes(step * LANES)])
            if self.size < self.width:
                with T.serial(self.size, self.width) as d:
                    T.buffer_store(head, f32(0), [d])
            self._rotate(head)
            with T.serial(0, self.width // LANES) as step:
                T.buffer_store(acc, head[lanes(step * LANES)], [h, lanes(step * LANES)])

    def _accumulate_group(
        self, part: Any, half: int, page: Any, group: Any, count: int, weights: Any, seen: Any, fade: Any, acc: Any
    ) -> None:
        """The part-th group of elements; a token's scale is in its weight, minimums are summed over tokens first."""
        columns = range(0, 2 * half, LANES)
        scaled = registers((count * LANES,), "float32")
        sums = registers((count * 2 * half,), "float32")
        zero = splat(f32(0))
        for h in range(count):  # a place that was never written may hold any scale, NaN too
            weight = weights[lanes(h * LANES)]
            scales, minimums = (self._table(page, 1, group, part + n * self.groups) for n in range(2))
            T.buffer_store(scaled, T.Select(seen, weight * scales, zero), [lanes(h * LANES)])
            offset = reduce_sum(T.Select(seen, weight * minimums, zero))
            for at in columns:
                total = fma(acc[h, lanes(part * GROUP + at)], splat(fade[h]), splat(offset))
                T.buffer_store(sums, total, [lanes(h * 2 * half + at)])
        with T.serial(0, PAGE // 4) as four:
            for one in range(4):
                token = four * 4 + one
                start = self.values_at + token * (self.width // 2) + part * LANES
                for at, value in zip(columns, self._four_bits(page, group, start, half), strict=True):
                    for h in range(count):
                        place = lanes(h * 2 * half + at)
                        T.buffer_store(sums, fma(splat(scaled[h * LANES + token]), value, sums[place]), [place])
        for h in range(count):
            for at in columns:
                T.buffer_store(acc, sums[lanes(h * 2 * half + at)], [h, lanes(part * GROUP + at)])

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
        return T.cast(self._bytes(page, side, head, at), "int32x16")
