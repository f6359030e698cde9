"""Reads the header of a safetensors file, every offset checked before it is used.

Format: https://github.com/huggingface/safetensors#format. As the reference does, it refuses
tensors that overlap or leave gaps. Its limit on the header is lower than the reference's 100 MB.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile, open_mapped
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.tensor import Tensor

MAX_HEADER = 16 << 20  # bytes: about 100,000 tensors
MAX_DIMS = 8

# Bytes of a value. Tensor.read refuses, by name, what it cannot turn into float32.
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Maps the file: its names -> tensors. Raises SourceError naming what is wrong."""
    file = open_mapped(path, minimum=10)
    length = int.from_bytes(file.data[:8], "little")
    room = file.size - 8
    if length > min(MAX_HEADER, room):
        raise SourceError(
            f"{path.name}: header of {length} bytes, wanted at most {MAX_HEADER} and the file has "
            f"{room}; it is cut short or not safetensors, fetch it again"
        )
    text = bytes(file.data[8 : 8 + length])
    if not text.startswith(b"{"):
        raise SourceError(f"{path.name}: the header starts with {text[:1]!r}, wanted '{{'")
    header = read_json(text, f"{path.name}: header")
    header.pop("__metadata__", None)  # free text about where the file comes from
    start = 8 + length
    tensors = {name: _tensor(file, start, name, entry) for name, entry in header.items()}
    _check_layout(file, start, tensors)
    return tensors


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(file: MappedFile, start: int, name: str, entry: Any) -> Tensor:
    def fail(problem: str) -> SourceError:
        return SourceError(f"{file.name}: tensor {clip(name)}: {problem}; the file is damaged")

    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        raise fail(f"{clip(entry)}, wanted dtype, shape and data_offsets")
    stored, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(stored, str) or stored not in SIZES:
        raise fail(f"dtype {clip(stored)}, wanted one of {', '.join(SIZES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_whole, shape)):
        raise fail(f"shape {clip(shape)}, wanted at most {MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise fail(f"data_offsets {clip(offsets)}, wanted [begin, end]")
    begin, end = offsets
    wanted = prod(shape) * SIZES[stored]
    if end - begin != wanted:
        raise fail(f"{end - begin} bytes for {stored} {clip(shape)}, wanted {clip(wanted)}")
    if start + end > file.size:
        raise fail(f"data ends at {start + end}, but the file has {file.size} bytes")
    return Tensor(name, tuple(shape), stored, start + begin, wanted, file)


def _check_layout(file: MappedFile, start: int, tensors: dict[str, Tensor]) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    at = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != at:
            fault = "overlaps the tensor before it" if tensor.offset < at else "follows a gap"
            raise SourceError(
                f"{file.name}: tensor {clip(tensor.name)} starts at {tensor.offset}, wanted {at}: "
                f"it {fault}; the file is damaged"
            )
        at += tensor.nbytes
    if at != file.size:
        raise SourceError(
            f"{file.name}: {file.size - at} bytes after the last tensor, wanted none; the file is damaged"
        )
