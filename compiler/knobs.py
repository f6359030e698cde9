"""Every `LLMC_*` environment variable of the compile side, in one place, typed.

Those that the runtime reads are in runtime/loading/integrity.py and cpu.py; README lists them all.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmc.compiler.errors import LlmcError


def dump_folder() -> Path | None:
    """`LLMC_DUMP`: a folder for the module after every pass, as TVMScript; made if it is not there."""
    value = os.environ.get("LLMC_DUMP", "")
    if not value:
        return None
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LlmcError(f"LLMC_DUMP={value}: cannot be made: {(error.strerror or str(error)).lower()}") from error
    return Path(value)
