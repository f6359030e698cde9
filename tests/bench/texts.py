"""Fetch Jane Austen's novels once and split them: one novel to calibrate on, another to measure on.

    python tests/bench/texts.py                 fetch with apt-get, print paths, sizes, SHA-256
    python tests/bench/texts.py --deb FILE      take a package file that is already here

The texts ship inside the Debian package r-cran-janeaustenr 1.0.0-1 (MIT; the novels are in the public domain), which
is downloaded with apt-get, checked and unpacked, never installed. Everything lies where examples/fetch_smollm2.py
keeps the model: .cache/ of the checkout, or LLMC_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples")]

from package_files import cache_folder, sha256_of

PACKAGE = "r-cran-janeaustenr=1.0.0-1"
FILE = "r-cran-janeaustenr_1.0.0-1_all.deb"
SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
MEMBER = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
# The order in the package's data file (its index, Rdata.rdx, lists them by name).
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
CALIBRATION, EVALUATION = "emma", "persuasion"

_AR_MAGIC, _AR_HEADER = b"!<arch>\n", 60
_STRSXP, _CHARSXP = 16, 9  # R's type codes: a vector of strings, one string


def fetch(given: Path | None = None) -> Path:
    """Return the path of the package in the cache: copied from `given`, or downloaded, and checked."""
    path = cache_folder() / FILE
    if path.exists() and sha256_of(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / FILE
        if given is not None:
            shutil.copyfile(given, new)
        elif subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, stdout=sys.stderr.fileno()).returncode != 0:
            sys.exit(f"{PACKAGE}: apt-get could not download it; its message is above (--deb takes a file)")
        found = sha256_of(new) if new.exists() else "nothing"
        if found != SHA256:
            sys.exit(f"{PACKAGE}: SHA-256 is {found}, expected {SHA256}")
        new.replace(path)  # in one step: two processes may fetch at the same time
    return path


def austen(name: str, given: Path | None = None) -> str:
    """Return the text of the novel `name` (one of NOVELS), its lines as printed, unwrapped by nobody."""
    record = list(_records(_member(fetch(given).read_bytes())))[NOVELS.index(name)]
    return "\n".join(_strings(record)) + "\n"


def split(given: Path | None = None) -> tuple[Path, Path]:
    """Write the two texts as .txt into the cache; return (calibration, evaluation): different novels, no overlap."""
    paths = []
    for name in (CALIBRATION, EVALUATION):
        path = cache_folder() / f"austen-{name}.txt"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(austen(name, given), encoding="utf-8")
            part.replace(path)
        paths.append(path)
    return paths[0], paths[1]


def _member(package: bytes) -> bytes:
    """The data file inside the package: an ar archive that holds a tar archive."""
    assert package.startswith(_AR_MAGIC)
    position = len(_AR_MAGIC)
    while position < len(package):
        header = package[position : position + _AR_HEADER]
        position += _AR_HEADER
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(package[position : position + size])) as archive:
                file = archive.extractfile(MEMBER)
                assert file is not None
                return file.read()
        position += size + size % 2  # members start at even offsets
    raise ValueError("the package has no data.tar")


def _records(data: bytes) -> Iterator[bytes]:
    """The objects of an R lazy-load file: [u32 big-endian unpacked size][zlib stream], repeated."""
    position = 0
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        stream = zlib.decompressobj()
        record = stream.decompress(data[position + 4 :])
        assert len(record) == size
        yield record
        position = len(data) - len(stream.unused_data)


def _strings(record: bytes) -> Iterator[str]:
    """The strings of one serialized character vector (XDR, version 3 of R's format)."""
    assert record.startswith(b"X\n")
    (encoding,) = struct.unpack_from(">I", record, 14)  # after "X\n", version, writer's R, oldest reader's R
    position = 18 + encoding
    kind, count = struct.unpack_from(">II", record, position)
    assert kind & 255 == _STRSXP
    position += 8
    for _ in range(count):
        kind, size = struct.unpack_from(">II", record, position)
        assert kind & 255 == _CHARSXP
        yield record[position + 8 : position + 8 + size].decode("utf-8")
        position += 8 + size


def main() -> None:
    """Write the two texts, print where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb", type=Path, help="the package, if it is already here")
    options = parser.parse_args()
    for use, path in zip(("calibration", "evaluation"), split(options.deb), strict=True):
        print(f"{use:12} {path} {path.stat().st_size} bytes, sha256 {sha256_of(path)}")


if __name__ == "__main__":
    main()
