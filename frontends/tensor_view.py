"""Tensors of ours that are part of a file's tensor, or lie turned in it: read from it when asked, never copied before.

Rows are independent in every block format, so a selection of rows keeps the stored codes; a turned matrix does not,
for its blocks lie along what are columns there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import Quantized
from llmc.compiler.spec.sources import Layout, Source, before_turning
from llmc.frontends.files.mapped_file import MappedFile
from llmc.frontends.tensor import Floats, Tensor

SHORTEST = 1e-12  # length that a shorter row is taken for when it is normalized: torch.nn.functional.normalize's
CHUNK = 1 << 22  # values of a turned matrix that are read at a time: bounds what is in memory besides the result


@dataclass(frozen=True, kw_only=True)
class TensorView(Tensor):
    """A tensor read through `viewed`, a tensor of the file or another view.

    `name`, `stored`, `offset`, `nbytes` and `file` are those of `viewed`; `plus` stays 0, for what `viewed` adds is
    in what it reads.
    """

    viewed: Tensor

    @classmethod
    def of(cls, viewed: Tensor, shape: tuple[int, ...], **places: Any) -> TensorView:
        """A view of this shape; `places` are the fields of its class."""
        where = viewed.name, shape, viewed.stored, viewed.offset, viewed.nbytes, viewed.file
        return cls(*where, viewed=viewed, **places)

    @property
    def readable(self) -> bool:
        """Whether the file's tensor is."""
        return self.viewed.readable

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """Every file that has a part of the file's tensor."""
        return self.viewed.files

    @property
    def kept(self) -> str | None:
        """None: a view keeps nothing unless its class says what."""
        return None

    def _rows(self, start: int, stop: int) -> Floats:
        """Rows of a matrix, or (1, N) for a vector, as Tensor asks for them."""
        return self._taken(start, stop) if len(self.shape) > 1 else self._taken(0, self.shape[0])[None]

    def _taken(self, start: int, stop: int) -> Floats:
        """Entries `start` to `stop` of the first dimension."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RowsView(TensorView):
    """Rows `start + stride * (i // run) + i % run` of `viewed`, for i from 0 on; entries, where it is a vector."""

    start: int
    run: int
    stride: int

    @property
    def by_rows(self) -> bool:
        """As the file's tensor."""
        return self.viewed.by_rows

    @property
    def kept(self) -> str | None:
        """The format that keeps the file's tensor."""
        return self.viewed.kept

    def read_quantized(self) -> Quantized:
        """The codes and scales of these rows; those of the whole tensor are in memory meanwhile."""
        whole = self.viewed.read_quantized()
        places = self._places(0, self.shape[0])
        return Quantized(whole.codes[places], {name: table[places] for name, table in whole.tables.items()})

    def _taken(self, start: int, stop: int) -> Floats:
        if start == stop:
            return np.empty((0, *self.shape[1:]), np.float32)
        places = self._places(start, stop)
        first, last = int(places[0]), int(places[-1])
        span = self.viewed.read_rows(first, last + 1)
        return span if len(span) == len(places) else span[places - first]

    def _places(self, start: int, stop: int) -> NDArray[np.int64]:
        """(stop - start,), ascending."""
        rows = np.arange(start, stop, dtype=np.int64)
        return self.start + self.stride * (rows // self.run) + rows % self.run


@dataclass(frozen=True, kw_only=True)
class VectorView(TensorView):
    """Row `row` of `viewed`, a matrix."""

    row: int

    def _taken(self, start: int, stop: int) -> Floats:
        return self.viewed.read_rows(self.row, self.row + 1)[0, start:stop]


@dataclass(frozen=True, kw_only=True)
class TransposedView(TensorView):
    """`viewed` is (K, N), this is (N, K)."""

    def _taken(self, start: int, stop: int) -> Floats:
        columns = self.shape[1]
        values = np.empty((stop - start, columns), np.float32)
        step = max(1, CHUNK // max(1, self.shape[0]))
        for at in range(0, columns, step):
            end = min(at + step, columns)
            values[:, at:end] = self.viewed.read_rows(at, end)[:, start:stop].T
        return values


@dataclass(frozen=True, kw_only=True)
class FlatView(TensorView):
    """The rows of `viewed`, one after another."""

    def _taken(self, start: int, stop: int) -> Floats:
        return self.viewed.read().reshape(-1)[start:stop]


@dataclass(frozen=True, kw_only=True)
class SqueezedView(TensorView):
    """`viewed` without its dimensions of 1."""

    def _taken(self, start: int, stop: int) -> Floats:
        return self.viewed.read().reshape(self.shape)[start:stop]


@dataclass(frozen=True, kw_only=True)
class NormalizedView(TensorView):
    """The rows of `viewed`, each divided by its length."""

    @property
    def by_rows(self) -> bool:
        """As the file's tensor."""
        return self.viewed.by_rows

    def _taken(self, start: int, stop: int) -> Floats:
        rows = self.viewed.read_rows(start, stop)
        lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(1, keepdims=True))
        return np.asarray(rows / np.maximum(lengths, SHORTEST), np.float32)


@dataclass(frozen=True, kw_only=True)
class TurnedView(TensorView):
    """`viewed` is `groups` matrices (N, K) one under another, this is the same of (K, N)."""

    groups: int

    def _taken(self, start: int, stop: int) -> Floats:
        rows, theirs = self.shape[0] // self.groups, self.viewed.shape[0] // self.groups
        if start == stop:
            return np.empty((0, self.shape[1]), np.float32)
        parts = []
        for group in range(start // rows, (stop - 1) // rows + 1):
            matrix = self.viewed.read_rows(group * theirs, (group + 1) * theirs).T
            parts.append(matrix[max(0, start - group * rows) : stop - group * rows])
        return np.ascontiguousarray(np.concatenate(parts))


def flat(tensor: Tensor) -> Tensor:
    """The tensor as a vector."""
    return FlatView.of(tensor, (math.prod(tensor.shape),))


def squeezed(tensor: Tensor) -> Tensor:
    """The tensor without dimensions of 1."""
    return SqueezedView.of(tensor, tuple(size for size in tensor.shape if size != 1))


def view(tensor: Tensor, source: Source, shape: tuple[int, ...], place: Layout, groups: int = 1) -> Tensor:
    """The tensor of `shape` that `source` makes of the file's, which has `place.shape`. `groups`: KV heads."""
    read = before_turning(shape, source, groups)
    if source.transposed:
        tensor = TransposedView.of(tensor, tensor.shape[::-1])
    if source.row:
        return VectorView.of(tensor, shape, row=place.start)
    if tensor.shape != read:
        tensor = RowsView.of(tensor, read, start=place.start, run=place.run, stride=place.stride)
    if source.turned:
        tensor = TurnedView.of(tensor, shape, groups=groups)
    return NormalizedView.of(tensor, shape) if source.normalized else tensor
