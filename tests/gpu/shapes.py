"""Artifacts that have the shape of a model of billions of weights, and travel without them.

`write_folder` makes a model folder whose weights are all zero, in sparse files; `strip` takes the weights out of its
artifact, `grow` puts some of the same size back: made-up numbers, for times alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from llmc.compiler.artifact import CHUNK_BYTES, write_manifest

HEADER = "weights.header"
_BYTE = b"\x2c"  # so that every float of any size is a small number
# Llama 2 7B's sizes, with the vocabulary and heads of its paper (https://arxiv.org/abs/2307.09288).
SEVEN_BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_folder(folder: Path, config: dict[str, Any], tokenizer_json: bytes) -> None:
    """A Llama folder of these sizes whose weights are zero; the file takes no room on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    table, at = {}, 0
    for name, shape in _tensors(config):
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def prefill_flops(config: dict[str, Any], tokens: int) -> float:
    """Of a prompt: matrices of the layers, for each token; scores and sums of values of what a token sees."""
    matrices = sum(shape[0] * shape[1] for name, shape in _tensors(config) if ".layers." in name and len(shape) == 2)
    seen = tokens * (tokens + 1) / 2
    return 2.0 * matrices * tokens + 4.0 * seen * config["hidden_size"] * config["num_hidden_layers"]


def _tensors(config: dict[str, Any]) -> list[tuple[str, list[int]]]:
    width, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    found = [
        ("model.embed_tokens.weight", [vocab, width]),
        ("model.norm.weight", [width]),
        ("lm_head.weight", [vocab, width]),
    ]
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": [width, width], "self_attn.k_proj": [kv, width], "self_attn.v_proj": [kv, width],
            "self_attn.o_proj": [width, width], "mlp.gate_proj": [ffn, width], "mlp.up_proj": [ffn, width],
            "mlp.down_proj": [width, ffn], "input_layernorm": [width], "post_attention_layernorm": [width],
        }  # fmt: skip
        found += [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    return found


def strip(artifact: Path) -> None:
    """Keep only the header of the weights' file, and its size."""
    weights = artifact / json.loads((artifact / "manifest.json").read_text())["weights"]["file"]
    with weights.open("rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(length)
    (artifact / HEADER).write_bytes(weights.stat().st_size.to_bytes(8, "little") + header)
    weights.unlink()


def grow(artifact: Path) -> None:
    """Write weights of the size that was taken out, and a manifest that vouches for them."""
    kept = (artifact / HEADER).read_bytes()
    size, header = int.from_bytes(kept[:8], "little"), kept[8:]
    manifest = json.loads((artifact / "manifest.json").read_text())
    weights, chunks = artifact / manifest["weights"]["file"], []
    with weights.open("wb") as file:
        for at in range(0, size, CHUNK_BYTES):
            block = (header[at:] if at < len(header) else b"").ljust(min(CHUNK_BYTES, size - at), _BYTE)
            block = block[: min(CHUNK_BYTES, size - at)]
            file.write(block)
            chunks.append(hashlib.sha256(block).hexdigest())
    (artifact / HEADER).unlink()
    manifest["weights"]["chunks"] = chunks
    for key in ("format", "files", "manifest_sha256"):
        del manifest[key]
    write_manifest(artifact, manifest)
