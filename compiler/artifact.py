"""Writes an artifact: a folder `name.llmc/` that the thin runtime loads. The format is docs/design.md, "The artifact".

Everything is written to a temporary folder beside the target and renamed when it is whole, so that a crash leaves
nothing behind that looks like an artifact. Nothing in it depends on time, place or machine load: two compiles of the
same input are byte-identical.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight

FORMAT = 4  # of the manifest; a reader refuses a newer one
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
ALIGN = 64  # bytes; kernels use aligned vector loads
CHUNK_BYTES = 16 << 20  # weights are hashed in pieces of this size
_SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass
class _Hashing:
    """A file being written, hashed in chunks on the way.

    It is written in whole chunks: a file system that can then keeps it in pages of 2 MB, which are faster to read.
    """

    file: BinaryIO
    chunk: bytearray = field(default_factory=bytearray)
    chunks: list[str] = field(default_factory=list)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            room = CHUNK_BYTES - len(self.chunk)
            self.chunk += view[:room]
            view = view[room:]
            if len(self.chunk) == CHUNK_BYTES:
                self._close_chunk()

    def _close_chunk(self) -> None:
        self.file.write(self.chunk)
        self.chunks.append(hashlib.sha256(self.chunk).hexdigest())
        self.chunk.clear()

    def finish(self) -> list[str]:
        """Hashes of all chunks, the last one included."""
        if self.chunk:
            self._close_chunk()
        return self.chunks


def _header(entries: list[StoredWeight]) -> bytes:
    """The safetensors header: tensors on 64-byte borders; the format allows no gaps, so gaps are tensors "pad.N"."""
    table: dict[str, Any] = {}
    at = 0
    for number, entry in enumerate(entries):
        table[entry.name] = {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
        gap = -at % ALIGN
        if gap:
            table[f"pad.{number}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            at += gap
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % ALIGN)


def write_weights(
    path: Path, entries: list[StoredWeight], arrays: Iterable[NDArray[Any]], done: Callable[[int], None]
) -> dict[str, Any]:
    """Store the tensors in order; the manifest's "weights" section. `arrays` gives their values, in the same order."""
    header = _header(entries)
    with path.open("wb") as file:
        out = _Hashing(file)
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for number, (entry, array) in enumerate(zip(entries, arrays, strict=True)):
            if array.shape != entry.shape or str(array.dtype) != entry.dtype:
                raise LlmcError(
                    f"{entry.name}: packed as {array.dtype}{array.shape}, the graph says {entry.dtype}{entry.shape}"
                )
            out.write(array.reshape(-1).view(np.uint8).data)
            out.write(bytes(-entry.nbytes % ALIGN))
            done(number + 1)
        chunks = out.finish()
    order = [entry.name for entry in entries]
    return {"file": path.name, "chunk_bytes": CHUNK_BYTES, "chunks": chunks, "order": order}


def _digest(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def canonical(value: Any) -> bytes:
    """The one JSON text of a value that hashes are made of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def write_manifest(folder: Path, manifest: dict[str, Any], files: dict[str, Any] | None = None) -> dict[str, Any]:
    """Add the list of files and the manifest's own hash, and write it, over an earlier one -> what is written.

    `files`: the list, from when the manifest was written before.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    if files is None:
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        files = {name: _digest(folder / name) for name in names}
    manifest = {"format": FORMAT, **manifest, "files": files}
    manifest["manifest_sha256"] = hashlib.sha256(canonical(manifest)).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def check_output(path: Path) -> None:
    """Refuse before any work what could not be written, or would overwrite something that is no artifact."""
    if not path.resolve().parent.is_dir():
        raise LlmcError(f"{path}: its folder does not exist; create {path.resolve().parent} first")
    if not os.access(path.resolve().parent, os.W_OK):
        raise LlmcError(f"{path}: its folder is not writable")
    if path.is_symlink() or (path.exists() and not (path / MANIFEST).is_file()):
        raise LlmcError(f"{path}: exists and is not an artifact; choose another name or remove it")


@contextmanager
def new_artifact(path: Path) -> Iterator[Path]:
    """A folder to fill; renamed to `path` on success (an older artifact there is replaced), removed on failure."""
    check_output(path)
    path = path.resolve()
    _remove_abandoned(path)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise LlmcError(f"{path}: cannot be created: {(error.strerror or str(error)).lower()}") from error
    lock = _lock(folder)
    try:
        folder.chmod(0o755)
        (folder / "lib").mkdir()
        yield folder
        _put_in_place(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """An open, exclusively locked folder; None if somebody else holds it. The kernel lets go when a process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary folders of compiles to this name that were killed."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        if folder.is_symlink() or not (folder / "lib").is_dir():
            continue
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _put_in_place(folder: Path, path: Path) -> None:
    """Rename over `path`; an old artifact there changes places with the new one in one step.

    Where the system cannot swap, the old one steps aside first and comes back if the new one cannot take its place.
    """
    if path.exists() and _exchange(folder, path):
        return  # the caller removes `folder`, which now holds the old artifact
    aside = folder.with_name(f"{folder.name}.old")
    try:
        if path.exists():
            path.rename(aside)
        folder.rename(path)
    except OSError as error:
        if aside.exists():
            aside.rename(path)
        raise LlmcError(f"{path}: cannot be put in place: {(error.strerror or str(error)).lower()}") from error
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (Linux renameat2 with RENAME_EXCHANGE); False where that cannot be done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
