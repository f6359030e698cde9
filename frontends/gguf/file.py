"""Reads the header of a GGUF file: metadata and tensor list, every length checked before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Versions 2 and 3, little-endian.
As llama.cpp does, it refuses nested arrays, and tensors that overlap or leave gaps.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile, open_mapped
from llmc.frontends.tensor import READABLE, Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LISTED = ("xielu.alpha_p", "xielu.alpha_n")  # arrays of a number for each layer, which are weights
MAX_LISTED = 1 << 12
MAX_KEYS = 1 << 16  # real files have under 100
MAX_TENSORS = 1 << 17
MAX_NAME = 256  # bytes of a key or tensor name; llama.cpp allows 64 for tensors
MAX_ITEMS = 1 << 24  # of one array; a vocabulary has at most a few hundred thousand
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL, FLOAT = 8, 9, 7, 6
# Type id of a metadata value -> its layout.
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

# Type id of a tensor -> (name, values in a block, bytes of a block).
# https://github.com/ggml-org/llama.cpp/blob/master/ggml/include/ggml.h (enum ggml_type)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    id_: (name, *READABLE[name])
    for id_, name in {
        0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
        10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 30: "BF16", 39: "MXFP4",
        40: "NVFP4",
        16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M",
        34: "TQ1_0", 35: "TQ2_0",
    }.items()
} | {
    # Known so that the refusal can name them; llmc does not read their values.
    9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
}  # fmt: skip


@dataclass(frozen=True)
class GgufFile:
    """`metadata`: key -> int, float, bool, str or list of these.

    `tensors`: by the file's names; shapes are (N, K), slowest first. `listed`: the numbers of arrays LISTED, each as a
    vector of one, "KEY.0" and so on.
    """

    file: MappedFile
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    listed: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Cursor:
    """Reads forward through the header; every method checks that what it reads is in the file."""

    file: MappedFile
    at: int = 0
    what: str = "header"  # what is being read, for messages
    names: set[str] = field(default_factory=set)

    def fail(self, problem: str) -> SourceError:
        return SourceError(f"{self.file.name}: {self.what}: {problem}; the file is damaged, fetch it again")

    def take(self, count: int) -> int:
        """Moves over `count` bytes and returns where they start."""
        left = self.file.size - self.at
        if count > left:
            raise self.fail(f"{count} bytes wanted at {self.at}, but the file ends {left} bytes later")
        self.at += count
        return self.at - count

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.file.data, self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.file.data, self.take(8))[0])

    def count(self, limit: int, smallest: int, noun: str) -> int:
        """A number of things to come, each of `smallest` bytes or more: a lie is seen at once."""
        number = self.u64()
        room = (self.file.size - self.at) // smallest
        if number > min(limit, room):
            raise self.fail(f"{number} {noun}, wanted at most {limit} and the file has room for {room}")
        return number

    def text(self, limit: int | None = None) -> str:
        length = self.u64()
        if limit is not None and not 0 < length <= limit:
            raise self.fail(f"a name of {length} bytes, wanted 1 to {limit}")
        start = self.take(length)
        try:
            return self.file.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"text at {start} is not UTF-8") from None

    def name(self, noun: str) -> str:
        """A key or tensor name, which must be new."""
        self.what = noun
        name = self.text(MAX_NAME)
        self.what = f"{noun} {clip(name)}"
        if name in self.names:
            raise self.fail("appears twice")
        self.names.add(name)
        return name

    def scalar(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self.fail(f"value type {kind}, wanted 0 to 12")
        layout = np.dtype(SCALARS[kind])
        values = np.frombuffer(self.file.data, layout, count, self.take(layout.itemsize * count))
        if kind == BOOL and (values > 1).any():
            raise self.fail("a boolean that is neither 0 nor 1")
        listed: list[Any] = (values.astype(bool) if kind == BOOL else values).tolist()
        return listed

    def value(self) -> Any:
        kind = self.u32()
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(kind)
        item = self.u32()
        if item == ARRAY:
            raise self.fail("an array of arrays, which no reader of this format supports")
        smallest = np.dtype(SCALARS[item]).itemsize if item in SCALARS else 8
        count = self.count(MAX_ITEMS, smallest, "items")
        if item == STRING:
            return [self.text() for _ in range(count)]
        return self.numbers(item, count)


@dataclass(frozen=True)
class _Entry:
    """A line of the tensor list. `offset` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    stored: str
    offset: int
    nbytes: int


def is_gguf(path: Path) -> bool:
    """Whether the file begins as one."""
    return open_mapped(path, minimum=4).data[:4] == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Maps the file and reads its header. Raises SourceError naming what is wrong and where."""
    cursor = _Cursor(open_mapped(path, minimum=24))
    if cursor.file.data[:4] != MAGIC:
        raise SourceError(f"{path.name}: starts with {cursor.file.data[:4]!r}, wanted {MAGIC!r}: not a GGUF file")
    cursor.take(4)
    version = cursor.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = "big-endian" if swapped in VERSIONS else f"version {version}"
        raise SourceError(
            f"{path.name}: GGUF is {reason}, llmc reads little-endian versions 2 and 3; convert it with llama.cpp"
        )
    tensor_count = cursor.count(MAX_TENSORS, 24, "tensors")
    key_count = cursor.count(MAX_KEYS, 13, "keys")
    metadata = {}
    listed: dict[str, Tensor] = {}
    for _ in range(key_count):
        key = cursor.name("key")
        start = cursor.at
        metadata[key] = cursor.value()
        if key in LISTED:
            listed |= _listed(cursor.file, key, start)
    cursor.names.clear()
    entries = [_entry(cursor) for _ in range(tensor_count)]
    return GgufFile(cursor.file, metadata, _place(cursor, entries, _alignment(cursor, metadata)), listed)


def _listed(file: MappedFile, key: str, start: int) -> dict[str, Tensor]:
    """The numbers of an array that was read from `start` on; none unless they are float32."""
    head = struct.unpack_from("<IIQ", file.data, start) if file.size - start >= 16 else (0, 0, 0)
    kind, item, count = head
    if (kind, item) != (ARRAY, FLOAT) or count > MAX_LISTED:
        return {}
    first = start + 16
    return {f"{key}.{i}": Tensor(f"{key}.{i}", (1,), "F32", first + 4 * i, 4, file) for i in range(count)}


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    cursor.what = "key 'general.alignment'"
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"{clip(alignment)}, wanted a power of two up to {MAX_ALIGNMENT}")
    return int(alignment)


def _entry(cursor: _Cursor) -> _Entry:
    name = cursor.name("tensor")
    dims = cursor.u32()
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{dims} dimensions, wanted 1 to {MAX_DIMS}")
    sizes = [cursor.u64() for _ in range(dims)]  # fastest first
    type_id = cursor.u32()
    offset = cursor.u64()
    if type_id not in TENSOR_TYPES:
        raise cursor.fail(f"type {type_id}, which this llmc does not know")
    stored, block, block_bytes = TENSOR_TYPES[type_id]
    values = prod(sizes)
    if values == 0 or values >= 1 << 63:
        raise cursor.fail(f"sizes {sizes}, wanted each at least 1 and less than 2^63 values")
    if sizes[0] % block:
        raise cursor.fail(f"rows of {sizes[0]} values, wanted a multiple of {block} for {stored}")
    return _Entry(name, tuple(reversed(sizes)), stored, offset, values // block * block_bytes)


def _place(cursor: _Cursor, entries: list[_Entry], alignment: int) -> dict[str, Tensor]:
    """Tensors at their place in the file: one after the other, each padded to the alignment."""
    start = -(-cursor.at // alignment) * alignment
    expected = 0
    tensors = {}
    for entry in entries:
        cursor.what = f"tensor {clip(entry.name)}"
        if entry.offset != expected:
            raise cursor.fail(f"data at {entry.offset}, wanted {expected}, right after the tensor before it")
        begin, end = start + entry.offset, start + entry.offset + entry.nbytes
        if end > cursor.file.size:
            raise cursor.fail(f"data ends at {end}, but the file has {cursor.file.size} bytes")
        expected += -(-entry.nbytes // alignment) * alignment
        tensors[entry.name] = Tensor(entry.name, entry.shape, entry.stored, begin, entry.nbytes, cursor.file)
    return tensors
