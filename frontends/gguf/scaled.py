"""Matrices of blocks that a number beside them scales: NAME.weight and NAME.scale, as llama.cpp has NVFP4.

A stack of experts has a number for each. What is said of activations, NAME.input_scale, is for runtimes that round them
to 4 bits too. https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py, src/llama-graph.cpp)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import Quantized
from llmc.frontends.gguf.blocks import kept_format
from llmc.frontends.quantized.folded_tensor import FoldedTensor
from llmc.frontends.quantized.grouped import half_of
from llmc.frontends.tensor import Floats, Tensor

STORED = "NVFP4"
_WEIGHT, _SCALE, _INPUT = ".weight", ".scale", ".input_scale"


@dataclass(frozen=True, kw_only=True)
class ScaledBlocks(FoldedTensor):
    """Blocks whose values are `times` as great: one number, or one for each of as many parts of the rows."""

    times: Tensor

    @property
    def in_rows(self) -> bool:
        """Always."""
        return True

    @property
    def kept(self) -> str | None:
        """The format of the blocks, with scales that float16 has, or has nearly (`half_of`)."""
        return kept_format(self.stored) if len(self.shape) == 2 else None

    def _rows(self, start: int, stop: int) -> Floats:
        with np.errstate(over="ignore"):
            values = super()._rows(start, stop) * self._times(self._row_count)[start:stop]
        if not np.isfinite(values).all():
            raise self._damaged()
        return values

    def _blocks(self) -> Quantized:
        blocks = super()._blocks()
        scales = blocks.tables["scale"].astype(np.float32) * self._times(self.shape[0])
        where = f"{self.file.name}: {self.name}"
        return Quantized(blocks.codes, {"scale": half_of(scales, where, "scale")})

    def _times(self, rows: int) -> Floats:
        """(rows, 1)."""
        given = self.times.read()
        return np.repeat(given, rows // len(given))[:, None]


def with_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with what scales blocks in them, instead of beside them."""
    result, faults = dict(tensors), []
    for name, tensor in tensors.items():
        if tensor.stored != STORED or not name.endswith(_WEIGHT):
            continue
        stem = name.removesuffix(_WEIGHT)
        result.pop(stem + _INPUT, None)
        times = result.pop(stem + _SCALE, None)
        if times is None:
            continue
        if times.stored != "F32" or times.shape not in {(1,), tensor.shape[:-2]}:
            faults.append(f"{times.name} is {times.stored} {list(times.shape)} for {list(tensor.shape)}")
            continue
        own = {field.name: getattr(tensor, field.name) for field in fields(tensor)}
        result[name] = ScaledBlocks(**own, times=times)
    if faults:
        raise SourceError(f"scales do not fit their matrices: {'; '.join(faults)}; the file is damaged")
    return result
