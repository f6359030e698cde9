"""Reads and writes of q8 KV pages inside kernels (compiler/kv_pages.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE, TABLE, q8_key_bytes
from llmc.targets.attention.kv_codes import CodePages, within
from llmc.targets.vector import LANES, held, lanes, registers, round_int, splat


class Q8Pages(CodePages):
    """int8 codes, one scale a token: K (D, 16), V (16, W)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, q8_key_bytes(size))

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

    def key_unit(self, page: Any, head: Any, unit: Any) -> Iterator[Any]:
        """The unit-th `unit` elements of K, each a float32x16 of sixteen tokens."""
        start = TABLE + unit * self.unit * PAGE
        for e in range(self.unit):
            yield held(self._value(page, 0, head, start + e * PAGE))

    def weights(self, weights: Any, page: Any, head: Any) -> Any:
        """Softmax weights of sixteen tokens, as `values` are multiplied with them; where they are 0, 0."""
        return self.weighted(weights, page, head, 0)

    def values(self, page: Any, head: Any, token: Any, register: Any, count: int) -> list[Any]:
        """`count` registers of a token's value."""
        start = TABLE + token * self.width
        return [held(self._value(page, 1, head, start + (register + c) * LANES)) for c in range(count)]

    def _value(self, page: Any, side: int, head: Any, at: Any) -> Any:
        codes = T.reinterpret(self.bytes(page, side, head, at), dtype="int8x16")
        return T.cast(T.cast(codes, "int32x16"), "float32x16")
