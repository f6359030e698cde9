"""What an architecture's name says beyond the keys, and the keys it brings: windows, norms, scales."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec, Pooling, Scaling, Window
from llmc.frontends.gguf.architectures import ARCHITECTURES, EPS
from llmc.frontends.gguf.experts import guess_ahead
from llmc.frontends.gguf.refused import REFUSED
from llmc.frontends.gguf.spec import derive_spec

LAYERS = 7
# What an architecture needs beside the others' keys.
NEEDS: dict[str, dict[str, Any]] = {
    "gemma3": {"attention.sliding_window": 8},
    "gptneox": {"use_parallel_residual": True},
    "mpt": {"attention.max_alibi_bias": 8.0},
    "command-r": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "attention.sliding_window": 8},
    "granite": {"logit_scale": 8.0},
    "granitemoe": {"logit_scale": 8.0},
    "minicpm": {"embedding_scale": 12.0, "residual_scale": 0.3, "logit_scale": 8.0},
    "bert": {"pooling_type": 1},
    "nomic-bert": {"pooling_type": 1},
    "modern-bert": {"pooling_type": 1},
    "gpt-oss": {"attention.sliding_window": 8},
    "exaone-moe": {"attention.sliding_window": 8},
    "t5": {"attention.relative_buckets_count": 8, "decoder_start_token_id": 0},
    "deepseek2": {
        "attention.kv_lora_rank": 32, "attention.key_length": 24, "attention.value_length": 48,
        "rope.dimension_count": 8,
    },
}  # fmt: skip
_MIXTURE = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
for _kind, _rule in ARCHITECTURES.items():
    if _rule.experts and not _rule.experts.optional:
        _needed = {key: value for key, value in _MIXTURE.items() if not _rule.experts.wide or "forward" not in key}
        NEEDS[_kind] = NEEDS.get(_kind, {}) | _needed
ROUTERS = {f"blk.{layer}.ffn_gate_inp.weight": (8, 48) for layer in range(LAYERS)}
SHARED = {f"blk.{layer}.ffn_up_shexp.weight": (64, 48) for layer in range(LAYERS)}


def derive(
    kind: str,
    tensors: Collection[str] | None = None,
    vocab: int = 2,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> ModelSpec:
    """The spec of a small file; "." is written "__", and None leaves a key out. Of experts every layer has some."""
    rule = ARCHITECTURES[kind]
    said = [key for key, path in rule.numbers.items() if path == "norm.eps"]
    eps = said[0] if said else EPS[rule.settings.get("norm.kind", "rms")]
    own = {
        "context_length": 64, "embedding_length": 48, "block_count": LAYERS, "feed_forward_length": 96,
        "attention.head_count": 4, eps: 1e-6, "attention.key_length": 16, **NEEDS.get(kind, {}),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip
    metadata = {
        "general.architecture": kind,
        "tokenizer.ggml.tokens": [str(i) for i in range(vocab)],
        "tokenizer.ggml.model": "gpt2",
        **{f"{kind}.{key}": value for key, value in own.items() if value is not None},
        **{key: [value or 0.8] * LAYERS for key, value in rule.constants.items()},
        **(more or {}),
    }
    shapes = tensors if isinstance(tensors, dict) else dict.fromkeys(tensors or (), (1,))
    mixed = tensors is None and ARCHITECTURES[kind].experts
    return derive_spec(metadata, ROUTERS | SHARED | shapes if mixed else shapes, "x")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_gives_a_spec(kind: str) -> None:
    spec = derive(kind)
    assert (spec.window is not None) == (kind in ("gemma2", "gemma3", "cohere2", "gpt-oss", "exaone-moe"))
    assert spec.attention.scale == (1 if kind == "t5" else 1 / math.sqrt(spec.attention.head_dim))
    assert spec.head.tied
    assert not spec.attention.bias
    assert (spec.experts.count != 0) == ("expert_count" in NEEDS.get(kind, {}))


@pytest.mark.parametrize("kind", NEEDS)
def test_what_an_architecture_must_say(kind: str) -> None:
    for key in NEEDS[kind]:
        with pytest.raises(LlmcError, match=f"missing key {kind}.{key}"):
            derive(kind, **{key.replace(".", "__"): None})


def test_what_tensors_say() -> None:
    assert derive("qwen2", ["blk.0.attn_q.bias"]).attention.bias
    assert not derive("llama", ["output.weight"]).head.tied
    fused = derive("stablelm", ["blk.0.attn_qkv.weight", "blk.0.ffn_norm.weight"])
    assert fused.tensors["layers.{layer}.k"] == "blk.{layer}.attn_qkv.weight | q k v"
    assert fused.wiring.order == "sequential"
    assert derive("stablelm").wiring.order == "shared"
    assert derive("falcon", ["blk.0.attn_norm_2.weight"]).wiring.order == "parallel"


def test_numbers_that_the_file_has_otherwise() -> None:
    assert derive("granite").head.scale == 0.125
    assert derive("command-r").head.scale == 0.25
    assert derive("qwen").sizes.ffn == 48
    assert derive("gptneox", use_parallel_residual=False).wiring.order == "sequential"


def test_rope_of_a_part_and_of_some_layers() -> None:
    assert derive("phi2", rope__dimension_count=8).position.rotary_dim == 8
    assert derive("phi2", rope__dimension_count=16).position.rotary_dim == 0
    assert derive("smollm3", block_count=9).position.plain_layers == (3, 7)


def test_which_layers_have_the_window() -> None:
    assert derive("gemma3").window == Window(size=8, layers=(0, 1, 2, 3, 4, 6), theta=10000.0)
    other = {"attention__sliding_window_pattern": 3, "rope__freq_base_swa": 5e4, "rope__scaling__factor": 8.0}
    spec = derive("gemma3", **other)
    assert spec.window == Window(size=8, layers=(0, 1, 3, 4, 6), theta=5e4)
    assert spec.position.factor == 8.0
    assert spec.window.factor == 1.0
    old = derive("gemma2", rope__scaling__factor=2.0, rope__freq_base=5e4)
    assert old.window == Window(size=4096, layers=(0, 2, 4, 6), theta=5e4, factor=2.0)
    assert derive("phi3", attention__sliding_window=8).window == Window(8, tuple(range(LAYERS)), 10000.0)
    assert derive("phi3", attention__sliding_window=0).window is None


def test_layers_without_a_window_have_no_rope_beside_it() -> None:
    assert derive("exaone4").position.plain_layers == ()
    spec = derive("exaone4", attention__sliding_window=8)
    assert (spec.window, spec.position.plain_layers) == (Window(8, (0, 1, 2, 4, 5, 6), 10000.0), (3,))
    listed = {"attention__sliding_window_pattern": [True, False, True, True, False, True]}
    spec = derive("exaone-moe", nextn_predict_layers=1, **listed)
    assert spec.window is not None
    assert (spec.window.layers, spec.position.plain_layers) == ((0, 2, 3, 5), (1, 4))
    spec = derive("exaone-moe", nextn_predict_layers=2)
    assert spec.window is not None
    assert (spec.sizes.layers, spec.window.layers, spec.position.plain_layers) == (5, (0, 1, 2, 4), (3,))
    assert derive("afmoe").position.plain_layers == (3,)


def test_what_numbers_say_beyond_themselves() -> None:
    assert derive("baichuan").position.kind == "rope"
    assert derive("baichuan", block_count=40).position.kind == "alibi"
    assert derive("baichuan", ["output.weight"]).tensors["head"] == "output.weight"
    second = derive("baichuan", ["output.weight"], vocab=125696)
    assert second.tensors["head"] == "output.weight | normalized"


def test_numbers_of_an_activation() -> None:
    assert derive("apertus").tensors["layers.{layer}.xielu_below"] == "xielu.alpha_n.{layer}"
    for key, value, message in (
        ("xielu.beta", [0.5] * 6 + [0.7], "0.7.*, llmc knows: 0.5"),
        ("xielu.eps", 1e-6, "xielu.eps = 1e-06, wanted a number for each layer"),
        ("xielu.alpha_p", None, "xielu.alpha_p = None, wanted a number for each layer"),
    ):
        with pytest.raises(LlmcError, match=message):
            derive("apertus", more={key: value})
    with pytest.raises(LlmcError, match=r"unknown keys 'xielu.beta'"):
        derive("llama", more={"xielu.beta": [0.5]})


def test_scales_that_no_key_says() -> None:
    assert derive("gemma3").embedding.scale == math.sqrt(48)
    assert derive("gemma3", block_count=62).attention.scale == 1 / math.sqrt(48 / 4)
    assert derive("llama", block_count=62).attention.scale == 0.25
    assert derive("llama").embedding.scale == 1


def test_what_tensors_say_of_experts() -> None:
    routed = {f"blk.{layer}.ffn_gate_inp.weight": (8, 48) for layer in (1, 3)}
    more = {"blk.3.ffn_up_shexp.weight": (80, 48), "blk.3.exp_probs_b.bias": (8,)}
    spec = derive("deepseek", routed | more, leading_dense_block_count=1)
    assert spec.experts.layers == (1, 3)
    assert spec.experts.shared_ffn == 80
    assert spec.experts.bias
    assert spec.tensors["layers.{layer}.experts.up"] == "blk.{layer}.ffn_up_exps.weight"
    assert derive("deepseek", expert_gating_func=3).experts.routing == "softmax_of_chosen"
    assert derive("glm4moe", nextn_predict_layers=2).experts.layers == (0, 1, 2, 3, 4)
    assert guess_ahead(
        {"general.architecture": "x", "x.block_count": 3, "x.nextn_predict_layers": 1},
        {"blk.1.a": (1,), "blk.2.a": (1,), "blk.20.a": (1,)},
    ) == {"blk.2.a"}
    with pytest.raises(LlmcError, match="qwen3moe.expert_count = 8, but no layer has"):
        derive("qwen3moe", ())


def test_experts_of_llama_are_those_that_a_file_has() -> None:
    assert derive("llama", expert_count=0).experts.count == 0
    old = derive("llama", ROUTERS | {"blk.0.ffn_up.0.weight": (96, 48)}, expert_count=8, expert_used_count=2)
    assert old.experts.ffn == 96
    assert old.experts.renormalize
    assert old.tensors["layers.{layer}.experts.down"] == "blk.{layer}.ffn_down.{expert}.weight"
    fused = derive("qwen3moe", ROUTERS | {"blk.0.ffn_gate_up_exps.weight": (8, 64, 48)})
    assert fused.tensors["layers.{layer}.experts.gate"] == "blk.{layer}.ffn_gate_up_exps.weight | gate up by expert"


def test_yarn() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    context = {"rope__scaling__original_context_length": 32}
    spec = derive("qwen2", **yarn, **context, rope__scaling__attn_factor=2.0)
    assert spec.position.factor == 1.0
    magnitude = 2 * (1 + 0.1 * math.log(4))
    assert spec.scaling == Scaling("yarn", 4.0, 32, low=1.0, high=32.0, magnitude=magnitude, round_ends=True)
    assert derive("gpt-oss", **yarn, **context).scaling == Scaling(
        "yarn", 4.0, 32, low=1.0, high=32.0, magnitude=magnitude / 2, round_ends=False
    )
    for changes, message in (
        (yarn, "rope.scaling.type = 'yarn', but scaling.original_context is not said"),
        (yarn | context | {"rope__scaling__factor": 0.0}, "qwen2.rope.scaling.factor = 0.0"),
        (yarn | context | {"rope__scaling__yarn_beta_fast": "x"}, "yarn_beta_fast = 'x'"),
        (context | {"rope__scaling__type": "longrope"}, "'longrope', llmc knows: 'none', 'linear'"),
    ):
        with pytest.raises(LlmcError, match=message):
            derive("qwen2", **changes)


def test_none_is_both_read_and_refused() -> None:
    assert not REFUSED.keys() & ARCHITECTURES.keys()


def test_encoders() -> None:
    spec = derive("bert", {"token_types.weight": (2, 48)}, pooling_type=2)
    assert spec.pooling == Pooling("first", normalize=True)
    assert spec.tensors["embedding_bias"] == "token_types.weight | row 0 of 2"
    assert not spec.attention.causal
    spec = derive("modern-bert", attention__sliding_window=8, rope__freq_base=160000.0, hidden_activation="silu")
    assert spec.window == Window(size=5, layers=(1, 2, 4, 5), theta=10000.0)
    assert spec.position.theta == 160000.0
    assert spec.mlp.activation == "silu"


@pytest.mark.parametrize("kind", REFUSED)
def test_architectures_that_are_refused(kind: str) -> None:
    with pytest.raises(LlmcError, match=f"'{kind}', which llmc has no block for: its .*; run it elsewhere"):
        derive_spec({"general.architecture": kind}, {}, "x")


_LISTED = {"attention__sliding_window": 8}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma3", {"attention__sliding_window": 0}, r"gemma3.attention.sliding_window = 0, wanted a whole number"),
        ("gemma3", {"attention__sliding_window_pattern": 1}, "sliding_window_pattern = 1, wanted a whole number"),
        ("gemma3", {"attention__sliding_window_pattern": [True, False]}, r"sliding_window_pattern = \[True, False\]"),
        ("exaone4", _LISTED | {"attention__sliding_window_pattern": [True]}, r"\[True\], wanted true or false"),
        ("exaone4", _LISTED | {"attention__sliding_window_pattern": [1] * LAYERS}, r"pattern = \[1, 1"),
        ("exaone-moe", {"attention__sliding_window": None}, "missing key exaone-moe.attention.sliding_window"),
        ("gemma3", {"attention__sliding_window_pattern": True}, "sliding_window_pattern = True"),
        ("gemma3", {"rope__freq_base_swa": -1.0}, "rope.freq_base_swa = -1.0"),
        ("gemma3", {"rope__scaling__type": "yarn"}, "rope.scaling.type = 'yarn', llmc knows: 'none', 'linear'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "unknown keys gemma3.'final_logit_softcapping'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "unknown keys gemma3.'attn_logit_softcapping'"),
        ("gemma3", {"attention__causal": False}, "attention.causal = False"),
        ("qwen2", {"attention__sliding_window": 8}, "attention.sliding_window = 8, llmc knows: 0"),
        ("qwen3", {"attention__sliding_window_pattern": 6}, "'attention.sliding_window_pattern'"),
        ("phi3", {"attention__sliding_window": -1}, "attention.sliding_window = -1"),
        ("phi3", {"attention__sliding_window": False}, "attention.sliding_window = False"),
        ("phi3", {"attention__sliding_window_pattern": 2}, "'attention.sliding_window_pattern'"),
        ("phi2", {"rope__dimension_count": 24}, "position.rotary_dim"),
        ("phi2", {"rope__dimension_count": -2}, "rope.dimension_count = -2"),
        ("phi2", {"rope__dimension_count": 0}, "rope.dimension_count = 0"),
        ("falcon", {"rope__dimension_count": 8}, "wanted head_dim = 16"),
        ("falcon", {"tensor_data_layout": "other"}, "tensor_data_layout = 'other', llmc knows: 'jploski'"),
        ("gptneox", {"use_parallel_residual": 1}, "use_parallel_residual = 1, llmc knows: True, False"),
        ("mpt", {"attention__max_alibi_bias": 0.0}, "max_alibi_bias = 0.0, llmc knows: 8.0"),
        ("granite", {"logit_scale": 0.0}, "granite.logit_scale = 0.0"),
        ("granite", {"logit_scale": float("nan")}, "granite.logit_scale = nan"),
        ("granite", {"logit_scale": 1e-300}, "granite.logit_scale = "),
        ("gpt2", {"attention__layer_norm_rms_epsilon": 1e-6}, "'attention.layer_norm_rms_epsilon'"),
        ("qwen", {"feed_forward_length": 1}, "qwen.feed_forward_length = 0"),
        ("qwen3", {"expert_count": 8}, "expert_count = 8"),
        ("qwen3moe", {"expert_count": 1}, "qwen3moe.expert_count = 1, wanted a whole number from 2"),
        ("qwen3moe", {"expert_gating_func": 9}, "expert_gating_func = 9, llmc knows: 1, 2, 3"),
        ("qwen3moe", {"expert_gating_func": [1]}, r"expert_gating_func = \[1\]"),
        ("qwen3moe", {"expert_weights_norm": 1}, "expert_weights_norm = 1, wanted a boolean"),
        ("deepseek", {"leading_dense_block_count": 2}, r"leading_dense_block_count = 2, but layers \[0, 1, 2"),
        ("glm4moe", {"nextn_predict_layers": LAYERS}, "nextn_predict_layers = 7, wanted a whole number below"),
        ("glm4moe", {"nextn_predict_layers": -1}, "nextn_predict_layers = -1"),
        ("bert", {"pooling_type": 0}, "bert.pooling_type = 0, llmc knows: 1, 2, 3"),
        ("bert", {"pooling_type": True}, "bert.pooling_type = True"),
        ("modern-bert", {"hidden_activation": "relu"}, "hidden_activation = 'relu', llmc knows: 'gelu', 'silu'"),
        ("modern-bert", {"attention__sliding_window": True}, "attention.sliding_window = True"),
        ("bert", {"attention__causal": True}, "attention.causal = True, llmc knows: False"),
    ],
)
def test_values_that_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        derive(kind, **changes)
    assert "\n" not in str(caught.value)
