"""What a GGUF file says about latent attention, in keys and in the names of its tensors.

Source: llama.cpp's src/llama-model.cpp (its graph of deepseek2) and its conversion of DeepSeek V2. Newer files have
k_up and v_up apart, k_up turned as the spec has it, and sizes of the absorbed form under the old keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec import range_fault
from llmc.compiler.spec.fields import clip

_LAYER = "blk.{layer}"
_KEY, _VALUE, _HEADS, _KV_HEADS = (
    "attention.key_length", "attention.value_length", "attention.head_count", "attention.head_count_kv",
)  # fmt: skip
_ROTATED, _RANK = "rope.dimension_count", "attention.kv_lora_rank"
_SIZES = {"attention.q_lora_rank": "latent.q_rank", _RANK: "latent.kv_rank", _ROTATED: "latent.rope_dim"}
_YARN = {
    "rope.scaling.factor": "scaling.factor", "rope.scaling.original_context_length": "scaling.original_context",
    "rope.scaling.yarn_beta_slow": "scaling.low", "rope.scaling.yarn_beta_fast": "scaling.high",
}  # fmt: skip
_GROWTH = "rope.scaling.yarn_log_multiplier"  # of scores, a tenth of mscale_all_dim

TENSORS = {
    "layers.{layer}.q_down": f"{_LAYER}.attn_q_a.weight",
    "layers.{layer}.q_down_norm": f"{_LAYER}.attn_q_a_norm.weight",
    "layers.{layer}.q_plain": f"{_LAYER}.attn_q_b.weight | q_plain q_rope by group",
    "layers.{layer}.q_rope": f"{_LAYER}.attn_q_b.weight | q_plain q_rope by group",
    "layers.{layer}.kv_down": f"{_LAYER}.attn_kv_a_mqa.weight | kv_down k_rope",
    "layers.{layer}.k_rope": f"{_LAYER}.attn_kv_a_mqa.weight | kv_down k_rope",
    "layers.{layer}.kv_down_norm": f"{_LAYER}.attn_kv_a_norm.weight",
    "layers.{layer}.k_up": f"{_LAYER}.attn_k_b.weight",
    "layers.{layer}.v_up": f"{_LAYER}.attn_v_b.weight",
}
WHOLE_QUERY = {
    f"layers.{{layer}}.{name}": f"{_LAYER}.attn_q.weight | q_plain q_rope by group" for name in ("q_plain", "q_rope")
}
FUSED_UP = {
    "layers.{layer}.k_up": f"{_LAYER}.attn_kv_b.weight | k_up v_up by group | turned by group",
    "layers.{layer}.v_up": f"{_LAYER}.attn_kv_b.weight | k_up v_up by group",
}
STACKED = ("attn_k_b.weight", "attn_v_b.weight")  # matrices of heads, of three dimensions


def latent_settings(
    own: Mapping[str, Any], kind: str, faults: list[str]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """What is left of `own`, the keys after "`kind`.", as an ordinary model would have it; fields of the spec that the
    others say; and what scores are multiplied with.
    """
    rest = dict(own)
    settings: dict[str, Any] = {}
    absorbed = f"{_KEY}_mla" in own
    sizes = _SIZES | {f"{_VALUE}_mla" if absorbed else _VALUE: "latent.value_dim"}
    length = f"{_KEY}_mla" if absorbed else _KEY
    growth = _yarn(rest, kind, settings, faults) if rest.get("rope.scaling.type") == "yarn" else 1.0
    faults += [f"missing key {kind}.{key}" for key in (*sizes, length) if key not in own and "q_lora" not in key]
    for key, path in sizes.items():
        if key in rest:
            _read(rest.pop(key), path, f"{kind}.{key}", settings, faults)
    heads, kv_heads = own.get(_HEADS), rest.pop(_KV_HEADS, None)
    if kv_heads not in (None, 1, heads):
        faults.append(f"{kind}.{_KV_HEADS} = {clip(kv_heads)}, wanted 1 or {_HEADS} = {clip(heads)}")
    if absorbed:
        rest.pop(_VALUE, None)
        rest[_KEY] = rest.pop(f"{_KEY}_mla")
    size, rotated = rest.get(_KEY), settings.get("latent.rope_dim", 0)
    if type(size) is int and size > rotated:
        _read(size - rotated, "latent.plain_dim", f"{kind}.{length} - {_ROTATED}", settings, faults)
    return rest, settings, growth


def _yarn(rest: dict[str, Any], kind: str, settings: dict[str, Any], faults: list[str]) -> float:
    """Takes the keys of yarn out of `rest`: fields of the spec, and what it makes scores grow by."""
    rest.pop("rope.scaling.type")
    settings |= {"scaling.kind": "yarn", "scaling.low": 1.0, "scaling.high": 32.0}
    for key, path in _YARN.items():
        if key in rest:
            _read(rest.pop(key), path, f"{kind}.{key}", settings, faults)
    missing = [path for path in ("scaling.factor", "scaling.original_context") if path not in settings]
    faults += [f"{kind}.rope.scaling.type = 'yarn', but {path} is not said" for path in missing]
    multiplier = rest.pop(_GROWTH, 0.0)
    if type(multiplier) not in (int, float) or not 0 <= multiplier < 1e3:
        faults.append(f"{kind}.{_GROWTH} = {clip(multiplier)}, wanted a number from 0")
        return 1.0
    return (1 + multiplier * math.log(settings.get("scaling.factor", 1.0))) ** 2


def _read(value: Any, path: str, label: str, settings: dict[str, Any], faults: list[str]) -> None:
    fault = range_fault(path, value, label)
    if fault:
        faults.append(fault)
    else:
        settings[path] = value
