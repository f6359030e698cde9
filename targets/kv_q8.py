"""Reads and writes of q8 KV pages inside kernels (compiler/kv_pages.py)."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE, TABLE, q8_key_bytes
from llmc.targets.kv_codes import CodePages, within
from llmc.targets.vector import LANES, f32, fma, held, lanes, registers, round_int, splat


class Q8Pages(CodePages):
    """int8 codes, one scale a token: K (D, 16), V (16, W)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, q8_key_bytes(size))

    def write_key(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """K of one head, the columns of a row of x from `start` on, into its place in a page."""
        codes = self._encode(x, row, start, page, 0, head, place)
        with T.serial(0, self.size) as d:
            at = TABLE + d * PAGE + place
            T.buffer_store(self.buffer, T.cast(codes[d], "uint8"), self.at(page, 0, head, at))

    def write_value(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """V of one head, as `write_key`."""
        codes = self._encode(x, row, start, page, 1, head, place)
        with T.serial(0, self.width) as d:
            at = TABLE + place * self.width + d
            T.buffer_store(self.buffer, T.cast(codes[d], "uint8"), self.at(page, 1, head, at))

    def keys(self, page: Any, head: Any) -> Any:
        """K (D * 16,) of one head of a page: of each element, sixteen tokens."""
        x = registers((self.size * PAGE,), "float32")
        with T.serial(0, self.size) as d:
            value = self._value(page, 0, head, TABLE + d * PAGE) * self.table(page, 0, head, 0)
            T.buffer_store(x, value, [lanes(d * PAGE)])
        return x

    def _encode(self, qkv: Any, row: Any, start: Any, page: Any, side: int, head: Any, place: Any) -> Any:
        """Codes (W,) int32 of a head, its scale written."""
        x = self.row(qkv, row, start)
        bits, inverse = self.scale(self.absmax(x), 1 / 127)
        self.put_table(bits, page, side, head, 0, place)
        codes = registers((self.width,), "int32")
        with T.serial(0, self.width // LANES) as step:
            value = within(x[lanes(step * LANES)] * splat(inverse), -127, 127)
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
            self.fetch(following, group, step, self.size // together)
            for one in range(together):
                d = step * together + one
                key = held(self._value(page, 0, group, TABLE + d * PAGE))
                for h in range(count):
                    total = fma(splat(queries(h, d)), key, scores[lanes(h * LANES)])
                    T.buffer_store(scores, total, [lanes(h * LANES)])
        for h in range(count):
            scaled = scores[lanes(h * LANES)] * self.table(page, 0, group, 0)
            T.buffer_store(scores, scaled, [lanes(h * LANES)])

    def accumulate(self, page: Any, group: Any, count: int, weights: Any, seen: Any, fade: Any, acc: Any) -> None:
        """acc[h] = acc[h] * fade[h] + weights[h] . V."""
        part, scaled = registers((count * LANES,), "float32"), registers((count * LANES,), "float32")
        for h in range(count):  # a place that was never written may hold any scale, NaN too
            weight = weights[lanes(h * LANES)] * self.table(page, 1, group, 0)
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
        codes = T.reinterpret(self.bytes(page, side, head, at), dtype="int8x16")
        return T.cast(T.cast(codes, "int32x16"), "float32x16")
