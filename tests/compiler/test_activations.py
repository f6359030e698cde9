"""What quantized weights are multiplied with: each target's graph rounds as its kernels take it, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.compiler.driver.compile import planned_step
from llmc.compiler.driver.recipe import uniform
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.steps import steps_for
from llmc.frontends.source import open_model
from llmc.targets.target import get


@pytest.mark.parametrize(
    ("quant", "activations", "gpu", "cpu"),
    [
        ("q4", "auto", "bf16_linear", "i8_linear"),
        ("q4", "f32", "packed_linear", "packed_linear"),
        ("q4", "bf16", "bf16_linear", "bf16_linear"),
        ("f32", "auto", "packed_linear", "packed_linear"),
    ],
)
def test_each_target_rounds_in_its_own_way(
    quant: str, activations: str, gpu: str, cpu: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Of one model for two targets; the weights are the same."""
    chosen = get("cuda:sm_80,cpu:native")
    request = Request(tmp_path, tmp_path / "a.llmc", quant=quant, activations=activations)
    with open_model(tiny_model("llama")) as model:
        spec, recipe = model.spec, uniform(model.spec, quant)
    _, made = steps_for(
        request, chosen, lambda exact: planned_step(spec, recipe, "f32", None, exact, lambda *_: None)
    )  # fmt: skip
    kinds = {"bf16_linear", "packed_linear", "i8_linear"}
    for target, wanted in zip(chosen, (gpu, cpu), strict=True):
        text = made[target].script()
        assert {kind for kind in kinds if f'"llmc.{kind}"' in text} == {wanted}, target.name
