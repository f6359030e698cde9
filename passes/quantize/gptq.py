"""Second-order error compensation: what rounding one column does to the output, later columns make good.

The loss of a matrix is tr(E H E^T), E = W - Q its error and H = X^T X / m the second moments of its inputs. With
H = R R^T, R upper triangular in the order in which columns are quantized, the loss is the sum over columns j of

    |(E R)_j|^2,   (E R)_j = sum_{k < j} E_k R_kj  +  E_j R_jj

so each column takes the code that makes its own term least, given the errors of the earlier ones. This is GPTQ
(https://arxiv.org/abs/2210.17323) without the inverse of H, in the form of LDLQ (https://arxiv.org/abs/2307.13304).
A code for a pair of columns makes both terms least at once: R_jj is its 2 x 2 block, and the nearest entry is searched
in that metric. Scales of a block are chosen when the block starts, for its compensated weights, an error in column j
counting R_jj^2.

Then `rounds` of coordinate descent on the same loss: each block's scale, then each code again, all others fixed
(QuantEase, https://arxiv.org/abs/2309.01885). The first one takes about 0.3 dB more off, the next ones 0.1 dB.

Letters: X = weights, D = what they decode to, both (K, n): one column of the matrix a row, in processing order, n
matrix rows at once. w columns a code, c codes a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats.activations import rotate_rows
from llmc.compiler.formats.block import U8, BlockFormat, Quantized, scales
from llmc.compiler.formats.plain import F32, Array, ceil_to
from llmc.compiler.formats.search import (
    PADDING,
    TOP,
    Blocks,
    inverse_of,
    nearest_of,
    normalized,
    signed_square,
)

ROWS = 1024  # handled at once: what is worked on for one block stays in the second-level cache


def compensate(
    weight: F32, format: BlockFormat, hessian: NDArray[np.floating], *, damp: float = 0.01, rounds: int = 1
) -> Quantized:
    """(N, K) finite float32 -> codes and tables that make the loss under `hessian` (K, K) small.

    `damp` times the mean of its diagonal is added to the diagonal: it stands for inputs that calibration did not see,
    and keeps columns that were never active (all zeros in `hessian`) from counting nothing.
    Formats with "f16" scales, or "row" ones and a codebook. Raises LlmcError for those that checkpoints alone have, and
    for a Hessian with NaN or infinity.
    """
    if format.scale == "super":
        raise LlmcError(f"{format.name} only keeps weights that a checkpoint stores in it; choose another format")
    rows, columns = weight.shape
    if hessian.shape != (columns, columns) or not np.isfinite(hessian).all():
        raise LlmcError(
            f"calibration: got second moments {hessian.shape}, wanted ({columns}, {columns}) finite numbers; "
            "do the calibration texts make the model overflow?"
        )
    if format.rotated:  # weights and inputs that are both rotated have the same products
        weight, hessian = rotate_rows(weight), rotate_rows(rotate_rows(hessian.astype(np.float32)).T)
        columns = len(hessian)
    plan = _planned(format, hessian, columns, damp)
    padded = len(plan.hessian)
    codes = np.empty((rows, padded // plan.entries.width), np.uint8)
    parts = []
    for at in range(0, rows, ROWS):
        work = _Rows(plan, weight[at : at + ROWS])
        for block in range(len(plan.order)):
            work.quantize(block)
        for _ in range(rounds):
            work.descend()
        codes[at : at + ROWS] = work.natural_codes()
        parts.append(work.tables())
    return Quantized(codes, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


class _Entries:
    """What a format's codes stand for, zero point taken off: (entries, w) float32."""

    def __init__(self, format: BlockFormat) -> None:
        raw = np.arange(format.top + 1) if format.values is None else format.values
        zero = format.offset if isinstance(format.offset, int) else 0
        self.values = raw.astype(np.float32).reshape(len(raw), -1) - np.float32(zero)
        self.width = self.values.shape[1]
        if self.width == 1:  # whole numbers, ascending: what lies between two parts at a multiple of one half
            self._least, self._cells = self.values[0, 0], int(2 * (self.values[-1, 0] - self.values[0, 0])) + 1
            middle = self._least + (np.arange(self._cells, dtype=np.float32) + np.float32(0.5)) / 2
            self._codes = np.abs(middle[:, None] - self.values[:, 0]).argmin(1)

    def pick(self, y: F32, root: F32) -> NDArray[np.intp]:
        """y (w, n) in units of the entries: codes (n,) with the least |root (y - entry)|."""
        if self.width == 1:
            cell = np.clip((y[0] - self._least) * 2, 0, self._cells - 1)
            return self._codes[cell.astype(np.intp)]
        seen = self.values @ root.T
        z = root @ y
        sides = np.stack([*z, np.ones_like(z[0])], axis=1)
        return (sides @ np.stack([*seen.T, np.float32(-0.5) * (seen**2).sum(1)])).argmax(1)


@dataclass(frozen=True)
class _Plan:
    """What all rows of a matrix share."""

    format: BlockFormat
    entries: _Entries
    order: NDArray[np.intp]  # (blocks, c, w) columns as they are quantized
    hessian: F32  # (K, K) damped, in that order
    factor: F32  # (K, K) upper: factor factor^T = hessian


def _planned(format: BlockFormat, hessian: NDArray[np.floating], columns: int, damp: float) -> _Plan:
    """Blocks in order of falling importance, codes likewise within a block; later ones can make good what is left."""
    entries, padded = _Entries(format), ceil_to(columns, format.columns)
    mean = float(np.mean(np.diag(hessian), dtype=np.float64))
    whole = np.zeros((padded, padded))
    whole[:columns, :columns] = hessian / mean if mean > 0 else np.eye(columns)
    diagonal = np.diag(whole).copy()
    groups = np.arange(padded).reshape(-1, entries.width, 4).transpose(0, 2, 1)  # a pair: 8g + p and 8g + 4 + p
    order = groups.reshape(-1, format.block // entries.width, entries.width)
    order = order[np.argsort(-diagonal[order].sum((1, 2)), kind="stable")]
    within = np.argsort(-diagonal[order].sum(2), axis=1, kind="stable")
    order = np.take_along_axis(order, within[..., None], axis=1)
    flat = order.ravel()
    whole = whole[np.ix_(flat, flat)]
    added = np.where(flat < columns, 1.0, 0.0)
    while True:
        damped = whole + np.diag(damp * added + PADDING)
        try:
            # The factor of the matrix turned round, turned round: upper instead of lower.
            factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
            return _Plan(format, entries, order, damped.astype(np.float32), factor.astype(np.float32))
        except np.linalg.LinAlgError:  # not positive definite as rounded: more damping
            damp = max(10 * damp, 1e-4)
            if damp > 1e3:
                raise LlmcError("calibration: second moments of inputs are not those of any inputs") from None


class _Rows:
    """Some rows of the matrix, on their way."""

    def __init__(self, plan: _Plan, weight: F32) -> None:
        self.plan, self.rows = plan, len(weight)
        padded, block = len(plan.hessian), plan.format.block
        if plan.format.scale == "row":
            x, self.exponent = normalized(weight, padded)
        else:
            x = np.zeros((self.rows, padded), np.float32)
            x[:, : weight.shape[1]] = weight
        self.x: F32 = np.ascontiguousarray(x[:, plan.order.ravel()].T)
        self.decoded = np.zeros_like(self.x)
        self.codes = np.empty((len(plan.order), block // plan.entries.width, self.rows), np.uint8)
        self.scale = np.zeros((len(plan.order), self.rows), np.float32)
        self.offset = np.zeros_like(self.scale)
        self.by_block: list[dict[str, Array]] = []  # of formats with float16 scales
        if plan.format.scale == "row":
            # The greatest scale that the search would consider. Sub-scales stand for squares: the room costs little.
            nearest = nearest_of(plan.format)
            least = nearest.reach * nearest.reaches[0] * np.float32(TOP * TOP)
            self.unit = np.abs(self.x).max(0) / least
            self.sub = np.zeros((len(plan.order), self.rows), np.float32)

    def quantize(self, block: int) -> None:
        """Codes and scale of one block, given those before it."""
        plan, size = self.plan, self.plan.format.block
        start, end = block * size, (block + 1) * size
        factor = plan.factor[start:end, start:end]
        carried = plan.factor[:start, start:end].T @ (self.x[:start] - self.decoded[:start])
        back = np.linalg.inv(factor.astype(np.float64)).T.astype(np.float32)
        current = self.x[start:end] + back @ carried  # the block's weights as compensation wants them
        self._choose_scale(block, current, np.diag(factor) ** 2)
        scale, offset = self.scale[block], self.offset[block]
        inverse, width = inverse_of(scale), plan.entries.width
        pending = np.zeros_like(current)  # sum of the block's errors so far, times the factor
        for i in range(size // width):
            own = slice(i * width, (i + 1) * width)
            root = factor[own, own].T
            wanted = current[own] + _solved(root, pending[own])
            code = plan.entries.pick((wanted - offset) * inverse, root)
            decoded = plan.entries.values[code].T * scale + offset
            later = slice((i + 1) * width, None)
            pending[later] += factor[own, later].T @ (current[own] - decoded)
            self.codes[block, i] = code
            self.decoded[start + i * width : start + (i + 1) * width] = decoded

    def _choose_scale(self, block: int, current: F32, importance: F32) -> None:
        format, width = self.plan.format, self.plan.entries.width
        if format.scale == "row":
            importance = np.maximum(importance / importance.mean(), np.float32(PADDING))
            by_place = [np.concatenate([a[i::width] for i in range(width)]) for a in (current, importance[:, None])]
            blocks = Blocks(nearest_of(format), *by_place)
            self.sub[block] = blocks.round_scales(blocks.best_scales(), self.unit)
            self.scale[block] = signed_square(self.sub[block]) * self.unit
            return
        tables = format.quantize(np.ascontiguousarray(current.T)).tables
        scale, offset = scales(format, tables)
        # What a whole zero point adds is in the entries here.
        self.scale[block], self.offset[block] = scale[:, 0], offset[:, 0] if format.offset == "minimum" else 0
        self.by_block.append({name: table[:, 0] for name, table in tables.items()})

    def descend(self) -> None:
        """One round over all scales and codes, each made the best with all others as they are."""
        plan, size, width = self.plan, self.plan.format.block, self.plan.entries.width
        pull = plan.hessian @ (self.x - self.decoded)  # H E^T: minus half the slope of the loss
        for block in range(len(plan.order)):
            own = slice(block * size, (block + 1) * size)
            hessian = np.ascontiguousarray(plan.hessian[own, own])
            decoded, near = self.decoded[own].copy(), pull[own].copy()
            if plan.format.scale == "row":
                self._rescale(block, decoded, near, hessian)
            scale, offset = self.scale[block], self.offset[block]
            inverse = inverse_of(scale)
            for i in range(size // width):
                at = slice(i * width, (i + 1) * width)
                root = np.linalg.cholesky(hessian[at, at].astype(np.float64)).T.astype(np.float32)
                wanted = decoded[at] + _solved(root, _solved(root.T, near[at]))
                code = plan.entries.pick((wanted - offset) * inverse, root)
                change = plan.entries.values[code].T * scale + offset - decoded[at]
                decoded[at] += change
                near -= hessian[:, at] @ change
                self.codes[block, i] = code
            pull -= plan.hessian[:, own] @ (decoded - self.decoded[own])
            self.decoded[own] = decoded

    def _rescale(self, block: int, decoded: F32, near: F32, hessian: F32) -> None:
        """The block's best sub-scale with its codes as they are; `decoded` and `near` follow."""
        bent = hessian @ decoded
        slope, curve = (decoded * near).sum(0), (decoded * bent).sum(0)
        sub, usable = self.sub[block], (self.sub[block] != 0) & (curve > 0)
        factor = 1 + slope / np.where(usable, curve, 1)
        better = np.clip(np.rint(sub * np.sqrt(np.maximum(factor, 0))), -TOP, TOP)
        change = (better / np.where(usable, sub, 1)) ** 2 - 1
        usable &= (better != 0) & (change * (2 * slope - change * curve) > 0)
        change = np.where(usable, change, 0).astype(np.float32)
        decoded += change * decoded
        near -= change * bent
        self.sub[block] = np.where(usable, better, sub)
        self.scale[block] = signed_square(self.sub[block]) * self.unit

    def natural_codes(self) -> U8:
        """(n, K / w), codes in the order of the columns."""
        first = self.plan.order[..., 0].ravel()
        place = first // 8 * 4 + first % 4 if self.plan.entries.width == 2 else first
        out = np.empty((self.rows, len(place)), np.uint8)
        out[:, place] = self.codes.reshape(len(place), -1).T
        return out

    def tables(self) -> dict[str, Array]:
        """The format's tables for these rows, blocks in the order of the columns."""
        back = np.argsort(self.plan.order.min((1, 2)))
        if self.plan.format.scale == "row":
            sub = np.ascontiguousarray(self.sub[back].T.astype(np.int8))
            return {"row_scale": np.ldexp(self.unit, self.exponent), "sub_scale": sub}
        return {name: np.stack([self.by_block[i][name] for i in back], axis=1) for name in self.by_block[0]}


def _solved(triangular: F32, right: F32) -> F32:
    """triangular^-1 @ right, of width 1 or 2; zeros off the diagonal included, so either triangle will do."""
    if len(triangular) == 1:
        return right / triangular[0, 0]
    (a, b), (c, d) = triangular
    determinant = a * d - b * c
    return np.stack([d * right[0] - b * right[1], a * right[1] - c * right[0]]) / determinant
