"""Matrices as compressed-tensors packs them, which llm-compressor writes and vLLM reads.

LAYER.weight_scale is for so many rows and columns of LAYER's matrix (N, K); codes are

- "pack-quantized": LAYER.weight_packed, int32 words of codes of 1 to 8 bits along K, moved up to be positive, and
  LAYER.weight_shape, [N, K]; where zero is not the middle, LAYER.weight_zero_point, words along N;
- "int-quantized" and "float-quantized": LAYER.weight, int8 or E4M3;
- "mxfp4-pack-quantized", "nvfp4-pack-quantized": LAYER.weight_packed, bytes of two E2M1 (fp4.py); of the latter scales
  are divided by LAYER.weight_global_scale.

What is said of activations (input_scale and the like) is for runtimes that round them so; this one has its own way.
https://github.com/vllm-project/compressed-tensors (compressors/)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from llmc.frontends.quantized.bits import unpack
from llmc.frontends.quantized.fp4 import MXFP4, NVFP4, fp4_tensor
from llmc.frontends.quantized.grouped import FLOATS, GroupedTensor, Offset, floats_of
from llmc.frontends.quantized.packing import Parts, fold_layers, wrong_types
from llmc.frontends.quantized.scaled_floats import CODES, POWERS, scaled_floats, scales_of
from llmc.frontends.quantized.words import in_order
from llmc.frontends.tensor import Floats, Tensor

WORD = 32
WHOLE = -1  # of a scheme's rows and columns: all there are
PACKED, SCALE, ZERO, SHAPE, ORDER, GLOBAL = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"
)  # fmt: skip
PARTS = (PACKED, SCALE, ZERO, SHAPE, ORDER, GLOBAL)


@dataclass(frozen=True)
class Scheme:
    """How some of the layers are packed. `rows` and `columns` share a scale, WHOLE for all."""

    format: str
    bits: int
    symmetric: bool
    rows: int
    columns: int

    def rectangle(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale of a matrix."""
        high, wide = (size if own == WHOLE else own for size, own in zip(shape, (self.rows, self.columns), strict=True))
        return high, wide

    def __str__(self) -> str:
        """For messages."""
        sides = ["all" if side == WHOLE else str(side) for side in (self.rows, self.columns)]
        zero = "" if self.symmetric else " with zero points"
        return f"{self.format} of {self.bits} bits{zero}, scales for {sides[0]} rows and {sides[1]} columns"


@dataclass(frozen=True, kw_only=True)
class IntTensor(GroupedTensor):
    """A matrix whose codes are in the tensor `codes`, int32 words or int8; `stored` is "INT4" or the like."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def zero_code(self) -> Offset:
        """The middle, where there are no zeros."""
        return 1 << (self.bits - 1) if self.zeros is None else "zero"

    def _codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        raw = self.codes.raw_rows(start, stop)
        return raw ^ np.uint8(128) if self.codes.stored == "I8" else unpack(raw, self.bits, self.shape[1])

    def _scales(self, start: int, stop: int) -> Floats:
        if prod(self.scales.shape) == 1:  # for all
            return np.broadcast_to(self.scales.read().reshape(1, 1), (stop - start, 1))
        if len(self.scales.shape) == 1:
            return self.scales.read()[start:stop, None]
        return floats_of(self.scales, start, stop)

    def _offsets(self, start: int, stop: int) -> Floats:
        """Words along N: (words of N, groups)."""
        assert self.zeros is not None
        words = np.ascontiguousarray(self.zeros.raw_rows(0, self.zeros.shape[0]).view("<u4").T)
        return unpack(words.view(np.uint8), self.bits, self.shape[0]).T[start:stop].astype(np.float32)


@dataclass(frozen=True)
class CompressedPacking:
    """Each quantized layer is packed as one of `schemes` says; which, its tensors tell."""

    schemes: tuple[Scheme, ...]

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One tensor LAYER.weight in place of those that hold it; what is of activations is left out."""
        return fold_layers(found, where, "compressed-tensors", PARTS, self._matrix)

    def _matrix(self, name: str, parts: Parts) -> Tensor | str:
        """The matrix by the first scheme that its tensors fit, or why they fit none."""
        problems = []
        for scheme in self.schemes:
            reader = READERS[scheme.format]
            if problem := _shapes_fault(parts, reader) or reader.fault(scheme, parts):
                problems.append(f"{problem}, for {scheme}")
            else:
                return reader.make(name, scheme, parts)
        return "; ".join(problems)


@dataclass(frozen=True)
class Reader:
    """How a format's matrices are read.

    `types`: those of parts that have to be there; `other`, of those that may. `fault` and `make` are asked once types
    are right.
    """

    types: dict[str, tuple[str, ...]]
    other: dict[str, tuple[str, ...]]
    fault: Callable[[Scheme, Parts], str | None]
    make: Callable[[str, Scheme, Parts], Tensor]


def _shapes_fault(parts: Parts, reader: Reader) -> str | None:
    """What is wrong with which parts there are, and their types."""
    if missing := [part for part in reader.types if part not in parts]:
        return f"missing {', '.join(missing)}"
    if more := [part for part in parts if part not in reader.types | reader.other]:
        return f"{', '.join(more)} not expected"
    if wrong := wrong_types(parts, reader.types | reader.other):
        return ", ".join(wrong)
    codes = parts[next(iter(reader.types))]
    return f"{codes.name} has shape {list(codes.shape)}, wanted a matrix" if len(codes.shape) != 2 else None


def _scale_fault(scheme: Scheme, shape: tuple[int, ...], scales: Tensor) -> str | None:
    if min(shape) < 1:
        return f"a matrix of shape {list(shape)}"
    wanted = scales_of(*scheme.rectangle(shape), shape)
    fits = list(scales.shape) == wanted or (prod(wanted) == 1 and prod(scales.shape) == 1)
    return None if fits else f"{SCALE} has shape {list(scales.shape)}, wanted {wanted} for {list(shape)}"


def _shape(parts: Parts) -> tuple[int, ...]:
    """(N, K) that a packed matrix says it has."""
    stored = parts[SHAPE].raw_rows(0, 1).view("<i8" if parts[SHAPE].stored == "I64" else "<i4")
    return tuple(int(size) for size in stored[0])


def _packed_fault(scheme: Scheme, parts: Parts) -> str | None:
    if parts[SHAPE].shape != (2,):
        return f"{SHAPE} has shape {list(parts[SHAPE].shape)}, wanted [2]"
    rows, columns = _shape(parts)
    words = -(-columns * scheme.bits // WORD)
    if list(parts[PACKED].shape) != [rows, words]:
        return f"{PACKED} has shape {list(parts[PACKED].shape)}, wanted {[rows, words]} for {[rows, columns]}"
    if scheme.symmetric == (ZERO in parts):
        return f"{ZERO} {'not expected' if scheme.symmetric else 'missing'}"
    if problem := _scale_fault(scheme, (rows, columns), parts[SCALE]):
        return problem
    group = scheme.rectangle((rows, columns))[1]
    wanted = [-(-rows * scheme.bits // WORD), -(-columns // group)]
    if ZERO in parts and list(parts[ZERO].shape) != wanted:
        return f"{ZERO} has shape {list(parts[ZERO].shape)}, wanted {wanted}"
    if ORDER in parts and not (parts[ORDER].shape == (columns,) and in_order(parts[ORDER], group)):
        return f"columns are grouped in the order of their activations ({ORDER}), which llmc cannot keep"
    return None


def _packed(name: str, scheme: Scheme, parts: Parts) -> Tensor:
    return _whole(name, scheme, _shape(parts), parts[PACKED], parts)


def _whole(name: str, scheme: Scheme, shape: tuple[int, ...], codes: Tensor, parts: Parts) -> Tensor:
    return IntTensor(
        name, shape, f"INT{scheme.bits}", codes.offset, codes.nbytes + parts[SCALE].nbytes, codes.file,
        codes=codes, scales=parts[SCALE], zeros=parts.get(ZERO), bits=scheme.bits, group=scheme.rectangle(shape)[1],
    )  # fmt: skip


def _weight_fault(scheme: Scheme, parts: Parts) -> str | None:
    return _scale_fault(scheme, parts["weight"].shape, parts[SCALE])


def _bytes(name: str, scheme: Scheme, parts: Parts) -> Tensor:
    return _whole(name, scheme, parts["weight"].shape, parts["weight"], parts)


def _floats(name: str, scheme: Scheme, parts: Parts) -> Tensor:
    codes = parts["weight"]
    return scaled_floats(name, codes, parts[SCALE], codes.shape, *scheme.rectangle(codes.shape))


def _fp4_shape(parts: Parts) -> tuple[int, int]:
    rows, half = parts[PACKED].shape
    return rows, 2 * half


def _fp4_fault(scheme: Scheme, parts: Parts) -> str | None:
    if GLOBAL in parts and parts[GLOBAL].shape not in ((), (1,)):
        return f"{GLOBAL} has shape {list(parts[GLOBAL].shape)}, wanted [1]"
    shape = _fp4_shape(parts)
    if shape[1] % scheme.columns:
        return f"rows of {shape[1]}, wanted a multiple of {scheme.columns}"
    return _scale_fault(scheme, shape, parts[SCALE])


def _mxfp4(name: str, scheme: Scheme, parts: Parts) -> Tensor:
    return fp4_tensor(name, parts[PACKED], parts[SCALE], _fp4_shape(parts), MXFP4)


def _nvfp4(name: str, scheme: Scheme, parts: Parts) -> Tensor:
    whole = float(parts[GLOBAL].read().reshape(-1)[0])
    times = 1 / whole if whole else float("nan")
    return fp4_tensor(name, parts[PACKED], parts[SCALE], _fp4_shape(parts), NVFP4, times)


_LENGTHS = ("I64", "I32")
READERS = {
    "pack-quantized": Reader(
        {PACKED: ("I32",), SCALE: FLOATS, SHAPE: _LENGTHS}, {ZERO: ("I32",), ORDER: ("I32",)}, _packed_fault, _packed
    ),
    "int-quantized": Reader({"weight": ("I8",), SCALE: FLOATS}, {}, _weight_fault, _bytes),
    "float-quantized": Reader({"weight": (CODES,), SCALE: FLOATS}, {}, _weight_fault, _floats),
    "mxfp4-pack-quantized": Reader({PACKED: ("U8",), SCALE: (POWERS,)}, {}, _fp4_fault, _mxfp4),
    "nvfp4-pack-quantized": Reader(
        {PACKED: ("U8",), SCALE: (CODES,), GLOBAL: ("F32",)}, {}, _fp4_fault, _nvfp4
    ),
}  # fmt: skip
