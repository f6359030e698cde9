"""The weights of an artifact as tensors over the mapped file: nothing is read before a kernel touches it.

Or over a copy in memory: the file's own pages may be small ones, or in slow places (large_pages.py).

Format: https://github.com/huggingface/safetensors#format. Ours adds that every tensor starts at a multiple of
64 bytes, filled up with tensors named "pad.N".
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import schema
from llmc.runtime.loading.integrity import copy_plain, map_plain
from llmc.runtime.loading.large_pages import LargePages

ALIGN = 64  # bytes; kernels use aligned vector loads
_MAX_HEADER_BYTES = 100 << 20  # what safetensors itself allows
_PAD = "pad."
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_ENTRY = schema.record(
    dtype=schema.one_of(*_DTYPES),
    shape=schema.items(schema.whole(0, 2**48)),
    data_offsets=schema.items(schema.whole(0, 2**60), 2),
)


class Weights(NamedTuple):
    """`arrays`: the tensors, in the order that was asked for. `pages`: what has to be told of calls that read them."""

    arrays: list[NDArray[Any]]
    pages: LargePages | None

    def worked(self, seconds: float) -> None:
        """A call that read them took so long, and has ended."""
        if self.pages is not None:
            self.pages.worked(seconds)


def map_weights(path: Path, order: tuple[str, ...], copied: bool | None = None) -> Weights:
    """The tensors named in `order`, as arrays over a private map of the file, or over a copy of it in memory.

    copied: None copies pages of the map after calls that the weights are told of, where it pays (large_pages.py).
    Raises ArtifactError when the header is not sound or the file holds other tensors. Arrays count as writable because
    DLPack has no read-only tensors; a write would stay in this process.
    """
    data = (copy_plain if copied else map_plain)(path, least_bytes=8)
    header, start = _read_header(path, data)
    problem = _unsound(header, start, len(data)) or _other_names(header, order)
    if problem:
        raise ArtifactError(f"{path}: {problem}; compile the model again")
    return Weights([_view(data, start, header[name]) for name in order], LargePages(data) if copied is None else None)


def aligned_empty(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """An uninitialised array where kernels can read it: they use aligned vector loads."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(count + ALIGN, np.uint8)
    first = -memory.ctypes.data % ALIGN
    return memory[first : first + count].view(dtype).reshape(shape)


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise ArtifactError(f"{path}: its header of {length} bytes does not fit in the file of {len(data)}")
    try:
        header = schema.parse_json(data[8 : 8 + length])
    except ValueError as error:
        raise ArtifactError(f"{path}: its header is not readable: {str(error)[:200]}") from error
    problems = schema.mapping(_ENTRY)(header, "header")
    if problems:
        raise ArtifactError(f"{path}: {problems[0]}; compile the model again")
    return header, 8 + length


def _unsound(header: dict[str, Any], start: int, size: int) -> str | None:
    """What is wrong with where tensors lie: they must follow each other without gaps and fill the file."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if len(entry["data_offsets"]) != 2:
            return f"tensor {name[:80]!r} has {len(entry['data_offsets'])} offsets, wanted 2"
        begin, end = entry["data_offsets"]
        nbytes = math.prod(entry["shape"]) * np.dtype(_DTYPES[entry["dtype"]]).itemsize
        if begin != at or end - begin != nbytes:
            return f"tensor {name[:80]!r} lies at {begin}..{end}, wanted {at}..{at + nbytes}"
        if not name.startswith(_PAD) and (start + begin) % ALIGN:
            return f"tensor {name[:80]!r} starts at byte {start + begin}, which is no multiple of {ALIGN}"
        at = end
    return None if start + at == size else f"tensors end at byte {start + at}, the file at {size}"


def _other_names(header: dict[str, Any], order: tuple[str, ...]) -> str | None:
    stored = {name for name in header if not name.startswith(_PAD)}
    missing, unknown = sorted(set(order) - set(header)), sorted(stored - set(order))
    if missing:
        return f"tensors that the manifest names are missing: {', '.join(missing[:5])}"
    return f"tensors that the manifest does not name: {', '.join(unknown[:5])}" if unknown else None


def _view(data: mmap.mmap, start: int, entry: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    count = math.prod(entry["shape"])
    if count == 0:
        return np.empty(entry["shape"], dtype)
    flat = np.frombuffer(data, dtype, count, start + entry["data_offsets"][0])
    return flat.reshape(entry["shape"])
