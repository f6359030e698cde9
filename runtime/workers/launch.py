"""Starts the workers of an artifact: this process becomes mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading.device_manifest import read_device_manifest
from llmc.runtime.loading.manifest import DEVICES, read_document


def launch(path: str | os.PathLike[str], arguments: Sequence[str]) -> None:
    """Run `llmc` with these arguments in a process for each device of the artifact; does not come back.

    Raises ArtifactError for an artifact of one device, or where there is no mpirun.
    """
    folder = Path(path).resolve()
    if DEVICES not in read_document(folder):
        raise ArtifactError(f"{folder}: compiled for one device; run it without --devices, or compile it with it")
    count = len(read_device_manifest(folder).ranks)
    mpirun = _mpirun()
    command = [mpirun, *_options(mpirun), "-n", str(count), sys.executable, "-m", "llmc", *arguments]
    sys.stdout.flush()
    os.execv(mpirun, command)


def _mpirun() -> str:
    """That of the environment this Python is of, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise ArtifactError("--devices wants mpirun, which is not on PATH: pip install mpich, or your system's MPI")
    return found


def _options(mpirun: str) -> list[str]:
    """MPICH's would end all workers before one can say which of them was lost."""
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return ["-disable-auto-cleanup"] if "hydra" in said.lower() else []
