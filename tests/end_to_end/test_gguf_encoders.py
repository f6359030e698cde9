"""An encoder in a GGUF file, written as llama.cpp's converter does, gives the vectors that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

import llmc
from llmc.compiler.driver import compile_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "aeiourst")]
TEXTS = ["a cat", "rats rats rats and cats", "x"]
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
POOLED = {1: lambda rows: rows.mean(0), 2: lambda rows: rows[0], 3: lambda rows: rows[-1]}


@pytest.fixture(scope="module")
def twin() -> BertModel:
    torch.manual_seed(3)
    model = BertModel(BertConfig(vocab_size=len(WORDS), **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _phantom(word: str) -> str:
    """How a WordPiece entry is spelled in the file: a mark before what begins a word, none before what goes on."""
    if word.startswith("["):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def _write(twin: BertModel, path: Path, pooling: int) -> None:
    config = twin.config
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list([_phantom(word) for word in WORDS])
    writer.add_token_types([3 if word.startswith("[") else 1 for word in WORDS])
    writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
    writer.add_uint32("tokenizer.ggml.seperator_token_id", 3)
    writer.add_uint32("tokenizer.ggml.unknown_token_id", 1)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, values in twin.state_dict().items():
        base, suffix = name.rsplit(".", 1)
        if base.split(".")[0] != "pooler" and suffix != "position_ids":
            writer.add_tensor(f"{names.get_name(base)}.{suffix}", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("pooling", POOLED)
def test_vectors(pooling: int, twin: BertModel, tmp_path: Path) -> None:
    _write(twin, tmp_path / "tiny.gguf", pooling)
    compile_model(tmp_path / "tiny.gguf", tmp_path / "tiny.llmc", quant="f32")
    expected = []
    with llmc.load(tmp_path / "tiny.llmc") as model:
        vectors = model.embed(TEXTS)
        for text in TEXTS:
            ids = [*model.encode(text), 3]
            assert ids[0] == 2
            with torch.no_grad():
                vector = POOLED[pooling](twin(torch.tensor([ids])).last_hidden_state[0].numpy())
            expected.append(vector / np.linalg.norm(vector))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
