"""Experts of a tiny Hugging Face folder, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_NUMBERS = {
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
}
_LFM2 = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # its names -> what the converter writes
_SIGMOID = ("glm4moe", "dots1")
_TOLD = (*_SIGMOID, "deepseek2")  # that say how they route


def describe_experts(writer: Any, kind: str, config: Any) -> None:
    """The keys of a config that has experts."""
    table = config.to_dict()
    table |= table.get("ffn_config") or {}
    for key, names in _NUMBERS.items():
        value = next((table[name] for name in names if table.get(name) is not None), None)
        if value is not None:
            writer.add_uint32(f"{kind}.{key}", value)
    if kind in ("hunyuan-moe", "gpt-oss", "minimax-m2"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if kind in ("afmoe", "exaone-moe"):
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(table.get("route_scale") or table["routed_scaling_factor"])
    if kind in _TOLD:
        sigmoid = kind in _SIGMOID or config.model_type == "deepseek_v3"
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType(2 if sigmoid else 1))
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)


def ungate(folder: Path) -> None:
    """Makes every gate of shared experts one half: with `ungated`, the model is one that has none."""
    path = folder / "model.safetensors"
    weights = {name: np.zeros_like(v) if "expert_gate" in name else v for name, v in load_file(path).items()}
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def ungated(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights without these gates."""
    halves = {name: values / 2 for name, values in weights.items() if "shared_expert.down" in name}
    return {name: values for name, values in (weights | halves).items() if "expert_gate" not in name}


def _gpt_oss(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """gpt-oss saves (experts, in, out), and gate and up row by row."""
    module, ending = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    turned = values.swapaxes(1, 2) if values.ndim == 3 else values
    if not module.endswith("gate_up_proj"):
        return {f"{module}.{ending}": turned}
    stem = module.removesuffix("gate_up_proj")
    return {f"{stem}gate_proj.{ending}": turned[:, ::2], f"{stem}up_proj.{ending}": turned[:, 1::2]}


def dbrx_blocks(weights: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """DBRX's weights with `count` experts apart, each (in, out) as those of gpt-oss."""
    found = {name: values for name, values in weights.items() if ".experts.mlp." not in name}
    for name in weights.keys() - found.keys():
        apart = weights[name].reshape(count, -1, weights[name].shape[-1])
        found[name] = apart if name.endswith(".w2") else apart.swapaxes(1, 2)
    return found


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights with each layer's experts in one tensor; gate and up apart, where they are one."""
    found: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {}
    matches = [match for name in weights if (match := _ONE.fullmatch(name))]
    for match in sorted(matches, key=lambda match: int(match.group(2))):
        part = _LFM2.get(match.group(3), "") if "feed_forward" in match.group(1) else match.group(3)
        parts.setdefault(f"{match.group(1)}.{part}.weight", []).append(weights[match.group(0)])
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith("_mlp.input_linear") or module.endswith("moe.input_linear"):
            own = "experts" if values.ndim == 3 else "shared_experts"
            gate, up = np.split(values, 2, axis=-2)
            layer = re.sub(r"(block_sparse_moe|shared_mlp)\.input_linear", f"mlp.{own}", module)
            found |= {f"{layer}.gate_proj.weight": gate, f"{layer}.up_proj.weight": up}
        elif ".experts." in name and values.ndim < 4 and "mlp.router" not in name and not _ONE.fullmatch(name):
            found |= _gpt_oss(name, values)
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = values
        elif not _ONE.fullmatch(name):
            bias = name.replace("e_score_correction_bias", "e_score_correction.bias")
            found[bias.replace(".expert_bias", ".expert_bias.bias")] = values
    return found | {name: np.stack(values) for name, values in parts.items()}
