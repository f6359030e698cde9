"""Operands of tensor cores: four columns of a row as words of bfloat16 pairs, in one part or in two.

A float32 number is the sum of two bfloat16 numbers up to 2^-18 of itself: the nearest one, and the nearest one to what
is left. Of a product of two floats, all products of their parts but that of the two small ones are it up to 3 * 2^-18.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import f32, from_bf16, held, local, u32
from llmc.targets.cuda.prelude import bf16_pair, bytes_of
from llmc.targets.vector import i32

COLUMNS = 4  # of a row, in the two words that a lane has of them
Parts = list[list[Any]]  # of each part, large one first: two words, of two columns each
# x, row, first of 32 columns, the lane's quarter, whether its words are of columns four apart (operands.py), whether
# all columns that are asked for are x's -> for each of two products, the lane's four columns of the row, or zeros
Read = Callable[[Any, Any, Any, Any, bool, bool], list[Parts]]


def products(weight_parts: int, x_parts: int) -> list[tuple[int, int]]:
    """Which part of a weight meets which part of x, the greatest product last."""
    return [(i, j) for i, j in ((0, 1), (1, 0), (0, 0)) if i < weight_parts and j < x_parts]


def parted(numbers: list[Any], parts: int) -> Parts:
    """Four float32 -> their parts."""
    held, words = local((COLUMNS,)), local((2 * parts,), "uint32")
    for i, number in enumerate(numbers):
        T.buffer_store(held, number, [i])
    for part in range(parts):
        for i in range(2):
            if part:
                whole = words[2 * part - 2 + i]
                T.buffer_store(held, held[2 * i] - low(whole), [2 * i])
                T.buffer_store(held, held[2 * i + 1] - high(whole), [2 * i + 1])
            T.buffer_store(words, bf16_pair(held[2 * i], held[2 * i + 1]), [2 * part + i])
    return [[words[2 * part], words[2 * part + 1]] for part in range(parts)]


def low(pair: Any) -> Any:
    """The first number of a pair of bfloat16, as float32."""
    return from_bf16(pair & u32(0xFFFF))


def high(pair: Any) -> Any:
    """The second one."""
    return T.reinterpret("float32", pair & u32(0xFFFF0000))


def floats(columns: int) -> Read:
    """Of x (M, columns) float32, in two parts."""

    def four(x: Any, row: Any, first: Any, whole: bool) -> list[Any]:
        if columns % COLUMNS:
            each = [T.if_then_else(c < columns, x[row, c], f32(0)) for c in (first + i for i in range(COLUMNS))]
            return [held(number) for number in each]
        held_four = _vector(x, row, first, COLUMNS, "float32", f32(0), None if whole else first < columns)
        return [held_four[i] for i in range(COLUMNS)]

    def read(x: Any, row: Any, first: Any, quarter: Any, pair: bool, whole: bool) -> list[Parts]:
        if not pair:
            return [parted(four(x, row, first + 16 * step + COLUMNS * quarter, whole), 2) for step in range(2)]
        low, high = (four(x, row, first + 2 * COLUMNS * quarter + at, whole) for at in (0, COLUMNS))
        return [parted([low[at], high[at], low[at + 1], high[at + 1]], 2) for at in (0, 2)]

    return read


def pairs(count: int) -> Read:
    """Of x (M, count) bfloat16 pairs, which are the words themselves."""

    def two(x: Any, row: Any, first: Any, whole: bool) -> list[Any]:
        pair = T.floordiv(first, 2)
        if count % 2:
            both = [T.if_then_else(at < count, x[row, at], i32(0)) for at in (pair, pair + 1)]
            return [T.reinterpret("uint32", held(word, "int32")) for word in both]
        words = _vector(x, row, pair, 2, "int32", i32(0), None if whole else pair < count)
        return [T.reinterpret("uint32", words[i]) for i in range(2)]

    def read(x: Any, row: Any, first: Any, quarter: Any, pair: bool, whole: bool) -> list[Parts]:
        if not pair:
            return [[two(x, row, first + 16 * step + COLUMNS * quarter, whole)] for step in range(2)]
        low, high = (two(x, row, first + 2 * COLUMNS * quarter + at, whole) for at in (0, COLUMNS))
        return [[[bytes_of(low[at], high[at], chosen) for chosen in (0x5410, 0x7632)]] for at in range(2)]

    return read


def _vector(x: Any, row: Any, first: Any, lanes: int, dtype: str, nothing: Any, inside: Any) -> Any:
    """Neighbouring numbers of a row in one load, or `nothing` in their place; `inside` None: they are there."""
    held, all_lanes = local((lanes,), dtype), T.ramp(0, 1, lanes)
    if inside is None:
        T.buffer_store(held, x[row, T.ramp(first, 1, lanes)], [all_lanes])
        return held
    with T.If(inside):
        with T.Then():
            T.buffer_store(held, x[row, T.ramp(first, 1, lanes)], [all_lanes])
        with T.Else():
            T.buffer_store(held, T.broadcast(nothing, lanes), [all_lanes])
    return held
