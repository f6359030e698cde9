"""Hashes of an artifact's files, and the memory of which weights were found intact.

Weights are large, so their hashes are remembered by the file's identity: as long as device, inode, size and both times
stay the same, the file is taken to be the one that was hashed. Everything else is hashed at every load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.memory import MAP_NORESERVE, available_bytes

Progress = Callable[[str, int, int], None]  # (stage, done, total)

_BLOCK_BYTES = 1 << 20
_COPIED_AT_ONCE = 64 << 20  # bytes
_REMEMBERED = 256  # identities kept; the oldest go first
_SETTLED_NS = 50_000_000  # a younger change may share its time stamp with the next one


def open_plain(path: Path) -> int:
    """A descriptor for reading; a link in the last place is refused. The caller closes it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _opened(path: Path, least_bytes: int) -> Iterator[tuple[int, int]]:
    """A descriptor of a file and its size. Raises ArtifactError when that is less than `least_bytes`."""
    fd = open_plain(path)
    try:
        size = os.fstat(fd).st_size
        if size < least_bytes:
            raise ArtifactError(f"{path}: cut short: {size} bytes")
        yield fd, size
    finally:
        os.close(fd)


def map_plain(path: Path, least_bytes: int = 1) -> mmap.mmap:
    """A private map of the whole file. Raises ArtifactError when it has less than `least_bytes`, one or more.

    It asks for pages of 2 MB: a file system that has them reads the file so, and what is read through them comes up to
    a quarter faster than through pages of 4 KB.
    """
    with _opened(path, least_bytes) as (fd, size):
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE  # more weights than memory is fine: pages come back from the file
        data = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _ask_for_large_pages(data)
    return data


def _ask_for_large_pages(data: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
        data.madvise(mmap.MADV_HUGEPAGE)


def copy_plain(path: Path, least_bytes: int = 1) -> mmap.mmap:
    """The whole file in memory of this process, in pages of 2 MB where the system has them; errors of `map_plain`.

    RequestError where that is more memory than there is.
    """
    with _opened(path, least_bytes) as (fd, size):
        if size > (available := available_bytes()):
            raise RequestError(f"copy_weights: {path} has {size} bytes, and {available} are available; load without")
        try:
            data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _ask_for_large_pages(data)
            with memoryview(data) as whole:
                at = 0
                while at < size:
                    read = os.preadv(fd, [whole[at : at + _COPIED_AT_ONCE]], at)
                    if not read:
                        raise ArtifactError(f"{path}: became shorter while it was read")
                    at += read
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    return data


def file_sha256(path: Path) -> str:
    """SHA-256 of the whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with os.fdopen(open_plain(path), "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def wrong_chunk(
    path: Path, chunk_bytes: int, chunks: tuple[str, ...], threads: int, progress: Progress | None
) -> int | None:
    """Index of the first chunk of the file whose hash differs from `chunks`, or None when all agree."""
    from concurrent.futures import ThreadPoolExecutor  # here, as most loads do not come here

    def differs(index: int) -> bool:
        return hashlib.sha256(data[index * chunk_bytes : (index + 1) * chunk_bytes]).hexdigest() != chunks[index]

    with map_plain(path) as file, memoryview(file) as data, ThreadPoolExecutor(max(1, threads)) as pool:
        for index, wrong in enumerate(pool.map(differs, range(len(chunks)))):
            if wrong:
                pool.shutdown(cancel_futures=True)
                return index
            if progress:
                progress("verify weights", index + 1, len(chunks))
    return None


def identity(path: Path, manifest_sha256: str) -> str:
    """The key under which a file's hashes are remembered."""
    info = path.stat(follow_symlinks=False)
    fields = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    return ":".join(map(str, (*fields, manifest_sha256)))


def settled(path: Path) -> bool:
    """Whether the file's last change is long enough ago for its time to tell it from the next change."""
    info = path.stat(follow_symlinks=False)
    return time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns) > _SETTLED_NS


def cache_folder() -> Path:
    """Where the runtime keeps what it may lose: LLMC_CACHE_DIR, else llmc/ under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("LLMC_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "llmc"


def is_remembered(key: str) -> bool:
    """Whether `remember(key)` was called before, here or in another process."""
    return key in _read_memory()


def remember(key: str) -> None:
    """Keep `key` for later processes. A cache folder that cannot be written is no error: the next load hashes again."""
    import tempfile

    keys = [known for known in _read_memory() if known != key][-(_REMEMBERED - 1) :] + [key]
    folder = cache_folder()
    with contextlib.suppress(OSError, RuntimeError):
        folder.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=".verified.", dir=folder)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(keys, file)
            os.replace(temporary, folder / "verified.json")
        except OSError:
            os.unlink(temporary)


def remember_for(path: Path, known: str, manifest_sha256: str) -> None:
    """What is remembered of weights by the manifest with hash `known` holds for another one that lists the same."""
    if is_remembered(identity(path, known)):
        remember(identity(path, manifest_sha256))


def _read_memory() -> list[str]:
    try:
        keys = json.loads((cache_folder() / "verified.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return []
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
