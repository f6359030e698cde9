"""What the pass gives for each device: a module of its own, and what that module's weights are of the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from llmc.compiler.placement import Device
from llmc.passes.partition.shares import Ranges, length


@dataclass(frozen=True)
class WeightShare:
    """A weight of a device: `ranges` of one axis of the model's weight of that name, one after another."""

    name: str
    whole: tuple[int, ...]  # the model's weight's shape
    axis: int
    ranges: Ranges

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the share."""
        return tuple(length(self.ranges) if axis == self.axis else size for axis, size in enumerate(self.whole))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the weight, as it is."""
        return self.shape == self.whole and len(self.ranges) == 1

    def of(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The share of the model's weight."""
        if self.is_whole:
            return weight
        pieces = [np.arange(first, end) for first, end in self.ranges]
        return np.ascontiguousarray(weight.take(np.concatenate(pieces), axis=self.axis))


@dataclass(frozen=True)
class Part:
    """One device's part of a model.

    Its functions take the inputs of the model's, less pages of layers that it does not have (`layers` are those that
    it has), then `weights`. They give those of the model's outputs that `outputs` counts, then a zero for each of
    their sends. Pages of layer layers[i] are of `kv_heads[i]` heads.
    """

    rank: int
    stage: int
    device: Device
    module: tvm.IRModule
    weights: tuple[WeightShare, ...]
    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    outputs: dict[str, tuple[int, ...]]
