"""A small GGUF file, written with the `gguf` package, that tests can vary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]


def _vocabulary() -> tuple[list[str], list[int]]:
    from tokenizers import pre_tokenizers

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    return tokens, [3] * len(special) + [1] * (len(tokens) - len(special))


def _tensors(vocab: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    shapes["output_norm.weight"] = (HIDDEN,)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A function `(keys, tensors, quant, **split) -> path` that writes a two-layer model of 64 channels.

    `keys` replace or add metadata (None leaves a key out); `tensors` likewise, uint8 ones as bytes of
    blocks; `quant` is the type of every matrix; `split` cuts it into parts as
    GGUFWriter does, the path is then that of the first.
    """
    import gguf

    def write(
        keys: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
        quant: str = "F32",
        **split: Any,
    ) -> Path:
        tokens, types = _vocabulary()
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama", **split)
        metadata: dict[str, Any] = {
            "general.name": "Tiny",
            "llama.context_length": np.uint32(128),
            "llama.embedding_length": np.uint32(HIDDEN),
            "llama.block_count": np.uint32(LAYERS),
            "llama.feed_forward_length": np.uint32(FFN),
            "llama.attention.head_count": np.uint32(HEADS),
            "llama.attention.head_count_kv": np.uint32(KV_HEADS),
            "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
            "llama.rope.freq_base": np.float32(10000.0),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": np.uint32(1),
            "tokenizer.ggml.eos_token_id": np.uint32(2),
            "tokenizer.chat_template": "{{ messages }}",
        } | (keys or {})
        for key, value in metadata.items():
            _add_key(writer, key, value)
        for name, array in (_tensors(len(tokens)) | (tensors or {})).items():
            if array is None:
                continue
            kind = gguf.GGMLQuantizationType[quant if array.ndim > 1 else "F32"]
            blocks = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return min(tmp_path.glob("tiny-00001-of-*.gguf")) if split else path

    return write


def _add_key(writer: Any, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        str: writer.add_string,
        list: writer.add_array,
        np.uint32: writer.add_uint32,
        np.float32: writer.add_float32,
    }
    if value is not None:
        adders[type(value)](key, value if isinstance(value, (str, list, bool)) else value.item())
