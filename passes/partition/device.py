"""One device among those of a placement: what it takes of everything, whom it reaches, which weights it has so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import Placement
from llmc.passes.partition.part import WeightShare
from llmc.passes.partition.shares import Cut, Heads, Ranges


@dataclass(frozen=True)
class LayerHeads:
    """What attention of a layer says of its heads and of the pages that keep them."""

    heads: int
    kv_heads: int
    size: int
    kv_dtype: str


@dataclass(frozen=True)
class Member:
    """A device. `heads` are those of every layer that has pages, `layers` the ones that its stage has."""

    placement: Placement
    stage: int
    place: int  # in its stage
    layers: tuple[int, ...]
    heads: dict[int, LayerHeads]

    @property
    def rank(self) -> int:
        """Its place in the placement."""
        return self.placement.ranks(self.stage)[self.place]

    @property
    def cut(self) -> Cut:
        """Its share of its stage."""
        return Cut(self.placement.shares[self.stage], self.place)

    def heads_of(self, layer: int) -> Heads:
        """What it has of a layer's heads."""
        return self.cut.heads(self.heads[layer].heads, self.heads[layer].kv_heads)

    def receivers(self, stage: int) -> list[int]:
        """The ranks of a stage that it sends to: each of them has one sender. -1, nobody, where others suffice."""
        mine, theirs = len(self.placement.stages[self.stage]), self.placement.ranks(stage)
        return [rank for place, rank in enumerate(theirs) if place % mine == self.place] or [-1]

    def sender(self, stage: int) -> int:
        """The rank of a stage that it receives from."""
        ranks = self.placement.ranks(stage)
        return ranks[self.place % len(ranks)]


@dataclass
class DeviceWeights:
    """The shares of weights that a device's functions want: one of each weight."""

    shares: dict[str, WeightShare] = field(default_factory=dict)

    def share(self, parameter: Any, axis: int, ranges: Ranges) -> WeightShare:
        """Note that a function wants this. Raises LlmcError where another share of that weight is wanted too."""
        name, whole = str(parameter.name), tuple(int(size) for size in parameter.ty.shape)
        if ranges == ((0, whole[axis]),):
            axis, ranges = 0, ((0, whole[0]),)  # all of it, along whatever axis
        share = WeightShare(name, whole, axis, ranges)
        if self.shares.setdefault(name, share) != share:
            raise LlmcError(f"{name}: two functions of a model want different shares of it; this is a fault of llmc")
        return share
