"""Readers of files of weights."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mutate import EDGES, as_json, change_bytes, change_tree
from reader import Reader, read_tensors

from llmc.compiler.formats import block_format
from llmc.compiler.formats.block import dequantize
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.files.pickle_file import read_pickle
from llmc.frontends.files.safetensors_file import read_safetensors
from llmc.frontends.files.stored_zip import stored_files
from llmc.frontends.files.torch_file import read_torch
from llmc.frontends.gguf.blocks import kept_format, read_blocks
from llmc.frontends.gguf.file import TENSOR_TYPES, read_gguf
from llmc.frontends.gguf.split import read_parts
from llmc.frontends.llama2c.model import read_llama2c
from llmc.frontends.tensor import READABLE, decode_values


def _in_file(path: Path, samples: list[bytes], read: Callable[[Path], Any], make: Any = None) -> Reader:
    """A reader of one file, which `read` makes tensors of or nothing."""

    def run(_: bytes) -> None:
        tensors = read(path)
        if isinstance(tensors, dict):
            read_tensors(path, tensors)

    return Reader(samples, make or (lambda random: change_bytes(random, samples)), run, lay=path.write_bytes)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _gguf_bytes(random: Random, lies: float, parts: tuple[int, int] | None = None) -> bytes:
    """A GGUF file in which every number is a lie with this probability."""

    def number(layout: str, value: int) -> bytes:
        if random.random() < lies:
            value = random.choice(EDGES) & ((1 << 8 * struct.calcsize(layout)) - 1)
        return struct.pack(layout, value)

    def text(value: bytes) -> bytes:
        return number("<Q", len(value)) + value

    def value(kind: int) -> bytes:
        if kind == 8:
            return text(random.choice((b"", b"llama", b"\xc3\xa9", b"x" * 40)))
        if kind == 9:
            item, count = random.choice((0, 4, 5, 6, 7, 8, 10, 12)), random.randrange(5)
            return number("<I", item) + number("<Q", count) + b"".join(value(item) for _ in range(count))
        width = {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)
        return random.randrange(2).to_bytes(width, "little")

    kinds = [random.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)) for _ in range(random.randrange(6))]
    keys = [text(f"key.{i}".encode()) + number("<I", kind) + value(kind) for i, kind in enumerate(kinds)]
    if parts:
        named = (
            ("split.no", parts[0], 2, "<H"),
            ("split.count", parts[1], 2, "<H"),
            ("split.tensors.count", 6, 4, "<I"),
        )
        keys += [text(name.encode()) + number("<I", kind) + number(layout, n) for name, n, kind, layout in named]
    entries, at = [], 0
    for i in range(2 if parts else random.randrange(5)):
        type_id = random.choice((0, 1, 2, 8, 12, 14, 20, 30, *TENSOR_TYPES))
        _, block, block_bytes = TENSOR_TYPES[type_id]
        dims = [block * random.randrange(1, 3), *(random.randrange(1, 4) for _ in range(random.randrange(3)))]
        sizes = b"".join(number("<Q", size) for size in dims)
        name = f"{parts[0] if parts else ''}t.{i}.weight".encode()
        entries.append(text(name) + number("<I", len(dims)) + sizes + number("<I", type_id) + number("<Q", at))
        at += -(-int(np.prod(dims)) // block * block_bytes // 32) * 32
    head = b"GGUF" + number("<I", random.choice((2, 3))) + number("<Q", len(entries)) + number("<Q", len(keys))
    head += b"".join(keys + entries)
    return head + bytes(-len(head) % 32) + random.randbytes(at)


def _gguf(folder: Path) -> Reader:
    samples = [_gguf_bytes(Random(i), 0.0) for i in range(40)]

    def make(random: Random) -> bytes:
        return change_bytes(random, samples) if random.random() < 0.5 else _gguf_bytes(random, 0.03)

    return _in_file(folder / "x.gguf", samples, lambda path: read_gguf(path).tensors, make)


def _split(folder: Path) -> Reader:
    whole = [tuple(_gguf_part(i, number) for number in range(3)) for i in range(8)]

    def make(random: Random) -> tuple[bytes | None, ...]:
        parts: list[bytes | None] = list(random.choice(whole))
        at = random.randrange(3)
        change = random.random()
        if change < 0.1:
            parts[at] = None
        elif change < 0.2:
            parts[at] = parts[random.randrange(3)]
        elif change < 0.6:
            parts[at] = _gguf_bytes(random, 0.02, (at, 3))
        else:
            parts[at] = change_bytes(random, [part for part in parts if part])
        return tuple(parts)

    paths = [folder / f"x-0000{number}-of-00003.gguf" for number in (1, 2, 3)]

    def lay(parts: tuple[bytes | None, ...]) -> None:
        for path, part in zip(paths, parts, strict=True):
            path.unlink(missing_ok=True) if part is None else path.write_bytes(part)

    def read(_: object) -> None:
        tensors = read_parts(paths[0]).tensors
        for path in paths:
            read_tensors(path, {name: t for name, t in tensors.items() if t.file.name == path.name})

    return Reader(whole, make, read, lay=lay)


def _gguf_part(seed: int, number: int) -> bytes:
    """Part `number` of 3: metadata only in the first, so that the parts agree."""
    return _gguf_bytes(_Plain(seed), 0.0, (number, 3))


class _Plain(Random):
    """Random numbers that choose no metadata."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:  # type: ignore[override]
        return 0 if (start, stop) == (6, None) else super().randrange(start, stop, step)


_BLOCKS = [name for name in READABLE if kept_format(name)]


def _blocks(_: Path) -> Reader:
    def make(random: Random) -> tuple[str, bytes]:
        stored = random.choice(_BLOCKS)
        raw = bytearray(random.randbytes(READABLE[stored][1] * random.choice((1, 2))))
        if random.random() < 0.3:
            raw[: len(raw) // 2] = random.choice((b"\x00", b"\xff", b"\x7c", b"\x01")) * (len(raw) // 2)
        if stored == "MXFP4" and random.random() < 0.7:  # a power of two that float16 holds
            raw[:: READABLE[stored][1]] = bytes(random.randrange(104, 144) for _ in raw[:: READABLE[stored][1]])
        return stored, bytes(raw)

    def read(case: tuple[str, bytes]) -> None:
        stored, data = case
        raw = np.frombuffer(data, np.uint8)[None]
        wanted = decode_values(raw, stored)
        if not np.isfinite(wanted).all():
            return
        blocks = read_blocks(raw.reshape(1, -1, READABLE[stored][1]), stored)
        format = block_format(kept_format(stored) or "")
        with np.errstate(all="ignore"):
            ours = dequantize(format, blocks)
        np.testing.assert_array_equal(ours[:, : wanted.shape[1]], wanted)

    return Reader([case for i in range(50) if (case := make(Random(i)))[0] != "MXFP4"], make, read)


def _safetensors_bytes(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _safetensors(folder: Path) -> Reader:
    tree = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "BF16", "shape": [1, 0], "data_offsets": [32, 32]},
        "d": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    }
    data = np.arange(10, dtype=np.float32).tobytes()
    samples = [_safetensors_bytes(as_json(_Never(), tree), data)]

    def make(random: Random) -> bytes:
        if random.random() < 0.3:
            return change_bytes(random, samples)
        return _safetensors_bytes(as_json(random, change_tree(random, tree)), data)

    return _in_file(folder / "x.safetensors", samples, read_safetensors, make)


class _Never(Random):
    """Random numbers that damage no JSON."""

    def random(self) -> float:
        return 0.5


def _torch_samples(zipped: bool) -> list[bytes]:
    import torch

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    values: list[Any] = [
        {"a": base, "b": base.T, "c": base[1:, ::2], "d": torch.zeros(0, 3)},
        {"w": torch.nn.Parameter(base.half()), "i": torch.arange(3), "s": torch.tensor(1.5)},
        torch.nn.Linear(3, 2).state_dict(),
    ]
    samples = []
    for value in values:
        for protocol in (2, 4):
            buffer = io.BytesIO()
            torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
            samples.append(buffer.getvalue())
    return samples


def _torch_zip(folder: Path) -> Reader:
    samples = _torch_samples(zipped=True)
    members = []
    for sample in samples:
        with zipfile.ZipFile(io.BytesIO(sample)) as archive:
            members.append({name: archive.read(name) for name in archive.namelist()})

    def make(random: Random) -> bytes:
        if random.random() < 0.5:
            return change_bytes(random, samples)
        files = dict(random.choice(members))
        name = random.choice([name for name in files if name.endswith((".pkl", "byteorder")) or "/data/" in name])
        files[name] = _change_pickle(random, [files[name]])
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for key, data in files.items():
                archive.writestr(key if random.random() < 0.98 else key.upper(), data)
        return buffer.getvalue()

    return _in_file(folder / "x.bin", samples, read_torch, make)


def _torch_legacy(folder: Path) -> Reader:
    samples = _torch_samples(zipped=False)
    return _in_file(folder / "x.bin", samples, read_torch, lambda random: _change_pickle(random, samples))


_SNIPPETS = (
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n",
    b"ctorch\nFloatStorage\n", b")R", b"tR", b"(", b"t", b"}", b"]", b"s", b"u", b"a", b"e", b"Q", b"b", b"0", b"2",
    b"\x88", b"\x89", b"N", b"J\xff\xff\xff\xff", b"K\x05", b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"X\x02\x00\x00\x00ab",
    b"h\x00", b"q\x00", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"\x94", b"\x93", b"\x81", b"i", b"o", b".",
    b"P0\n",
    b"\x95" + b"\xff" * 8, b"T\xff\xff\xff\xff", b"\x8b\x04\x00\x00\x00abcd", b"\x80\x05",
    b"\x82\x01", b"\x85", b"\x87",
)  # fmt: skip


def _change_pickle(random: Random, samples: list[bytes]) -> bytes:
    """Changed bytes, or opcodes put in between."""
    if random.random() < 0.5:
        return change_bytes(random, samples)
    data = bytearray(random.choice(samples))
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        piece = random.choice(_SNIPPETS)
        data[at : at + (len(piece) if random.random() < 0.5 else 0)] = piece
    return bytes(data)


def _pickle(folder: Path) -> Reader:
    with_pickles = []
    for sample in _torch_samples(zipped=True):
        with zipfile.ZipFile(io.BytesIO(sample)) as archive:
            with_pickles += [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]

    def read(path: Path) -> None:
        file = open_mapped(path, minimum=1)
        read_pickle(file, 0, file.size)

    return _in_file(folder / "x.pkl", with_pickles, read, lambda random: _change_pickle(random, with_pickles))


def _zip(folder: Path) -> Reader:
    samples = []
    for names in (("a",), ("x/data.pkl", "x/data/0", "x/byteorder"), ()):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in names:
                with archive.open(name, "w", force_zip64=len(names) == 1) as file:
                    file.write(name.encode() * 9)
        samples.append(buffer.getvalue())
    samples += _torch_samples(zipped=True)[:1]

    def read(path: Path) -> None:
        file = open_mapped(path, minimum=4)
        for at, count in stored_files(file).values():
            assert len(file.bytes_at(at, count)) == count

    return _in_file(folder / "x.zip", samples, read)


def _llama2c(folder: Path) -> Reader:
    """The header and the places of tensors; what tokenizer.bin holds is another reader's."""
    vocab = 259
    (folder / "tokenizer.bin").write_bytes(_llama2c_tokenizer(vocab))
    sizes = (8, 16, 1, 2, 1, vocab, 16)
    samples = []
    for tied in (True, False):
        own = [1, 1, 8]
        floats = vocab * 8 * (1 if tied else 2) + 16 + 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 8
        legacy = struct.pack("<7i", *(*sizes[:5], vocab if tied else -vocab, sizes[6])) + bytes(4 * (floats + 16 * 4))
        samples += [
            legacy,
            struct.pack("<Ii7iB", 0x616B3432, own[0], *sizes, tied).ljust(256, b"\0") + bytes(4 * floats),
        ]

    def make(random: Random) -> bytes:
        data = bytearray(random.choice(samples))
        if random.random() < 0.2:
            return change_bytes(random, [bytes(data[:300]), bytes(data)])
        for _ in range(random.choice((1, 2, 3))):
            at = random.randrange(10) * 4
            number = random.choice((*EDGES, 5, 6, 10, 12, 24, 48)) * random.choice((1, 1, -1))
            data[at : at + 4] = (number & 0xFFFFFFFF).to_bytes(4, "little")
        return bytes(data) if random.random() < 0.9 else bytes(data[: random.randrange(len(data))])

    def read(path: Path) -> None:
        read_llama2c(path, None).close()

    return _in_file(folder / "x.bin", samples, read, make)


def _llama2c_tokenizer(vocab: int) -> bytes:
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{byte:02X}>".encode() for byte in range(vocab - 3))]
    return struct.pack("<i", 10) + b"".join(struct.pack("<fi", -float(i), len(p)) + p for i, p in enumerate(pieces))


BINARY: dict[str, Callable[[Path], Reader]] = {
    "gguf": _gguf,
    "gguf-split": _split,
    "gguf-blocks": _blocks,
    "safetensors": _safetensors,
    "pickle": _pickle,
    "torch-zip": _torch_zip,
    "torch-legacy": _torch_legacy,
    "zip": _zip,
    "llama2c": _llama2c,
}
