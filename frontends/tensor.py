"""One weight tensor on disk: its shape, how it is stored, and its values as float32 when asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import Quantized
from llmc.compiler.formats.plain import pieces
from llmc.frontends.files.mapped_file import MappedFile
from llmc.frontends.gguf.blocks import kept_format, read_blocks

Floats = NDArray[np.float32]

# Stored type -> (values in a block, bytes of a block). Blocks lie along the last dimension.
# https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
READABLE: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "IQ4_XS": (256, 136),
    "IQ3_S": (256, 110),
    "IQ3_XXS": (256, 98),
    "IQ2_S": (256, 82),
    "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66),
    "IQ1_M": (256, 56),
    "IQ1_S": (256, 50),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor in a mapped file. Nothing is read before `read`, and nothing is kept after it."""

    name: str  # in the file
    shape: tuple[int, ...]  # (N, K) for a linear layer, (N,) for a norm or a bias
    stored: str  # a key of READABLE, or a type that `read` refuses
    offset: int  # bytes from the start of the file
    nbytes: int  # on disk
    file: MappedFile
    plus: float = 0.0  # added to every value: 1 for the norms of files that store their weights less one

    @property
    def readable(self) -> bool:
        """Whether `read` knows how the values are stored."""
        return self.stored in READABLE

    @property
    def turned(self) -> bool:
        """Whether a matrix is (out, in) already where the spec says that the file's are (in, out)."""
        return False

    @property
    def in_rows(self) -> bool:
        """Whether it is one row after another in the file, so that its first dimensions may become one."""
        return type(self) is Tensor

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """Every file that has a part of the tensor."""
        return (self.file,)

    @property
    def kept(self) -> str | None:
        """The block format (a key of FORMATS) that holds the stored numbers without loss; None for floats."""
        return kept_format(self.stored) if len(self.shape) == 2 and not self.plus else None

    def read_quantized(self) -> Quantized:
        """The stored codes and scales, for the format `kept`: dequantized they are `read`, bit for bit.

        Columns are padded to whole records with blocks that decode to 0. Raises SourceError where nothing can be
        kept, and for NaN or infinity.
        """
        quantized = self._blocks()
        if not all(np.isfinite(table).all() for table in quantized.tables.values()):
            raise self._damaged()
        return quantized

    def read(self) -> Floats:
        """All values as a new float32 array of `shape`.

        Raises SourceError for a type that is not in READABLE, and for NaN or infinity.
        """
        return self._rows(0, self._row_count).reshape(self.shape)

    def read_rows(self, start: int, stop: int) -> Floats:
        """Rows `start` to `stop` of the first dimension, as `read`: for streaming a large table."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise SourceError(f"{self.file.name}: {self.name}: rows {start} to {stop} of {self.shape[0]}")
        if len(self.shape) == 1:
            return self.read()[start:stop]
        return self._rows(start, stop).reshape(stop - start, *self.shape[1:])

    @property
    def by_rows(self) -> bool:
        """Whether to read some rows takes their part of the work of reading all."""
        return type(self) is Tensor

    @property
    def _row_count(self) -> int:
        """A vector is one row."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def _rows(self, start: int, stop: int) -> Floats:
        if self.stored not in READABLE:
            raise SourceError(
                f"{self.file.name}: {self.name} is stored as {self.stored}, wanted one of "
                f"{', '.join(READABLE)}; convert the model"
            )
        raw = self.raw_rows(start, stop)
        values = np.empty((stop - start, math.prod(self.shape) // max(1, self._row_count)), np.float32)
        for piece in pieces(*values.shape):
            values[piece] = decode_values(raw[piece], self.stored)
            if not np.isfinite(values[piece]).all():
                raise self._damaged()
            if self.plus:
                values[piece] += np.float32(self.plus)
        return values

    def _blocks(self) -> Quantized:
        if self.kept is None:
            raise SourceError(f"{self.file.name}: {self.name} is stored as {self.stored}, which no block format keeps")
        raw = self.raw_rows(0, self.shape[0])
        return read_blocks(raw.reshape(len(raw), -1, READABLE[self.stored][1]), self.stored)

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows `start` to `stop`, as they are stored: (rows, bytes of a row). A vector is one row."""
        row_bytes = self.nbytes // max(1, self._row_count)
        raw = self.file.bytes_at(self.offset + start * row_bytes, (stop - start) * row_bytes)
        return raw.reshape(stop - start, row_bytes)

    def _damaged(self) -> SourceError:
        return SourceError(
            f"{self.file.name}: {self.name} has NaN or infinite values; the weights are damaged, fetch them again"
        )


def decode_values(raw: NDArray[np.uint8], stored: str) -> Floats:
    """Raw bytes (N, row bytes) -> float32 (N, K)."""
    if stored == "F32":
        return raw.view("<f4").astype(np.float32)
    if stored == "F16":
        return raw.view("<f2").astype(np.float32)
    if stored == "BF16":  # the upper half of a float32
        bits = raw.view("<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return np.asarray(bits.view(np.float32))
    from gguf import GGMLQuantizationType, quants  # slow to import, and only block formats need it

    # Damaged scales can be NaN or overflow: the caller looks at the values, so NumPy need not warn.
    with np.errstate(all="ignore"):
        values = quants.dequantize(raw, GGMLQuantizationType[stored])
    return np.ascontiguousarray(values, dtype=np.float32)
