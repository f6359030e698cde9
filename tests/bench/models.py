"""Models for benchmarks: the TinyLlama-1.1B shape with random weights, as a GGUF file that any system here can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

# TinyLlama-1.1B, with SmolLM2's vocabulary so that its tokenizer fits.
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, CONTEXT, VOCAB = 22, 2048, 5632, 32, 4, 2048, 49152
TYPES = {
    "q8": gguf.GGMLQuantizationType.Q8_0,  # 8.5 bits a weight
    "q4": gguf.GGMLQuantizationType.Q4_1,  # 5.0 bits a weight
}


def tinyllama_gguf(folder: Path, quant: str, tokenizer_from: Path) -> Path:
    """Write (once) the random 1.1B model with matrices of type `TYPES[quant]`; embedding and head are Q8_0 always."""
    path = folder / f"tinyllama-{quant}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path.with_suffix(".part")), "llama")
    _describe(writer, tokenizer_from)
    rng = np.random.default_rng(0)
    for name, shape in _shapes().items():
        _add(writer, name, shape, TYPES["q8"] if name in ("token_embd", "output") else TYPES[quant], rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)
    return path


def _shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}


def _add(writer: Any, name: str, shape: tuple[int, ...], kind: Any, rng: np.random.Generator) -> None:
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        writer.add_tensor(f"{name}.weight", 1 + 0.1 * values)
        return
    blocks = gguf.quants.quantize(values * np.float32(shape[1] ** -0.5), kind)
    writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)


def _describe(writer: Any, tokenizer_from: Path) -> None:
    writer.add_name("TinyLlama 1.1B shape, random")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    for field in gguf.GGUFReader(str(tokenizer_from)).fields.values():
        if field.name.startswith("tokenizer.ggml."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
