"""What a step is for each target: the same model, rounded and fused as that target's kernels want it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llmc.targets.target as targets
from llmc.compiler.driver.request import Request
from llmc.compiler.errors import LlmcError

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight


def steps_for(
    request: Request, chosen: Sequence[targets.AnyTarget], make: Callable[[bool], tuple[list[StoredWeight], Any]]
) -> tuple[list[StoredWeight], dict[targets.AnyTarget, Any]]:
    """What `make`, as `planned` does, gives for each target: one module for those that round activations, and one for
    those that do not (True). Weights are stored in the same way for both.
    """
    exact = {target: request.exact(target) for target in chosen}
    made = {each: make(each) for each in dict.fromkeys(exact.values())}
    stored, *others = [weights for weights, _ in made.values()]
    assert all(_kept(weights) == _kept(stored) for weights in others), "weights that targets store in different ways"

    def step(target: targets.AnyTarget) -> Any:
        _, plain = made[exact[target]]
        return step_for(request, target, plain)

    return stored, {target: step(target) for target in chosen}


def step_for(request: Request, target: targets.AnyTarget, step: Any) -> Any:
    """The module as a target's kernels take it: activations rounded as asked for, and what they do together fused."""
    from llmc.compiler.ops.narrowed import NARROWED
    from llmc.compiler.ops.rounded import ROUNDED
    from llmc.passes.fuse_activation import fuse_activation
    from llmc.passes.fuse_rope import fuse_rope
    from llmc.passes.fuse_rounding import fuse_rounding
    from llmc.passes.round_activations import round_activations
    from llmc.targets.lower import calls

    if (
        request.activations == "bf16"
        and targets.cpus([target])
        and any("packed_experts" in name for name in calls(step))
    ):
        raise LlmcError("--activations bf16: experts are multiplied with int8 or float32 on CPUs; leave it out")
    step = round_activations(step) if request.rounds_to_bf16(target) else step
    step = fuse_rope(step) if target.turns_in_attention else step
    step = fuse_rounding(step, ROUNDED if target.rounds_attention else NARROWED, target.rounded_columns)
    return fuse_activation(step, target.joins_rounded)


def _kept(weights: list[StoredWeight]) -> list[tuple[Any, ...]]:
    return [(weight.name, weight.shape, weight.dtype, weight.format, weight.recipe) for weight in weights]
