"""Integer dots of rows of int8 with words of weights, the same in every kernel of vectors that multiplies both."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import MIDDLE, TILE
from llmc.targets.matrices.codes import Words
from llmc.targets.matrices.linear import get, put, zeros
from llmc.targets.narrow import add_pairs, pairs_added, signed_dot, sums_of_pairs
from llmc.targets.target import Target
from llmc.targets.vector import dot4, held, i32, registers, splat

_AT_ONCE = 2  # groups of columns that are not looped over: more take no less time, and longer to compile


def start_of(zero: int, stored: Any) -> Any:
    """int32x16: where a dot begins whose bytes stand for themselves less `zero`, from quantize_rows's start for 128."""
    return start_from(zero, splat(stored), lambda number: splat(i32(number)))


def start_from(zero: int, stored: Any, constant: Callable[[int], Any]) -> Any:
    """The same as one number or several, as `stored` is; `constant` gives what is the same in all."""
    if not zero:
        return constant(0)
    part = zero & -zero  # the power of two in it; a shift is exact, for what is stored are multiples of MIDDLE
    less = (MIDDLE // part).bit_length() - 1
    start = T.shift_right(stored, constant(less)) if less else stored
    return start if zero == part else start * constant(zero // part)


def start_times(zero: int) -> int:
    """How often dots may be taken to begin with starts as they are stored; scales are as much smaller, exactly."""
    return MIDDLE // zero if zero & -zero == zero else 1


def add_dots(
    target: Target, top: int, codes: Any, row: Any, first: Any, groups: int, words: Words, starts: list[Any],
    times: int = 1, signed: bool = False,
) -> Any:  # fmt: skip
    """(rows * 16,) int32: `starts`, one int32x16 a row, plus dots of codes (M, words) of int8 with weights.

    Of rows from `row` and groups of four columns from `first` on, `groups` of them, which `words` has in any order.
    Bytes are up to `top`, or `signed`. Dots are taken so many `times`: where that is not 1, `sums_of_pairs` is not.
    """
    run = 1 if signed else sums_of_pairs(target, top)
    assert times == 1 or run > 1
    if run > 1:
        return _dots_by_pairs(target, codes, row, first, groups, words, starts, times, run)
    dots = _begun(starts)
    for group, word in islice(words, groups):
        for r in range(len(starts)):
            x = codes[row + r, first + group % groups]
            if signed:
                put(dots, r, signed_dot(target, get(dots, r), word, held(splat(x), "int32")))
            else:
                put(dots, r, dot4(target, get(dots, r), word, x, wide=top >= MIDDLE))
    return dots


def _dots_by_pairs(
    target: Target, codes: Any, row: Any, first: Any, groups: int, words: Words, starts: list[Any], times: int,
    run: int,
) -> Any:  # fmt: skip
    """`add_dots` where the products of a word are summed in pairs, of `run` groups, before the pairs are added.

    Starts come last: there are registers for them then.
    """
    dots = registers((len(starts) * TILE,), "int32")
    for begin in range(0, groups, run):
        sums = zeros(len(starts), "int32")
        for group, word in islice(words, min(run, groups - begin)):
            for r in range(len(starts)):
                x = held(splat(codes[row + r, first + group % groups]), "int32")
                put(sums, r, add_pairs(target, get(sums, r), word, x))
        for r, start in enumerate(starts):
            before = get(dots, r) if begin else start
            put(dots, r, before + pairs_added(target, get(sums, r), times))
    return dots


def add_dots_of_tiles(
    target: Target, top: int, codes: Any, row: Any, first: Any, groups: int, words: Callable[[Any], list[Any]],
    starts: list[Any],
) -> list[Any]:  # fmt: skip
    """The same with several tiles, of which `words(group)` has one word each: they share what is loaded of the rows.

    Bytes are not signed, and one instruction, or what stands for one, adds the products of a word.
    """
    dots = [_begun(starts) for _ in words(0)]
    with T.serial(0, groups // _AT_ONCE) as turn:
        for inside in range(_AT_ONCE):
            group = turn * _AT_ONCE + inside
            here = words(group)
            for r in range(len(starts)):
                x = codes[row + r, first + group]
                for own, word in zip(dots, here, strict=True):
                    put(own, r, dot4(target, get(own, r), word, x, wide=top >= MIDDLE))
    return dots


def _begun(starts: list[Any]) -> Any:
    """Registers with these in them."""
    dots = registers((len(starts) * TILE,), "int32")
    for r, start in enumerate(starts):
        put(dots, r, start)
    return dots
