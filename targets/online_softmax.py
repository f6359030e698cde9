"""Online softmax over the pages of one sequence, for some query heads of one row: the middle of every attention.

A page of a kv head is 16 tokens: in K one element of all tokens lies together, so a vector of scores grows one
multiply-add an element, and in V a token's elements do. What a page holds is in kv_plain.py, kv_q8.py and kv_q4.py.
Pages are read in order, so a row's result depends on nothing but what it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.elementwise import capped
from llmc.targets.kv_plain import PlainPages
from llmc.targets.kv_q4 import Q4Pages
from llmc.targets.kv_q8 import Q8Pages
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

    def write_key(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """K of one head, the columns of a row of x from `start` on, into its place in a page."""
        ...

    def keys(self, page: Any, head: Any) -> Any:
        """K (D * 16,) of one head of a page: of each element, sixteen tokens."""
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


def listed_page(seqs: Any, indptr: Any, ids: Any, row: Any, index: Any) -> Any:
    """The index-th page of a row's sequence, whose pages are ids[indptr[s]:indptr[s + 1]]."""
    return ids[indptr[seqs[row]] + index]


def pages_of(kind: str, size: int) -> Pages:
    """What reads and writes pages of a kind, of heads of this size."""
    if kind == "q8":
        return Q8Pages(size)
    return Q4Pages(size) if kind == "q4" else PlainPages(kind, size)


@dataclass(frozen=True)
class Scoring:
    """What a row sees and how it scores that: scaled, capped if `soft_cap`, less what `slopes` (H,) of alibi take.

    With a window (not 0), tokens less than so many away; where `causal`, none that follow the row. `biases` is a buffer
    (H, 2W + 1) of what is added for each distance -W..W, `sinks` one (H,) of the scores of a token without a value.
    """

    scale: float
    window: int = 0
    causal: bool = True
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    biases: Any = None
    sinks: Any = None

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

    def score(self, products: Any, head: Any, slopes: Any, place: Any) -> Any:
        """q.k of sixteen tokens -> their scores; `place` is the first one's relative to the row."""
        scores = products * splat(f32(self.scale))
        if self.soft_cap:
            scores = capped(scores, self.soft_cap)
        if self.biases is not None:
            scores = scores + self._bias(head, place)
        if slopes is None:
            return scores
        places = T.ramp(place, 1, LANES)
        places = places if self.causal else T.min(places, splat(i32(0)) - places)
        return fma(splat(slopes[head]), T.cast(places, "float32x16"), scores)

    def _bias(self, head: Any, place: Any) -> Any:
        """What is added to the scores of sixteen tokens from `place` on."""
        most = int(self.biases.shape[1]) // 2
        found = registers((LANES,), "float32")
        with T.serial(0, LANES) as lane:
            T.buffer_store(found, self.biases[head, T.max(T.min(place + lane, most), -most) + most], [lane])
        return found[lanes(0)]


@dataclass(frozen=True)
class Sight:
    """What a row at `slot` sees: `page_at(index)` are pages of a sequence, up to slot `end`.

    `hole` has the first slot that it does not see for all that, and the one after the last; None if there is none.
    """

    page_at: Callable[[Any], Any]
    slot: Any
    end: Any
    hole: tuple[Any, Any] | None = None

    def shows(self, index: Any, token: Any) -> Any:
        """Whether the tokens of a page, whose places are `token`, are outside the hole, where there is one."""
        assert self.hole is not None
        first, after = (slot - index * PAGE for slot in self.hole)
        return T.bitwise_or(token < splat(first), token >= splat(after))

    def place(self, index: Any) -> Any:
        """How far after the row the first token of a page is; a hole before the row takes its slots off that."""
        place = index * PAGE - self.slot
        if self.hole is None:
            return place
        first, after = self.hole
        return place + T.Select(index * PAGE < first, after - first, i32(0))

    def pages(self, first: Any, last: Any) -> tuple[Any, Callable[[Any], Any]]:
        """How many of the pages first..last have a token outside the hole, and the index of the i-th of them."""
        if self.hole is None:
            return last + 1 - first, lambda i: first + i
        start = T.min(T.max(T.floordiv(self.hole[0] + (PAGE - 1), PAGE), first), last + 1)
        left_out = T.max(T.min(T.floordiv(self.hole[1], PAGE), last + 1) - start, 0)
        bounds = registers((2,), "int32")
        T.buffer_store(bounds, start - first, [0])
        T.buffer_store(bounds, left_out, [1])
        return last + 1 - first - bounds[1], lambda i: first + i + T.Select(i < bounds[0], i32(0), bounds[1])


def parts_of(heads: int) -> int:
    """In how many parts the query heads that share a kv head may go to different threads."""
    return heads // HEADS_AT_ONCE if heads % HEADS_AT_ONCE == 0 else 1


def attend(
    kv: Pages, q: Any, out: Any, row: Any, group: Any, heads: int, size: int, sight: Sight, scoring: Scoring,
    part: Any = 0, parts: int = 1,
) -> None:  # fmt: skip
    """The `heads` query heads (of this size) of a row that share a kv head, or one of `parts` of them: q (M, ...) ->
    out (M, H D).
    """
    own = heads // parts
    for first in range(0, own, HEADS_AT_ONCE):
        some = min(HEADS_AT_ONCE, own - first)
        _attend(kv, q, out, row, group, group * heads + part * own + first, some, size, sight, scoring)


def _attend(
    kv: Pages, q: Any, out: Any, row: Any, group: Any, first_head: Any, count: int, size: int,
    sight: Sight, scoring: Scoring,
) -> None:  # fmt: skip
    """`count` query heads of one kv head."""
    window, slot, end, slopes = scoring.window, sight.slot, sight.end, scoring.table()
    scores = registers((count * LANES,), "float32")
    sums, top, fade = (registers((count * n,), "float32") for n in (LANES, 1, 1))
    acc = registers((count, -(-size // LANES) * LANES), "float32")
    queries = kv.queries(q, row, first_head, count)
    _start(acc, sums, top, count, first_head, scoring.sinks)
    if window and not scoring.causal:
        end = T.min(end, slot + (window - 1))
    last = T.floordiv(end, PAGE)
    first = T.floordiv(T.max(slot - (window - 1), 0), PAGE) if window else 0  # whole pages before it are not read
    many, index_of = sight.pages(first, last)
    with T.serial(0, many) as number:
        places = registers((3,), "int32")  # looked up once a page, not at every load
        T.buffer_store(places, index_of(number), [0])
        index = places[0]
        T.buffer_store(places, sight.page_at(index), [1])
        T.buffer_store(places, sight.page_at(index_of(T.min(number + 1, many - 1))), [2])
        page, following = places[1], places[2]
        kv.scores(queries, page, following, group, count, scores)
        token = T.ramp(tirx.const(0, "int32"), 1, LANES)
        seen = token <= splat(end - index * PAGE)
        if window:
            seen = T.bitwise_and(seen, token > splat(slot - index * PAGE - window))
        if sight.hole is not None:
            seen = T.bitwise_and(seen, sight.shows(index, token))
        for h in range(count):
            score = scoring.score(scores[lanes(h * LANES)], first_head + h, slopes, sight.place(index))
            T.buffer_store(scores, score, [lanes(h * LANES)])
            _softmax_step(scores, sums, top, fade, h, seen)
        kv.accumulate(page, group, count, scores, seen, fade, acc)
    kv.finish(acc, count)
    for h in range(count):
        T.buffer_store(fade, f32(1) / reduce_sum(sums[lanes(h * LANES)]), [h])
    for h in range(count):
        with T.serial(0, size) as d:
            T.buffer_store(out, acc[h, d] * fade[h], [row, (first_head + h) * size + d])


def _start(acc: Any, sums: Any, top: Any, count: int, first_head: Any, sinks: Any) -> None:
    """Nothing summed yet; a sink is a token that was seen before all others."""
    width = int(acc.shape[1])
    with T.serial(0, count * width) as i:
        T.buffer_store(acc, f32(0), [T.floordiv(i, width), T.floormod(i, width)])
    for h in range(count):
        T.buffer_store(sums, splat(f32(0)), [lanes(h * LANES)])
        T.buffer_store(top, f32(HIDDEN) if sinks is None else sinks[first_head + h], [h])
        if sinks is not None:
            T.buffer_store(sums, f32(1), [h * LANES])


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
