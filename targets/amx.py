"""Intel's tile registers: int8 products of 16 rows and 16 outputs over 32 columns in one instruction.

Sums of bytes are exact, so what comes out is what `dot4` gives, whatever the order.
"Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, instructions LDTILECFG to TDPBSUD.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import BLOCK, TILE
from llmc.targets.target import Target
from llmc.targets.vector import LANES, registers

ROWS = 16  # of a tile
_LINE = 64  # bytes of a tile's row, at most
_CONFIG_WORDS = 16
_SUMS, _ACTIVATIONS, _WEIGHTS = (0, 1), (2, 3), (4, 5)  # tile registers, a pair of each so that two products overlap


def has_tiles(target: Target) -> bool:
    """Whether kernels may use tiles of bytes."""
    return target.has("amx_int8") and target.has("amx_tile") and target.has("avx512f")


def _call(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin(f"llvm.x86.{name}", *operands, dtype="void"))


def _number(tile: int) -> Any:
    return tirx.const(tile, "int8")


def configure() -> None:
    """Set the shapes of this thread's tiles: sums (16, 16) words, activations (16, 32) bytes, weights (8, 16, 4)."""
    shapes = dict.fromkeys(_SUMS, (ROWS, 4 * LANES)) | dict.fromkeys(_ACTIVATIONS, (ROWS, BLOCK))
    shapes |= dict.fromkeys(_WEIGHTS, (BLOCK // 4, 4 * TILE))
    raw = bytearray(4 * _CONFIG_WORDS)
    raw[0] = 1  # the palette
    for tile, (rows, width) in shapes.items():
        raw[16 + 2 * tile : 18 + 2 * tile] = width.to_bytes(2, "little")
        raw[48 + tile] = rows
    config = registers((_CONFIG_WORDS,), "int32")
    for word in range(_CONFIG_WORDS):
        value = int.from_bytes(raw[4 * word : 4 * word + 4], "little", signed=True)
        T.buffer_store(config, tirx.const(value, "int32"), [word])
    _call("ldtilecfg", config.access_ptr("r"))


def release() -> None:
    """Give this thread's tiles back, so that the kernel need not save them."""
    _call("tilerelease")


def products(turn: int, activations: Any, stride: Any, weights: Any, sums: Any) -> None:
    """sums (16, 16) int32 = s8 activations (16 rows, `stride` bytes apart, 32 columns) times u8 weights (8, 16, 4).

    All three are pointers. `turn` 0 and 1 use different registers.
    """
    total, left, right = _SUMS[turn], _ACTIVATIONS[turn], _WEIGHTS[turn]
    _call("tilezero", _number(total))
    _call("tileloadd64", _number(left), activations, stride)
    _call("tileloadd64", _number(right), weights, tirx.const(_LINE, "int64"))
    _call("tdpbsud", _number(total), _number(left), _number(right))
    _call("tilestored64", _number(total), sums, tirx.const(_LINE, "int64"))
