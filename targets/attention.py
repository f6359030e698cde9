"""Paged attention: one kernel for prefill, chunks and decode, GQA-aware.

A page of a kv head is 16 tokens: K as (D, 16), so a vector of scores grows one multiply-add a head element, and V as
(16, D). One task is (row, kv head): its query heads share every K and V load. Softmax is computed online, page by page
in order, so a row's result depends on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.meaning import PAGE
from llmc.targets.rows import PARALLEL_ROWS
from llmc.targets.target import Target
from llmc.targets.vector import (
    LANES,
    exp,
    f32,
    fma,
    lanes,
    prefetch,
    reduce_max,
    reduce_sum,
    registers,
    round_bf16,
    splat,
    widen_bf16,
)

HEADS_AT_ONCE = 8  # query heads whose sums share registers; larger groups go in several passes
HIDDEN = -1e30  # the score of a token a row may not see


class _Kv:
    """Reads and writes of one layer's pages (pages, 2, G, 16 D) in either element type."""

    def __init__(self, buffer: Any, kind: str, size: int) -> None:
        self.buffer, self.kind, self.size = buffer, kind, size

    def load(self, page: Any, side: int, head: Any, at: Any) -> Any:
        value = self.buffer[page, side, head, lanes(at)]
        return widen_bf16(value) if self.kind == "bf16" else value

    def load_one(self, page: Any, side: int, head: Any, at: Any) -> Any:
        value = self.buffer[page, side, head, at]
        if self.kind == "f32":
            return value
        return T.reinterpret(T.shift_left(T.cast(value, "uint32"), tirx.const(16, "uint32")), dtype="float32")

    def prefetch(self, page: Any, side: int, head: Any, at: Any) -> None:
        """Ask for an element's cache line: pages lie anywhere, so the hardware cannot guess the next one."""
        _, sides, heads, width = (int(n) if isinstance(n, tirx.IntImm) else 0 for n in self.buffer.shape)
        place = T.cast(page, "int64") * (sides * heads * width) + (side * heads + head) * width + at
        prefetch(self.buffer.access_ptr("r", offset=place))

    def store(self, value: Any, page: Any, side: int, head: Any, at: Any) -> None:
        if self.kind == "bf16":
            value = T.cast(round_bf16(value), "uint16")
        T.buffer_store(self.buffer, value, [page, side, head, at])


def attention(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), kv pages, seqs, slots (M,), page_indptr (S + 1,), page_ids (P,) -> (M, H D)."""
    heads, groups, size = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    kind = str(attrs["kv_dtype"])
    dtypes = ["float32", "uint16" if kind == "bf16" else "float32", *["int32"] * 4, "float32"]
    with IRBuilder() as builder, T.prim_func():
        T.func_attr({"tirx.noalias": True})
        handles = [T.arg(f"a{i}", T.handle()) for i in range(len(dtypes))]
        qkv, pages, seqs, slots, indptr, ids, out = (
            T.match_buffer(h, s, d) for h, s, d in zip(handles, shapes, dtypes, strict=True)
        )
        kv = _Kv(pages, kind, size)
        rows = shapes[0][0]

        def page_of(row: Any, index: Any) -> Any:
            return ids[indptr[seqs[row]] + index]

        def write(row: Any) -> None:
            _write_row(kv, qkv, page_of(row, T.floordiv(slots[row], PAGE)), slots[row], row, heads, groups)

        with T.If(rows < PARALLEL_ROWS):
            with T.Then(), T.serial(0, rows) as row:
                write(row)
            with T.Else(), T.parallel(0, rows) as row:
                write(row)
        with T.parallel(0, rows * groups) as task:
            # Late rows of a prefill see more tokens: pair the first with the last so that threads get equal work.
            turn, group = T.floordiv(task, groups), T.floormod(task, groups)
            row = T.if_then_else(T.floormod(turn, 2) == 0, T.floordiv(turn, 2), rows - 1 - T.floordiv(turn, 2))
            for first in range(0, heads // groups, HEADS_AT_ONCE):
                count = min(HEADS_AT_ONCE, heads // groups - first)
                _attend(
                    kv, qkv, out, partial(page_of, row), slots[row], row,
                    group, group * (heads // groups) + first, count, float(attrs["scale"]),
                )  # fmt: skip
    return builder.get()


def _write_row(kv: _Kv, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
    """K and V of one row into its place in its page."""
    size, place = kv.size, T.floormod(slot, PAGE)
    with T.serial(0, groups) as head, T.serial(0, size) as d:
        key, value = (heads + head) * size + d, (heads + groups + head) * size + d
        kv.store(qkv[row, key], page, 0, head, d * PAGE + place)
        kv.store(qkv[row, value], page, 1, head, place * size + d)


def _attend(
    kv: _Kv, qkv: Any, out: Any, page_at: Callable[[Any], Any], slot: Any, row: Any,
    group: Any, first_head: Any, count: int, scale: float,
) -> None:  # fmt: skip
    """Online softmax attention of `count` query heads of one kv head, over slots 0..slot."""
    size = kv.size
    scores = registers((count * LANES,), "float32")
    sums, top, fade = (registers((count * n,), "float32") for n in (LANES, 1, 1))
    acc = registers((count, size), "float32")
    with T.serial(0, count * size) as i:
        T.buffer_store(acc, f32(0), [T.floordiv(i, size), T.floormod(i, size)])
    for h in range(count):
        T.buffer_store(sums, splat(f32(0)), [lanes(h * LANES)])
        T.buffer_store(top, f32(HIDDEN), [h])
    with T.serial(0, T.floordiv(slot, PAGE) + 1) as index:
        page, following = page_at(index), page_at(T.min(index + 1, T.floordiv(slot, PAGE)))
        _scores(kv, qkv, page, following, row, group, first_head, count, scores)
        seen = T.broadcast(slot - index * PAGE, LANES) >= T.ramp(tirx.const(0, "int32"), 1, LANES)
        for h in range(count):
            _softmax_step(scores, sums, top, fade, h, seen, scale)
        _accumulate(kv, page, group, count, scores, fade, acc)
    for h in range(count):
        T.buffer_store(fade, f32(1) / reduce_sum(sums[lanes(h * LANES)]), [h])
    for h in range(count):
        with T.serial(0, size) as d:
            T.buffer_store(out, acc[h, d] * fade[h], [row, (first_head + h) * size + d])


def _scores(
    kv: _Kv, qkv: Any, page: Any, following: Any, row: Any, group: Any, first_head: Any, count: int, scores: Any
) -> None:
    """scores[h] = q[h] . K for the 16 tokens of a page, while K and V of the following page are fetched."""
    for h in range(count):
        T.buffer_store(scores, splat(f32(0)), [lanes(h * LANES)])
    with T.serial(0, kv.size) as d:
        key = kv.load(page, 0, group, d * PAGE)
        for side in range(2):
            kv.prefetch(following, side, group, d * PAGE)
        for h in range(count):
            q = splat(qkv[row, (first_head + h) * kv.size + d])
            T.buffer_store(scores, fma(q, key, scores[lanes(h * LANES)]), [lanes(h * LANES)])


def _softmax_step(scores: Any, sums: Any, top: Any, fade: Any, h: int, seen: Any, scale: float) -> None:
    """Turn a page's scores into weights against the new greatest score; `fade` rescales what came before."""
    place = lanes(h * LANES)
    scaled = T.Select(seen, scores[place] * splat(f32(scale)), splat(f32(HIDDEN)))
    T.buffer_store(scores, scaled, [place])
    T.buffer_store(fade, top[h], [h])
    T.buffer_store(top, T.max(top[h], reduce_max(scores[place])), [h])
    T.buffer_store(scores, T.Select(seen, exp(scores[place] - splat(top[h])), splat(f32(0))), [place])
    one = registers((LANES,), "float32")
    T.buffer_store(one, exp(splat(fade[h] - top[h])), [lanes(0)])
    T.buffer_store(fade, one[0], [h])
    T.buffer_store(sums, fma(sums[place], splat(fade[h]), scores[place]), [place])


def _accumulate(kv: _Kv, page: Any, group: Any, count: int, weights: Any, fade: Any, acc: Any) -> None:
    """acc[h] = acc[h] * fade[h] + weights[h] . V."""
    whole = kv.size // LANES
    part = registers((count * LANES,), "float32")
    if whole:
        with T.serial(0, whole) as step:
            for h in range(count):
                T.buffer_store(part, acc[h, lanes(step * LANES)] * splat(fade[h]), [lanes(h * LANES)])
            for token in range(PAGE):
                value = kv.load(page, 1, group, token * kv.size + step * LANES)
                for h in range(count):
                    total = fma(splat(weights[h * LANES + token]), value, part[lanes(h * LANES)])
                    T.buffer_store(part, total, [lanes(h * LANES)])
            for h in range(count):
                T.buffer_store(acc, part[lanes(h * LANES)], [h, lanes(step * LANES)])
    if kv.size % LANES:
        with T.serial(0, kv.size % LANES) as rest:
            d = whole * LANES + rest
            for h in range(count):
                T.buffer_store(acc, acc[h, d] * fade[h], [h, d])
                with T.serial(0, PAGE) as token:
                    value = kv.load_one(page, 1, group, token * kv.size + d)
                    T.buffer_store(acc, acc[h, d] + weights[h * LANES + token] * value, [h, d])
