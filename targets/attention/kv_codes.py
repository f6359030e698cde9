"""What reads and writes of KV pages that hold codes have in common (compiler/kv_pages.py, kv_q8.py, kv_q4.py).

Scores are made of codes and scaled once, 16 tokens at a time; a token's scale of V goes into its softmax weight. The
bytes written are those of the NumPy meaning, bit for bit: a product is clamped before anything is added to it, so that
no compiler can fuse the two.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE, SMALLEST_SCALE, TABLE
from llmc.targets.attention.kv_pages import Pages
from llmc.targets.vector import (
    LANES,
    chosen,
    f32,
    greatest,
    i32,
    lanes,
    registers,
    round_bf16,
    splat,
    widen_bf16,
    widened,
)


def within(x: Any, low: float, high: float) -> Any:
    return T.min(T.max(x, splat(f32(low))), splat(f32(high)))


class CodePages(Pages):
    """What q8 and q4 share. Letters: D head size (`size`), W = D rounded up to 16 (`width`)."""

    def __init__(self, size: int, elements: int, key_bytes: int) -> None:
        super().__init__(size, elements)
        self.starts = (0, key_bytes)  # of K and of V

    def at(self, page: Any, side: int, head: Any, at: Any) -> list[Any]:
        """The place of a byte, or of several, of K (side 0) or V (side 1) of a head."""
        return [page, 0, head, self.starts[side] + at]

    def bytes(self, page: Any, side: int, head: Any, at: Any) -> Any:
        """Sixteen bytes."""
        return self.buffer[page, 0, head, lanes(self.starts[side] + at)]

    def table(self, page: Any, side: int, head: Any, number: Any) -> Any:
        """One float32 for each token."""
        raw = self.buffer[page, 0, head, T.ramp(self.starts[side] + number * TABLE, 1, TABLE)]
        return widen_bf16(T.reinterpret(raw, dtype="uint16x16"))

    def put_table(self, bits: Any, page: Any, side: int, head: Any, number: Any, place: Any) -> None:
        for byte in range(2):
            part = T.cast(T.bitwise_and(T.shift_right(bits, i32(8 * byte)), i32(0xFF)), "uint8")
            T.buffer_store(self.buffer, part, self.at(page, side, head, number * TABLE + 2 * place + byte))

    def row(self, x: Any, row: Any, start: Any) -> Any:
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

    def absmax(self, x: Any) -> Any:
        top = registers((LANES,), "float32")
        T.buffer_store(top, splat(f32(0)), [lanes(0)])
        with T.serial(0, self.width // LANES) as step:
            value = x[lanes(step * LANES)]
            T.buffer_store(top, T.max(top[lanes(0)], T.max(value, splat(f32(0)) - value)), [lanes(0)])
        return chosen(greatest(top[lanes(0)]), 0)

    def scale(self, span: Any, factor: float) -> tuple[Any, Any]:
        """Registers with (span * factor as bfloat16 bits, the inverse of what they mean or 0)."""
        bits, pair = registers((1,), "int32"), registers((2,), "float32")
        T.buffer_store(bits, round_bf16(span * f32(factor)), [0])
        T.buffer_store(pair, widened(bits[0]), [0])
        T.buffer_store(pair, T.Select(pair[0] >= f32(SMALLEST_SCALE), f32(1) / pair[0], f32(0)), [1])
        return bits[0], pair[1]

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row into its place in its page."""
        place = T.floormod(slot, PAGE)
        with T.serial(0, groups) as head:
            self.write_key(qkv, row, (heads + head) * self.size, page, head, place)
            self.write_value(qkv, row, (heads + groups + head) * self.size, page, head, place)

    def write_value(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """V of one head, as `write_key`."""
        raise NotImplementedError

    def span_of(self, side: int, head: Any) -> tuple[list[Any], int, int]:
        """What a page has of K (side 0) or V (side 1) of a head: index in the page, elements, bytes of an element."""
        return [0, head, self.starts[side]], (int(self.buffer.shape[3]) - self.starts[1]) if side else self.starts[1], 1

    def products(self, sums: Any, page: Any, head: Any) -> Any:
        """q . K of sixteen tokens, from the sums over all elements."""
        return sums * self.table(page, 0, head, 0)

    def weighted(self, weights: Any, page: Any, head: Any, number: Any) -> Any:
        """Weights of sixteen tokens times a table of V: a place that was never written may hold any number, NaN too."""
        zero = splat(f32(0))
        return T.Select(weights > zero, weights * self.table(page, 1, head, number), zero)
