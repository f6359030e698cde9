"""What every kind of KV pages can do inside kernels; kv_plain.py, kv_q8.py and kv_q4.py say how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.vector import LANES, exp, f32, fma, lanes, prefetch, splat

LINE = 64  # bytes of a cache line


class Pages:
    """Reads and writes of one layer's pages `buffer` (pages, *page_shape) of one kind.

    D is the head size (`size`), W that rounded up to 16 (`width`). Of K, `elements` are read, `unit` at once, a
    divisor and no more than `most`. Of what attention makes from the numbers read, a kind says what differs from plain
    sums of products.
    """

    functions: tuple[str, ...] = ()  # LLVM's text of what `multiply` calls
    at_once = 1  # tokens whose values are mixed in one step
    tiles = False  # whether products are made by tile registers (tile_products.py)
    fetches = 0  # in how many steps of mixing what is fetched meanwhile is asked for; 0: before the first
    exp = staticmethod(exp)  # of scores: as near as what weights are rounded to can tell

    def __init__(self, size: int, elements: int, most: int = 4) -> None:
        self.size, self.width, self.elements = size, -(-size // LANES) * LANES, elements
        self.unit = next(n for n in (4, 2, 1) if n <= most and elements % n == 0)
        self.buffer: Any = None

    def write(self, qkv: Any, page: Any, slot: Any, row: Any, heads: int, groups: int) -> None:
        """K and V of one row of qkv into its place in its page."""
        raise NotImplementedError

    def write_key(self, x: Any, row: Any, start: Any, page: Any, head: Any, place: Any) -> None:
        """K of one head, the columns of a row of x from `start` on, into its place in a page."""
        raise NotImplementedError

    def keys(self, page: Any, head: Any) -> Any:
        """K (D * 16,) of one head of a page: of each element, sixteen tokens."""
        raise NotImplementedError

    @property
    def page_elements(self) -> int:
        """Elements of a page: K and V of all heads."""
        _, sides, heads, width = self.buffer.shape
        return int(sides) * int(heads) * int(width)

    def span_of(self, side: int, head: Any) -> tuple[list[Any], int, int]:
        """What a page has of K (side 0) or V (side 1) of a head: index in the page, elements, bytes of an element."""
        raise NotImplementedError

    def fetch(self, page: Any, side: int, head: Any, part: Any, parts: int, far: bool) -> None:
        """Ask for the part-th of `parts` of what a page has of K or V of a head, `far` into the second-level cache.

        Pages lie anywhere, so the hardware cannot guess the next one.
        """
        (at, own_head, start), count, size = self.span_of(side, head)
        heads, width = (int(n) for n in self.buffer.shape[2:])
        begin = T.cast(page, "int64") * self.page_elements + (at * heads + own_head) * width + start
        lines = -(-count * size // LINE)
        each = -(-lines // parts)
        for line in range(each):
            place = begin + T.min(part * each + line, lines - 1) * (LINE // size)
            prefetch(self.buffer.access_ptr("r", offset=place), far)

    def prepare(self, vectors: int) -> None:
        """Registers for what is known of so many queries."""

    def query(self, x: Any, row: Any, start: Any, queries: Any, vector: Any) -> None:
        """A head of x, from column `start` on, into queries[vector * W :] as it is multiplied with `key_unit`."""
        with T.serial(0, self.size) as d:
            T.buffer_store(queries, x[row, start + d], [vector * self.width + d])

    def first_sum(self, vector: Any) -> Any:
        """Sixteen lanes that the products of a query are added to."""
        return splat(f32(0))

    def key_unit(self, page: Any, head: Any, unit: Any) -> Iterator[Any]:
        """The unit-th `unit` elements of K, each a float32x16 of sixteen tokens, emitted as they are asked for."""
        raise NotImplementedError

    def multiply(self, x: Any, y: Any, total: Any) -> Any:
        """total plus x, of a query or of weights, times what K or V has."""
        return fma(splat(x), y, total)

    def products(self, sums: Any, page: Any, head: Any) -> Any:
        """The sums over all elements of K -> q . K of sixteen tokens."""
        return sums

    def rounded(self, weights: Any) -> Any:
        """Softmax weights of sixteen tokens as their sum and their products take them."""
        return weights

    def put_weights(self, weights: Any, page: Any, head: Any, scores: Any, place: Any) -> None:
        """Softmax weights of sixteen tokens into scores[place :], as `mixed` names them."""
        T.buffer_store(scores, self.weights(weights, page, head), [lanes(place)])

    def weights(self, weights: Any, page: Any, head: Any) -> Any:
        """Softmax weights of sixteen tokens, as `values` are multiplied with them; where they are 0, 0."""
        return weights

    def spans(self, most: int) -> Iterator[tuple[int, int, int]]:
        """(first register, how many spans, registers in one, best at most `most`): what of values is summed at once."""
        registers = self.width // LANES
        count = next(n for n in range(min(most, registers), 0, -1) if registers % n == 0)
        yield 0, registers // count, count

    def column(self, register: Any) -> Any:
        """The first column of a register of a value."""
        return register * LANES

    def begin_span(self, vectors: int) -> None:
        """Before the first page whose values are summed."""

    def span_weights(self, weights: list[Any], page: Any, head: Any, register: Any) -> Any:
        """Weights (vectors * 16,) to use for values of a page from `register` on; None: those given."""
        return None

    def end_span(self, vector: int, total: Any) -> Any:
        """The sum of a vector's products in a register of a value -> the sum of weighted values."""
        return total

    def mixed(
        self, page: Any, head: Any, step: Any, register: Any, count: int, tokens: Any
    ) -> Iterator[tuple[Any, list[Any]]]:
        """(index of a weight, `count` registers of values that it is multiplied with), of one step.

        Emitted as they are asked for; `tokens`: how many of the page were written, None: all.
        """
        yield step, self.values(page, head, step, register, count)

    def values(self, page: Any, head: Any, token: Any, register: Any, count: int) -> list[Any]:
        """`count` registers of a token's value."""
        raise NotImplementedError

    def finish(self, x: Any) -> None:
        """x (W,), the mix of values, as the values really are."""
