"""A tiny Hugging Face folder as a GGUF file, with the names that the `gguf` package (llama.cpp's own) gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

# model_type -> general.architecture
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def write_gguf(folder: Path, path: Path) -> None:
    """Float32 tensors and the metadata that convert_hf_to_gguf.py writes."""
    config = json.loads((folder / "config.json").read_text())
    kind = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, kind)
    _describe(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in load_file(folder / "model.safetensors").items():
        base, suffix = name.rsplit(".", 1)
        one = np.float32(1 if kind == "gemma3" and base.endswith("norm") else 0)  # as the converter does
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", values + one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        rope = rope["full_attention"]
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    for token, id_ in vocab.items():
        tokens[id_] = token
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 if tokens[i] in vocab else 5 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
