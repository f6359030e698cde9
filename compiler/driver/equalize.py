"""Factors for columns of matrices with which rounding loses least, from what the columns are multiplied with.

Numbers that share a scale are all off by about as much, in proportion to the size of all: of W (N, K) with columns
times s by e, e^2 ~ sum_k w_k^2 s_k^2, of x over s likewise. Weights and what is rounded beside them both put a product
off by sum_k (a_k / s_k)^2 * sum_k (w_k s_k)^2, a_k^2 the mean square of x_k and w_k^2 that of the column, which is
least where s_k^2 = a_k / w_k (Cauchy-Schwarz). Then a column is as large as what it is multiplied with.
passes/quantize/equalize.py says which columns can be scaled, and what is divided.

How large x_k is may be the text's doing and not the model's, as with random weights, where scaling by it would do harm.
So texts are compared: of what columns differ by, only what texts have in common counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.passes.quantize.equalize import Group

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LEAST = 0.1  # of the usual size of x_k: a text may use what the sample did not
REACH = 32.0  # the greatest factor, and one over the least
COMPENSATED = 0.5  # of the exponent, where compensation shifts errors between columns by itself
_RUNS, _RUN = 16, 32  # rows of a matrix that its columns' sizes are taken from


@dataclass(frozen=True)
class Factors:
    """What a weight is multiplied with: rows (N,) and columns (K,); a vector has rows alone."""

    rows: F32 | None = None
    columns: F32 | None = None

    def onto(self, values: F32, start: int = 0) -> F32:
        """Rows from `start` on, (n, K) or (n,), in place."""
        if self.columns is not None:
            values *= self.columns
        if self.rows is not None:
            rows = self.rows[start : start + len(values)]
            values *= rows if values.ndim == 1 else rows[:, None]
        return values

    def off(self, values: F32) -> F32:
        """What `onto` would make these values of."""
        rows, columns = (None if each is None else np.reciprocal(each) for each in (self.rows, self.columns))
        return Factors(rows, columns).onto(values.copy())


def worth_scaling(groups: Iterable[Group], stays: Callable[[str], bool], rounded: Callable[[str], bool]) -> list[Group]:
    """Of groups, those with a matrix that is rounded and without weights that stay as they are, by their names."""
    return [group for group in groups if any(map(rounded, group.matrices)) and not any(map(stays, group.weights))]


def common(texts: Sequence[Mapping[str, F32]]) -> dict[str, F32]:
    """Matrix -> mean squares (K,) over several texts, drawn together by as much as these do not agree on.

    Without matrices that are multiplied with what is no number.
    """
    names = [name for name in texts[0] if all(np.isfinite(text[name]).all() for text in texts)]
    return {name: _agreed([_not_less(text[name].astype(np.float64)) for text in texts]) for name in names}


def _agreed(squares: list[F64]) -> F32:
    """Of what means differ by, the share that is no more than chance is between columns of each text alone."""
    mean, logs = np.log(np.mean(squares, axis=0)), np.log(squares)
    chance, spread = float(logs.var(0, ddof=1).mean()) / len(logs), float(mean.var())
    share = max(0.0, 1 - chance / spread) if spread > 0 else 0.0
    return np.exp(mean.mean() + share * (mean - mean.mean())).astype(np.float32)


def for_groups(squares: Mapping[str, F32], groups: Iterable[Group]) -> dict[str, F32]:
    """The squares, and those of matrices of experts: of all that others of a group are multiplied with."""
    found = dict(squares)
    for group in groups:
        known = [name for name in group.matrices if name in squares]
        found |= {name: squares[known[0]] for name in group.matrices if known and name not in squares}
    return found


def factors(model: Any, groups: Iterable[Group], squares: Mapping[str, F32], strength: float = 1) -> dict[str, Factors]:
    """Weight -> what it is multiplied with.

    `squares`: matrix -> mean squares (K,) of what its columns are multiplied with. `strength` 1 is what loses least by
    rounding each number for itself, 0 scales nothing.
    """
    known = [group for group in groups if group.matrices[0] in squares]
    return placed((group, _scales(model, group, squares[group.matrices[0]]) ** strength) for group in known)


def placed(scaled: Iterable[tuple[Group, F64]]) -> dict[str, Factors]:
    """Weight -> what it is multiplied with, of groups whose columns are multiplied with (F,), by what makes them."""
    found: dict[str, Factors] = {}
    for group, scales in scaled:
        columns, rows = scales[group.made_by].astype(np.float32), (1 / scales).astype(np.float32)
        for name in group.matrices:
            found[name] = Factors(found.get(name, Factors()).rows, columns)
        for name in (*group.vectors, *group.rows):
            found[name] = Factors(rows, found.get(name, Factors()).columns)
    return found


def _scales(model: Any, group: Group, square: F32) -> F64:
    """(F,) for what makes the columns: the square root of what these are multiplied with over their own size."""
    own = np.sum([_column_squares(model.tensors[name]) for name in group.matrices], axis=0)
    model.let_go()
    scales = np.sqrt(np.sqrt(_by_maker(group, square) / _by_maker(group, own)))
    scales /= np.exp(np.log(scales).mean())
    return np.clip(scales, 1 / REACH, REACH)


def _by_maker(group: Group, squares: NDArray[Any]) -> F64:
    """(F,) sums of squares (K,), none far below the usual one."""
    return _not_less(np.bincount(group.made_by, squares).astype(np.float64))


def _not_less(squares: F64) -> F64:
    """The squares, none far below the usual one."""
    usual = float(np.median(squares)) or float(squares.mean()) or 1.0
    return np.maximum(squares, LEAST**2 * usual)


def _column_squares(tensor: Any) -> F64:
    """(K,) sums of squares of some rows, as if they were all."""
    rows = tensor.shape[0]
    starts = [0] if rows <= _RUNS * _RUN else np.linspace(0, rows - _RUN, _RUNS).astype(int).tolist()
    run = rows if len(starts) == 1 else _RUN
    total = np.zeros(tensor.shape[1])
    for start in starts:
        total += np.square(tensor.read_rows(start, start + run), dtype=np.float64).sum(0)
    return total * (rows / (run * len(starts)))
