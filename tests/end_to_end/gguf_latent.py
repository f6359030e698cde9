"""Latent attention of a tiny Hugging Face folder, as llama.cpp's convert_hf_to_gguf.py writes it."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


def describe_latent(writer: Any, config: Any, apart: bool) -> None:
    """Sizes and rope's scaling. `apart`: k_up and v_up have tensors of their own, as in newer files."""
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_head_count_kv(1 if apart else config.num_attention_heads)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if apart else size)
    writer.add_value_length(config.kv_lora_rank if apart else config.v_head_dim)
    if apart:
        writer.add_key_length_mla(size)
        writer.add_value_length_mla(config.v_head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)


def with_ups_apart(weights: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """kv_b_proj as a matrix of three dimensions for keys, turned, and one for values."""
    found = dict(weights)
    for name in [name for name in found if ".kv_b_proj." in name]:
        heads = found.pop(name).reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
        found |= {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}
    return found
