"""The weights in ONNX files, under the names that torch had: for models whose weights are nowhere else.

An exporter keeps a parameter's name ("block.0.layer_norm.weight") unless it computes with it: a linear layer's matrix,
turned to (in, out), becomes "onnx::MatMul_17", and only the operator's name says whose it is
("/block.0/SelfAttention/q/MatMul"). A quantizer cuts a tensor into NAME_quantized, NAME_scale and NAME_zero_point:

    value = (code - zero point) * scale

https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile
from llmc.frontends.files.onnx_file import TensorReader, read_onnx
from llmc.frontends.tensor import Floats, Tensor
from llmc.frontends.tensor_view import TransposedView

CODES, SCALE, ZERO = "_quantized", "_scale", "_zero_point"
_FLOATS = {"float32": "F32", "float16": "F16"}
_PRODUCTS = ("MatMul", "MatMulInteger")
_PREFIXES = ("", "encoder.", "decoder.", "model.")  # what stands before a part's names in the whole model


@dataclass(frozen=True, kw_only=True)
class CodedTensor(Tensor):
    """Whole numbers of 8 bits with one scale, or one for each entry of `axis`; `stored` is INT8 or UINT8."""

    scale: NDArray[np.float32]  # (), or of the axis' size
    zero: NDArray[np.int32]
    axis: int

    @property
    def readable(self) -> bool:
        """Always."""
        return True

    @property
    def kept(self) -> str | None:
        """None: a float32 scale of a whole tensor is that of no block format."""
        return None

    def _rows(self, start: int, stop: int) -> Floats:
        raw = self.raw_rows(start, stop).view(np.int8 if self.stored == "INT8" else np.uint8)
        rows = stop - start if len(self.shape) > 1 else self.shape[0]
        codes = raw.reshape(rows, *self.shape[1:])
        scale, zero = self._along(self.scale, start, stop), self._along(self.zero, start, stop)
        with np.errstate(all="ignore"):  # what overflows is refused below
            values = np.asarray((codes.astype(np.int32) - zero).astype(np.float32) * scale, np.float32)
        if not np.isfinite(values).all():
            raise self._damaged()
        values = values if len(self.shape) > 1 else values[None]
        return values + np.float32(self.plus) if self.plus else values

    def _along(self, table: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """A scalar as it is; a vector in a shape that broadcasts against the rows."""
        if table.ndim == 0:
            return table
        if self.axis == 0 and len(self.shape) > 1:
            table = table[start:stop]
        return table.reshape([-1 if at == self.axis else 1 for at in range(len(self.shape))])


def read_onnx_tensors(paths: Iterable[Path], wanted: Collection[str]) -> dict[str, Tensor]:
    """Names as torch had them -> tensors, of one file or of those of an encoder and a decoder.

    `wanted` are names of the whole model: each file's names get the beginning that makes most of them one of these.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        tensors = _placed(_File(path).tensors(), wanted)
        for name, tensor in tensors.items():
            found.setdefault(name, replace(tensor, name=name))
    return found


def _placed(tensors: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors with the first part of their names put right: exporters wrap a model, or export a part of one."""
    starts = {""} | {f"{name.split('.')[0]}." for name in tensors}
    choices = [(start, prefix) for start in sorted(starts) for prefix in _PREFIXES]

    def renamed(start: str, prefix: str) -> dict[str, Tensor]:
        return {
            prefix + name[len(start) :] if name.startswith(start) else name: tensor for name, tensor in tensors.items()
        }

    return renamed(*max(choices, key=lambda choice: len(set(renamed(*choice)) & set(wanted))))


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.graph = read_onnx(path).graph
        self.reader = TensorReader(path)
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter, by the name torch had for it."""
        owners = dict(self._owners())
        found: dict[str, Tensor] = {}
        for name in self.stored:
            base = name.removesuffix(CODES)
            if name.endswith((SCALE, ZERO)) and name.removesuffix(SCALE).removesuffix(ZERO) + CODES in self.stored:
                continue
            tensor = self._coded(base) if base != name else self._plain(name)
            if tensor is None or not tensor.shape:
                continue
            if name in owners and len(tensor.shape) == 2:  # the operator multiplies (..., in) with (in, out)
                found[owners[name]] = TransposedView.of(tensor, tensor.shape[::-1])
            elif "::" not in base and "/" not in base:
                found[base] = tensor
        return found

    def _owners(self) -> Iterator[tuple[str, str]]:
        """Names of matrices without one -> the parameter's, from the operator that multiplies with them."""
        decoded = {node.output[0]: node.input[0] for node in self.graph.node if node.op_type == "DequantizeLinear"}
        for node in self.graph.node:
            if node.op_type in _PRODUCTS and len(node.input) > 1 and "/" in node.name:
                matrix = decoded.get(node.input[1], node.input[1])
                if matrix in self.stored and ("::" in matrix or "/" in matrix):
                    yield matrix, ".".join([*node.name.strip("/").split("/")[:-1], "weight"])

    def _plain(self, name: str) -> Tensor | None:
        tensor = self.stored[name]
        kind = _FLOATS.get(str(self.reader.dtype(tensor)))
        return None if kind is None else Tensor(*self._place(name, kind))

    def _coded(self, base: str) -> Tensor:
        parts = [self.stored.get(base + ending) for ending in (SCALE, ZERO)]
        codes = self.stored[base + CODES]
        kind = str(self.reader.dtype(codes)).upper()
        if kind not in ("INT8", "UINT8") or parts[0] is None:
            raise self._fail(
                base, f"{kind} codes with{'out' if parts[0] is None else ''} a scale, wanted 8 bits with one"
            )
        scale = self.reader.array(parts[0]).astype(np.float32)
        zero = np.zeros(scale.shape, np.int32) if parts[1] is None else self.reader.array(parts[1]).astype(np.int32)
        shape = self.reader.shape(codes)
        axes = [at for at, size in enumerate(shape) if size == scale.size]
        if scale.size == 1:
            scale, zero = scale.reshape(()), zero.reshape(())
        elif scale.ndim != 1 or zero.shape != scale.shape or not axes:
            raise self._fail(base, f"scales of shape {clip(list(scale.shape))} for codes of {clip(list(shape))}")
        return CodedTensor(*self._place(base + CODES, kind), scale=scale, zero=zero, axis=axes[-1] if axes else 0)

    def _place(self, name: str, kind: str) -> tuple[str, tuple[int, ...], str, int, int, MappedFile]:
        """The fields of a Tensor; what lies inside the protobuf is copied to memory of its own."""
        tensor = self.stored[name]
        values = self.reader.array(tensor)
        outside = self.reader.place(tensor)
        if outside is not None:
            return name, values.shape, kind, outside[1], values.nbytes, outside[0]
        data = mmap.mmap(-1, max(1, values.nbytes))
        data[: values.nbytes] = values.tobytes()
        return name, values.shape, kind, 0, values.nbytes, MappedFile(self.path.name, data)

    def _fail(self, name: str, problem: str) -> SourceError:
        return SourceError(f"{self.path.name}: tensor {clip(name)}: {problem}")


def onnx_files(folder: Path) -> list[str]:
    """The files of a folder that together hold one model's weights; none where there are no ONNX files."""
    for names in FILES:
        if all((folder / name).exists() for name in names):
            return list(names)
    return []


# Names that exporters give the files of one model; the first set that is there is taken.
FILES: tuple[tuple[str, ...], ...] = (
    ("encoder_model.onnx", "decoder_model.onnx"),
    ("encoder.onnx", "decoder.onnx"),
    ("model.onnx",),
)
