"""CUDA source -> machine code of one chip, by nvcc; and what ptxas says that each kernel takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.errors import LlmcError
from llmc.targets.cuda.target import CudaTarget

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '\w+'\n"
    r"(?:.*\n)*?.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*?Used (?P<registers>\d+) registers(?P<rest>.*)"
)
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:, \d+)?\) (\w+)\(")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of the chip: of a thread, and shared memory of a block."""

    threads: int  # of a block
    registers: int
    stack_bytes: int  # arrays that did not fit in registers, or whose index is not known
    spill_bytes: int
    shared_bytes: int


def find_nvcc() -> str:
    """The path of nvcc. Raises LlmcError where there is none."""
    path = shutil.which("nvcc")
    if path is None:
        raise LlmcError(
            "nvcc is needed to compile for CUDA and is not on PATH; install the CUDA toolkit (13.0 is what is tested)"
        )
    return path


def machine_code(source: str, target: CudaTarget) -> tuple[bytes, dict[str, Resources]]:
    """The cubin of CUDA source, and what each kernel takes by its name. Raises LlmcError with what nvcc said."""
    with tempfile.TemporaryDirectory() as folder:
        # The file's name goes into the cubin: the same one every time, for the same bytes.
        (Path(folder) / "kernels.cu").write_text(source, encoding="utf-8")
        command = [find_nvcc(), "-cubin", f"-arch={target.code}", "-O3", "-Xptxas", "-v", "kernels.cu", "-o", "k.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise LlmcError(f"nvcc refused the kernels for {target.chip}: {(said or ['no reason given'])[0][:300]}")
        return (Path(folder) / "k.cubin").read_bytes(), resources(done.stderr, source)


def resources(report: str, source: str) -> dict[str, Resources]:
    """What `ptxas -v` says of each kernel of the source."""
    threads = {name: int(count) for count, name in _BOUNDS.findall(source)}
    found = {}
    for entry in _ENTRY.finditer(report):
        shared = _SHARED.search(entry["rest"])
        spilled = int(entry["stores"]) + int(entry["loads"])
        found[entry["name"]] = Resources(
            threads[entry["name"]], int(entry["registers"]), int(entry["stack"]), spilled,
            int(shared[1]) if shared else 0,
        )  # fmt: skip
    return found
