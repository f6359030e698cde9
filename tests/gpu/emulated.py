"""A CUDA device without a GPU, for tests: a driver and a runtime library of ours, and kernels that g++ compiles.

What is real: TVM's CUDA source of every kernel, the host's code, TVM's CUDA runtime, llmc's runtime, the artifact.
What is not: nvcc's code (an object of g++ stands where the cubin does), and time. `emulator/device.h` says how threads
run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "emulator"
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(\d+(?:, \d+)?\) (\w+)\(([^)]*)\) \{')
_DYNAMIC = re.compile(r"extern __shared__ (?:(?:__align__|alignas)\(\d+\) )?(\w+) (\w+)\[\];")
_ALIGNED = re.compile(r"__shared__ (?:__align__|alignas)\((\d+)\)")
SHARED_BYTES = 227 << 10
_VERSIONS = "libcudart.so.13 { global: cuda*; emulated_count; };\n"
_SIZES = {"int64_t": 8, "int": 4, "float": 4, "double": 8, "uint": 4, "uint64_t": 8, "uint32_t": 4, "int32_t": 4}


def available() -> bool:
    """Whether this machine can be a device: a compiler, and the processor that fibers are written for."""
    return shutil.which("g++") is not None and os.uname().machine == "x86_64"


def build(folder: Path) -> Path:
    """Make libcudart.so.13, libcuda.so.1 and libnccl.so.2 in a folder, which is for LD_LIBRARY_PATH; its path."""
    (folder / "versions").write_text(_VERSIONS)
    common = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    sources = [str(FOLDER / name) for name in ("runtime.cc", "driver.cc")]
    _run([*common, *sources, "-o", "libcudart.so.13", "-Wl,-soname,libcudart.so.13", "-Wl,--version-script,versions"],
         folder)  # fmt: skip
    _run([*common, str(FOLDER / "nccl.cc"), "-o", "libnccl.so.2", "-Wl,-soname,libnccl.so.2",
          "-l:libcudart.so.13", "-L.", "-Wl,-rpath,$ORIGIN"], folder)  # fmt: skip
    (folder / "empty.cc").write_text("")
    _run([*common, "empty.cc", "-o", "libcuda.so.1", "-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed",
          "-l:libcudart.so.13", "-L.", "-Wl,-rpath,$ORIGIN"], folder)  # fmt: skip
    return folder


def machine_code(source: str, *_: Any) -> tuple[bytes, dict[str, Any]]:
    """What stands in for nvcc: the bytes of a shared object of the kernels. Registers and spills are not known."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernels.cc").write_text('#include "device.h"\n' + _plain(source) + _table(source), encoding="utf-8")
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
        _run(["g++", *flags, f"-I{FOLDER}", f"-I{FOLDER / 'include'}", "kernels.cc", "-o", "kernels.so"], folder)
        return (folder / "kernels.so").read_bytes(), {}


@contextmanager
def compiling() -> Iterator[None]:
    """While open, artifacts for CUDA get code for the emulated device."""
    from llmc.targets.cuda import build as cuda_build

    before = cuda_build.machine_code, cuda_build.find_nvcc
    cuda_build.machine_code, cuda_build.find_nvcc = machine_code, lambda: "g++"
    try:
        yield
    finally:
        cuda_build.machine_code, cuda_build.find_nvcc = before


def _plain(source: str) -> str:
    """The source as g++ can have it: of shared memory the one block that runs has all, and PTX is in device.h."""
    from llmc.targets.cuda.prelude import FUNCTIONS

    source = source.replace(FUNCTIONS, "")
    source = _DYNAMIC.sub(rf"alignas(64) static \1 \2[{SHARED_BYTES} / sizeof(\1)];", source)
    return _ALIGNED.sub(r"alignas(\1) static", source)


def _table(source: str) -> str:
    """The kernels by name, and the sizes of their arguments, for driver.cc."""
    calls, sizes = [], []
    for name, given in _KERNEL.findall(source):
        types = [part.rsplit(" ", 1)[0].replace("__restrict__", "").strip() for part in given.split(",")]
        values = ", ".join(f"*({type_} *)p[{number}]" for number, type_ in enumerate(types))
        calls.append(f'if (!strcmp(name, "{name}")) function = [](void **p) {{ {name}({values}); }};')
        widths = ", ".join(str(8 if type_.endswith("*") else _SIZES[type_]) for type_ in types)
        sizes.append(f'extern "C" const unsigned char llmc_sizes_{name}[] = {{{widths}, 0}};')
    body = "\n  ".join(calls)
    return (
        "\n" + "\n".join(sizes) + '\nextern "C" const char *llmc_run(const char *name, const unsigned *grid, '
        "const unsigned *block, void **given) {\n  emulated::Kernel function = nullptr;\n  " + body +
        '\n  return function ? emulated::run_grid(function, grid, block, given) : "no such kernel";\n}\n'
    )  # fmt: skip


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr[:4000]}")
