"""Reads and writes of KV pages that hold float32 inside the attention kernel (compiler/kv_pages.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.attention.kv_pages import Pages
from llmc.targets.vector import LANES, f32, held, lanes, registers, splat


class PlainPages(Pages):
    """One layer's pages (pages, 2, G, 16 D): K of a head as (D, 16), V as (16, D)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row into its place in its page."""
        size, place = self.size, T.floormod(slot, PAGE)
        with T.serial(0, groups) as head:
            self.write_key(qkv, row, (heads + head) * size, page, head, place)
            with T.serial(0, size) as d:
                self._store(qkv[row, (heads + groups + head) * size + d], page, 1, head, place * size + d)

    def write_key(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """K of one head, the columns of a row of x from `start` on, into its place in a page."""
        with T.serial(0, self.size) as d:
            self._store(x[row, start + d], page, 0, head, d * PAGE + place)

    def keys(self, page: Any, head: Any) -> Any:
        """K (D * 16,) of one head of a page: of each element, sixteen tokens."""
        x = registers((self.size * PAGE,), "float32")
        with T.serial(0, self.size) as d:
            T.buffer_store(x, self._load(page, 0, head, d * PAGE), [lanes(d * PAGE)])
        return x

    def span_of(self, side: int, head: Any) -> tuple[list[Any], int, int]:
        """What a page has of K (side 0) or V (side 1) of a head: index in the page, elements, bytes of an element."""
        return [side, head, 0], self.size * PAGE, 4

    def key_unit(self, page: Any, head: Any, unit: Any) -> Iterator[Any]:
        """The unit-th `unit` elements of K, each a float32x16 of sixteen tokens."""
        for e in range(self.unit):
            yield held(self._load(page, 0, head, (unit * self.unit + e) * PAGE))

    def column(self, register: Any) -> Any:
        """The first column of a register of a value; the last two may overlap."""
        uneven = self.size > LANES and self.size % LANES
        return T.min(register * LANES, self.size - LANES) if uneven else register * LANES

    def values(self, page: Any, head: Any, token: Any, register: Any, count: int) -> list[Any]:
        """`count` registers of a token's value."""
        start = token * self.size
        if self.size >= LANES:
            return [held(self._load(page, 1, head, start + self.column(register + c))) for c in range(count)]
        out = registers((LANES,), "float32")
        T.buffer_store(out, splat(f32(0)), [lanes(0)])
        with T.serial(0, self.size) as d:
            T.buffer_store(out, self.buffer[page, 1, head, start + d], [d])
        return [out[lanes(0)]]

    def _load(self, page: Any, side: int, head: Any, at: Any) -> Any:
        return self.buffer[page, side, head, lanes(at)]

    def _store(self, value: Any, page: Any, side: int, head: Any, at: Any) -> None:
        T.buffer_store(self.buffer, value, [page, side, head, at])
