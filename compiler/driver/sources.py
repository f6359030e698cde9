"""A model's weights as the artifact stores them: kept, calibrated, or packed as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.driver.equalize import Factors
from llmc.compiler.formats import FORMATS, BlockFormat, Format, Quantized, encode, join
from llmc.compiler.formats.plain import pieces, tiles_of
from llmc.passes.quantize.gptq import compensate
from llmc.runtime.loading.weights import aligned_empty

COMPENSATED_BITS = 6  # above, int8 activations lose more than weights do

F32 = NDArray[np.float32]
Gram = F32
Run = tuple[str, int, int]  # a weight, the first of some rows of it, and the one after the last
Pack = Callable[[NDArray[np.float32]], NDArray[Any]]  # rows -> packed ones

_PIECE = 1 << 20  # numbers of a matrix that are read at once: memory of 4 MB, which is used again
_LET_GO_BYTES = 32 << 20  # read between two times that memory of the model's files is given back


@dataclass
class ModelSources:
    """`Sources` of compiler/evaluate.py over an open model.

    `grams`: first weight of a matrix -> mean of x x^T of what it is multiplied with, (K, K), from calibration.
    `squares`: weight -> mean squares of that, (K,), which weigh errors of columns: the diagonals of `grams`, if any.
    `factors`: weight -> what it is multiplied with, so that x is divided; both others are those of x as it was.
    """

    model: Any
    grams: Mapping[str, Gram] = field(default_factory=dict)
    squares: Mapping[str, F32] = field(default_factory=dict)
    factors: Mapping[str, Factors] = field(default_factory=dict)
    _read: int = 0  # bytes since then

    def read(self, name: str) -> NDArray[np.float32]:
        """The values of one weight."""
        values: NDArray[np.float32] = self.model.tensors[name].read()
        self.count(values.nbytes)
        return self.factors[name].onto(values) if name in self.factors else values

    def stacked(self, names: tuple[str, ...]) -> NDArray[np.float32]:
        """Matrices one under another."""
        return np.concatenate([self.read(name) for name in names]) if len(names) > 1 else self.read(names[0])

    def unscaled(self, names: tuple[str, ...], values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What `stacked` makes these values of, (N, K)."""
        ends = np.cumsum([self.model.tensors[name].shape[0] for name in names])[:-1]
        parts = zip(names, np.split(values, ends), strict=True)
        return np.concatenate([self.factors.get(name, Factors()).off(part) for name, part in parts])

    def gram(self, name: str) -> Gram | None:
        """Of what a matrix is multiplied with, as it is divided; None without calibration."""
        gram, columns = self.grams.get(name), self.factors.get(name, Factors()).columns
        return gram if gram is None or columns is None else gram / columns / columns[:, None]

    def importance(self, name: str) -> F32 | None:
        """(K,) how much an error in a column of a matrix counts; None for all alike."""
        squares, columns = self.squares.get(name), self.factors.get(name, Factors()).columns
        return squares if squares is None or columns is None else squares / columns**2

    def quantized(self, format: BlockFormat, names: tuple[str, ...]) -> Quantized:
        """Codes and tables of matrices one under another."""
        tensors = [self.model.tensors[name] for name in names]
        if all(tensor.kept == format.name for tensor in tensors):
            return join([tensor.read_quantized() for tensor in tensors])
        gram = self.gram(names[0])
        if gram is not None and format.code_bits <= COMPENSATED_BITS:
            return compensate(self.stacked(names), format, gram)
        return format.quantize(self.stacked(names), self.importance(names[0]))

    def count(self, count: int) -> None:
        """So many bytes were read."""
        self._read += count
        if self._read >= _LET_GO_BYTES:
            self._read = 0
            self.model.let_go()

    def pack(self, format: str, names: tuple[str, ...]) -> NDArray[Any]:
        """The packed tensor of matrices one under another."""
        kind = FORMATS[format]
        if self.in_pieces(kind, names):
            runs = [(name, 0, self.model.tensors[name].shape[0]) for name in names]
            importance = self.importance(names[0])
            pack = partial(kind.pack, importance=importance) if isinstance(kind, BlockFormat) else kind.pack
            return self.packed_in_pieces(kind, runs, self.model.tensors[names[0]].shape[1], pack)
        if not isinstance(kind, BlockFormat):
            return kind.pack(self.stacked(names))
        quantized = self.quantized(kind, names)
        rows, columns = sum(self.model.tensors[n].shape[0] for n in names), self.model.tensors[names[0]].shape[1]
        self.count(rows * columns)
        return encode(kind, quantized, rows, columns)

    def in_pieces(self, kind: Format, names: tuple[str, ...]) -> bool:
        """Whether some rows can well be read and packed without the others, as where errors count alike."""
        tensors = [self.model.tensors[name] for name in names]
        return (
            self.grams.get(names[0]) is None
            and all(tensor.by_rows and len(tensor.shape) == 2 for tensor in tensors)
            and not all(tensor.kept == kind.name for tensor in tensors)
        )

    def packed_in_pieces(self, kind: Format, runs: Sequence[Run], columns: int, pack: Pack) -> NDArray[Any]:
        """Rows of `runs` one under another, of which `pack` makes packed ones of so many columns.

        Memory holds a few rows of the floats at a time; the bytes are those of all at once.
        """
        rows, width = sum(end - begin for _, begin, end in runs), self.model.tensors[runs[0][0]].shape[1]
        out = aligned_empty(kind.packed_shape(rows, columns), kind.dtype)
        for piece in pieces(rows, width, _PIECE):
            values = self._read_rows(runs, piece)
            out[tiles_of(piece)] = pack(values)
            self.count(values.nbytes)
        return out

    def _read_rows(self, runs: Sequence[Run], piece: slice) -> NDArray[np.float32]:
        """A piece of the rows of runs."""
        first, found = 0, []
        for name, begin, end in runs:
            low, high = max(piece.start - first, 0), min(piece.stop - first, end - begin)
            if low < high:
                values = self.model.tensors[name].read_rows(begin + low, begin + high)
                found.append(self.factors[name].onto(values, begin + low) if name in self.factors else values)
            first += end - begin
        return found[0] if len(found) == 1 else np.concatenate(found)
