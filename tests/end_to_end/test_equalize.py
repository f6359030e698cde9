"""Columns scaled, and what makes them divided: a step's logits stay what they were, in every structure there is.

Steps run by the NumPy meanings of their ops, so that nothing but the rule is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.driver.equalize import Factors, placed
from llmc.compiler.driver.probe import index_arrays
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.kv_pages import PAGE
from llmc.compiler.spec import cached_heads, layer_groups, pool_layers, tensor_shapes
from llmc.frontends.graph.build import build
from llmc.frontends.source import open_model
from llmc.passes.quantize.equalize import Group, groups

sys.path.insert(0, str(Path(__file__).parent))
from family_cases import CASES

# Of some structures, what is scaled beside q, k and v; other cases are more of the same.
SCALED = {
    "Llama": {"o", "gate", "up", "down", "head"}, "Llama with biases, tied": {"o", "down"}, "Gemma 3": {"o", "down"},
    "Qwen 3": {"o", "down"}, "LFM2": {"conv_in", "o", "down"}, "LFM3": {"attention_gate", "down"},
    "GPT-2": {"o", "up", "head"}, "OPT": {"o", "up", "down"}, "Falcon 40B": {"o", "up"}, "MPT, clipped": {"up"},
    "Cohere": {"o", "down"}, "Granite, windows and sinks": {"o", "down"}, "gpt-oss": {"o", "router", "experts.gate"},
    "Qwen 1.5 MoE": {"router", "experts.up", "shared_gate", "shared.down"}, "AFMoE": {"attention_gate", "o", "down"},
    "DeepSeek V3": {"q_down", "q_plain", "kv_down", "k_rope", "experts.up"}, "Ministral 3": {"o", "down"},
}  # fmt: skip
UNNORMED = {"OLMo 2": {"o", "down", "head"}, "OPT 350M": {"o", "down"}, "OLMo": {"down"}, "nanochat": {"o"}}


def _logits(model: Any, source: ModelSources, ids: list[int]) -> np.ndarray:
    """(n, V) by the meanings of the unpacked step's ops."""
    spec = model.spec
    ops.register_meanings()
    step = build(spec, "f32")["step"]
    executable = relax.build(tvm.IRModule({"step": step}), tvm.target.Target("llvm"))
    index, pages = index_arrays(ids, 0, len(layer_groups(spec)))
    heads, size = cached_heads(spec)
    kv = [tvm.runtime.tensor(np.zeros((pages, 2, heads, size * PAGE), np.float32)) for _ in range(pool_layers(spec))]
    weights = [tvm.runtime.tensor(source.read(name)) for name in tensor_shapes(spec)]
    found = relax.VirtualMachine(executable, tvm.cpu())["step"](*map(tvm.runtime.tensor, index), kv, *weights)
    logits: np.ndarray = found[0].numpy()
    return logits


def _random(found: list[Group], random: np.random.Generator) -> dict[str, Factors]:
    """Factors from a quarter to four."""
    divided = [name for group in found for name in (*group.vectors, *group.rows)]
    assert len(divided) == len(set(divided))
    return placed((group, np.exp2(random.uniform(-2, 2, int(group.made_by.max()) + 1))) for group in found)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough_if(case=lambda case: case not in SCALED | UNNORMED)
def test_logits_stay(case: str, tiny_model: Callable[..., Path]) -> None:
    model_type, config = CASES[case]
    random = np.random.default_rng(len(case))
    with open_model(tiny_model(model_type, **config)) as model:
        found = groups(build(model.spec, "f32"))
        kinds = {name.partition(".")[2].partition(".")[2] or name for group in found for name in group.matrices}
        if case in UNNORMED:
            assert kinds == UNNORMED[case]
        else:
            assert kinds > SCALED.get(case, set())
        ids = random.integers(3, 300, 9).tolist()
        before = _logits(model, ModelSources(model), ids)
        scaled = ModelSources(model, factors=_random(found, random))
        np.testing.assert_allclose(_logits(model, scaled, ids), before, atol=2e-4, rtol=2e-4)
        names = found[0].matrices
        stacked = ModelSources(model).stacked(names)
        np.testing.assert_allclose(scaled.unscaled(names, scaled.stacked(names)), stacked, rtol=1e-6)
