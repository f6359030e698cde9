"""Linear layers of AWQ and GPTQ folders: three or four tensors stand for one 4-bit matrix of ours, (N, K) = (out, in).

    w[n, k] = (code[k, n] - zero[k // group, n]) * scale[k // group, n]

int32 words hold eight codes or zeros, the first in the lowest bits:

- GPTQ: qweight (K / 8, N), a word for eight neighbours along K; qzeros (groups, N / 8), a word for eight along N,
  less one in the first format. https://github.com/AutoGPTQ/AutoGPTQ (nn_modules/qlinear/qlinear_cuda.py, `pack`)
- AWQ "gemm": qweight (K, N / 8) and qzeros (groups, N / 8), a word for eight along N, in the order of `AWQ_ORDER`.
  https://github.com/casper-hansen/AutoAWQ (modules/linear/gemm.py, `from_linear`)

scales is (groups, N). GPTQ's g_idx (K,) is the group of every column; only k // group can be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import Quantized, ceil_to
from llmc.frontends.binding import group_names
from llmc.frontends.folded_tensor import FoldedTensor, misfits
from llmc.frontends.hf.quantization import GROUP, KEY, Packing
from llmc.frontends.tensor import Floats, Tensor, decode_values

U8 = NDArray[np.uint8]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the place of a word's i-th code among its eight columns
PER_WORD = 8  # codes
PARTS = ("qweight", "qzeros", "scales", "g_idx")
SCALES = ("F16", "BF16", "F32")
SYMMETRIC_ZERO = 8
CHUNK = 1 << 22  # codes unpacked at a time: bounds what is in memory besides the result


@dataclass(frozen=True, kw_only=True)
class Int4Tensor(FoldedTensor):
    """A matrix in the tensors `words` (qweight), `zeros` (qzeros) and `scales`, which `fold` has checked.

    `shape` is ours; `stored` is "AWQ4" or "GPTQ4"; `offset` and `file` are those of `words`.
    """

    words: Tensor
    zeros: Tensor
    scales: Tensor
    packing: Packing

    @property
    def turned(self) -> bool:
        """Always: quantizers turn what lies (in, out), as GPT-2's does, before they pack it."""
        return True

    @property
    def kept(self) -> str | None:
        """A format with blocks of 64 columns where groups and rows are made of such, else of 32."""
        return f"int4_b{self._block}"

    @property
    def _block(self) -> int:
        return 64 if self._group % 64 == 0 and self.shape[1] % 64 == 0 else GROUP

    @property
    def _group(self) -> int:
        return self.packing.columns(self.shape[1])

    def _rows(self, start: int, stop: int) -> Floats:
        values = np.empty((stop - start, self.shape[1]), np.float32)
        for at, end in self._pieces(start, stop):
            part = values[at - start : end - start]
            part[:] = self._codes(at, end)
            part -= self._by_column(self._zeros(at, end).astype(np.float32))
            part *= self._by_column(self._scales(at, end))
        return values

    def _blocks(self) -> Quantized:
        rows, columns = self.shape
        width = ceil_to(columns, 64)
        codes = np.zeros((rows, width), np.uint8)
        tables = {name: np.zeros((rows, width // self._block), np.float16) for name in ("scale", "zero")}
        used = columns // self._block
        for start, stop in self._pieces(0, rows):
            codes[start:stop, :columns] = self._codes(start, stop)
            scale = self._half(self._scales(start, stop))
            for name, values in (("scale", scale), ("zero", self._zeros(start, stop))):
                repeated = np.repeat(values, self._group // self._block, axis=1)
                tables[name][start:stop, :used] = repeated[:, :used]
        return Quantized(codes, {**tables})

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of rows that are unpacked at once."""
        step = ceil_to(max(1, CHUNK // self.shape[1]), PER_WORD)
        return [(at, min(at + step, stop)) for at in range(start, stop, step)]

    def _by_column(self, values: Floats) -> Floats:
        """(rows, groups) -> (rows, K)."""
        return np.repeat(values, self._group, axis=1)[:, : self.shape[1]]

    def _codes(self, start: int, stop: int) -> U8:
        """(rows, K), 0 to 15."""
        if self.packing.method == "AWQ":
            return self._along_rows(self.words, start, stop).T
        words = _bytes(self.words).view("<u4").reshape(self.words.shape)[:, start:stop]
        return _nibbles(np.ascontiguousarray(words.T).view(np.uint8))

    def _zeros(self, start: int, stop: int) -> U8:
        """(rows, groups). Raises SourceError for zeros that contradict the configuration or mean two things."""
        zeros = self._along_rows(self.zeros, start, stop).T + np.uint8(self.packing.zero_shift)
        if self.packing.symmetric and (zeros != SYMMETRIC_ZERO).any():
            other = int(zeros[zeros != SYMMETRIC_ZERO][0])
            raise SourceError(
                f"{self.file.name}: {self.zeros.name} has a zero point of {other}, wanted {SYMMETRIC_ZERO} since "
                f"{KEY}.sym is true; correct sym, or checkpoint_format (gptq stores zero points less one, gptq_v2 "
                "as they are)"
            )
        if (zeros > 15).any():
            raise SourceError(
                f"{self.file.name}: {self.zeros.name} has zero points stored as 15, less one, which some readers take "
                "for 16 and some for 0; convert the model to checkpoint_format gptq_v2"
            )
        return zeros

    def _along_rows(self, packed: Tensor, start: int, stop: int) -> U8:
        """(R, N / 8) words that each hold eight of our rows -> (R, rows)."""
        count, width = packed.shape
        first = start // PER_WORD
        words = _bytes(packed).reshape(count, width, 4)[:, first : -(-stop // PER_WORD)]
        values = _nibbles(np.ascontiguousarray(words).reshape(count, -1))
        if self.packing.method == "AWQ":
            values = values.reshape(count, -1, PER_WORD)[:, :, np.argsort(AWQ_ORDER)].reshape(count, -1)
        return values[:, start - PER_WORD * first : stop - PER_WORD * first]

    def _scales(self, start: int, stop: int) -> Floats:
        """(rows, groups). Raises SourceError for NaN or infinity."""
        groups, rows = self.scales.shape
        raw = _bytes(self.scales).reshape(groups, rows, -1)[:, start:stop]
        values = decode_values(np.ascontiguousarray(raw).reshape(groups, -1), self.scales.stored)
        if not np.isfinite(values).all():
            raise self._damaged()
        return values.T

    def _half(self, scales: Floats) -> NDArray[np.float16]:
        with np.errstate(over="ignore"):
            half = scales.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), scales):
            raise SourceError(
                f"{self.file.name}: {self.scales.name} is stored as {self.scales.stored} and has scales that float16 "
                "cannot hold, so the weights cannot be kept as they are; quantize them again with --quant"
            )
        return half


def _bytes(tensor: Tensor) -> U8:
    return tensor.raw_rows(0, tensor.shape[0] if len(tensor.shape) > 1 else 1).reshape(-1)


def _nibbles(raw: U8) -> U8:
    """(R, bytes) -> (R, 2 * bytes), the lower half of a byte first."""
    return np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=2).reshape(len(raw), -1)


def fold(found: Mapping[str, Tensor], packing: Packing | None, where: str) -> dict[str, Tensor]:
    """The file's tensors, with one Int4Tensor "a.b.weight" in place of a.b.qweight, a.b.qzeros, a.b.scales, a.b.g_idx.

    Raises SourceError listing every layer whose parts are missing, of the wrong type or shape, or in act-order.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    result = {}
    for name, tensor in found.items():
        stem, _, part = name.rpartition(".")
        if stem and part in PARTS:
            layers.setdefault(stem, {})[part] = tensor
        else:
            result[name] = tensor
    if packing is None:
        if quantized := [f"{stem}.qweight" for stem, parts in layers.items() if "qweight" in parts]:
            raise SourceError(
                f"{where}: {group_names(quantized)} are quantized, but config.json has no {KEY}; "
                "put there what quantize_config.json or quant_config.json says, and quant_method"
            )
        return dict(found)
    if not layers:
        raise SourceError(f"{where}: config.json has {KEY}, but no tensor is called qweight; fetch the whole model")
    faults: dict[str, list[str]] = {}
    for stem, parts in layers.items():
        name = f"{stem}.weight"
        problems = _part_faults(parts, packing)
        if name in result:
            problems.append("stored both as it is and quantized")
        for problem in problems:
            faults.setdefault(problem, []).append(name)
        if not problems:
            result[name] = _tensor(name, parts, packing)
    if faults:
        raise misfits(where, faults)
    return result


def _size(parts: Mapping[str, Tensor], packing: Packing) -> tuple[int, int]:
    """(N, K) that qweight is for."""
    high, wide = parts["qweight"].shape
    return (wide, PER_WORD * high) if packing.method == "GPTQ" else (PER_WORD * wide, high)


def _part_faults(parts: Mapping[str, Tensor], packing: Packing) -> list[str]:
    """What is wrong with the tensors of one layer."""
    wanted = {"qweight": ("I32",), "qzeros": ("I32",), "scales": SCALES}
    if packing.act_order:
        wanted["g_idx"] = ("I32",)
    if missing := [part for part in wanted if part not in parts]:
        return [f"missing {', '.join(missing)}"]
    wanted["g_idx"] = ("I32",)
    faults = [
        f"{part} is stored as {tensor.stored}, wanted {' or '.join(wanted[part])}"
        for part, tensor in parts.items()
        if tensor.stored not in wanted[part]
    ]
    if packing.method == "AWQ" and "g_idx" in parts:
        faults.append("g_idx, which AWQ does not have")
    shape = parts["qweight"].shape
    if len(shape) != 2 or 0 in shape:
        return [*faults, f"qweight has shape {list(shape)}, wanted two sizes"]
    rows, columns = _size(parts, packing)
    if columns % GROUP or rows % PER_WORD:
        return [*faults, f"{rows} rows of {columns}, wanted multiples of {PER_WORD} and {GROUP}"]
    group = packing.columns(columns)
    groups = -(-columns // group)
    shapes = {"qzeros": (groups, rows // PER_WORD), "scales": (groups, rows), "g_idx": (columns,)}
    misshapen = {part: size for part, size in shapes.items() if part in parts and parts[part].shape != size}
    faults += [
        f"{part} has shape {list(parts[part].shape)}, wanted {list(size)} for {rows} rows of {columns} "
        f"in groups of {group}"
        for part, size in misshapen.items()
    ]
    if "g_idx" in parts and not faults and not _in_order(parts["g_idx"], group):
        faults.append(
            "columns are grouped in the order of their activations (g_idx), which llmc cannot keep; "
            "quantize with desc_act false or static_groups true, or use the unquantized model and --quant"
        )
    return faults


def _in_order(g_idx: Tensor, group: int) -> bool:
    return np.array_equal(_bytes(g_idx).view("<i4"), np.arange(g_idx.shape[0]) // group)


def _tensor(name: str, parts: Mapping[str, Tensor], packing: Packing) -> Int4Tensor:
    words, zeros, scales = (parts[part] for part in PARTS[:3])
    return Int4Tensor(
        name, _size(parts, packing), f"{packing.method}4", words.offset, words.nbytes + zeros.nbytes + scales.nbytes,
        words.file, words=words, zeros=zeros, scales=scales, packing=packing,
    )  # fmt: skip


def zero_biases(found: Mapping[str, Tensor], wanted: set[str]) -> set[str]:
    """Biases that a quantizer saved beside layers that have none: ignorable if they are all zero."""
    stems = [name.removesuffix(".weight") for name, tensor in found.items() if isinstance(tensor, Int4Tensor)]
    extra = {f"{stem}.bias" for stem in stems} & set(found) - wanted
    return {name for name in extra if found[name].readable and not found[name].read().any()}
