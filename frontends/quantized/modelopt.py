"""Matrices as NVIDIA's Model Optimizer exports them: LAYER.weight, and LAYER.weight_scale that says what codes count.

| LAYER.weight | LAYER.weight_scale | algorithm |
|---|---|---|
| (N, K) of E4M3 | float32: one, one a row, or one for a square of 128 | FP8, and by channel, by block |
| (N, K) of E4M3 | (N, K / 32), bytes, powers of 2 | MXFP8 |
| (N, K) of int8 | float32: one, or one a row | W8A16 |
| (N, K / 2), bytes of two E2M1 | (N, K / 16) of E4M3, times LAYER.weight_scale_2 | NVFP4 |
| (N, K / 2), bytes of two E2M1 | (N, K / 32), bytes, powers of 2 | MXFP4 |

What is said of activations is left out, as that of compressed-tensors is. https://github.com/NVIDIA/Model-Optimizer
(modelopt/torch/export/quant_utils.py): its exports of version 0.47 are so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from llmc.compiler.formats import block_format
from llmc.frontends.quantized.compressed import IntTensor
from llmc.frontends.quantized.fp4 import MXFP4, NVFP4, fp4_tensor
from llmc.frontends.quantized.packing import WEIGHT, Parts, fold_layers
from llmc.frontends.quantized.scaled_floats import CODES, POWERS, scaled_floats, scales_of
from llmc.frontends.tensor import Tensor

SCALE, SCALE_2, BEFORE = "weight_scale", "weight_scale_2", "pre_quant_scale"
SQUARE, POWER_BLOCK = 128, 32


@dataclass(frozen=True)
class ModelOptPacking:
    """How each layer is packed, its tensors tell."""

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One tensor LAYER.weight in place of those that hold it; what is of activations is left out."""
        return fold_layers(found, where, "modelopt", (SCALE, SCALE_2, BEFORE), _matrix)


def _matrix(name: str, parts: Parts) -> Tensor | str:
    """The matrix of these parts, or what is wrong with them."""
    if BEFORE in parts:
        return f"{BEFORE} is there: columns are scaled before they are multiplied, which llmc does not read"
    if missing := [part for part in (WEIGHT, SCALE) if part not in parts]:
        return f"missing {', '.join(missing)}"
    codes, scales = parts[WEIGHT], parts[SCALE]
    if len(codes.shape) != 2 or 0 in codes.shape:
        return f"shape {list(codes.shape)}, wanted a matrix"
    make = _KINDS.get((codes.stored, scales.stored))
    if make is None:
        known = ", ".join(" with ".join(pair) for pair in _KINDS)
        return f"stored as {codes.stored} with scales in {scales.stored}, llmc reads {known}"
    if SCALE_2 in parts and make is not _nvfp4:
        return f"{SCALE_2} not expected"
    return make(name, parts)


def _by_floats(name: str, parts: Parts) -> Tensor | str:
    """E4M3 with scales in float32."""
    codes, scales = parts[WEIGHT], parts[SCALE]
    (rows, columns), given = codes.shape, list(scales.shape)
    squares = scales_of(SQUARE, SQUARE, codes.shape)
    if prod(given) == 1:
        sides = (rows, columns)
    elif given in ([rows], [rows, 1]):
        sides = (1, columns)
    elif given in (squares, [squares[0], 1, squares[1], 1]):
        sides = (SQUARE, SQUARE)
    else:
        return f"{SCALE} has shape {given}, wanted [], [{rows}] or {squares} for {[rows, columns]}"
    return scaled_floats(name, codes, scales, codes.shape, *sides)


def _by_powers(name: str, parts: Parts) -> Tensor | str:
    """E4M3 with scales that are powers of 2."""
    codes = parts[WEIGHT]
    fault = _shape_fault(parts[SCALE], scales_of(1, POWER_BLOCK, codes.shape))
    return fault or scaled_floats(name, codes, parts[SCALE], codes.shape, 1, POWER_BLOCK)


def _bytes(name: str, parts: Parts) -> Tensor | str:
    codes, scales = parts[WEIGHT], parts[SCALE]
    rows, columns = codes.shape
    if prod(scales.shape) != 1 and (fault := _shape_fault(scales, [rows])):
        return fault
    return IntTensor(
        name, codes.shape, "INT8", codes.offset, codes.nbytes + scales.nbytes, codes.file,
        codes=codes, scales=scales, zeros=None, bits=8, group=columns,
    )  # fmt: skip


def _nvfp4(name: str, parts: Parts) -> Tensor | str:
    whole = parts.get(SCALE_2)
    if whole is None or whole.stored != "F32" or prod(whole.shape) != 1:
        return f"{SCALE_2} is {'missing' if whole is None else f'{whole.stored} {list(whole.shape)}'}, wanted one F32"
    return _fp4(name, parts, NVFP4, float(whole.read().reshape(-1)[0]))


def _mxfp4(name: str, parts: Parts) -> Tensor | str:
    return _fp4(name, parts, MXFP4, 1.0)


def _fp4(name: str, parts: Parts, format: str, times: float) -> Tensor | str:
    codes, block = parts[WEIGHT], block_format(format).block
    shape = codes.shape[0], 2 * codes.shape[1]
    if shape[1] % block:
        return f"rows of {shape[1]}, wanted a multiple of {block}"
    fault = _shape_fault(parts[SCALE], scales_of(1, block, shape))
    return fault or fp4_tensor(name, codes, parts[SCALE], shape, format, times)


def _shape_fault(scales: Tensor, wanted: list[int]) -> str | None:
    given = list(scales.shape)
    return None if given == wanted else f"{SCALE} has shape {given}, wanted {wanted}"


# As what codes and scales are stored -> what reads them.
_KINDS: dict[tuple[str, str], Callable[[str, Parts], Tensor | str]] = {
    (CODES, "F32"): _by_floats,
    (CODES, POWERS): _by_powers,
    ("I8", "F32"): _bytes,
    ("U8", CODES): _nvfp4,
    ("U8", POWERS): _mxfp4,
}
