"""A tiny T5's folder as a GGUF file, as llama.cpp's convert_hf_to_gguf.py writes it, with a unigram tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoConfig

PIECES = ["<pad>", "<unk>", "</s>", *"\u2581abcdefghijklmnopqrstuvwxyz", "\u2581a", "\u2581the", "house"]
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
CONTROL, UNKNOWN, NORMAL, UNUSED = 3, 2, 1, 5
NEVER_USED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias"


def write_t5(folder: Path, path: Path) -> None:
    """Float32 tensors and metadata, and the table for cross-attention that T5's first files have."""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(config.to_dict().get("n_positions", 512))
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_decoder_block_count(config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(config.decoder_start_token_id)
    _add_tokenizer(writer, config.vocab_size, config.eos_token_id)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(config.num_layers, config.num_decoder_layers))
    weights = {name: values for name, values in load_file(folder / "model.safetensors").items() if name not in _COPIES}
    unused = np.ones((config.relative_attention_num_buckets, config.num_heads), np.float32)
    for name, values in {**weights, f"{NEVER_USED}.weight": unused}.items():
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, vocab: int, eos: int) -> None:
    pieces = [*PIECES, *(f"[PAD{i}]" for i in range(len(PIECES), vocab))]
    kinds = [NORMAL if i < len(PIECES) else UNUSED for i in range(vocab)]
    kinds[:3] = CONTROL, UNKNOWN, CONTROL
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(i) / 8 for i in range(vocab)])
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
