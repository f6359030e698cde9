"""Matrices in 8-bit floats with a scale for each square of 128 rows and columns, as DeepSeek V3 and others publish.

    w[n, k] = E4M3[code[n, k]] * scale[n // 128, k // 128]

"NAME" holds the codes, "NAME_scale_inv" the scales (transformers/integrations/finegrained_fp8.py; E4M3, without
infinities: https://arxiv.org/abs/2209.05433 section 3). What a runtime does to activations besides is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmc.compiler.errors import SourceError
from llmc.frontends.folded_tensor import FoldedTensor, misfits
from llmc.frontends.tensor import Floats, Tensor

_CODES, _SCALES = "F8_E4M3", "_scale_inv"
_FLOATS = ("F32", "BF16")


def _e4m3() -> Floats:
    """(256,) by code: a sign, 4 bits of exponent of bias 7, 3 bits of fraction; all ones are no number."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])


E4M3 = _e4m3()


@dataclass(frozen=True, kw_only=True)
class Fp8Tensor(FoldedTensor):
    """A matrix in the tensors `codes` and `scales`, which `fold_fp8` has checked; `square` is 128.

    `stored` is "FP8"; `offset` and `file` are those of `codes`.
    """

    codes: Tensor
    scales: Tensor
    square: int

    @property
    def kept(self) -> str | None:
        """None: no format of ours has these codes."""
        return None

    def _rows(self, start: int, stop: int) -> Floats:
        if start == stop:
            return np.empty((0, self.shape[1]), np.float32)
        first = start // self.square
        scales = self.scales.read_rows(first, (stop - 1) // self.square + 1)
        own = scales[np.arange(start, stop) // self.square - first]
        values: Floats = E4M3[self.codes.raw_rows(start, stop)]
        values *= np.repeat(own, self.square, axis=1)[:, : self.shape[1]]
        if not np.isfinite(values).all():
            raise self._damaged()
        return values


def fold_fp8(found: Mapping[str, Tensor], square: int, where: str) -> dict[str, Tensor]:
    """The file's tensors, with one Fp8Tensor NAME in place of NAME and NAME_scale_inv.

    Raises SourceError listing every one whose parts are missing, or of the wrong type or shape.
    """
    stems = {name.removesuffix(_SCALES) for name in found if name.endswith(_SCALES)}
    stems |= {name for name, tensor in found.items() if tensor.stored == _CODES}
    if not stems:
        raise SourceError(f"{where}: quantized by fp8, but no tensor is stored as {_CODES}; fetch the whole model")
    result = {name: tensor for name, tensor in found.items() if name.removesuffix(_SCALES) not in stems}
    faults: dict[str, list[str]] = {}
    for stem in sorted(stems):
        codes, scales = found.get(stem), found.get(stem + _SCALES)
        if codes is None or scales is None:
            faults.setdefault(f"missing {_SCALES if codes else 'the matrix itself'}", []).append(stem)
        elif problem := _fault(codes, scales, square):
            faults.setdefault(problem, []).append(stem)
        else:
            result[stem] = Fp8Tensor(
                stem, codes.shape, "FP8", codes.offset, codes.nbytes + scales.nbytes, codes.file,
                codes=codes, scales=scales, square=square,
            )  # fmt: skip
    if faults:
        raise misfits(where, faults)
    return result


def _fault(codes: Tensor, scales: Tensor, square: int) -> str | None:
    """What is wrong with the two."""
    if codes.stored != _CODES or scales.stored not in _FLOATS:
        return f"stored as {codes.stored} and {scales.stored}, wanted {_CODES} and one of {', '.join(_FLOATS)}"
    if len(codes.shape) != 2 or 0 in codes.shape:
        return f"shape {list(codes.shape)}, wanted a matrix"
    wanted = [-(-size // square) for size in codes.shape]
    if list(scales.shape) != wanted:
        return f"{_SCALES} has shape {list(scales.shape)}, wanted {wanted} for {list(codes.shape)}"
    return None
