"""Intel's tile registers (AMX): int8 dots of 16 rows and 16 outputs in one instruction.

Sums of bytes are exact, so what comes out is what `dot4` gives. A tile has the columns that share a scale, for the
floating-point sums over them must go on in the order of the other kernels.
"Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, instructions LDTILECFG to TDPBSUD.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.target import Target
from llmc.targets.vector import LANES, i32, lanes, registers

ROWS = 16  # of activations in a tile
_WORD = 4  # bytes
_LINE = LANES * _WORD  # bytes of a row of sums or of weights
_SUMS, _ACTIVATIONS, _WEIGHTS = 0, 1, 2  # numbers of tile registers


def are_there(target: Target) -> bool:
    """Whether kernels may use tiles of bytes."""
    return all(target.has(flag) for flag in ("amx_tile", "amx_int8", "avx512f"))


def _call(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin(f"llvm.x86.{name}", *operands, dtype="void"))


def _tile(number: int) -> Any:
    return tirx.const(number, "int8")


def configure(columns: int) -> None:
    """Set this thread's tiles: sums (16, 16) int32, activations (16, columns) int8, weights (columns / 4, 16, 4)."""
    shapes = {_SUMS: (ROWS, _LINE), _ACTIVATIONS: (ROWS, columns), _WEIGHTS: (columns // _WORD, _LINE)}
    raw = bytearray(_LINE)
    raw[0] = 1  # the palette
    for tile, (rows, width) in shapes.items():
        raw[16 + 2 * tile : 18 + 2 * tile] = width.to_bytes(2, "little")
        raw[48 + tile] = rows
    config = registers((_LINE // _WORD,), "int32")
    for word in range(_LINE // _WORD):
        value = int.from_bytes(raw[_WORD * word : _WORD * (word + 1)], "little", signed=True)
        T.buffer_store(config, i32(value), [word])
    _call("ldtilecfg", config.access_ptr("r"))


def release() -> None:
    """Give this thread's tiles back, so that the kernel need not save them."""
    _call("tilerelease")


def dots(codes: Any, row: Any, start: Any, words: list[Any]) -> Any:
    """(16 * 16,) int32: the dots of 16 rows of s8 codes (M, words) from column `start` on, with u8 weights.

    `words` are int32x16: of four columns each, 16 outputs. Tiles are configured for as many columns.
    """
    weights, sums = registers((len(words) * LANES,), "int32"), registers((ROWS * LANES,), "int32")
    for group, word in enumerate(words):
        T.buffer_store(weights, word, [lanes(group * LANES)])
    width = int(codes.shape[1])
    _call("tilezero", _tile(_SUMS))
    _call(
        "tileloadd64", _tile(_ACTIVATIONS), codes.access_ptr("r", offset=row * width + start),
        tirx.const(width * _WORD, "int64"),
    )  # fmt: skip
    _call("tileloadd64", _tile(_WEIGHTS), weights.access_ptr("r"), tirx.const(_LINE, "int64"))
    _call("tdpbsud", _tile(_SUMS), _tile(_ACTIVATIONS), _tile(_WEIGHTS))
    _call("tilestored64", _tile(_SUMS), sums.access_ptr("w"), tirx.const(_LINE, "int64"))
    return sums
