"""Matrices of experts in MXFP4: two tensors stand for the stacked matrices of ours, (E, N, K) = (experts, out, in).

    w[e, n, k] = E2M1[code[e, n, k]] * 2 ** (scales[e, n, k // 32] - 127)

"NAME_blocks" (E, N, K / 32, 16) holds a byte for two codes, the lower half first, and "NAME_scales" (E, N, K / 32) a
byte for 32: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf sections 5.3.3 and
5.4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import Quantized, ceil_to
from llmc.frontends.folded_tensor import FoldedTensor, misfits
from llmc.frontends.tensor import Floats, Tensor

BLOCK = 32  # columns that share a scale
BIAS = 127  # of the scale's exponent
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FORMAT = "mxfp4"  # ours, that keeps them; it counts in halves, so that its scale is one power of two less
NAN = 255  # the scale that stands for none
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(FoldedTensor):
    """Matrices in the tensors `blocks` and `scales`, which `fold_mxfp4` has checked; one, or some one under another.

    `stored` is "MXFP4"; `offset` and `file` are those of `blocks`.
    """

    blocks: Tensor
    scales: Tensor

    @property
    def turned(self) -> bool:
        """Always: its matrices are (out, in) where the ones they were made of are (in, out)."""
        return True

    @property
    def in_rows(self) -> bool:
        """Always."""
        return True

    @property
    def kept(self) -> str | None:
        """The format of the same codes."""
        return FORMAT

    def _rows(self, start: int, stop: int) -> Floats:
        codes, exponents = self._parts(start, stop)
        scales = np.ldexp(np.float32(1), exponents)
        values: Floats = (E2M1[codes].reshape(*scales.shape, BLOCK) * scales[..., None]).reshape(codes.shape)
        return values

    def _blocks(self) -> Quantized:
        rows = int(np.prod(self.shape[:-1]))
        codes, exponents = self._parts_of_rows(0, rows)
        width = ceil_to(codes.shape[1], 64)
        padded = np.zeros((rows, width), np.uint8)
        padded[:, : codes.shape[1]] = codes
        scale = np.zeros((rows, width // BLOCK), np.float16)
        scale[:, : exponents.shape[1]] = self._half(exponents)
        return Quantized(padded, {"scale": scale})

    def _half(self, exponents: NDArray[np.int32]) -> NDArray[np.float16]:
        with np.errstate(over="ignore", under="ignore"):
            half = np.ldexp(np.float32(1), exponents - 1).astype(np.float16)
        if not np.isfinite(half).all() or (half == 0).any():
            raise SourceError(
                f"{self.file.name}: {self.scales.name} has scales that float16 cannot hold, so the weights cannot be "
                "kept as they are; quantize them again with --quant"
            )
        return half

    def _parts(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """Of entries of the first dimension: codes (rows, K) and exponents of scales (rows, K / 32)."""
        inner = int(np.prod(self.shape[1:-1]))
        return self._parts_of_rows(start * inner, stop * inner)

    def _parts_of_rows(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        groups = self.shape[-1] // BLOCK
        raw = _bytes(self.blocks, start * groups * BLOCK // 2, stop * groups * BLOCK // 2)
        codes = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=1).reshape(stop - start, -1)
        scales = _bytes(self.scales, start * groups, stop * groups).reshape(stop - start, groups)
        if (scales == NAN).any():
            raise self._damaged()
        return codes, scales.astype(np.int32) - BIAS


def _bytes(tensor: Tensor, start: int, stop: int) -> NDArray[np.uint8]:
    return tensor.file.bytes_at(tensor.offset + start, stop - start)


def fold_mxfp4(found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The file's tensors, with one Mxfp4Tensor NAME in place of NAME_blocks and NAME_scales.

    Raises SourceError listing every one whose parts are missing, or of the wrong type or shape.
    """
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
        shape = (*outer, groups * half * 2)
        result[stem] = Mxfp4Tensor(
            stem, shape, "MXFP4", blocks.offset, blocks.nbytes + scales.nbytes, blocks.file,
            blocks=blocks, scales=scales,
        )  # fmt: skip
    if not stems:
        raise SourceError(f"{where}: quantized by mxfp4, but no tensor's name ends in {_BLOCKS}; fetch the whole model")
    if faults:
        raise misfits(where, faults)
    return result


def _stem(name: str) -> str:
    return name.removesuffix(_BLOCKS).removesuffix(_SCALES) if name.endswith((_BLOCKS, _SCALES)) else ""


def _fault(blocks: Tensor, scales: Tensor | None) -> str | None:
    """What is wrong with the two."""
    if scales is None:
        return f"missing {_SCALES}"
    if wrong := {tensor.stored for tensor in (blocks, scales)} - {"U8"}:
        return f"stored as {', '.join(sorted(wrong))}, wanted U8"
    if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK // 2 or 0 in blocks.shape:
        return f"{_BLOCKS} has shape {list(blocks.shape)}, wanted [experts, rows, blocks, {BLOCK // 2}]"
    if scales.shape != blocks.shape[:-1]:
        return f"{_SCALES} has shape {list(scales.shape)}, wanted {list(blocks.shape[:-1])}"
    return None
