"""Matrices in 8-bit floats with a scale for each rectangle of so many rows and columns.

    w[n, k] = E4M3[code[n, k]] * scale[n // rows, k // columns]

E4M3, without infinities: https://arxiv.org/abs/2209.05433 section 3. DeepSeek V3 and others publish squares of 128:
NAME holds the codes, NAME_scale_inv the scales (transformers/integrations/finegrained_fp8.py). What a runtime does to
activations besides is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.frontends.quantized.folded_tensor import FoldedTensor, misfits
from llmc.frontends.tensor import Floats, Tensor

CODES = "F8_E4M3"
_SCALES = "_scale_inv"
_FLOATS = ("F32", "BF16")
POWERS = "U8"  # scales that are exponents of 2, less 127
BIAS, NO_NUMBER = 127, 255  # of these: https://www.opencompute.org OCP MX 1.0 section 5.4.1


def _e4m3() -> Floats:
    """(256,) by code: a sign, 4 bits of exponent of bias 7, 3 bits of fraction; all ones are no number."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])


E4M3 = _e4m3()


def powers_of(raw: NDArray[np.uint8]) -> Floats:
    """Exponents as powers of 2."""
    values = np.ldexp(np.float32(1), np.minimum(raw, NO_NUMBER - 1).astype(np.int32) - BIAS)
    return np.where(raw == NO_NUMBER, np.float32(np.nan), values).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class ScaledFloats(FoldedTensor):
    """A matrix in the tensors `codes`, bytes of E4M3, and `scales`, floats or POWERS, which fit.

    `stored` is "FP8"; `offset` and `file` are those of `codes`.
    """

    codes: Tensor
    scales: Tensor
    rectangle: tuple[int, int]  # rows and columns that share a scale

    def _rows(self, start: int, stop: int) -> Floats:
        if start == stop:
            return np.empty((0, self.shape[1]), np.float32)
        high, wide = self.rectangle
        first = start // high
        scales = self._scales(first, (stop - 1) // high + 1)
        own = scales[np.arange(start, stop) // high - first]
        values: Floats = E4M3[self.codes.raw_rows(start, stop)]
        with np.errstate(all="ignore"):  # what overflows is refused below
            values *= np.repeat(own, wide, axis=1)[:, : self.shape[1]] if own.shape[1] > 1 else own
        if not np.isfinite(values).all():
            raise self._damaged()
        return values

    def _scales(self, start: int, stop: int) -> Floats:
        """Rows of (N / rows, K / columns)."""
        if self.scales.stored == POWERS:
            return powers_of(self.scales.raw_rows(start, stop))
        if len(self.scales.shape) < 2:
            return self.scales.read().reshape(-1, 1)[start:stop]
        return self.scales.read_rows(start, stop).reshape(stop - start, -1)


def scaled_floats(name: str, codes: Tensor, scales: Tensor, shape: tuple[int, ...], high: int, wide: int) -> Tensor:
    """The matrix of this shape in two tensors that fit, with a scale for `high` rows and `wide` columns."""
    return ScaledFloats(
        name, shape, "FP8", codes.offset, codes.nbytes + scales.nbytes, codes.file,
        codes=codes, scales=scales, rectangle=(high, wide),
    )  # fmt: skip


def scales_of(high: int, wide: int, shape: tuple[int, ...]) -> list[int]:
    """The shape of the scales of a matrix."""
    return [-(-size // side) for size, side in zip(shape, (high, wide), strict=True)]


@dataclass(frozen=True)
class SquarePacking:
    """NAME and NAME_scale_inv, a scale for each square of so many rows and columns."""

    side: int

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One tensor NAME in place of NAME and NAME_scale_inv."""
        stems = {name.removesuffix(_SCALES) for name in found if name.endswith(_SCALES)}
        stems |= {name for name, tensor in found.items() if tensor.stored == CODES}
        if not stems:
            raise SourceError(f"{where}: quantized by fp8, but no tensor is stored as {CODES}; fetch the whole model")
        result = {name: tensor for name, tensor in found.items() if name.removesuffix(_SCALES) not in stems}
        faults: dict[str, list[str]] = {}
        for stem in sorted(stems):
            codes, scales = found.get(stem), found.get(stem + _SCALES)
            if codes is None or scales is None:
                faults.setdefault(f"missing {_SCALES if codes else 'the matrix itself'}", []).append(stem)
            elif problem := self._fault(codes, scales):
                faults.setdefault(problem, []).append(stem)
            else:
                result[stem] = scaled_floats(stem, codes, scales, codes.shape, self.side, self.side)
        if faults:
            raise misfits(where, faults)
        return result

    def _fault(self, codes: Tensor, scales: Tensor) -> str | None:
        """What is wrong with the two."""
        if codes.stored != CODES or scales.stored not in _FLOATS:
            return f"stored as {codes.stored} and {scales.stored}, wanted {CODES} and one of {', '.join(_FLOATS)}"
        if len(codes.shape) != 2 or 0 in codes.shape:
            return f"shape {list(codes.shape)}, wanted a matrix"
        wanted = scales_of(self.side, self.side, codes.shape)
        if list(scales.shape) != wanted:
            return f"{_SCALES} has shape {list(scales.shape)}, wanted {wanted} for {list(codes.shape)}"
        return None
