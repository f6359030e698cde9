"""Every `LLMC_*` environment variable of the compile side, in one place, typed.

The runtime's are in runtime/knobs.py; README lists them all.
"""

from __future__ import annotations

import os
from pathlib import Path


def dump_folder() -> Path | None:
    """`LLMC_DUMP`: a folder for the module after every pass, as TVMScript."""
    value = os.environ.get("LLMC_DUMP", "")
    return Path(value) if value else None
