"""Intel's tile registers (AMX): int8 dots of up to 16 rows and 16 outputs in one instruction.

Sums of bytes are exact, so what comes out is what `dot4` gives. A tile has the columns that share a scale, for the
floating-point sums over them must go on in the order of the other kernels.
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


def _call(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin(f"llvm.x86.{name}", *operands, dtype="void"))


def _tile(numbers: range, number: int) -> Any:
    return tirx.const(numbers[number % len(numbers)], "int8")


def configure(columns: int, rows: Any) -> None:
    """Set this thread's tiles: sums (rows, 16) int32, activations (rows, columns) int8, weights (columns / 4, 64)."""
    rows = T.cast(rows, "int32")
    raw: list[Any] = [i32(0)] * (_LINE // _WORD)  # words
    raw[0] = i32(1)  # the palette
    for tiles, width, height in (
        (_SUMS, _LINE, rows),
        (_ACTIVATIONS, columns, rows),
        (_WEIGHTS, _LINE, i32(columns // _WORD)),
    ):
        for tile in tiles:
            raw[4 + tile // 2] = raw[4 + tile // 2] + i32(width << tile % 2 * 16)
            raw[12 + tile // 4] = raw[12 + tile // 4] + height * i32(1 << tile % 4 * 8)
    config = registers((len(raw),), "int32")
    for place, word in enumerate(raw):
        T.buffer_store(config, word, [place])
    _call("ldtilecfg", config.access_ptr("r"))


def release() -> None:
    """Give this thread's tiles back, so that the kernel need not save them."""
    _call("tilerelease")


def dots(number: int, codes: Any, row: Any, start: Any, weights: Any, place: Any, rows: int, signed: bool) -> Any:
    """(rows * 16,) int32: dots of rows of s8 codes (M, words) from column `start` on with weights, words from `place`.

    Tiles are configured for the columns, and for `rows` rows or fewer: sums of others may be anything. A word of
    weights has four columns, s8 where `signed`, else u8; 16 words, a row of a tile, have 16 outputs. What has different
    numbers may be at work at once.
    """
    sums = registers((rows * LANES,), "int32")
    width = int(codes.shape[1])
    own_sums, left, right = (_tile(numbers, number) for numbers in (_SUMS, _ACTIVATIONS, _WEIGHTS))
    stride = tirx.const(width * _WORD, "int64")
    _call("tilezero", own_sums)
    _call("tileloadd64", left, codes.access_ptr("r", offset=row * width + start), stride)
    _call("tileloadd64", right, weights.access_ptr("r", offset=place), tirx.const(_LINE, "int64"))
    _call("tdpbssd" if signed else "tdpbsud", own_sums, left, right)
    _call("tilestored64", own_sums, sums.access_ptr("w"), tirx.const(_LINE, "int64"))
    return sums
