"""One function of a model written anew for one device: by demand, from what it gives back to what it reads.

A value of the old function is wanted in one of four ways. `whole`: as it was, the same on every device of the stage.
`split`: some of its columns. `partial`: a matrix of its shape, and all devices' together sum to it. `own`: slices of
experts, of which those of this device's experts are filled. Which of them is natural to a value, natural.py says; how
an op is written in each of them, rules.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import ir, relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.passes.partition import rules
from llmc.passes.partition.device import DeviceWeights, Member
from llmc.passes.partition.natural import Kind, Nature
from llmc.passes.partition.reading import Reading
from llmc.passes.partition.shares import Cut, Heads, Ranges
from llmc.passes.partition.stages import Stages


class Rewriting:
    """The new function as far as it is written."""

    def __init__(
        self, builder: Any, reading: Reading, stages: Stages, member: Member, weights: DeviceWeights, pages: Any
    ) -> None:
        self.builder, self.reading, self.stages, self.member, self.weights = builder, reading, stages, member, weights
        self.pages = pages  # the new input of pages, where there is one
        self.nature = Nature(reading, member)
        self.variables: dict[str, Any] = {}  # this function's weights
        self._done: dict[Any, Any] = {}  # (variable, how it is wanted) -> what it has become
        self._inputs = set(reading.inputs)
        self._parameters = set(reading.weights)

    @property
    def cut(self) -> Cut:
        """The device's share of its stage."""
        return self.member.cut

    def write(self) -> tuple[list[Any], tuple[int, ...]]:
        """What the new function gives, and which of the old one's outputs are among it, first and in this order.

        Values are written in the old order where stages wait for one another, so that no two wait for each other.
        """
        sent = []
        for variable, stage in self.stages.of.items():
            others = self.stages.wanted.get(variable, ())
            here = stage == self.member.stage
            if self.nature.needed_whole(variable) if here else self.member.stage in others:
                self.whole(variable)
            if here:
                ranks = [rank for other in others for rank in self.member.receivers(other)]
                sent += [self.op("send", [self.whole(variable)], to=rank) for rank in ranks]
        places = [
            place for place, each in enumerate(self.reading.outputs) if self.stages.output(each) == self.member.stage
        ]
        return [*(self.whole(self.reading.outputs[place]) for place in places), *sent], tuple(places)

    def op(self, name: str, tensors: list[Any], **attrs: Any) -> Any:
        """One op of the table in the new function."""
        return self.builder.emit(ops.call(name, tensors, attrs))

    def emit(self, value: Any) -> Any:
        """Any other value in it."""
        return self.builder.emit(value)

    def whole(self, x: Any) -> Any:
        """What a variable or constant of the old function is in the new one."""
        if isinstance(x, ir.Constant) or x in self._inputs:
            return x
        if x in self._parameters:
            return self.weight(x, 0, ((0, int(x.ty.shape[0])),))
        return self._once(x, "whole", self._whole)

    def split(self, x: Any, columns: Ranges) -> Any:
        """Those columns of it."""
        return self._once(x, columns, lambda x: rules.split(self, x, columns))

    def partial(self, x: Any) -> Any:
        """This device's addend of it."""
        return self._once(x, "partial", lambda x: rules.partial(self, x))

    def own(self, x: Any) -> Any:
        """It with the slices of this device's experts."""
        return self._once(x, "own", lambda x: rules.own(self, x))

    def _once(self, x: Any, how: Any, make: Any) -> Any:
        if (x, how) not in self._done:
            self._done[x, how] = make(x)
        return self._done[x, how]

    def _whole(self, x: Any) -> Any:
        stage = self.stages.of.get(x, self.member.stage)
        if stage != self.member.stage and x not in self.reading.made:
            return self.op("recv", [self._as_many_rows(x)], source=self.member.sender(stage), width=int(x.ty.shape[1]))
        if self.nature.sums(x):
            return self.op("all_reduce", [self.partial(x)], group=self.member.stage)
        columns = self.nature.of(x)
        if columns is Kind.ANY and x in self.nature.gathered:
            columns = (self.cut.rows(int(x.ty.shape[1])),)
        if isinstance(columns, tuple):
            part = self.split(x, columns)
            return self.op("all_gather", [part], group=self.member.stage, width=int(x.ty.shape[1]))
        return rules.whole(self, x)

    def _as_many_rows(self, x: Any) -> Any:
        """An input with as many rows as a value."""
        for candidate in self.reading.inputs:
            if isinstance(candidate.ty, relax.TensorType) and candidate.ty.shape[0].same_as(x.ty.shape[0]):
                return candidate
        raise LlmcError(f"a value of shape {x.ty.shape} between two stages: no input has as many rows")

    def weight(self, parameter: Any, axis: int, ranges: Ranges) -> Any:
        """A parameter of the new function: a share of one of the old one's."""
        share = self.weights.share(parameter, axis, ranges)
        if share.name not in self.variables:
            self.variables[share.name] = relax.Var(share.name, relax.TensorType(share.shape, parameter.ty.dtype.dtype))
        return self.variables[share.name]

    def constant(self, x: Any, axis: int, ranges: Ranges) -> Any:
        """Ranges of one axis of what is known at compile time: a weight, a constant, or what is made of them."""
        if x in self._parameters:
            return self.weight(x, axis, ranges)
        if isinstance(x, ir.Constant):
            places = np.concatenate([np.arange(first, end) for first, end in ranges])
            return relax.const(x.value.numpy().take(places, axis=axis))
        return self._once(x, (axis, ranges), lambda x: rules.constant(self, x, axis, ranges))

    def of_layer(self, variable: Any) -> tuple[Any, Heads]:
        """The new pages of a layer, and what of its heads they have."""
        layer = self.reading.layer(variable)
        if layer is None or layer not in self.member.layers:
            raise LlmcError(f"stage {self.member.stage} reads pages of layer {layer}, which it does not have")
        heads = self.member.heads_of(layer)
        place = self.member.layers.index(layer)
        return self._once(variable, "pages", lambda _: self.emit(relax.TupleGetItem(self.pages, place))), heads

    def taken(self, x: Any, columns: Ranges) -> Any:
        """Columns of a value that was computed whole: what every device can do that knows no better."""
        value = self.whole(x)
        parts = [self.op("take_columns", [value], first=first, count=end - first) for first, end in columns]
        return parts[0] if len(parts) == 1 else self.emit(relax.op.concat(parts, axis=1))
