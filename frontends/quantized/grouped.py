"""A matrix of whole numbers where so many columns of a row share a scale, and perhaps an offset.

    w[n, k] = scale[n, k // group] * (code[n, k] - zero)  or  scale[n, k // group] * code[n, k] + minimum[n, k // group]

Subclasses say where codes, scales and offsets are. A block format of ours keeps them, where it has codes of as many
bits, an offset of the same kind, and blocks that groups and rows are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import FORMATS, BlockFormat, Quantized, ceil_to
from llmc.frontends.quantized.folded_tensor import FoldedTensor
from llmc.frontends.tensor import Floats, Tensor, decode_values

U8 = NDArray[np.uint8]
Half = NDArray[np.float16]
Offset = Literal["zero", "minimum"] | int  # stored for every group, or the code that stands for 0

FLOATS = ("F16", "BF16", "F32")  # that scales and minima are stored as
CHUNK = 1 << 22  # codes unpacked at a time: bounds what is in memory besides the result
ROWS = 32  # pieces begin at a multiple: where numbers of any number of bits begin a word
NEAR = 2.0**-11  # of the greatest scale of a matrix: how far float16 may be from another


@cache
def format_for(bits: int, offset: Offset, group: int, columns: int) -> BlockFormat | None:
    """The format with the widest blocks that keeps such a matrix; None where there is none.

    A whole number of scales is as good as stored: float16 has it, for it is a power of two.
    """
    fit = [
        format
        for format in FORMATS.values()
        if isinstance(format, BlockFormat)
        and (format.scale, format.values is None, sum(format.planes)) == ("f16", True, bits)
        and group % format.block == 0
        and columns % format.block == 0
    ]
    for kind in (offset, "minimum") if isinstance(offset, int) else (offset,):
        if found := [format for format in fit if format.offset == kind]:
            return max(found, key=lambda format: format.block)
    return None


@dataclass(frozen=True, kw_only=True)
class GroupedTensor(FoldedTensor):
    """A matrix (N, K) of codes of so many bits; `group` columns of a row share a scale, the last perhaps fewer."""

    bits: int
    group: int

    @property
    def zero_code(self) -> Offset:
        """What kind of offset there is."""
        raise NotImplementedError

    def _codes(self, start: int, stop: int) -> U8:
        """(rows, K)."""
        raise NotImplementedError

    def _scales(self, start: int, stop: int) -> Floats:
        """(rows, groups)."""
        raise NotImplementedError

    def _offsets(self, start: int, stop: int) -> Floats:
        """(rows, groups), where they are stored."""
        raise NotImplementedError

    def _check(self, start: int, stop: int) -> None:
        """Raises SourceError where what these rows have stored contradicts what the folder says of it."""

    @property
    def kept(self) -> str | None:
        """A format of the same codes; scales are float16 there, within `NEAR` of the greatest where they were not."""
        return self._format.name if self._format else None

    @property
    def _format(self) -> BlockFormat | None:
        return format_for(self.bits, self.zero_code, self.group, self.shape[1])

    def _rows(self, start: int, stop: int) -> Floats:
        values = np.empty((stop - start, self.shape[1]), np.float32)
        for at, end in self._pieces(start, stop):
            self._check(at, end)
            part = values[at - start : end - start]
            part[:] = self._codes(at, end)
            with np.errstate(all="ignore"):  # what overflows is refused below
                if isinstance(self.zero_code, int):
                    part -= np.float32(self.zero_code)
                elif self.zero_code == "zero":
                    part -= self._by_column(self._offsets(at, end))
                part *= self._by_column(self._scales(at, end))
                if self.zero_code == "minimum":
                    part += self._by_column(self._offsets(at, end))
            self._checked(part)
        return values

    def _blocks(self) -> Quantized:
        format = self._format
        assert format is not None
        rows, columns = self.shape
        width, used = ceil_to(columns, format.columns), columns // format.block
        codes = np.zeros((rows, width), np.uint8)
        tables = {"scale": np.zeros((rows, width // format.block), np.float32)}
        if not format.whole:
            tables[str(format.offset)] = np.zeros_like(tables["scale"])
        for start, stop in self._pieces(0, rows):
            self._check(start, stop)
            codes[start:stop, :columns] = self._codes(start, stop)
            scales = self._checked(self._scales(start, stop))
            found = {"scale": scales}
            if isinstance(self.zero_code, int):
                with np.errstate(over="ignore"):  # of scales that are too large for float16 themselves
                    found["minimum"] = scales * np.float32(-self.zero_code)
            else:
                found[self.zero_code] = self._checked(self._offsets(start, stop))
            for name, table in tables.items():
                table[start:stop, :used] = np.repeat(found[name], self.group // format.block, axis=1)[:, :used]
        return Quantized(codes, {name: self._half(table, name) for name, table in tables.items()})

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of rows that are unpacked at once."""
        step = ceil_to(max(1, CHUNK // self.shape[1]), ROWS)
        first = start // ROWS * ROWS
        return [(max(at, start), min(at + step, stop)) for at in range(first, stop, step) if start < stop]

    def _by_column(self, values: Floats) -> Floats:
        """(rows, groups) -> (rows, K)."""
        return np.repeat(values, self.group, axis=1)[:, : self.shape[1]]

    def _checked(self, values: Floats) -> Floats:
        if not np.isfinite(values).all():
            raise self._damaged()
        return values

    def _half(self, values: Floats, name: str) -> Half:
        """The table as float16. Raises SourceError where that is another table."""
        return half_of(values, f"{self.file.name}: {self.name}", name)


def half_of(values: Floats, where: str, name: str) -> Half:
    """A table of a matrix as float16. Raises SourceError where that is another one."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    far = np.abs(half.astype(np.float32) - values)
    if values.size and not far.max() <= NEAR * np.abs(values).max():
        raise SourceError(
            f"{where} has {name}s that float16 cannot hold, so the weights cannot be kept as they are; "
            "quantize them again with --quant"
        )
    return half


def floats_of(tensor: Tensor, start: int, stop: int) -> Floats:
    """Rows of a matrix of FLOATS, which may have numbers that are none."""
    return decode_values(np.ascontiguousarray(tensor.raw_rows(start, stop)), tensor.stored)
