"""A graph that somebody's tool exported, as Relax: what every importer of this folder makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from numpy.typing import NDArray

STEP = "step"  # the one function of a graph's module
LEAST_WEIGHT = 1024  # values; a smaller constant is part of the code


@dataclass(frozen=True)
class Port:
    """An input or output of a graph: `shape` has numbers and names of dynamic sizes, an output's also terms of them."""

    name: str
    dtype: str
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Imported:
    """`module` has one function: step(inputs..., weights..., matrices...) -> outputs.

    `matrices`, (N, K) float32, are operands of the ops that passes/pack_weights.py packs; `weights` are all others.
    """

    name: str
    module: tvm.IRModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    conditions: tuple[tuple[Any, str, Any], ...]  # terms that must be "equal", or one "at least" the other
    weights: Mapping[str, NDArray[Any]]
    matrices: Mapping[str, NDArray[Any]]
    exact: frozenset[str]  # matrices of whole numbers, which bfloat16 holds and other formats may not
    operators: tuple[str, ...]  # that the file's graph consists of
    source: str  # "onnx" or "torch.export"
