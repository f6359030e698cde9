"""Intel's tile registers (AMX): dots of up to 16 rows and 16 outputs in one instruction, of int8 or of bfloat16.

Sums of bytes are exact, so what comes out is what `dot4` gives. A tile of bytes has the columns that share a scale, for
the floating-point sums over them must go on in the order of the other kernels.
"Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, instructions LDTILECFG to TDPBUSD.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.target import Target
from llmc.targets.vector import LANES, i32, registers

ROWS = 16  # of activations in a tile, at most
_WORD = 4  # bytes
_LINE = LANES * _WORD  # bytes of a row of sums or of weights
# Numbers of tile registers. Several of each, so that products need not wait until those before them are stored.
_SUMS, _ACTIVATIONS, _WEIGHTS = range(4), range(4, 6), range(6, 8)


def are_there(target: Target) -> bool:
    """Whether kernels may use tiles of bytes."""
    return all(target.has(flag) for flag in ("amx_tile", "amx_int8", "avx512f"))


def are_there_for_bf16(target: Target) -> bool:
    """Whether they may use tiles of bfloat16."""
    return all(target.has(flag) for flag in ("amx_tile", "amx_bf16", "avx512f"))


def _call(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin(f"llvm.x86.{name}", *operands, dtype="void"))


def _tile(numbers: range, number: int) -> Any:
    return tirx.const(numbers[number % len(numbers)], "int8")


def configure(columns: int, rows: Any) -> None:
    """Set this thread's tiles: sums (rows, 16) int32, activations (rows, columns) int8, weights (columns / 4, 64)."""
    sums, left, right = (rows, _LINE), (rows, columns), (columns // _WORD, _LINE)
    _shape([sums] * len(_SUMS) + [left] * len(_ACTIVATIONS) + [right] * len(_WEIGHTS))


def _shape(tiles: list[tuple[Any, int]]) -> None:
    """Give each tile so many rows of so many bytes."""
    raw: list[Any] = [i32(0)] * (_LINE // _WORD)  # words
    raw[0] = i32(1)  # the palette
    for tile, (height, width) in enumerate(tiles):
        raw[4 + tile // 2] = raw[4 + tile // 2] + i32(width << tile % 2 * 16)
        raw[12 + tile // 4] = raw[12 + tile // 4] + T.cast(height, "int32") * i32(1 << tile % 4 * 8)
    config = registers((len(raw),), "int32")
    for place, word in enumerate(raw):
        T.buffer_store(config, word, [place])
    _call("ldtilecfg", config.access_ptr("r"))


def release() -> None:
    """Give this thread's tiles back, so that the kernel need not save them."""
    _call("tilerelease")


def multiply(number: int, codes: Any, start: Any, weights: Any, place: Any, columns: int, signed: bool) -> None:
    """Make dots of rows of s8 codes, words from `start` on, a row behind another, with weights, words from `place` on.

    A word of weights has four columns, s8 where `signed`, else u8; 16 words, a row of a tile, have 16 outputs. What has
    different numbers may be at work at once, and `store` takes it.
    """
    own_sums, left, right = (_tile(numbers, number) for numbers in (_SUMS, _ACTIVATIONS, _WEIGHTS))
    _call("tilezero", own_sums)
    _load(left, codes, start, columns // _WORD)
    _load(right, weights, place, LANES)
    _call("tdpbssd" if signed else "tdpbsud", own_sums, left, right)


def store(number: int, sums: Any) -> None:
    """Write the dots of this number, (rows, 16) int32, as many rows as tiles are configured for."""
    _call("tilestored64", _tile(_SUMS, number), sums.access_ptr("w"), tirx.const(_LINE, "int64"))


# Of tiles of bfloat16 with four sums.
SUMS, LEFTS, RIGHTS = len(_SUMS), len(_ACTIVATIONS), len(_WEIGHTS)
_BYTES = {"uint16": 2, "int32": 4, "float32": 4}


def configure_pairs(rows: Any, pairs: int) -> None:
    """Set this thread's tiles: sums (rows, 16) float32, left (rows, pairs) and right (pairs, 16) pairs of bfloat16."""
    sums, left, right = (rows, _LINE), (rows, pairs * _WORD), (pairs, _LINE)
    _shape([sums] * len(_SUMS) + [left] * LEFTS + [right] * RIGHTS)


def load_left(left: int, buffer: Any, start: Any, apart: int) -> None:
    """The left-th tile of the left from an element of a buffer on; rows are so many elements apart."""
    _load(_tile(_ACTIVATIONS, left), buffer, start, apart)


def load_right(right: int, buffer: Any, start: Any, apart: int) -> None:
    """The right-th tile of the right, likewise."""
    _load(_tile(_WEIGHTS, right), buffer, start, apart)


def _load(tile: Any, buffer: Any, start: Any, apart: int) -> None:
    stride = tirx.const(apart * _BYTES[str(buffer.dtype)], "int64")
    _call("tileloadd64", tile, buffer.access_ptr("r", offset=start), stride)


def clear_sums(number: int) -> None:
    """No products yet in sums of this number."""
    _call("tilezero", _tile(_SUMS, number))


def load_sums(number: int, buffer: Any, start: Any, apart: int) -> None:
    """Sums that `store_sums` wrote."""
    _load(_tile(_SUMS, number), buffer, start, apart)


def add_products(number: int, left: int, right: int) -> None:
    """Add the products of a tile of the left and one of the right to sums, in the order of `add_bf16`."""
    _call("tdpbf16ps", _tile(_SUMS, number), _tile(_ACTIVATIONS, left), _tile(_WEIGHTS, right))


def store_sums(number: int, buffer: Any, start: Any, apart: int) -> None:
    """Write sums, sixteen of a row together; rows are so many elements apart."""
    stride = tirx.const(apart * _BYTES[str(buffer.dtype)], "int64")
    _call("tilestored64", _tile(_SUMS, number), buffer.access_ptr("w", offset=start), stride)


# Of tiles of bfloat16: a group of rows has sums and activations of its own, so that the last may have fewer rows.
BF16_GROUPS = 3
BF16_PAIRS = 16  # of columns, in a tile
_OTHER_SUMS, _OTHER_LEFT, _OTHER_RIGHT = range(3), range(3, 6), range(6, 8)


def configure_bf16(heights: list[Any]) -> None:
    """Set this thread's tiles for groups of rows, at most BF16_GROUPS, of so many rows each, and clear their sums.

    Sums are (rows, 16) float32, activations (rows, 16) pairs of bfloat16, weights (16, 16) pairs.
    """
    idle = (0, 0)
    groups = [(height, _LINE) for height in heights] + [idle] * (BF16_GROUPS - len(heights))
    _shape([*groups, *groups, *[(BF16_PAIRS, _LINE)] * len(_OTHER_RIGHT)])
    for group in range(len(heights)):
        _call("tilezero", _tile(_OTHER_SUMS, group))


def add_bf16(x: Any, row: Any, column: Any, weight: Any, place: Any, groups: int) -> None:
    """Sums of all groups, of 16 rows each from `row` on, plus the products of 16 pairs of columns.

    x (M, pairs), from `column` on; weight: 16 words of 16 outputs from `place` on. Even columns are added up by
    themselves, odd ones too, from zero, by fma; then one to the other, and both to the sum. Numbers below 2^-126 are 0.
    """
    width = int(x.shape[1])
    right = _tile(_OTHER_RIGHT, 0)
    _call("tileloadd64", right, weight.access_ptr("r", offset=place), tirx.const(_LINE, "int64"))
    for group in range(groups):
        left = x.access_ptr("r", offset=(row + group * ROWS) * width + column)
        _call("tileloadd64", _tile(_OTHER_LEFT, group), left, tirx.const(width * _WORD, "int64"))
        _call("tdpbf16ps", _tile(_OTHER_SUMS, group), _tile(_OTHER_LEFT, group), right)


def store_bf16(sums: Any, groups: int) -> None:
    """Write the sums of all groups to an array of float32, a row's 16 together."""
    for group in range(groups):
        place = sums.access_ptr("w", offset=group * ROWS * LANES)
        _call("tilestored64", _tile(_OTHER_SUMS, group), place, tirx.const(_LINE, "int64"))
