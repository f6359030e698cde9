"""Matrices as MLX quantizes them: LAYER.weight holds codes in 32-bit words, LAYER.scales what so many columns share.

- "affine": codes of 2 to 8 bits, w = scale * code + bias, with LAYER.biases;
- "mxfp4", "nvfp4", "mxfp8": floats of 4 and 8 bits with scales of a byte (fp4.py, scaled_floats.py).

Codes stand in a row of words one behind another, the first in the lowest bits; of 3, 5 and 6 bits, also across words.
https://github.com/ml-explore/mlx (mlx/backend/cpu/quantized.cpp, python/mlx/nn/layers/quantized.py)

mlx-lm stacks the matrices of a layer's experts, (E, N, words), in most models under "switch_mlp".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.frontends.quantized.bits import unpack
from llmc.frontends.quantized.folded_tensor import misfits
from llmc.frontends.quantized.fp4 import fp4_tensor
from llmc.frontends.quantized.grouped import FLOATS, GroupedTensor, Offset, floats_of
from llmc.frontends.quantized.packing import Parts, by_layer, wrong_types
from llmc.frontends.quantized.scaled_floats import POWERS, scaled_floats
from llmc.frontends.tensor import Floats, Tensor

WORD = 32
AFFINE = "affine"
BITS = (2, 3, 4, 5, 6, 8)  # of affine
GROUPS = (32, 64, 128)
MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits and columns of a scale
PARTS = ("scales", "biases")

EXPERTS = ".experts."  # in the models' own names, before an expert's number
STACKS = (".switch_mlp.", EXPERTS)  # in mlx-lm's
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # where a layer's part is block_sparse_moe


@dataclass(frozen=True)
class MlxLayer:
    """How a layer's matrix is packed."""

    bits: int
    group: int
    mode: str = AFFINE

    def shapes(self, columns: int) -> tuple[int, int]:
        """Words and scales of a row of so many columns."""
        return columns * self.bits // WORD, columns // self.group


@dataclass(frozen=True, kw_only=True)
class MlxTensor(GroupedTensor):
    """A matrix in the tensors `words`, `scales` and `biases`, which fit. `stored` is "MLX4" or the like."""

    words: Tensor
    scales: Tensor
    biases: Tensor

    @property
    def zero_code(self) -> Offset:
        """Always "minimum", what MLX calls a bias."""
        return "minimum"

    def _codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        return unpack(self.words.raw_rows(start, stop), self.bits, self.shape[1])

    def _scales(self, start: int, stop: int) -> Floats:
        return floats_of(self.scales, start, stop)

    def _offsets(self, start: int, stop: int) -> Floats:
        return floats_of(self.biases, start, stop)


@dataclass(frozen=True)
class MlxPacking:
    """`usual` for all layers but those of `by_name`."""

    usual: MlxLayer
    by_name: Mapping[str, MlxLayer]

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One tensor LAYER.weight in place of LAYER.weight, LAYER.scales and LAYER.biases."""
        layers, result = by_layer(found, PARTS)
        if not layers:
            raise SourceError(f"{where}: quantized by MLX, but no tensor is called scales; fetch the whole model")
        faults: dict[str, list[str]] = {}
        made: list[tuple[str, Tensor]] = []
        for stem, parts in layers.items():
            name = f"{stem}.weight"
            kind = self.by_name.get(stem, self.usual)
            if name in result:
                parts["weight"] = result.pop(name)
            if problems := _faults(parts, kind):
                for problem in problems:
                    faults.setdefault(problem, []).append(name)
                continue
            made += [(alone, _tensor(alone, own, kind)) for alone, own in _matrices(name, parts)]
        made += _unstacked(result)
        if twice := [name for name, count in Counter(name for name, _ in made).items() if count > 1]:
            faults["stored twice, in a stack of experts and by itself"] = twice
        if faults:
            raise misfits(where, faults)
        return dict(made)


def _unstacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with stacks of experts that are not quantized, as their widths may not let them be, taken apart."""
    for name, tensor in tensors.items():
        if len(tensor.shape) == 3 and tensor.in_rows and _place(name):
            yield from ((alone, own["weight"]) for alone, own in _matrices(name, {"weight": tensor}))
        else:
            yield name, tensor


def _place(name: str) -> tuple[str, str] | None:
    """What stands before and after an expert's number in the names of which mlx-lm has one for all."""
    for stack in STACKS:
        outer, found, own = name.partition(stack)
        if found and outer.endswith("block_sparse_moe"):
            part, _, end = own.partition(".")
            return outer + EXPERTS, f"{_MIXTRAL.get(part, part)}.{end}"
        if found:
            return outer + EXPERTS, own
    return None


def _matrices(name: str, parts: Parts) -> Iterator[tuple[str, Parts]]:
    """The matrix, or its experts' each by itself, under the names that the model has without MLX."""
    place = _place(name)
    if len(parts["weight"].shape) == 2 or place is None:
        yield name, parts
        return
    for expert in range(parts["weight"].shape[0]):
        yield f"{place[0]}{expert}.{place[1]}", {part: _matrix(tensor, expert) for part, tensor in parts.items()}


def _matrix(stack: Tensor, number: int) -> Tensor:
    """One of the matrices (E, N, words)."""
    size = stack.nbytes // stack.shape[0]
    return replace(stack, shape=stack.shape[1:], offset=stack.offset + number * size, nbytes=size)


def _faults(parts: Parts, kind: MlxLayer) -> list[str]:
    """What is wrong with the tensors of one layer."""
    affine = kind.mode == AFFINE
    wanted = {"weight": ("U32",), "scales": FLOATS if affine else (POWERS,)} | ({"biases": FLOATS} if affine else {})
    if missing := [part for part in wanted if part not in parts]:
        return [f"missing {', '.join(missing)}"]
    faults = wrong_types(parts, wanted)
    faults += [f"{part} does not lie row after row" for part, tensor in parts.items() if not tensor.in_rows]
    faults += [f"{part}, which {kind.mode} does not have" for part in parts if part not in wanted]
    shape = parts["weight"].shape
    if len(shape) not in (2, 3) or 0 in shape:
        return [*faults, f"weight has shape {list(shape)}, wanted two sizes, or three of stacked experts"]
    if len(shape) == 3 and not _place(parts["weight"].name):
        known = " or ".join(stack.strip(".") for stack in STACKS)
        return [*faults, f"weight has shape {list(shape)}, and llmc knows stacks of experts by {known} in their name"]
    columns = shape[-1] * WORD // kind.bits
    words, groups = kind.shapes(columns)
    if words != shape[-1] or columns % kind.group:
        return [*faults, f"{shape[-1]} words a row are not of groups of {kind.group} codes of {kind.bits} bits"]
    scales = (*shape[:-1], groups)
    return faults + [
        f"{part} has shape {list(parts[part].shape)}, wanted {list(scales)} for rows of {columns}, {kind.bits} bits in "
        f"groups of {kind.group}"
        for part in PARTS
        if part in parts and parts[part].shape != scales
    ]


def _tensor(name: str, parts: Parts, kind: MlxLayer) -> Tensor:
    words, scales = parts["weight"], parts["scales"]
    rows, columns = words.shape[0], words.shape[1] * WORD // kind.bits
    if kind.mode == "mxfp8":
        codes = replace(words, shape=(rows, columns), stored="F8_E4M3")
        return scaled_floats(name, codes, scales, (rows, columns), 1, kind.group)
    if kind.mode != AFFINE:
        return fp4_tensor(name, words, scales, (rows, columns), kind.mode)
    biases = parts["biases"]
    return MlxTensor(
        name, (rows, columns), f"MLX{kind.bits}", words.offset, words.nbytes + scales.nbytes + biases.nbytes,
        words.file, words=words, scales=scales, biases=biases, bits=kind.bits, group=kind.group,
    )  # fmt: skip
