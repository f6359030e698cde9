"""By layer: which stage computes which binding of a function.

A layer is where attention, or a convolution, reads its pages; a stage has layers in a row, and between two of them the
function is cut where the fewest values cross, as late as possible: behind the sum of the layer before. What is made of
inputs alone, such as rope's tables, belongs to no stage: each makes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import Placement
from llmc.passes.partition.reading import ATTENDING, CONVOLVING, Reading, operands
from llmc.passes.partition.shares import apportion


@dataclass(frozen=True)
class Stages:
    """Of one function: the stage of each binding, and which stages want what others made."""

    of: dict[Any, int]
    wanted: dict[Any, tuple[int, ...]]  # variable -> the other stages that read it, ascending

    def output(self, variable: Any) -> int:
        """The stage that gives it; what belongs to none is the first one's."""
        return self.of.get(variable, 0)


def layers_of(count: int, placement: Placement) -> list[range]:
    """The layers of each stage, by the sums of their devices' shares."""
    shares = [sum(stage) for stage in placement.shares]
    return [range(*each) for each in apportion(count, shares, "layers, as stages")]


def stages_of(name: str, reading: Reading, layers: list[range]) -> Stages:
    """The stages of a function's bindings; one that has none of its layers has nothing of it.

    Raises LlmcError where no stage has.
    """
    stage_of_layer = {layer: stage for stage, each in enumerate(layers) for layer in each}
    if len(layers) == 1:
        return Stages({variable: 0 for variable in reading.bound}, {})
    order = [variable for variable in reading.bound if variable not in reading.made]
    pinned = {
        variable: stage_of_layer[reading.owner(layer)]
        for variable in order
        if (layer := reading.touched(reading.bound[variable])) is not None
    }
    anchors = [
        (place, pinned[variable])
        for place, variable in enumerate(order)
        if variable in pinned and reading.name(variable) in (*ATTENDING, CONVOLVING)
    ]
    if not pinned:
        raise LlmcError(f"{name}: no layer to cut it by; a step in parts is for one stage")
    of = _along(reading, order, anchors, pinned)
    wanted: dict[Any, set[int]] = {}
    for variable in order:
        for part in operands(reading.bound[variable]):
            if part in of and of[part] != of[variable]:
                wanted.setdefault(part, set()).add(of[variable])
    return Stages(of, {variable: tuple(sorted(wanted[variable])) for variable in order if variable in wanted})


def _along(
    reading: Reading, order: list[Any], anchors: list[tuple[int, int]], pinned: dict[Any, int]
) -> dict[Any, int]:
    """Stages by the order of attention; what touches pages of a layer elsewhere is in that layer's stage."""
    of: dict[Any, int] = {}
    stage, cuts = (anchors[0][1] if anchors else 0), _cuts(reading, order, anchors)
    for place, variable in enumerate(order):
        of[variable] = stage
        stage = cuts.get(place, stage)
    # What only those read that touch another stage's pages goes there with them.
    moved = {variable: stage for variable, stage in pinned.items() if of[variable] != stage}
    of |= moved
    readers: dict[Any, set[int]] = {}
    for variable in reversed(order):
        # -1 is a reader that stays where it is, which keeps what it reads.
        found = readers.get(variable, set())
        if variable not in moved and variable not in pinned and len(found) == 1 and -1 not in found:
            moved[variable] = of[variable] = found.copy().pop()
        for part in operands(reading.bound[variable]):
            readers.setdefault(part, set()).add(moved.get(variable, -1))
    return of


def _cuts(reading: Reading, order: list[Any], anchors: list[tuple[int, int]]) -> dict[int, int]:
    """Places behind which another stage begins, and which."""
    place_of = {variable: place for place, variable in enumerate(order)}
    last = dict.fromkeys(order, -1)
    for place, variable in enumerate(order):
        for part in operands(reading.bound[variable]):
            if part in last:
                last[part] = place
    last |= {variable: len(order) for variable in reading.outputs if variable in last}
    cuts: dict[int, int] = {}
    for (before, stage), (after, following) in zip(anchors, anchors[1:], strict=False):
        if stage == following:
            continue
        crossing = [
            (sum(place_of[variable] <= cut < last[variable] for variable in order), -cut)
            for cut in range(before, after)
        ]
        cuts[-min(crossing)[1]] = following
    return cuts
