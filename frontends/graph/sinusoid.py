"""The sines and cosines that tell a model of places (https://arxiv.org/abs/1706.03762 section 3.5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.spec import ModelSpec


def sinusoidal_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """(C/2,) radians a position."""
    pairs = spec.sizes.hidden // 2
    exponents = np.arange(pairs) / (spec.position.pairs or pairs)
    frequencies: NDArray[np.float32] = (spec.position.theta**-exponents).astype(np.float32)
    return frequencies


def sinusoidal_table(spec: ModelSpec, rows: int) -> NDArray[np.float32]:
    """(rows, C): what some files hold; row r is for position r - offset."""
    angles = np.arange(rows)[:, None] * sinusoidal_frequencies(spec)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
