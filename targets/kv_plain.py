"""Reads and writes of KV pages that hold numbers, f32 or bf16, inside the attention kernel (compiler/kv_pages.py)."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.vector import LANES, f32, fma, lanes, prefetch, registers, round_bf16, splat, widen_bf16


def prefetch_element(buffer: Any, page: Any, side: int, head: Any, at: Any) -> None:
    """Ask for an element's cache line: pages lie anywhere, so the hardware cannot guess the next one."""
    _, sides, heads, width = (int(n) if isinstance(n, tirx.IntImm) else 0 for n in buffer.shape)
    place = T.cast(page, "int64") * (sides * heads * width) + (side * heads + head) * width + at
    prefetch(buffer.access_ptr("r", offset=place))


class PlainPages:
    """One layer's pages (pages, 2, G, 16 D): K of a head as (D, 16), V as (16, D)."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.buffer: Any = None

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

    def queries(self, qkv: Any, row: Any, first_head: Any, count: int) -> Any:
        """`count` query heads as `scores` wants them."""
        return lambda h, d: qkv[row, (first_head + h) * self.size + d]

    def scores(self, queries: Any, page: Any, following: Any, group: Any, count: int, scores: Any) -> None:
        """scores[h] = q[h] . K for the 16 tokens of a page, while K and V of the following page are fetched."""
        for h in range(count):
            T.buffer_store(scores, splat(f32(0)), [lanes(h * LANES)])
        with T.serial(0, self.size) as d:
            key = self._load(page, 0, group, d * PAGE)
            for side in range(2):
                prefetch_element(self.buffer, following, side, group, d * PAGE)
            for h in range(count):
                total = fma(splat(queries(h, d)), key, scores[lanes(h * LANES)])
                T.buffer_store(scores, total, [lanes(h * LANES)])

    def accumulate(self, page: Any, group: Any, count: int, weights: Any, seen: Any, fade: Any, acc: Any) -> None:
        """acc[h] = acc[h] * fade[h] + weights[h] . V."""
        whole = self.size // LANES
        part = registers((count * LANES,), "float32")
        if whole:
            with T.serial(0, whole) as step:
                for h in range(count):
                    T.buffer_store(part, acc[h, lanes(step * LANES)] * splat(fade[h]), [lanes(h * LANES)])
                for token in range(PAGE):
                    value = self._load(page, 1, group, token * self.size + step * LANES)
                    for h in range(count):
                        total = fma(splat(weights[h * LANES + token]), value, part[lanes(h * LANES)])
                        T.buffer_store(part, total, [lanes(h * LANES)])
                for h in range(count):
                    T.buffer_store(acc, part[lanes(h * LANES)], [h, lanes(step * LANES)])
        if self.size % LANES:
            with T.serial(0, self.size % LANES) as rest:
                d = whole * LANES + rest
                for h in range(count):
                    T.buffer_store(acc, acc[h, d] * fade[h], [h, d])
                    with T.serial(0, PAGE) as token:
                        value = self._load_one(page, 1, group, token * self.size + d)
                        T.buffer_store(acc, acc[h, d] + weights[h * LANES + token] * value, [h, d])

    def finish(self, acc: Any, count: int) -> None:
        """Nothing is left to do."""

    def _load(self, page: Any, side: int, head: Any, at: Any) -> Any:
        value = self.buffer[page, side, head, lanes(at)]
        return widen_bf16(value) if self.kind == "bf16" else value

    def _load_one(self, page: Any, side: int, head: Any, at: Any) -> Any:
        value = self.buffer[page, side, head, at]
        if self.kind == "f32":
            return value
        return T.reinterpret(T.shift_left(T.cast(value, "uint32"), tirx.const(16, "uint32")), dtype="float32")

    def _store(self, value: Any, page: Any, side: int, head: Any, at: Any) -> None:
        if self.kind == "bf16":
            value = T.cast(round_bf16(value), "uint16")
        T.buffer_store(self.buffer, value, [page, side, head, at])
