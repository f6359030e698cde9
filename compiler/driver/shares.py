"""A device's shares of a model's weights as its artifact stores them (docs/partition.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.driver.sources import F32, ModelSources, Run
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, BlockFormat, Format, Quantized, encode

if TYPE_CHECKING:
    from llmc.passes.partition.part import WeightShare
    from llmc.passes.partition.shares import Ranges


@dataclass(frozen=True)
class ShareSources:
    """`Sources` of compiler/evaluate.py: a device's shares of a model's weights."""

    whole: ModelSources
    shares: dict[str, WeightShare]

    def read(self, name: str) -> NDArray[np.float32]:
        """The share's values."""
        return self.shares[name].of(self.whole.read(name))

    def pack(self, format: str, names: tuple[str, ...]) -> NDArray[Any]:
        """The packed shares of matrices, one under another: of block formats with the codes that the whole would have.

        Where a share does not begin and end with blocks of the whole, it is quantized as a matrix of its own.
        """
        kind, shares = FORMATS[format], [self.shares[name] for name in names]
        if all(share.is_whole for share in shares):
            return self.whole.pack(format, names)
        if self.whole.in_pieces(kind, names):
            ranges = _columns(shares)
            importance = self.whole.importance(names[0])
            pack = partial(_packed_columns, kind, ranges or ((0, shares[0].whole[1]),), importance)
            return self.whole.packed_in_pieces(kind, _runs(shares), shares[0].shape[1], pack)
        rows, columns = sum(share.shape[0] for share in shares), shares[0].shape[1]
        if isinstance(kind, BlockFormat):
            whole = self.whole.quantized(kind, names)
            quantized = _taken(whole, kind, _rows(shares), _columns(shares), shares[0].whole[1])
            if quantized is not None:
                self.whole.count(rows * columns)
                return encode(kind, quantized, rows, columns)
        return kind.pack(np.concatenate([self.read(name) for name in names]))


def _runs(shares: list[WeightShare]) -> list[Run]:
    """The rows of the shares."""
    return [
        (share.name, begin, end)
        for share in shares
        for begin, end in (share.ranges if share.axis == 0 else ((0, share.whole[0]),))
    ]


def _rows(shares: list[WeightShare]) -> NDArray[np.int64]:
    """The rows of the shares in the matrices one under another."""
    first, found = 0, []
    for share in shares:
        found += [np.arange(first + begin, first + end) for _, begin, end in _runs([share])]
        first += share.whole[0]
    return np.concatenate(found)


def _packed_columns(kind: Format, ranges: Ranges, importance: F32 | None, values: F32) -> NDArray[Any]:
    """Columns of rows packed, with the codes that the rows as a whole have, if these can be cut so."""
    rows, columns = values.shape
    taken = np.concatenate([np.arange(begin, end) for begin, end in ranges])
    if not isinstance(kind, BlockFormat):
        return kind.pack(values[:, taken])
    quantized = _taken(kind.quantize(values, importance), kind, np.arange(rows), ranges, columns)
    if quantized is not None:
        return encode(kind, quantized, rows, len(taken))
    return kind.pack(values[:, taken], None if importance is None else importance[taken])


def _columns(shares: list[WeightShare]) -> Ranges | None:
    """The columns that shares of a stack have; None for all."""
    found = {share.ranges if share.axis == 1 else None for share in shares}
    if len(found) > 1:
        raise LlmcError(f"{shares[0].name}: matrices one under another whose columns are not the same")
    return found.pop()


def _taken(
    whole: Quantized, kind: BlockFormat, rows: NDArray[np.int64], ranges: Ranges | None, columns: int
) -> Quantized | None:
    """Rows and columns of a quantized matrix of so many columns; None where they would cut its records."""
    codes, tables = whole.codes[rows], {name: table[rows] for name, table in whole.tables.items()}
    if ranges is None or ranges == ((0, columns),):
        return Quantized(codes, tables)
    unit = kind.columns
    if any(begin % unit or (end % unit and end != columns) for begin, end in ranges):
        return None
    records = np.concatenate([np.arange(begin // unit, -(-end // unit)) for begin, end in ranges])

    def picked(array: NDArray[Any]) -> NDArray[Any]:
        if array.ndim == 1:  # scales of rows: scales of blocks are relative to them
            return array
        by_record = array.reshape(len(array), -(-columns // unit), -1)
        return np.ascontiguousarray(by_record[:, records].reshape(len(array), -1))

    return Quantized(picked(codes), {name: picked(table) for name, table in tables.items()})
