"""Codes and scales of our codebook formats, chosen for the least squared error. Nothing here looks beyond one row.

A block of columns is scale * codebook entry, the scale signed: a negative one mirrors the codebook. For every block

1. scales on a fixed grid, both signs, are tried with the nearest entries; codes c fixed, the best scale is
   s = sum(h x c) / sum(h c c) and takes sum(h x c) * s off the error, so two sums rank a candidate (h: importance),
2. the best one is tried once more from its own s,
3. s is rounded to row scale * q |q|, q an int8, the better of two neighbours, and the codes are chosen for that.

Letters: x = weights in units of 2^e of their row, laid out (b, n) with one block of b columns a column, pairs' first
columns in the upper half of the rows and their second ones in the lower; y = x / s, the weight in codebook units.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats.block import U8, BlockFormat, Quantized
from llmc.compiler.formats.plain import F32, ceil_to
from llmc.compiler.formats.trials import Trials

ZERO = 64  # the stored entry that stands for 0
TOP = 127  # greatest |sub-scale|
CHUNK = 4096  # blocks handled at once: 512 KB of weights
NOTHING = 1e-20  # a block this far below its row is zero in any case, and 1 / its scale would overflow
PADDING = 1e-6  # importance of columns that are not there, the mean being 1: they decode to about 0
IDLE = 0.03  # least importance of those that are: a text may use what calibration did not


class Nearest:
    """The nearest entry of a codebook, from a table over a fine grid of cells, or exactly.

    `values` (entries,) or (entries, 2) are signed, within -64..64. With the default two `steps` a unit the table is
    exact for a codebook of whole numbers: what lies between two entries parts at a multiple of one half.
    For pairs (one step a unit) a cell that a boundary cuts goes to the entry nearest to its middle.
    """

    def __init__(self, values: NDArray[np.floating], steps: int | None = None) -> None:
        self.values = np.asarray(values, np.float32).reshape(len(values), -1)
        self.width = self.values.shape[1]  # columns a code stands for
        self.reach = np.float32(np.abs(self.values).max())
        self.steps = steps or 3 - self.width
        self.cells = 2 * ZERO * self.steps  # a side
        line = ((np.arange(self.cells) + 0.5) / self.steps - ZERO).astype(np.float32)
        if self.width == 1:
            codes = np.abs(line[:, None] - self.values[:, 0]).argmin(1)
        else:
            grid = np.meshgrid(line, line, indexing="ij")
            codes = self.exact(grid[0].ravel(), grid[1].ravel(), None)
        self.codes: U8 = codes.astype(np.uint8)
        self.reaches = _reaches(self.width, len(self.values))
        # Small scales first, which count where a greater one does as well: a row's scale leaves little room above them.
        self.trials = np.stack([self.reaches[::-1], -self.reaches[::-1]], axis=1).ravel()
        self.table = np.ascontiguousarray(self.values[self.codes].T)

    def near(self, y: F32) -> U8:
        """Codes of blocks y (b, n) by the table: (b, n), or (b / 2, n) for pairs."""
        cells = (y + np.float32(ZERO)) * np.float32(self.steps)
        at = np.clip(cells, np.float32(0), np.float32(self.cells - 0.5), out=cells).astype(np.int32)
        if self.width == 2:
            at = at[: len(at) // 2] * self.cells + at[len(at) // 2 :]
        return self.codes[at]

    def exact(self, first: F32, second: F32, weights: tuple[F32, F32] | None) -> NDArray[np.intp]:
        """Codes of pairs (M,) each, with the errors of the two columns weighted: least sum of h * (y - c)^2."""
        squares = np.float32(-0.5) * self.values.T**2
        if weights is None:
            book = np.stack([*self.values.T, squares.sum(0)])
            sides = np.stack([first, second, np.ones_like(first)], axis=1)
        else:
            book = np.concatenate([self.values.T, squares])
            sides = np.stack([weights[0] * first, weights[1] * second, *weights], axis=1)
        out = np.empty(len(first), np.intp)
        slab = 65536 // len(self.values)  # few enough products that the BLAS library stays on this thread
        for at in range(0, len(out), slab):
            np.argmax(sides[at : at + slab] @ book, axis=1, out=out[at : at + slab])
        return out


class Blocks:
    """Blocks x (b, n) that are quantized with one codebook; `importance` (b, n) or None for all alike."""

    def __init__(self, nearest: Nearest, x: F32, importance: F32 | None = None) -> None:
        self.nearest, self.x, self.importance = nearest, x, importance
        trials = Trials(nearest.table, nearest.steps, x, importance)
        self.sums, self._best = trials.sums, trials.best

    def best_scales(self) -> F32:
        """(n,) signed scale of every block, not rounded; 0 where no scale beats all zeros."""
        top = np.abs(self.x).max(0)
        unit = inverse_of(np.where(top > NOTHING, top, np.float32(0))) * self.nearest.reach
        return self._best(unit, self.nearest.trials)

    def round_scales(self, scale: F32, row_scale: F32) -> NDArray[np.int8]:
        """(n,) sub-scales: of the two next to the root of scale / row_scale that with less error; both (n,)."""
        low = np.floor(signed_root(scale * inverse_of(row_scale)))
        best, sub = np.full_like(scale, -np.inf), np.zeros_like(scale)
        for step in (0, 1):
            candidate = np.clip(low + np.float32(step), -TOP, TOP)
            rounded = candidate * np.abs(candidate) * row_scale
            inner, square = self.sums(inverse_of(rounded))
            gain = rounded * (2 * inner - rounded * square)
            better = gain > best
            np.copyto(best, gain, where=better)
            np.copyto(sub, candidate, where=better)
        return sub.astype(np.int8)

    def codes(self, scale: F32) -> U8:
        """(b, n), or (b / 2, n) for pairs: the nearest entries at scale (n,), exactly."""
        inverse, half = inverse_of(scale), len(self.x) // 2
        y, h = self.x * inverse, self.importance
        if self.nearest.width == 1:
            return self.nearest.near(y)
        weights = None if h is None else (h[:half].ravel(), h[half:].ravel())
        codes = self.nearest.exact(y[:half].ravel(), y[half:].ravel(), weights)
        return codes.astype(np.uint8).reshape(half, -1)


def search(weight: F32, format: BlockFormat, importance: F32 | None = None) -> Quantized:
    """(N, K) finite float32 -> codes and tables of a format with scale "row" and a codebook.

    `importance` (K,) >= 0 weighs the columns' squared errors; without it all count alike.
    """
    rows, columns = weight.shape
    padded = ceil_to(columns, format.columns)
    blocks = padded // format.block
    nearest = nearest_of(format)
    codes = np.empty((rows, padded // nearest.width), np.uint8)
    row_scale, sub_scale = np.empty(rows, np.float32), np.empty((rows, blocks), np.int8)
    weights = _column_weights(importance, columns, padded)
    step = max(1, CHUNK // blocks)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        x, exponent = normalized(weight[part], padded)
        height = len(x)
        h = None if weights is None else np.tile(_laid_out(weights[None], nearest.width, format.block), (1, height))
        chunk = Blocks(nearest, _laid_out(x, nearest.width, format.block), h)
        scale = chunk.best_scales()
        unit = np.abs(scale).reshape(height, blocks).max(1) / np.float32(TOP * TOP)
        spread = np.repeat(unit, blocks)
        sub = chunk.round_scales(scale, spread)
        codes[part] = chunk.codes(signed_square(sub) * spread).T.reshape(height, -1)
        row_scale[part] = np.ldexp(unit, exponent)
        sub_scale[part] = sub.reshape(height, blocks)
    return Quantized(codes, {"row_scale": row_scale, "sub_scale": sub_scale})


def _reaches(width: int, entries: int) -> NDArray[np.float32]:
    """Candidate scales: where a block's greatest |weight| lands, in units of the greatest |entry|, ascending.

    Few entries want some overload; below the range the fine part of the codebook would be left unused. More candidates
    than these take less than 0.01 dB more off the error (0.1 dB for 64 scalar entries).
    """
    if width == 2:
        return np.geomspace(0.5, 1.25, 12, dtype=np.float32)
    return np.geomspace(0.68, 1.08, 9 if entries <= 16 else 12 if entries <= 32 else 20, dtype=np.float32)


def nearest_of(format: BlockFormat) -> Nearest:
    """The look-up of a format's codebook, made once."""
    values = format.values
    if values is None or format.scale != "row":
        raise ValueError(f"{format.name}: wanted a codebook and a scale a row")
    return _made(np.ascontiguousarray(values, np.uint8).tobytes(), 2 if format.pair else 1)


@lru_cache(maxsize=16)
def _made(values: bytes, width: int) -> Nearest:
    return Nearest(np.frombuffer(values, np.uint8).reshape(-1, width).astype(np.float32) - ZERO)


def signed_root(x: F32) -> F32:
    """The number whose `signed_square` it is."""
    return np.copysign(np.sqrt(np.abs(x)), x)


def signed_square(x: NDArray[np.number]) -> F32:
    """x |x|: what a sub-scale stands for, in units of its row's scale."""
    wide = x.astype(np.float32)
    return wide * np.abs(wide)


def inverse_of(scale: F32) -> F32:
    """1 / scale, and 0 where it is 0."""
    zero = scale == 0
    return np.where(zero, np.float32(0), np.float32(1) / np.where(zero, np.float32(1), scale))


def _column_weights(importance: F32 | None, columns: int, padded: int) -> F32 | None:
    """(padded,) with mean 1 over the real columns; None where all are real and count alike."""
    if importance is None and columns == padded:
        return None
    out = np.full(padded, PADDING, np.float32)
    out[:columns] = 1.0
    if importance is not None:
        mean = float(np.mean(importance, dtype=np.float64))
        out[:columns] = np.maximum(importance / mean, IDLE) if mean > 0 else 1.0
    return out


def normalized(weight: F32, padded: int) -> tuple[F32, NDArray[np.int32]]:
    """Rows over 2^e, e near that of their greatest magnitude, zeros added: exact, and no square over- or underflows."""
    exponent = np.clip(np.frexp(np.abs(weight).max(1))[1], -126, 126).astype(np.int32)
    out = np.zeros((len(weight), padded), np.float32)
    np.multiply(weight, np.ldexp(np.float32(1), -exponent)[:, None], out=out[:, : weight.shape[1]])
    return out, exponent


def _laid_out(x: F32, width: int, block: int) -> F32:
    """(rows, padded) -> (b, rows * blocks), a pair's columns 8g + p and 8g + 4 + p in rows 4g + p and b/2 + 4g + p."""
    if width == 1:
        return np.ascontiguousarray(x.reshape(-1, block).T)
    return np.ascontiguousarray(x.reshape(-1, block // 8, 2, 4).transpose(2, 1, 3, 0)).reshape(block, -1)
