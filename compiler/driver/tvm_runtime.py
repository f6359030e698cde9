"""TVM's runtime library for the machine that will run an artifact: ours, or one that the user names."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from llmc.compiler.errors import LlmcError

RUNTIME = "libtvm_runtime.so"
CUDA_RUNTIME = "libtvm_runtime_cuda.so"  # beside it, for code of GPUs
_FOLDER = "tvm/lib/"  # of an apache-tvm wheel
_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF headers: EM_X86_64, EM_AARCH64


def find_runtime(arch: str, given: Path | None, library: str = RUNTIME) -> Path:
    """The file that holds the runtime for `arch`: the given one once it was looked into, or this installation's own.

    Another library than RUNTIME is in the same wheel, or in the same folder.

    Raises LlmcError when there is none, or when it is of another architecture or another version of TVM.
    """
    path = given or _own(arch)
    if path.suffix != ".whl" and library != RUNTIME:
        path = path.parent / library
    try:
        with _opened(path, library) as file:
            head = file.read(20)
    except KeyError as error:
        raise LlmcError(f"{path}: no {_FOLDER}{library} in it; wanted an apache-tvm wheel") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise LlmcError(f"{path}: cannot be read as TVM's runtime: {error}; {_advice(arch)}") from error
    machine = int.from_bytes(head[18:20], "little")
    if head[:4] != b"\x7fELF" or machine != _MACHINES[arch]:
        names = {number: name for name, number in _MACHINES.items()}
        got = names.get(machine, f"ELF machine {machine}") if head[:4] == b"\x7fELF" else "no ELF library"
        raise LlmcError(f"{path}: got {got}, wanted TVM's runtime for {arch}; {_advice(arch)}")
    return path


def copy_runtime(path: Path, folder: Path, library: str = RUNTIME) -> None:
    """Put what `find_runtime` found into the folder, under the library's name."""
    with _opened(path, library) as source, (folder / library).open("wb") as out:
        shutil.copyfileobj(source, out)


def _own(arch: str) -> Path:
    if arch != platform.machine():
        raise LlmcError(f"an artifact for {arch} holds TVM's runtime for {arch}, and this is {platform.machine()}; "
                        f"name it with --tvm-runtime: {_advice(arch)}")  # fmt: skip
    found = find_spec("tvm")
    if found is None or found.origin is None:
        raise LlmcError("apache-tvm is not installed here; pip install 'llmc[compile]'")
    return Path(found.origin).parent / "lib" / RUNTIME


def _advice(arch: str) -> str:
    version = importlib.metadata.version("apache-tvm")
    return (
        f"get the wheel with pip download --no-deps --only-binary :all: --platform manylinux_2_28_{arch} "
        f"apache-tvm=={version}"
    )


def _opened(path: Path, library: str) -> IO[bytes]:
    """The library's bytes: the file's own, or those of a member of a wheel."""
    if path.suffix != ".whl":
        return path.open("rb")
    with zipfile.ZipFile(path) as wheel:
        name = next((n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")), "")
        got = HeaderParser().parsestr(wheel.read(name).decode("utf-8", "replace"))["Version"]
        wanted = importlib.metadata.version("apache-tvm")
        if got != wanted:
            raise LlmcError(f"{path}: TVM {got}, and this compiler is TVM {wanted}; they must be the same")
        return wheel.open(_FOLDER + library)
