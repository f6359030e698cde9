"""Which layers have experts, and what the keys of families with experts mean."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec
from llmc.frontends.hf.config import derive_spec
from llmc.frontends.hf.experts import ExpertLayers, expert_layers
from llmc.frontends.source import open_model

SIZES = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 128, "num_key_value_heads": 2,
}  # fmt: skip
FULL = ExpertLayers(first_key="first", first=1, last_key="last", step_key="step", plain_key="plain")


def derive(model_type: str, **config: Any) -> ModelSpec:
    return derive_spec({"model_type": model_type, **SIZES, **config}, {}, "x", None)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (1, 2, 3, 4, 5)),
        ({"first": 0}, (0, 1, 2, 3, 4, 5)),
        ({"last": 3}, (1, 2, 3)),
        ({"last": 30}, (1, 2, 3, 4, 5)),
        ({"step": 2}, (1, 3, 5)),
        ({"step": 2, "plain": [3]}, (1, 5)),
        ({"plain": None}, (1, 2, 3, 4, 5)),
    ],
)
def test_layers(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    faults: list[str] = []
    assert expert_layers(config, FULL, 6, faults) == {"experts.layers": layers}
    assert not faults


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"first": -1}, "first = -1, wanted a whole number from 0"),
        ({"step": 0}, "step = 0, wanted a whole number from 1"),
        ({"step": True}, "step = True"),
        ({"last": "x"}, "last = 'x'"),
        ({"plain": [1.5]}, "plain = [1.5], wanted a list of layers"),
        ({"first": 6}, "none of the 6 layers has experts"),
    ],
)
def test_what_is_wrong_with_layers(config: dict[str, Any], message: str) -> None:
    faults: list[str] = []
    expert_layers(config, FULL, 6, faults)
    assert message in "; ".join(faults)


def test_what_a_config_leaves_out() -> None:
    mixtral = derive("mixtral").experts
    assert (mixtral.count, mixtral.used, mixtral.ffn, mixtral.renormalize) == (8, 2, 96, True)
    qwen = derive("qwen2_moe").experts
    assert (qwen.count, qwen.used, qwen.ffn, qwen.shared_ffn, qwen.renormalize) == (60, 4, 1408, 5632, False)
    assert derive("qwen2_moe", num_experts=8, norm_topk_prob=True).experts.renormalize
    assert derive("qwen3_moe", num_local_experts=16).experts.count == 16
    dense, sparse = ["dense"], ["sparse"]
    assert derive("hy_v3", mlp_layer_types=sparse + 2 * dense + 3 * sparse).experts.layers == (0, 3, 4, 5)
    assert derive("hy_v3").experts.layers == (1, 2, 3, 4, 5)
    assert derive("exaone_moe", first_k_dense_replace=4).experts.layers == (4, 5)
    glm = derive("glm4_moe", n_shared_experts=2, moe_intermediate_size=32).experts
    assert (glm.routing, glm.bias, glm.shared_ffn, glm.layers) == ("sigmoid", True, 64, (1, 2, 3, 4, 5))


def test_layers_beyond_the_last_are_not_read(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """GLM 4.5 saves one that predicts the token after the next; more, or part of another, is not understood."""
    made = tiny_model("glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    folder = tmp_path / "glm"
    shutil.copytree(made, folder)
    weights = load_file(made / "model.safetensors")
    extra = np.ones((64, 128), np.float32)
    save_file(weights | {"model.layers.2.eh_proj.weight": extra}, folder / "model.safetensors")
    with open_model(folder) as model:
        assert model.spec.sizes.layers == 2
        assert len(model.tensors) == len(open_model(made).tensors)
    for name in ("model.layers.3.eh_proj.weight", "model.layers.20.eh_proj.weight", "model.layers.1.eh_proj.weight"):
        save_file(weights | {name: extra}, folder / "model.safetensors")
        with pytest.raises(LlmcError, match=f"not read by any block {name}"):
            open_model(folder)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = True, llmc knows: False"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is set"),
        ("mixtral", {"num_local_experts": 1}, "num_local_experts = 1, wanted a whole number from 2"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts.used = 9, wanted 1 to experts.count = 8"),
        ("qwen3_moe", {"moe_intermediate_size": 100}, "experts.ffn = 100, wanted a multiple of 16"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is set: llmc has no biases of experts"),
        ("sarvam_moe", {"use_bias": True}, "use_bias is set: llmc reads this family without a bias after attention"),
        ("sarvam_moe", {"score_function": "softmax"}, "score_function = 'softmax', llmc knows: 'sigmoid'"),
        ("sarvam_mla", {"use_qk_norm": False}, "use_qk_norm = False, llmc knows: True"),
        ("mixtral", {"expert_dropout": 1}, "unknown keys"),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 5}, "'dense'], wanted 6 times dense or sparse"),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 6}, "experts.layers has no layer"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5, llmc knows: 1.702"),
    ],
)
def test_refused(model_type: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=re.escape(message)):
        derive(model_type, **config)
