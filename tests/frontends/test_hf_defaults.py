"""What an absent key of config.json means is what transformers makes of it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from llmc.compiler.spec import ModelSpec, to_toml
from llmc.frontends.hf.config import derive_spec
from llmc.frontends.hf.families import Family, known_families, load_family

# Families that transformers has not by this name.
REMOTE = {
    "aquila",
    "baichuan",
    "chatglm",
    "deepseek",
    "internlm",
    "internlm2",
    "kimi_k2",
    "minicpm",
    "orion",
    "qwen",
    "xverse",
}
NATIVE = [
    name
    for name in known_families()
    if name not in REMOTE
    and load_family(name).settings.get("attention.causal", True)
    and not load_family(name).encoder_layers
]
# Of the keys that must be there, large enough for every family's defaults of the others.
SIZES = {
    "sizes.vocab": 400000, "sizes.hidden": 4096, "sizes.layers": 8, "sizes.ffn": 512, "sizes.context": 16384,
    "attention.heads": 32, "attention.head_dim": 128, "experts.count": 16, "experts.used": 4, "encoder.layers": 8,
    "encoder.ffn": 512,
}  # fmt: skip

# What some families need besides.
MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "deepseek_v2": {"moe_intermediate_size": 1408},
    "minicpm3": {"hidden_size": 5120},
    "lfm3": {"layer_types": [*["conv"] * 2, "full_attention", "conv", "sliding_attention", *["conv"] * 3]},
    "helium": {"num_attention_heads": 40, "hidden_size": 5120},
}


def derive(model_type: str, config: dict[str, Any]) -> ModelSpec:
    spec = derive_spec({**config, "model_type": model_type}, {}, "x", None)
    return dataclasses.replace(spec, tokens=dataclasses.replace(spec.tokens, bos=None, eos=()))


def required(family: Family) -> dict[str, Any]:
    return {key: SIZES[number.sets] for key, number in family.numbers.items() if number.absent is None}


@pytest.mark.parametrize("model_type", NATIVE)
def test_absent_keys(model_type: str) -> None:
    family = load_family(model_type)
    given = required(family) | MORE.get(model_type, {})
    if family.settings.get("attention.kind") == "mla":  # no groups: as many heads as keys
        given["num_attention_heads"] = CONFIG_MAPPING[model_type]().num_key_value_heads
    whole = json.loads(CONFIG_MAPPING[model_type](**given).to_json_string(use_diff=False))
    assert rounded(derive(model_type, given)) == rounded(derive(model_type, whole))


_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False, "auto_map": {"AutoModel": "m.X"},
}  # fmt: skip
_SARVAM: dict[str, Any] = _SIZES | {
    "num_hidden_layers": 3, "hidden_act": "silu", "rms_norm_eps": 1e-5, "moe_intermediate_size": 48, "num_experts": 16,
    "num_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True, "routed_scaling_factor": 1.5, "score_function": "sigmoid",
    "router_dtype": "fp32", "use_qk_norm": True, "embedding_dropout": 0.0, "output_dropout": 0.0, "rope_theta": 5e4,
}  # fmt: skip
# As the families' own code, which was there before transformers had them, names and writes the keys.
OWN: dict[str, dict[str, Any]] = {
    "exaone": _SIZES
    | {
        "num_layers": 3, "num_key_value_heads": 2, "activation_function": "silu", "layer_norm_epsilon": 1e-6,
        "rope_theta": 1e6, "embed_dropout": 0.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "sarvam_moe": _SARVAM
    | {"num_key_value_heads": 2, "head_dim": 16, "use_qkv_bias": True, "use_bias": False, "rope_scaling": None,
       "max_window_layers": 3, "n_group": 4, "topk_group": 2},
    "sarvam_mla": _SARVAM
    | {
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_head_dim": 24,
        "head_dim": 40,
        "rope_scaling": {
            "type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.9,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", OWN)
def test_a_family_s_own_keys(model_type: str) -> None:
    read = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(OWN[model_type])))  # it changes what it is given
    saved = json.loads(read.to_json_string())
    assert rounded(derive(model_type, OWN[model_type])) == rounded(derive(model_type, saved))


def rounded(spec: ModelSpec) -> str:
    """The spec's text, floats to ten digits: a root can be taken in two ways."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.10g}", to_toml(spec))
