"""Which layers of a Hugging Face model have a sliding window, and which rope each layer has."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec, Scaling, Window
from llmc.frontends.hf.config import derive_spec

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


def test_windows_of_other_families() -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    assert derive("cohere2", sliding_window=9, head_dim=12).position.plain_layers == (3,)
    assert layers("cohere2", sliding_window=9) == (0, 1, 2, 4, 5, 6)
    assert derive("exaone4", sliding_window=9).position.plain_layers == (3,)
    assert derive("exaone4", sliding_window=None).position.plain_layers == ()
    assert layers("exaone4", sliding_window=None) == ()
    assert layers("cwm") == (1, 2, 3, 5, 6)
    smollm3 = derive_spec({"model_type": "smollm3", **sizes, "num_key_value_heads": 2}, {}, "x", None)
    assert smollm3.position.plain_layers == (3,)
    assert smollm3.window is None
    neo = {
        "model_type": "gpt_neo", "vocab_size": 64, "hidden_size": 48, "num_layers": 6, "num_heads": 4,
        "max_position_embeddings": 9,
    }  # fmt: skip
    window = derive_spec({**neo, "attention_types": [[["global", "local"], 3]]}, {}, "x", None).window
    assert window
    assert (window.size, window.layers) == (256, (1, 3, 5))
    for wrong in (
        [[["global", "local"], 2]],
        [[["global", "local"], 10**9]],
        [["global", 6]],
        3,
        [[["global", "near"], 3]],
    ):
        with pytest.raises(LlmcError, match="attention_"):
            derive_spec({**neo, "attention_types": wrong}, {}, "x", None)


def test_part_of_a_head() -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    config: dict[str, Any]
    for config, rotated in (
        ({}, 4),
        ({"rotary_pct": 0.5}, 8),
        ({"partial_rotary_factor": 1.0}, 0),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.3}}, 4),
    ):
        spec = derive_spec({"model_type": "gpt_neox", **sizes, "hidden_size": 64, **config}, {}, "x", None)
        assert spec.position.rotary_dim == rotated
    for part in (0, 1.5, "x", True):
        with pytest.raises(LlmcError, match="rotary_pct = .*wanted a number above 0 and up to 1"):
            derive_spec({"model_type": "gpt_neox", **sizes, "rotary_pct": part}, {}, "x", None)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2] * 8}


def test_scaling() -> None:
    for key in ("rope_parameters", "rope_scaling"):
        spec = derive("llama", rope_theta=5e5, **{key: LLAMA3})
        assert spec.scaling == Scaling("llama3", 8.0, 32, low=1.0, high=4.0)
        assert spec.position.theta == 5e5
    assert derive("llama", rope_scaling={"type": "dynamic", "factor": 2.0}).scaling == Scaling("dynamic", 2.0, 128)
    yarn = derive("qwen2", rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
    assert yarn.scaling == Scaling("yarn", 4.0, 32, low=1.0, high=32.0, magnitude=1 + 0.1 * math.log(4))
    spelled = {"beta_fast": 16, "beta_slow": 2.0, "attention_factor": 0.5, "truncate": False}
    yarn = derive("qwen2", rope_scaling={"type": "yarn", **spelled})
    assert yarn.scaling == Scaling("yarn", 1.0, 128, low=2.0, high=16, magnitude=0.5, round_ends=False)
    both = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    yarn = derive("qwen2", rope_parameters=both)
    assert yarn.scaling
    assert yarn.scaling.magnitude == 1.0
    sizes = {**SIZES, "num_key_value_heads": 4, "hidden_size": 64, "model_type": "phi3"}
    del sizes["head_dim"]
    for kind in ("longrope", "su"):
        long = derive_spec(
            {**sizes, "rope_scaling": LONG | {"type": kind}, "original_max_position_embeddings": 32}, {}, "x", None
        )
        magnitude = math.sqrt(1 + math.log(4) / math.log(32))
        assert long.scaling == Scaling("longrope", 4.0, 32, magnitude=magnitude, short=(1.0,) * 8, long=(2.0,) * 8)


def test_an_alpha_makes_the_base_grow_for_good() -> None:
    table = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    found = derive("hunyuan_v1_dense", rope_theta=1e4, rope_scaling=table)
    assert found.scaling is None
    assert found.position.theta == pytest.approx(1e4 * 1000 ** (16 / 14))
    with pytest.raises(LlmcError, match="rope_scaling has unknown keys 'alpha'"):
        derive("llama", rope_scaling=table)
    with pytest.raises(LlmcError, match=r"rope_scaling.alpha = 'x', wanted a number"):
        derive("hunyuan_v1_dense", rope_scaling=table | {"alpha": "x"})
    with pytest.raises(LlmcError, match="original_max_position_embeddings = 64, wanted max_position_embeddings = 128"):
        derive("llama", rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64})


def test_a_number_of_one_other_that_is_not_whole() -> None:
    sizes = {"d_model": 65, "num_layers": 2, "attention_heads": 5, "ffn_dim": 64, "vocab_size": 100}
    with pytest.raises(LlmcError, match="d_model = 65 makes pairs no whole number, and pairs is not given"):
        derive_spec({"model_type": "xglm", "max_position_embeddings": 64, **sizes}, {}, "x", None)


def test_a_list_of_bases() -> None:
    listed = derive("granite_swa", layer_rope_theta=[5e4, 1e4, 0, 1e4, 5e4, 0, 1e4])
    assert listed.position.theta == 5e4
    assert listed.position.plain_layers == (2, 5)
    assert listed.window
    assert listed.window.theta == 1e4
    for bases, message in (
        ([1e4] * 6, "wanted 7 numbers"),
        ([1e4, 2e4, 3e4, 2e4, 1e4, 2e4, 2e4], "has one base for"),
        ([10**400] * 7, "layer_rope_theta = 1000"),  # beyond any float
    ):
        with pytest.raises(LlmcError, match=message):
            derive("granite_swa", layer_rope_theta=bases)


def test_windows_given_by_what_is_on_both_sides() -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    config = {**sizes, "local_attention": 10, "model_type": "modernbert-decoder"}
    decoder = derive_spec(config, {}, "x", None)
    assert decoder.window == Window(size=5, layers=(1, 2, 4, 5), theta=1e4)
    config |= {"model_type": "modernbert", "architectures": ["ModernBertModel"], "global_attn_every_n_layers": 2}
    assert derive_spec(config, {}, "x", None).window == Window(size=6, layers=(1, 3, 5), theta=1e4)


def test_layers_with_a_window_can_be_unscaled() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    olmo3 = derive_spec({"model_type": "olmo3", **sizes, "rope_scaling": LLAMA3, "rope_theta": 5e4}, {}, "x", None)
    assert olmo3.scaling
    assert olmo3.window == Window(size=4096, layers=(0, 1, 2, 4, 5, 6), theta=5e4, scaled=False)
    cwm = derive("cwm")  # which is scaled when no key says so, in all layers
    assert cwm.scaling == Scaling("llama3", 16.0, 8192, low=1.0, high=4.0)
    assert cwm.window
    assert cwm.window.scaled


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"low_freq_factor": ...}, "rope_scaling.low_freq_factor = None, wanted a number"),
        ({"factor": ...}, "rope_scaling.factor = None, wanted a number"),
        ({"factor": 0.5}, "rope_scaling.factor = 0.5, wanted"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings = 0, wanted a whole number"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings = 'x', wanted a whole number"),
        ({"beta_fast": 32}, "rope_scaling has unknown keys 'beta_fast'"),
        ({"rope_type": "yarn"}, "unknown keys 'low_freq_factor'"),
        ({"rope_type": ["yarn"]}, "llmc knows rope_type 'default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'"),
        ({"type": "yarn"}, "rope_scaling is "),
    ],
)
def test_scaling_that_is_refused(table: dict[str, Any], message: str) -> None:
    scaling = {key: value for key, value in (LLAMA3 | table).items() if value is not ...}
    with pytest.raises(LlmcError, match=message):
        derive("llama", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rope_type": "yarn", "mscale": -1}, "mscale = -1, wanted a number above 0"),
        ({"rope_type": "yarn", "attention_factor": 0}, "attention_factor = 0, wanted"),
        ({"rope_type": "yarn", "truncate": 1}, "truncate = 1, wanted true or false"),
        ({"rope_type": "yarn", "beta_slow": "1"}, "beta_slow = '1', wanted a number"),
        (LONG | {"long_factor": None}, "long_factor = None, wanted a list of numbers"),
        (LONG | {"long_factor": ["1"] * 8}, "long_factor = .*, wanted a list of numbers"),
        (LONG | {"long_factor": [1.0] * 7}, "scaling.long = .*, wanted 8 numbers above 0"),
        (LONG | {"short_factor": [0.0] * 8}, "short_factor = .*, wanted a list of numbers above 0"),
    ],
)
def test_more_scaling_that_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message):
        derive("llama", rope_scaling=table)


def test_two_tables_that_disagree() -> None:
    with pytest.raises(LlmcError, match="rope_parameters and rope_scaling scale rope in different ways"):
        derive("llama", rope_parameters=DEFAULT, rope_scaling=LLAMA3)


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
        ("gemma3_text", {"hidden_activation": "xielu"}, "hidden_activation = 'xielu', llmc knows: 'silu'"),
        ("gemma3_text", {"hidden_act": "gelu_pytorch_tanh"}, r"unknown keys 'hidden_act' \(near: hidden_activation"),
        ("gemma3_text", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping = -50.0, wanted a number"),
        ("apertus1p5_text", {"output_vocab_size": 48}, "output_vocab_size is set: llmc has no head of fewer rows"),
        ("mistral", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set: llmc has no softcapping"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
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
        ("gemma3_txt", {}, r"model_type is 'gemma3_txt' \(near: gemma3_text\), llmc knows: .*llama, .*mistral"),
        ("_llama", {}, "model_type is '_llama'"),
        ("../families/llama", {}, "model_type is '../families/llama'"),
    ],
)
def test_values_that_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        derive(model_type, **changes)
    assert "\n" not in str(caught.value)
