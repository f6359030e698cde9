"""What a machine lacks to run code for a CUDA device: a driver, CUDA's runtime library, a device that is new enough.

Asking starts nothing on a device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading.package import Device

_DRIVER = "libcuda.so.1"
_CUDART = "libcudart.so.13"  # what libtvm_runtime_cuda.so is linked with
_NCCL = "libnccl.so.2"
NCCL_WISH = "LLMC_NCCL"  # in the environment; "0": GPUs exchange through the host's memory
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR of cuda.h


class _Shown:
    """The number of the device that this process sees, if it is not to see all; whether the driver was asked before."""

    number: int | None = None
    asked = False


def show_only(number: int) -> None:
    """Have this process see one device, which is its first then; to be called before anything asks the driver.

    Devices are counted as the environment shows them. Raises ArtifactError when it shows fewer, and in a process that
    has another one already, or has asked the driver, which goes by what was shown then.
    """
    if _Shown.number not in (None, number):
        raise ArtifactError(f"device cuda:{number}: this process has cuda:{_Shown.number}; load it in one of its own")
    if _Shown.number is None:
        said = os.environ.get(_VISIBLE)
        listed = None if said is None else [name.strip() for name in said.split(",") if name.strip()]
        if listed is not None and number >= len(listed):
            raise ArtifactError(f"device cuda:{number}: {_VISIBLE} shows {len(listed)} devices")
        if _Shown.asked and number:
            raise ArtifactError(
                f"device cuda:{number}: this process has asked for all devices; load it in one of its own"
            )
        os.environ[_VISIBLE] = str(number) if listed is None else listed[number]
        _Shown.number = number


def lacking(device: Device, number: int | None = None) -> list[str]:
    """What is missing, each in words; empty when nothing is. `number`: of the device that it has to be, if any."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return [f"an NVIDIA driver ({_DRIVER} is not here)"]
    found = _devices(driver)
    if isinstance(found, str):
        return [found]
    if number is not None and _Shown.number is None:
        if number >= len(found):
            return [f"a device cuda:{number} (here: {len(found)})"]
        found = found[number : number + 1]
    missing = [] if any(runs(device.arch, compute) for compute in found) else [_wanted(device.arch, found)]
    try:
        ctypes.CDLL(cudart_path())
    except OSError:
        missing.append(f"{_CUDART} (pip install nvidia-cuda-runtime)")
    return missing


def cudart_path() -> str:
    """CUDA's runtime library, as the system finds it; else that of the package nvidia-cuda-runtime, if it is there."""
    return _found(_CUDART)


def nccl() -> ctypes.CDLL | None:
    """NCCL, as the system finds it, or that of the package nvidia-nccl-cu13; None where none is here, or wanted."""
    if os.environ.get(NCCL_WISH) == "0":
        return None
    try:
        return ctypes.CDLL(_found(_NCCL))
    except OSError:
        return None


def _found(name: str) -> str:
    """The path of a library in a package of NVIDIA's, where the system has none of this name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        found = importlib.util.find_spec("nvidia")
        folders = [] if found is None else found.submodule_search_locations or []
        for folder in folders:
            for path in sorted(Path(folder).glob(f"*/lib/{name}")):
                return str(path)
    return name


def runs(arch: str, compute: tuple[int, int]) -> bool:
    """Whether a device of this compute capability runs code for a chip: of the same major and no lower minor.

    >>> [runs("sm_86", compute) for compute in ((8, 0), (8, 6), (8, 9), (9, 0))]
    [False, True, True, False]
    """
    chip = re.fullmatch(r"sm_(\d+)(\d)", arch)
    return chip is not None and int(chip[1]) == compute[0] and int(chip[2]) <= compute[1]


def _wanted(arch: str, found: list[tuple[int, int]]) -> str:
    here = ", ".join(f"sm_{major}{minor}" for major, minor in found)
    return f"a device that runs {arch} (here: {here})"


def _devices(driver: ctypes.CDLL) -> list[tuple[int, int]] | str:
    """The compute capability of every device, or what is wrong."""
    count, _Shown.asked = ctypes.c_int(0), True
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or count.value < 1:
        return f"an NVIDIA device (the driver finds none{f', error {status}' if status else ''})"
    found = []
    for number in range(count.value):
        handle, values = ctypes.c_int(0), [ctypes.c_int(0), ctypes.c_int(0)]
        status = driver.cuDeviceGet(ctypes.byref(handle), number)
        for value, attribute in zip(values, (_MAJOR, _MINOR), strict=True):
            status = status or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        if status:
            return f"an NVIDIA device that answers (device {number}: error {status})"
        found.append((values[0].value, values[1].value))
    return found
