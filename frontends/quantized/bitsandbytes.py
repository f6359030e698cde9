"""Matrices as bitsandbytes quantizes them, as QLoRA and many published folders have them.

4 bits: NAME holds a byte for two codes, the upper half first, in the order of the matrix's rows; so many codes, one
behind another, share a number of NAME.absmax:

    w[i] = quant_map[code[i]] * absmax[i // blocksize]

Where absmax is bytes, those are codes likewise: absmax = nested_quant_map[byte] * nested_absmax[...] + nested_offset.
NAME.quant_state.bitsandbytes__nf4 (or __fp4) is JSON of what is not a tensor. 8 bits: NAME.weight is int8, w = code *
LAYER.SCB[row] / 127. https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py, QuantState);
https://arxiv.org/abs/2305.14314 appendix E has the map of nf4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import NF4_ONE, Quantized, block_format, ceil_to
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.quantized.folded_tensor import FoldedTensor, misfits
from llmc.frontends.quantized.grouped import GroupedTensor, Offset, half_of
from llmc.frontends.quantized.packing import Parts, wrong_types
from llmc.frontends.tensor import Floats, Tensor

NF4 = "nf4"  # a format of ours too
INT8_TOP = 127
STATE = "quant_state.bitsandbytes__"
KINDS = (NF4, "fp4")
MAX_STATE = 1 << 12  # bytes of JSON
MAX_BLOCK = 1 << 16
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_LAYER_PARTS = ("SCB", "weight_format")
_KEYS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_KEYS = {"nested_blocksize", "nested_dtype", "nested_offset"}


@dataclass(frozen=True)
class _State:
    """What the JSON says: `nested` is (blocksize, offset) of absmax, None where it is floats."""

    shape: tuple[int, int]
    block: int
    nested: tuple[int, float] | None


@dataclass(frozen=True, kw_only=True)
class Bnb4Tensor(FoldedTensor):
    """A matrix in tensors that `fold` has checked. `stored` is "NF4" or "FP4"."""

    words: Tensor
    absmax: Tensor
    quant_map: Tensor
    nested_absmax: Tensor | None
    nested_map: Tensor | None
    state: _State

    @property
    def kept(self) -> str | None:
        """nf4 where blocks fill rows and the map is the one it has, by numbers off by 0.4 % of the greatest at most."""
        whole = self.state.block % block_format(NF4).block == 0 and self.shape[1] % self.state.block == 0
        return NF4 if self.stored == NF4.upper() and whole and self._is_known else None

    @cached_property
    def _is_known(self) -> bool:
        """Whether the map is that of our format."""
        values, format = self.quant_map.read().astype(np.float64) * NF4_ONE, block_format(NF4)
        assert format.values is not None
        with np.errstate(invalid="ignore"):  # what is no number is no whole number near
            return bool((np.abs(values + int(format.offset) - format.values) <= 1 / 2).all())

    def _rows(self, start: int, stop: int) -> Floats:
        columns, block = self.shape[1], self.state.block
        first, last = start * columns, stop * columns
        scales = self._scales(first // block, -(-last // block))
        values: Floats = self.quant_map.read()[self._codes(first, last - first)]
        with np.errstate(all="ignore"):  # what overflows is refused below
            values *= scales[np.arange(first, last) // block - first // block]
        if not np.isfinite(values).all():
            raise self._damaged()
        return values.reshape(stop - start, columns)

    def _blocks(self) -> Quantized:
        format = block_format(NF4)
        rows, columns = self.shape
        codes = np.zeros((rows, ceil_to(columns, format.columns)), np.uint8)
        codes[:, :columns] = self._codes(0, rows * columns).reshape(rows, columns)
        scales = self._scales(0, rows * columns // self.state.block).reshape(rows, -1) / np.float32(NF4_ONE)
        if not np.isfinite(scales).all():
            raise self._damaged()
        half = half_of(scales, f"{self.file.name}: {self.absmax.name}", "scale")
        table = np.zeros((rows, codes.shape[1] // format.block), np.float16)
        table[:, : columns // format.block] = np.repeat(half, self.state.block // format.block, axis=1)
        return Quantized(codes, {"scale": table})

    def _codes(self, first: int, count: int) -> NDArray[np.uint8]:
        """So many codes from one on."""
        begin, end = first // 2, -(-(first + count) // 2)
        raw = self.words.raw_rows(begin, end).reshape(-1)
        return np.stack([raw >> np.uint8(4), raw & np.uint8(15)], axis=1).reshape(-1)[first - 2 * begin :][:count]

    def _scales(self, start: int, stop: int) -> Floats:
        """Of blocks `start` to `stop`."""
        if self.state.nested is None:
            values = self.absmax.read()[start:stop]
        else:
            assert self.nested_absmax is not None
            assert self.nested_map is not None
            block, offset = self.state.nested
            raw = self.absmax.raw_rows(0, 1)[0, start:stop]
            own = self.nested_absmax.read()[np.arange(start, stop) // block]
            with np.errstate(all="ignore"):  # what overflows is refused with the values
                values = self.nested_map.read()[raw] * own + np.float32(offset)
        return values


@dataclass(frozen=True, kw_only=True)
class Bnb8Tensor(GroupedTensor):
    """A matrix in the tensors `codes`, int8 (N, K), and `greatest` (N,), float32. `stored` is "INT8"."""

    codes: Tensor
    greatest: Tensor

    @property
    def zero_code(self) -> Offset:
        """The middle: codes are signed."""
        return 1 << 7

    def _codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self.codes.raw_rows(start, stop) ^ np.uint8(1 << 7)

    def _scales(self, start: int, stop: int) -> Floats:
        return self.greatest.read()[start:stop, None] / np.float32(INT8_TOP)


@dataclass(frozen=True)
class BnbPacking:
    """Layers of 4 bits or of 8."""

    bits: int

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One tensor NAME in place of those that hold it."""
        matrices, result = _by_matrix(found)
        if not matrices:
            raise SourceError(f"{where}: quantized by bitsandbytes, but no tensor is; fetch the whole model")
        faults: dict[str, list[str]] = {}
        for name, parts in matrices.items():
            if name in found:
                parts["weight"] = result.pop(name)
            made = _eight(name, parts) if self.bits == 8 else _four(name, parts)
            if isinstance(made, Tensor):
                result[name] = made
                continue
            for problem in made:
                faults.setdefault(problem, []).append(name)
        if faults:
            raise misfits(where, faults)
        return result


def _by_matrix(found: Mapping[str, Tensor]) -> tuple[dict[str, Parts], dict[str, Tensor]]:
    """Names of matrices -> what stands beside them; and all else."""
    matrices: dict[str, Parts] = {}
    others = {}
    for name, tensor in found.items():
        layer, _, part = name.rpartition(".")
        matrix, _, state = name.partition(f".{STATE}")
        if state in KINDS:
            matrices.setdefault(matrix, {})[STATE + state] = tensor
        elif part in _PARTS:
            matrices.setdefault(layer, {})[part] = tensor
        elif part in _LAYER_PARTS:
            matrices.setdefault(f"{layer}.weight", {})[part] = tensor
        else:
            others[name] = tensor
    return matrices, others


def _eight(name: str, parts: Parts) -> Tensor | list[str]:
    wanted = {"weight": ("I8",), "SCB": ("F32",)}
    if missing := [part for part in wanted if part not in parts]:
        return [f"missing {', '.join(missing)}"]
    codes, greatest = parts["weight"], parts["SCB"]
    faults = wrong_types(parts, wanted | {"weight_format": ("U8",)})
    faults += [f"{part}, which 8 bits do not have" for part in parts if part not in (*wanted, "weight_format")]
    if len(codes.shape) != 2 or 0 in codes.shape or greatest.shape != codes.shape[:1]:
        faults.append(f"weight and SCB have shapes {list(codes.shape)} and {list(greatest.shape)}, wanted [N, K], [N]")
    order = parts.get("weight_format")
    if not faults and order is not None and (order.shape not in ((), (1,)) or order.raw_rows(0, 1).any()):
        faults.append("weight_format is not 0, rows one after another; save it with a newer bitsandbytes")
    if faults:
        return faults
    return Bnb8Tensor(
        name, codes.shape, "INT8", codes.offset, codes.nbytes + greatest.nbytes, codes.file,
        codes=codes, greatest=greatest, bits=8, group=codes.shape[1],
    )  # fmt: skip


def _four(name: str, parts: Parts) -> Tensor | list[str]:
    kinds = [part.removeprefix(STATE) for part in parts if part.startswith(STATE)]
    needed = ("weight", "absmax", "quant_map")
    if missing := [part for part in needed if part not in parts] + [STATE] * (not kinds):
        return [f"missing {', '.join(missing)}"]
    if len(kinds) > 1:
        return [f"two of {STATE}"]
    state = _state(parts[STATE + kinds[0]], kinds[0])
    if isinstance(state, str):
        return [state]
    if faults := _misfits(parts, state):
        return faults
    words, absmax = parts["weight"], parts["absmax"]
    return Bnb4Tensor(
        name, state.shape, kinds[0].upper(), words.offset, words.nbytes + absmax.nbytes, words.file,
        words=words, absmax=absmax, quant_map=parts["quant_map"], nested_absmax=parts.get("nested_absmax"),
        nested_map=parts.get("nested_quant_map"), state=state,
    )  # fmt: skip


def _misfits(parts: Parts, state: _State) -> list[str]:
    """What is wrong with the types and shapes of a matrix of 4 bits."""
    blocks = -(-prod(state.shape) // state.block)
    shapes = {"absmax": [blocks], "quant_map": [16]}
    types = {"weight": ("U8",), "absmax": ("F32",), "quant_map": ("F32",)}
    if state.nested:
        shapes |= {"nested_absmax": [-(-blocks // state.nested[0])], "nested_quant_map": [256]}
        types |= {"absmax": ("U8",), "nested_absmax": ("F32",), "nested_quant_map": ("F32",)}
    known = (*shapes, "weight")
    faults = [f"missing {part}" for part in shapes if part not in parts] + wrong_types(parts, types)
    faults += [f"{part}, which {STATE} does not tell of" for part in parts if part in _PARTS and part not in known]
    faults += [f"{part}, which 4 bits do not have" for part in parts if part in _LAYER_PARTS]
    faults += [
        f"{part} has shape {list(parts[part].shape)}, wanted {size}"
        for part, size in shapes.items()
        if part in parts and list(parts[part].shape) != size
    ]
    if parts["weight"].shape != (words := (-(-prod(state.shape) // 2), 1)):
        faults.append(f"weight has shape {list(parts['weight'].shape)}, wanted {list(words)} for {list(state.shape)}")
    return faults


def _state(stored: Tensor, kind: str) -> _State | str:
    """What the JSON says, or what is wrong with it."""
    if stored.stored != "U8" or stored.nbytes > MAX_STATE:
        return f"{STATE}{kind} is stored as {stored.stored}, {stored.nbytes} bytes, wanted U8, at most {MAX_STATE}"
    table: dict[str, Any] = read_json(stored.raw_rows(0, 1).tobytes(), stored.name)
    keys = _KEYS | (_NESTED_KEYS if _NESTED_KEYS & set(table) else set())
    if set(table) != keys:
        return f"{STATE}{kind} has keys {clip(sorted(table))}, wanted {', '.join(sorted(keys))}"
    shape, block, nested = table["shape"], table["blocksize"], None
    sizes = [*shape, block] if isinstance(shape, list) and len(shape) == 2 else [0]
    if keys & _NESTED_KEYS:
        sizes.append(table["nested_blocksize"])
        if not isinstance(table["nested_offset"], float):
            return f"{STATE}{kind}.nested_offset = {clip(table['nested_offset'])}, wanted a number"
        nested = table["nested_blocksize"], table["nested_offset"]
    if not all(type(size) is int and 0 < size < 1 << 31 for size in sizes) or max(sizes[2:]) > MAX_BLOCK:
        return f"{STATE}{kind} has shape {clip(shape)} and blocksize {clip(block)}, wanted two sizes and one"
    if table["quant_type"] != kind:
        return f"{STATE}{kind} has quant_type {clip(table['quant_type'])}"
    return _State((shape[0], shape[1]), block, nested)
