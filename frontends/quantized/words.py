"""Linear layers of AWQ and GPTQ folders: three or four tensors stand for one matrix of ours, (N, K) = (out, in).

    w[n, k] = (code[k, n] - zero[k // group, n]) * scale[k // group, n]

int32 words hold codes or zeros of 2, 3, 4 or 8 bits, the first in the lowest bits:

- GPTQ: qweight (K * bits / 32, N), words for neighbours along K; qzeros (groups, N * bits / 32), words along N, less
  one in the first format. https://github.com/AutoGPTQ/AutoGPTQ (nn_modules/qlinear/qlinear_cuda.py, `pack`)
- AWQ "gemm", 4 bits: qweight (K, N / 8) and qzeros (groups, N / 8), words along N, in the order of `AWQ_ORDER`.
  https://github.com/casper-hansen/AutoAWQ (modules/linear/gemm.py, `from_linear`)

scales is (groups, N). GPTQ's g_idx (K,) is the group of every column; only k // group can be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.frontends.binding import group_names
from llmc.frontends.quantized.bits import unpack
from llmc.frontends.quantized.folded_tensor import misfits
from llmc.frontends.quantized.grouped import FLOATS, GroupedTensor, Offset
from llmc.frontends.quantized.packing import Parts, by_layer, wrong_types
from llmc.frontends.tensor import Floats, Tensor, decode_values

U8 = NDArray[np.uint8]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the place of a word's i-th code among its eight columns
WORD = 32  # bits
PARTS = ("qweight", "qzeros", "scales", "g_idx")
COLUMNS = 32  # a matrix's columns are a multiple of this


@dataclass(frozen=True)
class WordPacking:
    """How each quantized linear layer of a folder is stored."""

    method: str  # "AWQ" or "GPTQ"
    bits: int
    group: int  # columns that share a scale and a zero; -1: all of a row
    zero_shift: int = 0  # zero = stored zero + this: 1 in GPTQ's first format
    symmetric: bool = False  # every zero is in the middle
    act_order: bool = False  # columns may be in groups of any order: g_idx has to be there

    def columns(self, width: int) -> int:
        """Columns of a group in a row of `width`."""
        return width if self.group == -1 else min(self.group, width)

    @property
    def per_word(self) -> int:
        """The least number of codes that fill whole words."""
        return WORD // gcd(WORD, self.bits)

    def words(self, count: int) -> int:
        """Words of so many codes, which fill them."""
        return count * self.bits // WORD

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One WordTensor "a.b.weight" in place of a.b.qweight, a.b.qzeros, a.b.scales, a.b.g_idx."""
        layers, result = by_layer(found, PARTS)
        if not layers:
            raise SourceError(f"{where}: quantized, but no tensor is called qweight; fetch the whole model")
        faults: dict[str, list[str]] = {}
        for stem, parts in layers.items():
            name = f"{stem}.weight"
            problems = _part_faults(parts, self)
            if name in result:
                problems.append("stored both as it is and quantized")
            for problem in problems:
                faults.setdefault(problem, []).append(name)
            if not problems:
                result[name] = _tensor(name, parts, self)
        if faults:
            raise misfits(where, faults)
        return result


@dataclass(frozen=True, kw_only=True)
class WordTensor(GroupedTensor):
    """A matrix in the tensors `words` (qweight), `zeros` (qzeros) and `scales`, which `fold` has checked.

    `shape` is ours; `stored` is "AWQ4", "GPTQ8" or the like; `offset` and `file` are those of `words`.
    """

    words: Tensor
    zeros: Tensor
    scales: Tensor
    packing: WordPacking

    @property
    def zero_code(self) -> Offset:
        """The middle where the configuration says so, else stored."""
        return 1 << (self.bits - 1) if self.packing.symmetric else "zero"

    def _codes(self, start: int, stop: int) -> U8:
        if self.packing.method == "AWQ":
            return self._along_rows(self.words, start, stop).T
        words = _bytes(self.words).view("<u4").reshape(self.words.shape)[:, start:stop]
        return unpack(np.ascontiguousarray(words.T).view(np.uint8), self.bits, self.shape[1])

    @property
    def by_rows(self) -> bool:
        """No: words and scales stand row by row of the turned matrix."""
        return False

    def _check(self, start: int, stop: int) -> None:
        if self.packing.symmetric:
            self._offsets(start, stop)

    def _offsets(self, start: int, stop: int) -> Floats:
        """(rows, groups). Raises SourceError for zeros that contradict the configuration or mean two things."""
        zeros = self._along_rows(self.zeros, start, stop).T.astype(np.float32)
        zeros += np.float32(self.packing.zero_shift)
        middle, top = 1 << (self.bits - 1), (1 << self.bits) - 1
        if self.packing.symmetric and (zeros != middle).any():
            other = int(zeros[zeros != middle][0])
            raise SourceError(
                f"{self.file.name}: {self.zeros.name} has a zero point of {other}, wanted {middle} since sym is true "
                "in config.json; correct sym, or checkpoint_format (gptq stores zero points less one, gptq_v2 as they "
                "are)"
            )
        if (zeros > top).any():
            raise SourceError(
                f"{self.file.name}: {self.zeros.name} has zero points stored as {top}, less one, which some readers "
                f"take for {top + 1} and some for 0; convert the model to checkpoint_format gptq_v2"
            )
        return zeros

    def _along_rows(self, packed: Tensor, start: int, stop: int) -> U8:
        """(R, words) that each hold some of our rows -> (R, rows)."""
        count, width = packed.shape
        each = self.packing.per_word
        first, last = start // each, -(-stop // each)
        words = _bytes(packed).reshape(count, width, 4)
        words = words[:, self.packing.words(first * each) : self.packing.words(last * each)]
        values = unpack(np.ascontiguousarray(words).reshape(count, -1), self.bits, (last - first) * each)
        if self.packing.method == "AWQ":
            values = values.reshape(count, -1, each)[:, :, np.argsort(AWQ_ORDER)].reshape(count, -1)
        return values[:, start - each * first : stop - each * first]

    def _scales(self, start: int, stop: int) -> Floats:
        groups, rows = self.scales.shape
        raw = _bytes(self.scales).reshape(groups, rows, -1)[:, start:stop]
        return decode_values(np.ascontiguousarray(raw).reshape(groups, -1), self.scales.stored).T


def _bytes(tensor: Tensor) -> U8:
    return tensor.raw_rows(0, tensor.shape[0] if len(tensor.shape) > 1 else 1).reshape(-1)


def refuse_unsaid(found: Mapping[str, Tensor], where: str, key: str) -> None:
    """Raises SourceError for words of codes where config.json does not say how they are packed."""
    if quantized := [name for name in found if name.rpartition(".")[2] == PARTS[0]]:
        raise SourceError(
            f"{where}: {group_names(quantized)} are quantized, but config.json has no {key}; "
            "put there what quantize_config.json or quant_config.json says, and quant_method"
        )


def _size(parts: Parts, packing: WordPacking) -> tuple[int, int]:
    """(N, K) that qweight is for."""
    high, wide = parts["qweight"].shape
    if packing.method == "AWQ":
        return wide * WORD // packing.bits, high
    return wide, high * WORD // packing.bits


def _part_faults(parts: Parts, packing: WordPacking) -> list[str]:
    """What is wrong with the tensors of one layer."""
    wanted = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS}
    if packing.act_order:
        wanted["g_idx"] = ("I32",)
    if missing := [part for part in wanted if part not in parts]:
        return [f"missing {', '.join(missing)}"]
    wanted["g_idx"] = ("I32",)
    faults = wrong_types(parts, wanted)
    if packing.method == "AWQ" and "g_idx" in parts:
        faults.append("g_idx, which AWQ does not have")
    shape = parts["qweight"].shape
    if len(shape) != 2 or 0 in shape:
        return [*faults, f"qweight has shape {list(shape)}, wanted two sizes"]
    rows, columns = _size(parts, packing)
    if columns % COLUMNS or rows % packing.per_word:
        return [*faults, f"{rows} rows of {columns}, wanted multiples of {packing.per_word} and {COLUMNS}"]
    group = packing.columns(columns)
    groups = -(-columns // group)
    shapes = {"qzeros": (groups, packing.words(rows)), "scales": (groups, rows), "g_idx": (columns,)}
    misshapen = {part: size for part, size in shapes.items() if part in parts and parts[part].shape != size}
    faults += [
        f"{part} has shape {list(parts[part].shape)}, wanted {list(size)} for {rows} rows of {columns} "
        f"in groups of {group}"
        for part, size in misshapen.items()
    ]
    if "g_idx" in parts and not faults and not in_order(parts["g_idx"], group):
        faults.append(
            "columns are grouped in the order of their activations (g_idx), which llmc cannot keep; "
            "quantize with desc_act false or static_groups true, or use the unquantized model and --quant"
        )
    return faults


def in_order(g_idx: Tensor, group: int) -> bool:
    """Whether the groups of columns, int32 (K,), are k // group."""
    return np.array_equal(_bytes(g_idx).view("<i4"), np.arange(g_idx.shape[0]) // group)


def _tensor(name: str, parts: Parts, packing: WordPacking) -> WordTensor:
    words, zeros, scales = (parts[part] for part in PARTS[:3])
    rows, columns = _size(parts, packing)
    return WordTensor(
        name, (rows, columns), f"{packing.method}{packing.bits}", words.offset,
        words.nbytes + zeros.nbytes + scales.nbytes, words.file,
        words=words, zeros=zeros, scales=scales, packing=packing, bits=packing.bits, group=packing.columns(columns),
    )  # fmt: skip


def zero_biases(found: Mapping[str, Tensor], wanted: set[str]) -> set[str]:
    """Biases that a quantizer saved beside layers that have none: ignorable if they are all zero."""
    stems = [name.removesuffix(".weight") for name, tensor in found.items() if isinstance(tensor, WordTensor)]
    extra = {f"{stem}.bias" for stem in stems} & set(found) - wanted
    return {name for name in extra if found[name].readable and not found[name].read().any()}
