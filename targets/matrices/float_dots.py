"""Dots of integers that are read as float32: they begin with the bits of a number whose last bit stands for one.

A dot is less than 2**22, so it leaves the sign and the exponent of BASE = 1.5 * 2**23 alone: read as float32 it is
BASE + d. One instruction then takes BASE off and multiplies with a scale, d * s = (BASE + d) * s - BASE * s, where a
conversion and a multiplication are two. It gives the same bits where BASE * s is exact, as it is for the scales of
blocks of weights: no format's have more than 22 significant bits (float16 times a byte, whole numbers below 2**15).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from llmc.targets.vector import f32, fma, splat

BASE = float(3 << 22)
BITS = int(np.float32(BASE).view(np.int32))


def less_of(scale: Any) -> Any:
    """-BASE * s, what `scaled` takes beside a scale."""
    return scale * splat(f32(-BASE))


def scaled(dot: Any, scale: Any, less: Any) -> Any:
    """d * s, float32x16, of a dot that begins so."""
    return fma(T.reinterpret(dot, dtype="float32x16"), scale, less)
