"""Matrices of experts in the file's tensors, as one matrix: an expert's rows follow those of the expert before it.

The file has a tensor for each expert (a name with "{expert}"), or one of three dimensions for all: (experts, out, in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmc.compiler.errors import SpecError
from llmc.compiler.formats import Quantized, join
from llmc.compiler.spec.sources import EXPERT, HEAD, Source
from llmc.frontends.files.mapped_file import MappedFile
from llmc.frontends.tensor import Floats, Tensor
from llmc.frontends.tensor_view import RowsView, TensorView, TransposedView, flat


@dataclass(frozen=True, kw_only=True)
class StackedView(TensorView):
    """`parts`, matrices of one shape, one under another; `viewed` is the first."""

    parts: tuple[Tensor, ...]

    @property
    def readable(self) -> bool:
        """Whether all are."""
        return all(part.readable for part in self.parts)

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """Those of all parts."""
        return tuple(file for part in self.parts for file in part.files)

    @property
    def kept(self) -> str | None:
        """The format that keeps every part, if it is the same."""
        kinds = {part.kept for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else None

    def read_quantized(self) -> Quantized:
        """The codes and scales of all parts."""
        return join([part.read_quantized() for part in self.parts])

    def _taken(self, start: int, stop: int) -> Floats:
        rows = self.parts[0].shape[0]
        values = np.empty((stop - start, self.shape[1]), np.float32)
        for number in range(start // rows, -(-stop // rows)):
            first, last = max(start, number * rows), min(stop, (number + 1) * rows)
            part = self.parts[number].read_rows(first - number * rows, last - number * rows)
            values[first - start : last - start] = part
        return values


@dataclass(frozen=True, kw_only=True)
class MergedView(TensorView):
    """`viewed` is (E, N, K), this is (E * N, K)."""

    def _taken(self, start: int, stop: int) -> Floats:
        rows = self.viewed.shape[1]
        first = start // rows
        whole = self.viewed.read_rows(first, -(-stop // rows))
        return whole.reshape(-1, self.shape[1])[start - first * rows : stop - first * rows]


def names_of(source: Source, count: int) -> list[str]:
    """The tensors of the file that a source reads."""
    mark = next((mark for mark in (EXPERT, HEAD) if mark in source.name), None)
    return [source.name.replace(mark, str(n)) for n in range(count)] if mark else [source.name]


def gather(source: Source, found: Mapping[str, Tensor], count: int) -> tuple[Tensor | None, Source]:
    """The tensor that a source of experts reads, None when one of them is not there; and the steps that are left.

    Raises SpecError when the file's tensors are not those of `count` experts.
    """
    parts = [found[name] for name in names_of(source, count) if name in found]
    if EXPERT in source.name:
        if len(parts) < count:
            return None, source
        if len({part.shape for part in parts}) > 1 or len(parts[0].shape) != 2:
            raise SpecError(f"the experts have shapes {sorted({part.shape for part in parts})}, wanted one of matrices")
        if not source.transposed or all(part.turned for part in parts):
            return _stacked(parts), replace(source, transposed=False)
        return _stacked([_turned(part) for part in parts]), replace(source, transposed=False)
    under = len(parts[0].shape) == 2 if parts else False  # one expert under another already
    if not parts or len(parts[0].shape) != 3 and not (under and source.transposed):
        return (parts[0] if parts else None), source
    if parts[0].shape[0] % count if under else parts[0].shape[0] != count:
        raise SpecError(f"it has {parts[0].shape[0]} {'rows' if under else 'matrices'}, wanted {count} experts")
    merged = parts[0] if under else _merged(parts[0])
    if not source.transposed or parts[0].turned:
        return merged, replace(source, transposed=False)
    rows = merged.shape[0] // count
    slices = [
        RowsView.of(merged, (rows, merged.shape[1]), start=number * rows, run=rows, stride=rows)
        for number in range(count)
    ]
    return _stacked([_turned(part) for part in slices]), replace(source, transposed=False)


def gather_vectors(source: Source, found: Mapping[str, Tensor], count: int) -> Tensor | None:
    """Vectors of all experts or heads, one after another; None when one of them is not there."""
    names = names_of(source, count)
    parts = [found[name] for name in names if name in found]
    if len(parts) < len(names):
        return None
    if names == [source.name]:
        return flat(parts[0])
    if len({part.shape for part in parts}) > 1 or len(parts[0].shape) != 1:
        raise SpecError(f"they have shapes {sorted({part.shape for part in parts})}, wanted one of vectors")
    rows = [replace(part, shape=(1, *part.shape)) for part in parts]
    return flat(_stacked(rows))


def _stacked(parts: list[Tensor]) -> Tensor:
    first = parts[0]
    rows, columns = first.shape
    return StackedView(
        first.name, (rows * len(parts), columns), first.stored, first.offset, sum(part.nbytes for part in parts),
        first.file, viewed=first, parts=tuple(parts),
    )  # fmt: skip


def _turned(part: Tensor) -> Tensor:
    return TransposedView.of(part, part.shape[::-1])


def _merged(tensor: Tensor) -> Tensor:
    count, rows, columns = tensor.shape
    if tensor.in_rows:  # one row after another in the file, whatever the number of dimensions
        return replace(tensor, shape=(count * rows, columns))
    return MergedView.of(tensor, (count * rows, columns))
