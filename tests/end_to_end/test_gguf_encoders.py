"""An encoder in a GGUF file, written as llama.cpp's converter does, gives the vectors that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
)

import llmc
from llmc.compiler.driver import compile_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "aeiourst")]
LETTERS = [*WORDS[:5], "\u0120", *"abcdefghijklmnopqrstuvwxyz", "at"]  # of a byte-level tokenizer
TEXTS = ["a cat", "rats rats rats and cats", "x"]
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
POOLED = {1: lambda rows: rows.mean(0), 2: lambda rows: rows[0], 3: lambda rows: rows[-1]}
_MODERN = {
    **SIZES, "num_hidden_layers": 4, "local_attention": 6, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
    "sep_token_id": 3,
}  # fmt: skip
# Architecture -> the model, and names of modules that gguf's own table lacks.
MODELS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "bert": (BertModel, BertConfig(vocab_size=len(WORDS), **SIZES), {}),
    "nomic-bert": (
        NomicBertModel,
        NomicBertConfig(vocab_size=len(WORDS), **SIZES),
        {
            "post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm",
            "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
    ),
    "modern-bert": (ModernBertModel, ModernBertConfig(vocab_size=len(LETTERS), **_MODERN), {}),
}  # fmt: skip


def _twin(architecture: str) -> PreTrainedModel:
    kind, config, _ = MODELS[architecture]
    torch.manual_seed(3)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _phantom(word: str) -> str:
    """How a WordPiece entry is spelled in the file: a mark before what begins a word, none before what goes on."""
    if word.startswith("["):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def _add_tokenizer(writer: gguf.GGUFWriter, byte_level: bool) -> None:
    words = LETTERS if byte_level else WORDS
    writer.add_token_list(words if byte_level else [_phantom(word) for word in words])
    writer.add_token_types([3 if word.startswith("[") else 1 for word in words])
    writer.add_uint32("tokenizer.ggml.unknown_token_id", 1)
    writer.add_uint32("tokenizer.ggml.seperator_token_id", 3)
    if not byte_level:
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("modern-bert")
    writer.add_token_merges(["a t"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    for key in ("bos", "eos", "sep"):
        writer.add_bool(f"tokenizer.ggml.add_{key}_token", True)


def _tensors(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Names of the file -> values."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names: Any = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    state, made = dict(model.state_dict()), {}
    for name in [name for name in state if name.endswith("self_attn.q_proj.weight")]:
        layer = name.removesuffix("self_attn.q_proj.weight")
        parts = [state.pop(f"{layer}self_attn.{part}_proj.weight") for part in "qkv"]
        made[f"blk.{layer.split('.')[1]}.attn_qkv.weight"] = torch.cat(parts).numpy()
    for name, values in state.items():
        base, suffix = name.rsplit(".", 1)
        if base.split(".")[0] == "pooler" or suffix == "position_ids":
            continue
        _, _, module = base.split(".", 2) if base.startswith("layers.") else ("", "", "")
        own = MODELS[architecture][2].get(module)
        made[f"blk.{base.split('.')[1]}.{own}.{suffix}" if own else f"{names.get_name(base)}.{suffix}"] = values.numpy()
    return made


def _write(architecture: str, model: PreTrainedModel, path: Path, pooling: int) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "norm_eps", None) or config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    rope = getattr(config, "rope_parameters", None) or {}
    if theta := rope.get("full_attention", rope).get("rope_theta"):
        writer.add_rope_freq_base(theta)
    if architecture == "modern-bert":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
        writer.add_vocab_size(config.vocab_size)
        writer.add_string("modern-bert.hidden_activation", config.hidden_activation)
    _add_tokenizer(writer, architecture == "modern-bert")
    for name, values in _tensors(architecture, model).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "pooling"), [("bert", 1), ("bert", 2), ("bert", 3), ("nomic-bert", 1), ("modern-bert", 2)]
)
def test_vectors(architecture: str, pooling: int, tmp_path: Path) -> None:
    reference = _twin(architecture)
    _write(architecture, reference, tmp_path / "tiny.gguf", pooling)
    compile_model(tmp_path / "tiny.gguf", tmp_path / "tiny.llmc", quant="f32")
    expected = []
    with llmc.load(tmp_path / "tiny.llmc") as model:
        vectors = model.embed(TEXTS)
        for text in TEXTS:
            ids = [*model.encode(text), 3]
            assert ids[0] == 2
            with torch.no_grad():
                vector = POOLED[pooling](reference(torch.tensor([ids])).last_hidden_state[0].numpy())
            expected.append(vector / np.linalg.norm(vector))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
