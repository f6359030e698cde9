"""A part of a tensor as a tensor of its own, by DLPack: TVM's kernels take none that begins at an offset.

Layout: https://dmlc.github.io/dlpack/latest/c_api.html, DLManagedTensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CUDA = 2  # kDLCUDA
_CODES = {"i": 0, "u": 1, "f": 2}  # of DLDataTypeCode, by kinds of numpy.dtype

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class DeviceMemory:
    """Memory of a device at `pointer`, for `from_dlpack`. What is made of it must not outlive this, nor the memory."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._tensor = _DLTensor(
            pointer, CUDA, 0, len(shape), _CODES[dtype.kind], 8 * dtype.itemsize, 1, ctypes.addressof(self._shape)
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)
