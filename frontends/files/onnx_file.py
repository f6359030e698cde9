"""Reads an ONNX file: protobuf, with the values of tensors in it or in files beside it.

Nothing outside the file's folder is read, whatever the file says: no absolute path, no "..", no link on the way. A
tensor's size must be that of its values before any of them is touched.
Format: https://github.com/onnx/onnx/blob/main/docs/IR.md, docs/ExternalData.md
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile, open_mapped, read_bounded, regular_size

MAX_FILE = 2 << 30  # bytes: what protobuf itself allows
MAX_NODES = 1 << 18
MAX_DEPTH = 16  # of graphs in graphs
MAX_RANK = 16

# TensorProto.DataType -> how NumPy reads it. https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
DTYPES: dict[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64",
}  # fmt: skip
# Those that a list of numbers may hold instead of raw bytes, and which list.
_LISTS = {
    1: "float_data", 2: "int32_data", 3: "int32_data", 4: "int32_data", 5: "int32_data", 6: "int32_data",
    7: "int64_data", 9: "int32_data", 10: "int32_data", 11: "double_data", 12: "uint64_data", 13: "uint64_data",
}  # fmt: skip
_IN_A_FILE = 1  # TensorProto.EXTERNAL


def need_onnx() -> Any:
    """The module onnx. Raises SourceError where it is not installed."""
    try:
        import onnx
    except ImportError:
        raise SourceError("reading ONNX needs the package onnx; install llmc[onnx]") from None
    return onnx


def read_onnx(path: Path) -> Any:
    """The ModelProto in a file, its external tensors not read. Raises SourceError for what is not one."""
    onnx = need_onnx()
    from google.protobuf.message import DecodeError

    data = read_bounded(path, min(MAX_FILE, regular_size(path)))  # memory is set aside for as much as it is told
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError, RecursionError) as error:
        raise SourceError(f"{path.name}: not an ONNX file: {str(error).splitlines()[0][:100]}") from None
    if not _all_text(model):
        raise SourceError(f"{path.name}: a name in it is not UTF-8; the file is damaged")
    if not model.HasField("graph") or not model.graph.node:
        raise SourceError(f"{path.name}: not an ONNX file: it has no graph; it may be cut short or of another format")
    count = sum(len(graph.node) for graph in graphs(model.graph, path.name))
    if count > MAX_NODES:
        raise SourceError(f"{path.name}: {count} operators, wanted at most {MAX_NODES}")
    return model


def _all_text(message: Any) -> bool:
    """Whether every text of a message is text: protobuf gives what is not UTF-8 as bytes."""
    for field, value in message.ListFields():
        repeated = not isinstance(value, (str, bytes, int, float)) and hasattr(value, "__len__")
        values = value if repeated else (value,)
        if field.type == field.TYPE_STRING and not all(isinstance(text, str) for text in values):
            return False
        if field.type == field.TYPE_MESSAGE and not all(_all_text(inner) for inner in values):
            return False
    return True


def graphs(graph: Any, where: str, depth: int = 0) -> Iterator[Any]:
    """A graph and those in its operators' attributes."""
    if depth > MAX_DEPTH:
        raise SourceError(f"{where}: graphs nested deeper than {MAX_DEPTH}")
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs(inner, where, depth + 1)


class TensorReader:
    """Gives the values of the tensors of one file; files beside it are mapped once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, MappedFile] = {}

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Its sizes. Raises SourceError where there are negative or too many of them."""
        shape = tuple(int(size) for size in tensor.dims)
        if len(shape) > MAX_RANK or any(size < 0 for size in shape):
            raise self._fail(tensor, f"shape {clip(list(shape))}")
        return shape

    def dtype(self, tensor: Any) -> np.dtype[Any]:
        """The type of its values. Raises SourceError where NumPy has none."""
        if tensor.data_type not in DTYPES:
            known = ", ".join(DTYPES.values())
            raise self._fail(tensor, f"type number {tensor.data_type}, wanted one of {known}")
        return np.dtype(DTYPES[tensor.data_type])

    def array(self, tensor: Any) -> NDArray[Any]:
        """All values; a view of the file where they lie in one of their own."""
        shape, dtype = self.shape(tensor), self.dtype(tensor).newbyteorder("<")
        nbytes = math.prod(shape) * dtype.itemsize
        if tensor.data_location == _IN_A_FILE:
            return self._external(tensor, nbytes).view(dtype).reshape(shape)
        if tensor.HasField("raw_data"):
            if len(tensor.raw_data) != nbytes:
                raise self._fail(tensor, f"{len(tensor.raw_data)} bytes for shape {clip(list(shape))} of {dtype}")
            return np.frombuffer(tensor.raw_data, dtype).reshape(shape)
        values = getattr(tensor, _LISTS[tensor.data_type])
        if len(values) != math.prod(shape):
            raise self._fail(tensor, f"{len(values)} values for shape {clip(list(shape))}")
        if dtype == np.float16:  # its bits
            return np.array(values, np.int64).astype(np.uint16).view(np.float16).reshape(shape)
        return np.array(values).astype(dtype).reshape(shape)

    def _external(self, tensor: Any, nbytes: int) -> NDArray[np.uint8]:
        fields = {entry.key: entry.value for entry in tensor.external_data}
        if len(fields) != len(tensor.external_data) or "location" not in fields:
            raise self._fail(tensor, "external data without a location, or with a key twice")
        numbers = {}
        for key in ("offset", "length"):
            text = fields.get(key, "0" if key == "offset" else str(nbytes))
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise self._fail(tensor, f"{key} {clip(text)} of external data")
            numbers[key] = int(text)
        if numbers["length"] != nbytes:
            raise self._fail(tensor, f"{numbers['length']} bytes of external data, wanted {nbytes}")
        if nbytes == 0:
            return np.empty(0, np.uint8)
        name = fields["location"]
        if name not in self._files:
            self._files[name] = open_mapped(below(self.path.parent, name), minimum=1)
        return self._files[name].bytes_at(numbers["offset"], nbytes)

    def place(self, tensor: Any) -> tuple[MappedFile, int] | None:
        """Where the values lie, for a tensor in a file of its own."""
        if tensor.data_location != _IN_A_FILE:
            return None
        self.array(tensor)
        fields = {entry.key: entry.value for entry in tensor.external_data}
        file = self._files.get(fields["location"])  # none for a tensor without values
        return None if file is None else (file, int(fields.get("offset", "0")))

    def _fail(self, tensor: Any, problem: str) -> SourceError:
        return SourceError(f"{self.path.name}: tensor {clip(tensor.name)}: {problem}; the file is damaged, or hostile")


def below(folder: Path, name: str) -> Path:
    """The path of a file below `folder`. Raises SourceError for one that leads out of it, and for links on the way.

    A second name of a file elsewhere, a hard link, is refused too: it could be any file of this disk.
    """
    parts = name.split("/")
    plain = name.isprintable() and not set(name) & set("\\:") and set(parts).isdisjoint({"", ".", ".."})
    if not plain or len(parts) > MAX_DEPTH:
        raise SourceError(f"external data {clip(name)}: wanted a path below the folder of the ONNX file")
    path = folder
    for part in parts:
        path = path / part
        try:
            status = os.lstat(path)
        except (OSError, ValueError) as error:
            raise SourceError(f"{clip(name)}: cannot be read: {getattr(error, 'strerror', error)}") from None
        if stat.S_ISLNK(status.st_mode):
            raise SourceError(f"{clip(name)}: a link on the way; copy the file there")
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise SourceError(f"{clip(name)}: not a plain file with one name; copy it")
    return path
