"""Models for benchmarks: shapes of real models with random weights, as GGUF files that any system here can read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_TOKENS = 3  # that a convolution sees
VOCAB = 49152  # SmolLM2's, so that its tokenizer fits
TYPES = {
    "q8": gguf.GGMLQuantizationType.Q8_0,  # 8.5 bits a weight
    "q4": gguf.GGMLQuantizationType.Q4_1,  # 5.0 bits a weight
}


@dataclass(frozen=True)
class Shape:
    """What a model is made of. `ffn` is of the MLP or, where there are experts, of each of them."""

    name: str
    arch: str  # as GGUF calls it
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int = 2048
    experts: int = 0
    used: int = 0
    convolved: tuple[int, ...] = ()  # layers with a convolution over three tokens in place of attention

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names, without `.weight`, and shapes."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd", (VOCAB, self.hidden)
        for layer in range(self.layers):
            block: dict[str, tuple[int, ...]] = {"attn_norm": (self.hidden,), "ffn_norm": (self.hidden,)}
            if layer in self.convolved:
                block |= {
                    "shortconv.in_proj": (3 * self.hidden, self.hidden), "shortconv.conv": (self.hidden, _TOKENS),
                    "shortconv.out_proj": (self.hidden, self.hidden),
                }  # fmt: skip
            else:
                block |= {
                    "attn_q": (q, self.hidden), "attn_k": (kv, self.hidden), "attn_v": (kv, self.hidden),
                    "attn_output": (self.hidden, q),
                }  # fmt: skip
            if self.convolved and layer not in self.convolved:
                block |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
            inward, outward = (self.ffn, self.hidden), (self.hidden, self.ffn)
            if self.experts:
                block |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
                block |= {"ffn_gate_inp": (self.experts, self.hidden)}
                block |= {f"ffn_{part}_exps": (self.experts, *inward) for part in ("gate", "up")}
                block |= {"ffn_down_exps": (self.experts, *outward)}
            else:
                block |= {"ffn_gate": inward, "ffn_up": inward, "ffn_down": outward}
            yield from ((f"blk.{layer}.{name}", shape) for name, shape in block.items())
        yield "token_embd_norm" if self.convolved else "output_norm", (self.hidden,)
        yield "output", (VOCAB, self.hidden)

    def weights(self) -> tuple[int, int]:
        """Those that a step of one row reads, and those of the embedding, which it looks up one row of."""
        looked_up, read = VOCAB * self.hidden, 0
        for name, size in self.tensors():
            read += math.prod(size) * self.used // self.experts if name.endswith("_exps") else math.prod(size)
        return read - looked_up, looked_up


TINYLLAMA = Shape("tinyllama", "llama", 22, 2048, 5632, 32, 4, 64)  # TinyLlama-1.1B
# Six of the 48 layers of Qwen3-30B-A3B: 3.8 G weights, of which a token uses 0.6 G (head and embedding in both).
LFM2 = Shape(  # LFM2-1.2B, with a head of its own
    "lfm2", "lfm2", 16, 2048, 8192, 32, 8, 64, convolved=tuple({*range(16)} - {2, 5, 8, 10, 12, 14})
)
QWEN3_MOE = Shape("qwen3moe", "qwen3moe", 6, 2048, 768, 32, 4, 128, experts=128, used=8)


def random_gguf(folder: Path, shape: Shape, quant: str, tokenizer_from: Path) -> Path:
    """Write (once) the shape with random matrices of type `TYPES[quant]`; embedding and head are Q8_0 always."""
    path = folder / f"{shape.name}-{quant}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path.with_suffix(".part")), shape.arch, use_temp_file=True)
    _describe(writer, shape, tokenizer_from)
    rng = np.random.default_rng(0)
    for name, size in shape.tensors():
        _add(writer, name, size, TYPES["q8"] if name in ("token_embd", "output") else TYPES[quant], rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)
    return path


def _add(writer: Any, name: str, shape: tuple[int, ...], kind: Any, rng: np.random.Generator) -> None:
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        writer.add_tensor(f"{name}.weight", 1 + 0.1 * values)
        return
    values *= np.float32(shape[-1] ** -0.5)
    if name.endswith(("ffn_gate_inp", "shortconv.conv")):  # kept as they are
        writer.add_tensor(f"{name}.weight", values)
        return
    writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)


def _describe(writer: Any, shape: Shape, tokenizer_from: Path) -> None:
    writer.add_name(f"{shape.name} shape, random")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.convolved:
        writer.add_head_count_kv([0 if layer in shape.convolved else shape.kv_heads for layer in range(shape.layers)])
        writer.add_shortconv_l_cache(_TOKENS)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    if shape.experts:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn)
    else:
        writer.add_rope_dimension_count(shape.head_dim)
    for field in gguf.GGUFReader(str(tokenizer_from)).fields.values():
        if field.name.startswith("tokenizer.ggml."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
