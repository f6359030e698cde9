"""Matrices in 4-bit floats, E2M1, with a scale for so many columns of a row; one, or some of experts, (E, N, K).

    w[..., n, k] = E2M1[code[..., n, k]] * scale[..., n, k // block]

A byte holds two codes, the lower half first. MXFP4: a scale is a byte, a power of 2, for 32 columns; gpt-oss has
"NAME_blocks" (E, N, K / 32, 16) and "NAME_scales" (E, N, K / 32). NVFP4: a scale is an E4M3 byte for 16 columns, times
one number of the matrix. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
sections 5.3.3 and 5.4.1; https://docs.nvidia.com/deeplearning/cudnn/ (block scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import Quantized, block_format, ceil_to
from llmc.frontends.quantized.bits import unpack
from llmc.frontends.quantized.folded_tensor import FoldedTensor, misfits
from llmc.frontends.quantized.grouped import half_of
from llmc.frontends.quantized.scaled_floats import E4M3, POWERS, powers_of
from llmc.frontends.tensor import Floats, Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
HALVES = np.float32(0.5)  # what our formats count in
MXFP4, NVFP4 = "mxfp4", "nvfp4"  # formats of ours too
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, kw_only=True)
class Fp4Tensor(FoldedTensor):
    """Matrices in the tensors `codes` and `scales`, whose fit is checked; one, or some one under another.

    `stored` is "MXFP4" or "NVFP4"; `offset` and `file` are those of `codes`.
    """

    codes: Tensor
    scales: Tensor
    format: str  # of ours
    times: float = 1.0  # every scale

    @property
    def in_rows(self) -> bool:
        """Always."""
        return True

    @property
    def kept(self) -> str | None:
        """The format of the same codes; with scales that float16 has, or has nearly (`half_of`)."""
        return self.format

    def _rows(self, start: int, stop: int) -> Floats:
        inner = int(np.prod(self.shape[1:-1]))
        codes, scales = self._parts(start * inner, stop * inner)
        blocks = E2M1[codes].reshape(*scales.shape, block_format(self.format).block)
        with np.errstate(all="ignore"):
            values: Floats = (blocks * scales[..., None]).reshape(codes.shape)
        if not np.isfinite(values).all():
            raise self._damaged()
        return values

    def _blocks(self) -> Quantized:
        format = block_format(self.format)
        rows = int(np.prod(self.shape[:-1]))
        codes, scales = self._parts(0, rows)
        width = ceil_to(codes.shape[1], format.columns)
        padded = np.zeros((rows, width), np.uint8)
        padded[:, : codes.shape[1]] = codes
        table = np.zeros((rows, width // format.block), np.float16)
        table[:, : scales.shape[1]] = half_of(scales * HALVES, f"{self.file.name}: {self.scales.name}", "scale")
        return Quantized(padded, {"scale": table})

    def _parts(self, start: int, stop: int) -> tuple[NDArray[np.uint8], Floats]:
        """Of rows of all matrices: codes (rows, K) and scales (rows, K / block)."""
        rows, columns = int(np.prod(self.shape[:-1])), self.shape[-1]
        raw, stored = (_bytes(part, rows, start, stop) for part in (self.codes, self.scales))
        with np.errstate(all="ignore"):  # what overflows is refused below
            scales = powers_of(stored) if self.format == MXFP4 else E4M3[stored] * np.float32(self.times)
        if not np.isfinite(scales).all():
            raise self._damaged()
        return unpack(raw, 4, columns), scales


def _bytes(tensor: Tensor, rows: int, start: int, stop: int) -> NDArray[np.uint8]:
    """Bytes (rows, bytes) of rows `start` to `stop` of a tensor that is so many, whatever its first dimensions."""
    inner = rows // tensor.shape[0]
    first = start // inner
    raw = tensor.raw_rows(first, -(-stop // inner))
    return raw.reshape(len(raw) * inner, tensor.nbytes // rows)[start - first * inner : stop - first * inner]


def fp4_tensor(
    name: str, codes: Tensor, scales: Tensor, shape: tuple[int, ...], format: str, times: float = 1.0
) -> Tensor:
    """The matrices of this shape in two tensors that fit."""
    return Fp4Tensor(
        name, shape, format.upper(), codes.offset, codes.nbytes + scales.nbytes, codes.file,
        codes=codes, scales=scales, format=format, times=times,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpertsPacking:
    """Matrices of experts as gpt-oss has them: NAME_blocks and NAME_scales."""

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """One tensor NAME in place of NAME_blocks and NAME_scales."""
        stems = {name.removesuffix(_BLOCKS) for name in found if name.endswith(_BLOCKS)}
        result = {name: tensor for name, tensor in found.items() if _stem(name) not in stems}
        faults: dict[str, list[str]] = {}
        for stem in sorted(stems):
            blocks, scales = found[stem + _BLOCKS], found.get(stem + _SCALES)
            problem = "stored both as it is and quantized" if stem in found else _fault(blocks, scales)
            if problem:
                faults.setdefault(problem, []).append(stem)
                continue
            assert scales is not None
            *outer, groups, half = blocks.shape
            result[stem] = fp4_tensor(stem, blocks, scales, (*outer, groups * half * 2), MXFP4)
        if not stems:
            raise SourceError(
                f"{where}: quantized by mxfp4, but no tensor's name ends in {_BLOCKS}; fetch the whole model"
            )
        if faults:
            raise misfits(where, faults)
        return result


def _stem(name: str) -> str:
    return name.removesuffix(_BLOCKS).removesuffix(_SCALES) if name.endswith((_BLOCKS, _SCALES)) else ""


def _fault(blocks: Tensor, scales: Tensor | None) -> str | None:
    """What is wrong with the two."""
    if scales is None:
        return f"missing {_SCALES}"
    if wrong := {tensor.stored for tensor in (blocks, scales)} - {POWERS}:
        return f"stored as {', '.join(sorted(wrong))}, wanted {POWERS}"
    half = block_format(MXFP4).block // 2
    if len(blocks.shape) != 4 or blocks.shape[-1] != half or 0 in blocks.shape:
        return f"{_BLOCKS} has shape {list(blocks.shape)}, wanted [experts, rows, blocks, {half}]"
    if scales.shape != blocks.shape[:-1]:
        return f"{_SCALES} has shape {list(scales.shape)}, wanted {list(blocks.shape[:-1])}"
    return None
