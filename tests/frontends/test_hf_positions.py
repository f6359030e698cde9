"""Which layers of a Hugging Face model have a sliding window, and which rope each layer has."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec, Window
from llmc.frontends.hf_config import derive_spec

SIZES = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 7, "intermediate_size": 96,
    "max_position_embeddings": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT = {"rope_type": "default"}


def derive(model_type: str, **changes: Any) -> ModelSpec:
    return derive_spec({"model_type": model_type, **SIZES, **changes}, {}, "x", None)


def layers(model_type: str, **changes: Any) -> tuple[int, ...]:
    window = derive(model_type, **changes).window
    return window.layers if window else ()


def test_layers_with_a_window() -> None:
    assert layers("llama") == ()
    assert layers("mistral") == tuple(range(7))
    assert layers("mistral", sliding_window=None) == ()
    for qwen in ("qwen2", "qwen3"):
        assert layers(qwen) == layers(qwen, sliding_window=9, max_window_layers=2) == ()
        assert layers(qwen, use_sliding_window=True, sliding_window=9, max_window_layers=5) == (5, 6)
        assert layers(qwen, use_sliding_window=True, sliding_window=None, max_window_layers=5) == ()
        types = [SLIDING] + 6 * [FULL]
        assert layers(qwen, use_sliding_window=True, sliding_window=9, layer_types=types) == (0,)
    assert layers("gemma3_text") == (0, 1, 2, 3, 4, 6)
    assert layers("gemma3_text", sliding_window_pattern=2) == (0, 2, 4, 6)
    assert layers("gemma3_text", sliding_window_pattern=1) == ()
    assert layers("gemma3_text", layer_types=3 * [FULL] + 4 * [SLIDING]) == (3, 4, 5, 6)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                SLIDING: {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        {"rope_theta": 2e6, "rope_parameters": {FULL: {"type": "linear", "factor": 8}, SLIDING: {"rope_theta": 3e4}}},
    ],
)
def test_two_ropes_in_old_and_new_keys(config: dict[str, Any]) -> None:
    spec = derive("gemma3_text", sliding_window=8, **config)
    assert (spec.position.theta, spec.position.factor) == (2e6, 8.0)
    assert spec.window == Window(size=8, layers=(0, 1, 2, 3, 4, 6), theta=3e4)


def test_what_no_key_says() -> None:
    spec = derive("gemma3_text", query_pre_attn_scalar=25)
    assert spec.position.theta == 1e6
    assert spec.window == Window(size=4096, layers=(0, 1, 2, 3, 4, 6), theta=10000.0)
    assert spec.attention.scale == 0.2
    assert spec.embedding.scale == 48**0.5
    assert spec.head.tied
    assert (spec.norm.weight, spec.norm.place, spec.mlp.activation) == ("plus_one", "sandwich", "gelu_tanh")
    qwen = derive("qwen2", rope_theta=5e5, use_sliding_window=True, max_window_layers=6)
    assert qwen.attention.bias
    assert not qwen.attention.output_bias
    assert qwen.window == Window(size=4096, layers=(6,), theta=5e5)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma3_text", {"layer_types": [FULL]}, r"layer_types = \['full_attention'\], wanted 7 times"),
        ("gemma3_text", {"layer_types": 7 * ["chunked_attention"]}, "wanted 7 times full_attention or sliding"),
        ("gemma3_text", {"layer_types": 7 * [[]]}, "layer_types = "),
        ("gemma3_text", {"layer_types": "full"}, "layer_types = 'full'"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window = None, wanted a whole number"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window = 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3_text", {"sliding_window_pattern": "6"}, "sliding_window_pattern = '6'"),
        ("gemma3_text", {"query_pre_attn_scalar": -256}, "query_pre_attn_scalar = -256"),
        ("gemma3_text", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar = None"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu', llmc knows: 'silu'"),
        ("gemma3_text", {"hidden_act": "gelu_pytorch_tanh"}, r"unknown keys 'hidden_act' \(near: hidden_activation"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set: llmc has no softcapping"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ("gemma3_text", {"attention_k_eq_v": True}, "attention_k_eq_v is set"),
        ("gemma3_text", {"num_kv_shared_layers": 3}, "unknown keys 'num_kv_shared_layers'"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters has unknown keys 'rope_theta'"),
        ("gemma3_text", {"rope_parameters": [1]}, r"rope_parameters = \[1\], wanted a table"),
        ("gemma3_text", {"rope_parameters": {FULL: 3}}, "rope_parameters.full_attention = 3, wanted a table"),
        ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, "rope_parameters.sliding_attention is"),
        ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq = 0"),
        (
            "gemma3_text",
            {"rope_local_base_freq": 5e4, "rope_parameters": {SLIDING: DEFAULT | {"rope_theta": 1e4}}},
            "rope_parameters.sliding_attention.rope_theta = 10000.0, rope_local_base_freq = 50000.0 disagree",
        ),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window = 1, wanted true or false"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers = -1"),
        ("qwen2", {"layer_types": 7 * [SLIDING]}, "sliding_window = None, wanted a whole number"),
        ("qwen2", {"rope_local_base_freq": 1e4}, "unknown keys 'rope_local_base_freq'"),
        ("qwen2", {"attention_bias": True}, "unknown keys 'attention_bias'"),
        ("mistral", {"layer_types": 7 * [FULL]}, "unknown keys 'layer_types'"),
        ("gemma3", {}, "model_type is 'gemma3', llmc knows: llama, mistral, qwen2, qwen3, gemma3_text"),
    ],
)
def test_values_that_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        derive(model_type, **changes)
    assert "\n" not in str(caught.value)
