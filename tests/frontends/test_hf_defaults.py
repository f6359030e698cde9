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
    "exaone",
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


def rounded(spec: ModelSpec) -> str:
    """The spec's text, floats to ten digits: a root can be taken in two ways."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.10g}", to_toml(spec))
