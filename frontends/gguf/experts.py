"""What a GGUF file says about experts, in keys and in the names of its tensors.

Source: llama.cpp's src/llama-arch.cpp (names) and src/llama-model.cpp (what an architecture's graph does with them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.compiler.spec.fields import clip

_LAYER = "blk.{layer}"
COUNT = "expert_count"
WIDTH = "expert_feed_forward_length"
NUMBERS = {
    COUNT: "experts.count",
    "expert_used_count": "experts.used",
    "expert_weights_scale": "experts.scale",
    "expert_group_count": "experts.groups",
    "expert_group_used_count": "experts.groups_used",
}
GATING = "expert_gating_func"
ROUTINGS = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}  # llama_expert_gating_func_type
RENORMALIZE = "expert_weights_norm"
LEADING = "leading_dense_block_count"
NEXT = "nextn_predict_layers"  # layers after the last one, which guess what follows the next token
# The tensors say the same: which layers have experts, and how wide the shared ones are.
TOLD_BY_TENSORS = ("interleave_moe_layer_step", "expert_shared_count", "expert_shared_feed_forward_length")
KEYS = (*NUMBERS, WIDTH, GATING, RENORMALIZE, LEADING, NEXT, *TOLD_BY_TENSORS)

ROUTER, SHARED = f"{_LAYER}.ffn_gate_inp.weight", f"{_LAYER}.ffn_up_shexp.weight"
TENSORS = {
    "layers.{layer}.router": ROUTER,
    "layers.{layer}.router_bias": f"{_LAYER}.exp_probs_b.bias",
    **{f"layers.{{layer}}.experts.{part}": f"{_LAYER}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    **{f"layers.{{layer}}.shared.{part}": f"{_LAYER}.ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    "layers.{layer}.router_product_bias": f"{_LAYER}.ffn_gate_inp.bias",
    **{f"layers.{{layer}}.experts.{part}_bias": f"{_LAYER}.ffn_{part}_exps.bias" for part in ("gate", "up", "down")},
    "layers.{layer}.shared_gate": f"{_LAYER}.ffn_gate_inp_shexp.weight",
}
# Switches of the spec -> a tensor that a file has where they are on.
_BIASES = {
    "experts.bias": "layers.{layer}.router_bias",
    "experts.product_bias": "layers.{layer}.router_product_bias",
    "experts.biases": "layers.{layer}.experts.up_bias",
}
# Files of before April 2024 have a tensor for each expert, and some have gate and up in one.
OLD = {f"layers.{{layer}}.experts.{part}": f"{_LAYER}.ffn_{part}.{{expert}}.weight" for part in ("gate", "up", "down")}
FUSED = {
    f"layers.{{layer}}.experts.{part}": f"{_LAYER}.ffn_gate_up_exps.weight | gate up by expert"
    for part in ("gate", "up")
}


@dataclass(frozen=True)
class Mixture:
    """Experts of an architecture: `settings` are what its files do not say, as fields of the spec.

    `wide`: their width is the MLP's, else a key's. `optional`: a file may have none.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    optional: bool = False


def expert_settings(
    own: Mapping[str, Any], kind: str, rule: Mixture, shapes: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Any], faults: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Fields of the spec beside `numbers`, which are those that keys say.

    `own`: keys after "`kind`."; `shapes`: of the file's tensors, by name.
    """
    routed = tuple(i for i in range(numbers["sizes.layers"]) if ROUTER.replace("{layer}", str(i)) in shapes)
    settings = {"experts.routing": "softmax", **rule.settings, "experts.layers": routed}
    if rule.wide and "sizes.ffn" in numbers:
        settings["experts.ffn"] = numbers["sizes.ffn"]
    if not routed:
        faults.append(f"{kind}.{COUNT} = {clip(own.get(COUNT))}, but no layer has {ROUTER}")
    leading = own.get(LEADING, 0)
    if type(leading) is not int or any(layer < leading for layer in routed):
        faults.append(f"{kind}.{LEADING} = {clip(leading)}, but layers {clip(list(routed))} have experts")
    if GATING in own:
        routing = ROUTINGS.get(own[GATING]) if type(own[GATING]) is int else None
        if routing is None:
            faults.append(f"{kind}.{GATING} = {clip(own[GATING])}, llmc knows: {', '.join(map(str, ROUTINGS))}")
        settings["experts.routing"] = routing
    if RENORMALIZE in own:
        if not isinstance(own[RENORMALIZE], bool):
            faults.append(f"{kind}.{RENORMALIZE} = {clip(own[RENORMALIZE])}, wanted a boolean")
        settings["experts.renormalize"] = own[RENORMALIZE] is True
    shared = {shapes[name][0] for i in routed if (name := SHARED.replace("{layer}", str(i))) in shapes}
    settings["experts.shared_ffn"] = max(shared, default=0)
    for path, ours in _BIASES.items():
        settings[path] = any(TENSORS[ours].replace("{layer}", str(i)) in shapes for i in routed)
    return settings


def expert_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Our names of experts' tensors -> the file's, however it has them."""
    parts = {name.split(".", 2)[2] for name in shapes if name.startswith("blk.") and name.count(".") > 2}
    old = OLD if "ffn_up.0.weight" in parts else {}
    return TENSORS | old | (FUSED if "ffn_gate_up_exps.weight" in parts else {})


def own_layers(own: Mapping[str, Any], kind: str, layers: int, faults: list[str]) -> int:
    """How many of the file's layers are the model's: those that guess ahead come after them."""
    beyond = own.get(NEXT, 0)
    if type(beyond) is not int or not 0 <= beyond < layers:
        faults.append(f"{kind}.{NEXT} = {clip(beyond)}, wanted a whole number below block_count = {layers}")
        return layers
    return layers - beyond


def beyond(own: Mapping[str, Any]) -> int:
    """How many of the file's layers come after the model's own, 0 where it does not say so in a whole number."""
    count = own.get(NEXT, 0)
    return count if type(count) is int else 0


def guess_ahead(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The tensors of the layers after the model's own."""
    kind = metadata.get("general.architecture")
    count, beyond = metadata.get(f"{kind}.block_count"), metadata.get(f"{kind}.{NEXT}", 0)
    if type(count) is not int or type(beyond) is not int:
        return set()
    after = tuple(f"blk.{layer}." for layer in range(max(0, count - beyond), count)) if beyond < 1 << 10 else ()
    return {name for name in shapes if name.startswith(after)} if after else set()
