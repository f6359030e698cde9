"""Paged attention: one kernel for prefill, chunks and decode, GQA-aware.

A page of a kv head is 16 tokens: in K one element of all tokens lies together, so a vector of scores grows one
multiply-add an element, and in V a token's elements do. What a page holds is in kv_plain.py and kv_codes.py. One task
is (row, kv head): its query heads share every K and V load. Softmax is computed online, page by page in order, so a
row's result depends on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import KINDS, PAGE
from llmc.compiler.meaning import bias_slopes
from llmc.targets.elementwise import capped
from llmc.targets.kv_codes import Q4Pages, Q8Pages
from llmc.targets.kv_plain import PlainPages
from llmc.targets.rows import PARALLEL_ROWS
from llmc.targets.target import Target
from llmc.targets.vector import (
    LANES,
    exp,
    f32,
    fma,
    i32,
    lanes,
    reduce_max,
    reduce_sum,
    registers,
    splat,
)

HEADS_AT_ONCE = 8  # query heads whose sums share registers; larger groups go in several passes
HIDDEN = -1e30  # the score of a token a row may not see


class Pages(Protocol):
    """Reads and writes of one layer's pages `buffer` (pages, *page_shape) of one kind."""

    buffer: Any

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row of qkv into its place in its page."""
        ...

    def queries(self, qkv: Any, row: Any, first_head: Any, count: int) -> Any:
        """`count` query heads as `scores` wants them."""
        ...

    def scores(self, queries: Any, page: Any, following: Any, group: Any, count: int, scores: Any) -> None:
        """scores[h] = q[h] . K for the 16 tokens of a page, while K and V of the following page are fetched."""
        ...

    def accumulate(self, page: Any, group: Any, count: int, weights: Any, seen: Any, fade: Any, acc: Any) -> None:
        """acc[h] = acc[h] * fade[h] + weights[h] . V."""
        ...

    def finish(self, acc: Any, count: int) -> None:
        """acc (count, W) after the last page, as the values it sums really are."""
        ...


@dataclass(frozen=True)
class _Scoring:
    """What a row sees and how it scores that: scaled, capped if `soft_cap`, less what `slopes` (H,) of alibi take.

    With a window (not 0), tokens less than so many away; where `causal`, none that follow the row.
    """

    scale: float
    window: int
    causal: bool
    soft_cap: float
    slopes: tuple[float, ...]

    def table(self) -> Any:
        """The slopes where a head's number, not known yet, finds its own; None without alibi."""
        if not self.slopes:
            return None
        padded = [f32(slope) for slope in self.slopes] + [f32(0)] * (-len(self.slopes) % LANES)
        table = registers((len(padded),), "float32")
        for start in range(0, len(padded), LANES):
            sixteen = tirx.Shuffle(padded[start : start + LANES], [i32(lane) for lane in range(LANES)])
            T.buffer_store(table, sixteen, [lanes(start)])
        return table

    def score(self, products: Any, slope: Any, place: Any) -> Any:
        """Of sixteen tokens q.k -> scores; `place` is theirs relative to the row."""
        scores = products * splat(f32(self.scale))
        if self.soft_cap:
            scores = capped(scores, self.soft_cap)
        if slope is None:
            return scores
        place = place if self.causal else T.min(place, splat(i32(0)) - place)
        return fma(splat(slope), T.cast(place, "float32x16"), scores)


def _pages(kind: str, size: int) -> Pages:
    if kind == "q8":
        return Q8Pages(size)
    return Q4Pages(size) if kind == "q4" else PlainPages(kind, size)


def attention(target: Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), kv pages, seqs, slots (M,), page_indptr (S + 1,), page_ids (P,) -> (M, H D)."""
    heads, groups, size = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    kind = str(attrs["kv_dtype"])
    scale, bias = float(attrs["scale"]), str(attrs["bias"])
    slopes = () if bias == "none" else tuple(map(float, bias_slopes(bias, heads, scale)))
    scoring = _Scoring(scale, int(attrs["window"]), bool(attrs["causal"]), float(attrs["soft_cap"]), slopes)
    dtypes = ["float32", str(KINDS[kind].dtype), *["int32"] * 4, "float32"]
    with IRBuilder() as builder, T.prim_func():
        T.func_attr({"tirx.noalias": True})
        handles = [T.arg(f"a{i}", T.handle()) for i in range(len(dtypes))]
        kv = _pages(kind, size)
        qkv, kv.buffer, seqs, slots, indptr, ids, out = (
            T.match_buffer(h, s, d) for h, s, d in zip(handles, shapes, dtypes, strict=True)
        )
        rows = shapes[0][0]

        def page_of(row: Any, index: Any) -> Any:
            return ids[indptr[seqs[row]] + index]

        def write(row: Any) -> None:
            kv.write(qkv, page_of(row, T.floordiv(slots[row], PAGE)), slots[row], row, heads, groups)

        with T.If(rows < PARALLEL_ROWS):
            with T.Then(), T.serial(0, rows) as row:
                write(row)
            with T.Else(), T.parallel(0, rows) as row:
                write(row)
        with T.parallel(0, rows * groups) as task:
            # Late rows of a prefill see more tokens: pair the first with the last so that threads get equal work.
            turn, group = T.floordiv(task, groups), T.floormod(task, groups)
            row = T.if_then_else(T.floormod(turn, 2) == 0, T.floordiv(turn, 2), rows - 1 - T.floordiv(turn, 2))
            end = slots[row] if scoring.causal else _end(seqs, slots, rows, row)
            for first in range(0, heads // groups, HEADS_AT_ONCE):
                count = min(HEADS_AT_ONCE, heads // groups - first)
                _attend(
                    kv, qkv, out, partial(page_of, row), slots[row], end, row,
                    group, group * (heads // groups) + first, count, size, scoring,
                )  # fmt: skip
    return builder.get()


def _end(seqs: Any, slots: Any, rows: Any, row: Any) -> Any:
    """The last slot that the sequence of a row has in this step."""
    end = registers((1,), "int32")
    T.buffer_store(end, slots[row], [0])
    with T.serial(0, rows) as other:
        T.buffer_store(end, T.max(end[0], T.Select(seqs[other] == seqs[row], slots[other], i32(0))), [0])
    return end[0]


def _attend(
    kv: Pages, qkv: Any, out: Any, page_at: Callable[[Any], Any], slot: Any, end: Any, row: Any,
    group: Any, first_head: Any, count: int, size: int, scoring: _Scoring,
) -> None:  # fmt: skip
    """Online softmax attention of `count` query heads of one kv head, of the row at `slot`, over slots up to `end`."""
    window, slopes = scoring.window, scoring.table()
    width = -(-size // LANES) * LANES
    scores = registers((count * LANES,), "float32")
    sums, top, fade = (registers((count * n,), "float32") for n in (LANES, 1, 1))
    acc = registers((count, width), "float32")
    queries = kv.queries(qkv, row, first_head, count)
    with T.serial(0, count * width) as i:
        T.buffer_store(acc, f32(0), [T.floordiv(i, width), T.floormod(i, width)])
    for h in range(count):
        T.buffer_store(sums, splat(f32(0)), [lanes(h * LANES)])
        T.buffer_store(top, f32(HIDDEN), [h])
    if window and not scoring.causal:
        end = T.min(end, slot + (window - 1))
    last = T.floordiv(end, PAGE)
    first = T.floordiv(T.max(slot - (window - 1), 0), PAGE) if window else 0  # whole pages before it are not read
    with T.serial(first, last + 1) as index:
        page, following = page_at(index), page_at(T.min(index + 1, last))
        kv.scores(queries, page, following, group, count, scores)
        token = T.ramp(tirx.const(0, "int32"), 1, LANES)
        seen = token <= splat(end - index * PAGE)
        if window:
            seen = T.bitwise_and(seen, token > splat(slot - index * PAGE - window))
        for h in range(count):
            slope = None if slopes is None else slopes[first_head + h]
            place = token + splat(index * PAGE - slot)
            T.buffer_store(scores, scoring.score(scores[lanes(h * LANES)], slope, place), [lanes(h * LANES)])
            _softmax_step(scores, sums, top, fade, h, seen)
        kv.accumulate(page, group, count, scores, seen, fade, acc)
    kv.finish(acc, count)
    for h in range(count):
        T.buffer_store(fade, f32(1) / reduce_sum(sums[lanes(h * LANES)]), [h])
    for h in range(count):
        with T.serial(0, size) as d:
            T.buffer_store(out, acc[h, d] * fade[h], [row, (first_head + h) * size + d])


def _softmax_step(scores: Any, sums: Any, top: Any, fade: Any, h: int, seen: Any) -> None:
    """Turn a page's scores into weights against the new greatest score; `fade` rescales what came before."""
    place = lanes(h * LANES)
    T.buffer_store(scores, T.Select(seen, scores[place], splat(f32(HIDDEN))), [place])
    T.buffer_store(fade, top[h], [h])
    T.buffer_store(top, T.max(top[h], reduce_max(scores[place])), [h])
    T.buffer_store(scores, T.Select(seen, exp(scores[place] - splat(top[h])), splat(f32(0))), [place])
    one = registers((LANES,), "float32")
    T.buffer_store(one, exp(splat(fade[h] - top[h])), [lanes(0)])
    T.buffer_store(fade, one[0], [h])
    T.buffer_store(sums, fma(sums[place], splat(fade[h]), scores[place]), [place])
