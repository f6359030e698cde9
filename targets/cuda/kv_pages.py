"""KV pages in CUDA kernels: where a number of K or V lies in a page (compiler/kv_pages.py), read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.fragments import COLUMNS, Parts
from llmc.targets.cuda.kv_codes import Q4Pages, Q8Pages
from llmc.targets.cuda.kv_kind import Number, Pages, Token
from llmc.targets.cuda.launch import bf16_bits, from_bf16, local, strided, u32

Place = Callable[[Any, Any, int], Any]  # token of the page, element, head size -> where it is, of one kv head


def _same(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class PlainPages(Pages):
    """Pages of numbers, which go through `load` and `store` on their way."""

    dtype: str
    key: Place
    value: Place
    load: Callable[[Any], Any] = _same
    store: Callable[[Any], Any] = _same

    def query(self, x: Any) -> Any:
        return self.load(self.store(x))

    def keys(self, at: Token) -> Callable[[Any], list[Any]]:
        return lambda d: [self.load(at.kv[at.page, 0, at.head, self.key(at.place, d, at.size)])]

    def values(self, at: Token) -> Callable[[Any], Any]:
        return lambda d: self.load(at.kv[at.page, 1, at.head, self.value(at.place, d, at.size)])

    def write(self, at: Token, key: Number, value: Number, thread: Any, threads: int) -> None:
        def one(d: Any) -> None:
            for side, where, number in ((0, self.key, key), (1, self.value, value)):
                T.buffer_store(at.kv, self.store(number(d)), [at.page, side, at.head, where(at.place, d, at.size)])

        strided(at.size, thread, threads, one)
        if self._fills(at):
            with T.If(thread == 0), T.Then():
                self._fill(at)

    def write_keys(self, at: Token, number: Callable[[Any, Any], Any], thread: Any, threads: int) -> None:
        def one(i: Any) -> None:
            d, token = T.floordiv(i, PAGE), T.floormod(i, PAGE)
            T.buffer_store(at.kv, self.store(number(token, d)), [at.page, 0, at.head, self.key(token, d, at.size)])

        strided(at.size * PAGE, thread, threads, one)
        if self._fills(at):
            with T.If(thread < PAGE), T.Then():
                self._fill(at.of(thread))

    def beyond_keys(self, size: int) -> tuple[int, int]:
        return 1, 0

    @staticmethod
    def _fills(at: Token) -> bool:
        """Whether K has room for one element more: those of an odd size lie in pairs."""
        return int(at.kv.shape[3]) > at.size * PAGE

    def _fill(self, at: Token) -> None:
        T.buffer_store(at.kv, tirx.const(0, self.dtype), [at.page, 0, at.head, self.key(at.place, at.size, at.size)])


class Bf16Pages(PlainPages):
    """Numbers that are operands of tensor cores as they lie: elements of K in pairs, V of two tokens."""

    parts = 1
    operands = True

    def key_words(self, at: Token, quad: Any) -> list[Parts]:
        words = local((4,), "uint32")
        for i in range(2):
            pair, inside = quad * 2 + i, 4 * quad + 2 * i < at.size

            def load(i: int = i, pair: Any = pair) -> None:
                T.buffer_store(words, _words(at, 0, (pair * PAGE + at.place) * 2, 2), [T.ramp(2 * i, 1, 2)])

            if 0 < at.size % COLUMNS <= 2 * i:
                with T.If(inside):
                    with T.Then():
                        load()
                    with T.Else():
                        T.buffer_store(words, T.broadcast(u32(0), 2), [T.ramp(2 * i, 1, 2)])
            else:
                load()
        return [[[words[slot], words[2 + slot]]] for slot in range(2)]

    def value_words(self, at: Token, first: Any, count: int) -> list[list[Any]]:
        words = local((count,), "uint32")
        found = _words(at, 1, (T.floordiv(at.place, 2) * at.size + first) * 2, count)
        T.buffer_store(words, found, [T.ramp(0, 1, count) if count > 1 else 0])
        return [[words[i]] for i in range(count)]


def _words(at: Token, side: int, first: Any, count: int) -> Any:
    """So many pairs of neighbouring bfloat16 of K or of V, in one load."""
    pairs = at.kv[at.page, side, at.head, T.ramp(first, 1, 2 * count)]
    return T.reinterpret("uint32" if count == 1 else f"uint32x{count}", pairs)


KINDS: dict[str, Pages] = {
    "f32": PlainPages("float32", lambda token, d, size: d * PAGE + token, lambda token, d, size: token * size + d),
    "bf16": Bf16Pages(
        "uint16",
        lambda token, d, size: (T.floordiv(d, 2) * PAGE + token) * 2 + T.floormod(d, 2),
        lambda token, d, size: (T.floordiv(token, 2) * size + d) * 2 + T.floormod(token, 2),
        from_bf16,
        bf16_bits,
    ),
    "q8": Q8Pages(),
    "q4": Q4Pages(),
}
