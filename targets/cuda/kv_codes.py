"""KV pages of 8 and 4 bits in CUDA kernels: codes and their scales, the bytes of compiler/kv_pages.py.

The bytes are those of the NumPy meaning, bit for bit: a product is clamped before anything is added to it, or passes
through memory, so that no compiler can fuse the two. Letters: D head size, W = D rounded up to 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import ceil_to
from llmc.compiler.kv_pages import GROUP, PAGE, SMALLEST_SCALE, TABLE, q4_key_bytes, q8_key_bytes
from llmc.targets.cuda.fragments import COLUMNS, Parts, parted
from llmc.targets.cuda.kv_kind import Number, Pages, Token, slot_words
from llmc.targets.cuda.launch import (
    barrier,
    bf16_bits,
    block_reduce,
    f32,
    from_bf16,
    greater,
    held,
    i32,
    local,
    shared,
    strided,
)  # fmt: skip
from llmc.targets.cuda.rotation import rotate


class _Bytes:
    """The bytes of K or of V of a kv head in a page; `start` is where they begin."""

    def __init__(self, at: Token, start: int) -> None:
        self.at, self.start = at, start

    def __getitem__(self, place: Any) -> Any:
        """As int32."""
        return T.cast(self.at.kv[self.at.page, 0, self.at.head, self.start + place], "int32")

    def put(self, place: Any, value: Any) -> None:
        T.buffer_store(self.at.kv, T.cast(value, "uint8"), [self.at.page, 0, self.at.head, self.start + place])

    def several(self, place: Any, count: int) -> list[Any]:
        """Neighbouring ones in one load: 1, 2 or 4 from a multiple of so many on."""
        if count == 1:
            return [self[place]]
        found = self.at.kv[self.at.page, 0, self.at.head, T.ramp(self.start + place, 1, count)]
        word = local((1,), "int32")
        T.buffer_store(word, T.cast(T.reinterpret(f"uint{8 * count}", found), "int32"), [0])
        return [(word[0] >> i32(8 * i)) & i32(0xFF) for i in range(count)]

    def table(self, number: Any) -> Any:
        """The token's number in a table, as float32."""
        first = number * TABLE + 2 * self.at.place
        return from_bf16(T.cast(self[first] | (self[first + 1] << i32(8)), "uint32"))

    def put_table(self, number: Any, bits: Any) -> None:
        """The token's number, as bits of a bfloat16."""
        for byte in range(2):
            self.put(number * TABLE + 2 * self.at.place + byte, (bits >> i32(8 * byte)) & i32(0xFF))


def _scale(span: Any, factor: float) -> tuple[Any, Any]:
    """(bits of span * factor as bfloat16 in int32, the inverse of what they mean, or 0 where it has none)."""
    bits = local((1,), "int32")
    T.buffer_store(bits, T.cast(bf16_bits(held(span * f32(factor))), "int32"), [0])
    scale = held(from_bf16(T.cast(bits[0], "uint32")))
    return bits[0], held(T.Select(scale >= f32(SMALLEST_SCALE), f32(1) / scale, f32(0)))


def _code(value: Any, low: float, high: float, more: float = 0) -> Any:
    """The nearest whole number, ties to even, of a value within bounds, to which `more` is added first."""
    bounded = T.min(T.max(value, f32(low)), f32(high))
    return T.cast(T.nearbyint(bounded + f32(more) if more else bounded), "int32")


def _greatest(number: Number, size: int, thread: Any, threads: int) -> Any:
    """The greatest absolute number of all, in a register of every thread."""
    top = local((1,))
    T.buffer_store(top, f32(0), [0])
    strided(size, thread, threads, lambda d: T.buffer_store(top, T.max(top[0], T.fabs(number(d))), [0]))
    block_reduce(top, 0, thread, threads, greater)
    return top[0]


class _Writer:
    """Writes tokens of a page, one after another, by all threads of a block."""

    def __init__(self, size: int, thread: Any, threads: int) -> None:
        self.size, self.thread, self.threads, self.width = size, thread, threads, ceil_to(size, PAGE)

    def each(self, count: int, body: Callable[[Any], None]) -> None:
        strided(count, self.thread, self.threads, body)

    def once(self, body: Callable[[], None]) -> None:
        with T.If(self.thread == 0), T.Then():
            body()

    def key(self, at: Token, number: Number) -> None:
        """K of a token; a barrier follows the last use of shared memory."""
        raise NotImplementedError

    def value(self, at: Token, number: Number) -> None:
        """V of a token."""
        raise NotImplementedError


class _CodePages(Pages):
    """What both kinds share."""

    dtype = "uint8"
    writer: type[_Writer]

    def write(self, at: Token, key: Number, value: Number, thread: Any, threads: int) -> None:
        writer = self.writer(at.size, thread, threads)
        writer.key(at, key)
        writer.value(at, value)

    def write_keys(self, at: Token, number: Callable[[Any, Any], Any], thread: Any, threads: int) -> None:
        writer = self.writer(at.size, thread, threads)
        with T.serial(0, PAGE) as place:
            writer.key(at.of(place), lambda d: number(place, d))


class _Q8Writer(_Writer):
    def key(self, at: Token, number: Number) -> None:
        codes = _Bytes(at, 0)
        inverse = self._scale(codes, number)

        def one(d: Any) -> None:
            codes.put(TABLE + d * PAGE + at.place, _code(number(d) * inverse, -127, 127) & i32(0xFF))

        self.each(self.size, one)
        barrier()  # before another token is looked through

    def value(self, at: Token, number: Number) -> None:
        codes = _Bytes(at, q8_key_bytes(self.size))
        inverse = self._scale(codes, number)

        def one(d: Any) -> None:
            own = number(d) if self.width == self.size else T.if_then_else(d < self.size, number(d), f32(0))
            codes.put(TABLE + at.place * self.width + d, _code(own * inverse, -127, 127) & i32(0xFF))

        self.each(self.width, one)

    def _scale(self, codes: _Bytes, number: Number) -> Any:
        bits, inverse = _scale(_greatest(number, self.size, self.thread, self.threads), 1 / 127)
        self.once(lambda: codes.put_table(0, bits))
        return inverse


class Q8Pages(_CodePages):
    """int8 codes, one scale a token: K (D, 16), V (16, W)."""

    writer = _Q8Writer

    def keys(self, at: Token) -> Callable[[Any], list[Any]]:
        codes = _Bytes(at, 0)
        scale = held(codes.table(0))
        return lambda d: [self._number(codes[TABLE + d * PAGE + at.place]) * scale]

    def values(self, at: Token) -> Callable[[Any], Any]:
        codes, width = _Bytes(at, q8_key_bytes(at.size)), ceil_to(at.size, PAGE)
        scale = held(codes.table(0))
        return lambda d: self._number(codes[TABLE + at.place * width + d]) * scale

    def key_words(self, at: Token, quad: Any) -> list[Parts]:
        codes, both, size = _Bytes(at, 0), [at.of(at.place + i) for i in range(2)], at.size
        scales = [held(_Bytes(one, 0).table(0)) for one in both]
        numbers: list[list[Any]] = [[], []]
        for e in range(COLUMNS):
            d = quad * COLUMNS + e  # one beyond the last is not K's: the last one in its place, and then a zero
            there = d if size % COLUMNS == 0 else T.min(d, size - 1)
            for slot, byte in enumerate(codes.several(TABLE + there * PAGE + at.place, 2)):
                number = self._number(byte) * scales[slot]
                numbers[slot].append(number if size % COLUMNS == 0 else T.Select(d < size, number, f32(0)))
        return [parted(each, self.parts) for each in numbers]

    def value_words(self, at: Token, first: Any, count: int) -> list[list[Any]]:
        start, width = q8_key_bytes(at.size), ceil_to(at.size, PAGE)
        numbers = []
        for own in (at.of(at.place + i) for i in range(2)):
            codes = _Bytes(own, start)
            scale = held(codes.table(0))
            found = codes.several(TABLE + own.place * width + first, count)
            numbers.append([self._number(byte) * scale for byte in found])
        return slot_words(numbers, self.parts)

    def beyond_keys(self, size: int) -> tuple[int, int]:
        return 0, TABLE + PAGE * size

    @staticmethod
    def _number(byte: Any) -> Any:
        """The int8 of a byte, as float32."""
        return T.cast((byte ^ i32(0x80)) - i32(0x80), "float32")


class _Q4Writer(_Writer):
    def __init__(self, size: int, thread: Any, threads: int) -> None:
        super().__init__(size, thread, threads)
        self.groups = -(-size // GROUP)
        self.x, self.low, self.inverse = shared((size,)), shared((self.groups,)), shared((self.groups,))

    def _load(self, number: Number) -> None:
        self.each(self.size, lambda d: T.buffer_store(self.x, number(d), [d]))
        rotate(self.x, self.size, self.size, self.thread, self.threads)

    def key(self, at: Token, number: Number) -> None:
        self._load(number)
        codes = _Bytes(at, 0)
        bits, inverse = _scale(_greatest(lambda d: self.x[d], self.size, self.thread, self.threads), 1 / 31.5)
        self.once(lambda: codes.put_table(0, bits))

        def six(d: Any) -> Any:
            own = self.x[d] if self.width == self.size else T.if_then_else(d < self.size, self.x[d], f32(0))
            code = local((1,), "int32")
            T.buffer_store(code, _code(own * inverse, -31.5, 31.5, 31.5), [0])
            return code[0]

        def one(unit: Any) -> None:
            four = [six(unit * 4 + e) for e in range(4)]
            first = TABLE + unit * 3 * PAGE + at.place
            for j in range(2):
                low, high = (code & i32(15) for code in four[2 * j : 2 * j + 2])
                codes.put(first + j * PAGE, low | (high << i32(4)))
            top = i32(0)
            for e, code in enumerate(four):
                top = top | ((code >> i32(4)) << i32(2 * e))
            codes.put(first + 2 * PAGE, top)

        self.each(self.width // 4, one)
        barrier()  # before x is another's

    def value(self, at: Token, number: Number) -> None:
        self._load(number)
        codes = _Bytes(at, q4_key_bytes(self.size))
        self.each(self.groups, lambda group: self._group(codes, group))
        barrier()

        def code(group: Any, d: Any) -> Any:
            own = self.x[T.min(d, self.size - 1)]  # repeating the last element changes no minimum
            return _code((own - self.low[group]) * self.inverse[group], 0, 15)

        def one(i: Any) -> None:
            group, inside = T.floordiv(i, PAGE), T.floormod(i, PAGE)
            first = group * GROUP + inside
            both = code(group, first) | (code(group, first + _half(group, self.size)) << i32(4))
            codes.put(2 * self.groups * TABLE + at.place * (self.width // 2) + i, both)

        self.each(self.width // 2, one)

    def _group(self, codes: _Bytes, group: Any) -> None:
        """Scale and minimum of a group, by one thread."""
        least, most = local((1,)), local((1,))
        for one in (least, most):
            T.buffer_store(one, self.x[group * GROUP], [0])
        with T.serial(1, GROUP) as d, T.If(group * GROUP + d < self.size), T.Then():
            T.buffer_store(least, T.min(least[0], self.x[group * GROUP + d]), [0])
            T.buffer_store(most, T.max(most[0], self.x[group * GROUP + d]), [0])
        minimum = local((1,), "int32")
        T.buffer_store(minimum, T.cast(bf16_bits(least[0]), "int32"), [0])
        low = held(from_bf16(T.cast(minimum[0], "uint32")))
        bits, inverse = _scale(held(most[0] - low), 1 / 15)
        codes.put_table(group, bits)
        codes.put_table(self.groups + group, minimum[0])
        T.buffer_store(self.low, low, [group])
        T.buffer_store(self.inverse, inverse, [group])


class Q4Pages(_CodePages):
    """Rotated K in six-bit codes (W/4, 3, 16), a scale a token; rotated V in four, scale and minimum a group."""

    unit = 4
    rotated = True
    writer = _Q4Writer

    def keys(self, at: Token) -> Callable[[Any], list[Any]]:
        codes = _Bytes(at, 0)
        scale = held(codes.table(0))

        def read(unit: Any) -> list[Any]:
            rows = local((3,), "int32")
            for j in range(3):
                T.buffer_store(rows, codes[TABLE + (unit * 3 + j) * PAGE + at.place], [j])
            numbers = []
            for e in range(4):
                low = (rows[e // 2] >> i32(4 * (e % 2))) & i32(15)
                code = low | (((rows[2] >> i32(2 * e)) & i32(3)) << i32(4))
                numbers.append((T.cast(code, "float32") - f32(31.5)) * scale)
            return numbers

        return read

    def values(self, at: Token) -> Callable[[Any], Any]:
        groups, width = -(-at.size // GROUP), ceil_to(at.size, PAGE)
        codes = _Bytes(at, q4_key_bytes(at.size))

        def read(d: Any) -> Any:
            group, inside = T.floordiv(d, GROUP), T.floormod(d, GROUP)
            half = _half(group, at.size)
            byte = codes[2 * groups * TABLE + at.place * (width // 2) + group * PAGE + T.floormod(inside, half)]
            code = T.Select(inside >= half, byte >> i32(4), byte & i32(15))
            return T.cast(code, "float32") * codes.table(group) + codes.table(groups + group)

        return read

    def beyond_keys(self, size: int) -> tuple[int, int]:
        return 0, q4_key_bytes(size)


def _half(group: Any, size: int) -> Any:
    """Elements of a group in the low halves of its bytes: 16, of a last group of at most 16 elements 8."""
    rest = size % GROUP
    if not 0 < rest <= PAGE:
        return i32(PAGE)
    return T.Select(group == size // GROUP, i32(PAGE // 2), i32(PAGE))
