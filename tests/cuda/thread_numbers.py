"""What operations of TIR, and functions that kernels call, are of arrays of numbers, one a thread: cuda_threads.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import tensor_cores

Array = np.ndarray[Any, Any]


def scalar(dtype: Any) -> str:
    """float32x4 -> float32."""
    name = str(dtype)
    return "bool" if name.startswith("bool") else name.partition("x")[0]


def aligned(a: Array, b: Array) -> tuple[Array, Array]:
    """Scalars of threads beside vectors of threads."""
    if a.ndim < b.ndim:
        return a[:, None], b
    return (a, b[:, None]) if b.ndim < a.ndim else (a, b)


def _divided(a: Array, b: Array) -> Array:
    """As C divides."""
    return np.asarray(a / b) if a.dtype.kind == "f" else np.trunc(a.astype(np.float64) / b).astype(a.dtype)


def _erf(x: Array) -> Array:
    return np.array([math.erf(float(value)) for value in x.ravel()], np.float32).reshape(x.shape)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """Rounded twice where the first sum in float64 is not exact: hardly ever another float32."""
    return np.asarray(a.astype(np.float64) * b + c).astype(np.float32)


BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divided, "Mod": np.fmod,
    "FloorDiv": np.floor_divide, "FloorMod": np.mod, "Min": np.fmin, "Max": np.fmax,
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift, "RShift": np.right_shift,
}  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "cos": np.cos, "sin": np.sin, "erf": _erf,
    "nearbyint": np.rint, "fabs": np.abs, "__fmaf_rn": _fma, "llmc_bf16_pair": tensor_cores.bf16_pair,
    "llmc_bf16_add": tensor_cores.bf16_add, "llmc_half": tensor_cores.half, "__byte_perm": tensor_cores.bytes_of,
    "llmc_exp2": np.exp2, "__popc": np.bitwise_count,
}  # fmt: skip
