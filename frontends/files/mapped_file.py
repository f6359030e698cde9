"""A file of weights, mapped read-only, and safe ways to open the files of an untrusted model."""

from __future__ import annotations

import mmap
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip

MAX_FILE_NAME = 255  # bytes; no file system has longer ones


@dataclass(frozen=True)
class MappedFile:
    """`data` is the whole file, read-only; pages are read from disk when touched."""

    name: str
    data: mmap.mmap

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    def bytes_at(self, offset: int, count: int) -> NDArray[np.uint8]:
        """A view of `count` bytes, without a copy. Raises SourceError past the end of the file."""
        if self.data.closed:
            raise SourceError(f"{self.name}: is closed; read tensors before Source.close()")
        if offset < 0 or count < 0 or offset + count > self.size:
            raise SourceError(
                f"{self.name}: {count} bytes at {offset}, but the file has {self.size}; "
                "it is cut short or damaged, fetch it again"
            )
        return np.frombuffer(self.data, np.uint8, count, offset)

    def let_go(self) -> None:
        """Give back the memory of pages that were read; views stay valid, and read them from the file again."""
        if not self.data.closed and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def open_mapped(path: Path, minimum: int) -> MappedFile:
    """Maps a regular file of at least `minimum` bytes. Raises SourceError otherwise."""
    size = regular_size(path)
    if size < max(minimum, 1):
        raise SourceError(f"{path.name}: {size} bytes, wanted at least {minimum}; it is cut short, fetch it again")
    try:
        with path.open("rb") as file:
            return MappedFile(path.name, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path.name}: cannot be read: {error}") from None


def read_bounded(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes. Raises SourceError otherwise."""
    size = regular_size(path)
    if size > limit:
        raise SourceError(f"{path.name}: {size} bytes, wanted at most {limit}")
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise SourceError(f"{path.name}: cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise SourceError(f"{path.name}: more than {limit} bytes")
    return data


def regular_size(path: Path) -> int:
    """Size in bytes, without opening the file: opening a pipe or a device would hang."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path.name}: cannot be read: {reason}") from None
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path.name}: not a regular file; give the model's file or folder")
    return status.st_size


def inside(folder: Path, name: str) -> Path:
    """The real path of file `name` of a model folder.

    Raises SourceError for anything but a plain file name, and for a link that leaves the folder.
    One layout may: the Hugging Face cache, where `snapshots/<revision>/` holds links to `blobs/`
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
    """
    plain = name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\:")
    if not plain or len(name.encode()) > MAX_FILE_NAME:
        raise SourceError(f"{folder.name}: refers to file {clip(name)}, wanted a plain name in the folder")
    home = folder.resolve()
    try:
        real = (home / name).resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise SourceError(f"{name}: cannot be resolved: {error}") from None
    # The folder of a snapshot, or one in it.
    caches = [place.parent / "blobs" for place in (home.parent, home.parent.parent) if place.name == "snapshots"]
    if real.parent not in (home, *caches):
        raise SourceError(f"{name}: a link that leaves the folder; copy the file into it")
    return real
