"""What keys and tensors of a GGUF file mean, per `general.architecture`: rows of data, no code.

Source: llama.cpp's src/llama-arch.cpp (key and tensor names), src/llama-model.cpp (defaults, and what a file omits).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WindowRule:
    """All layers but every `period`-th have a sliding window, and rope of base `theta` without scaling.

    The file may say otherwise (keys `WINDOW_PERIOD`, `WINDOW_THETA`); the window's size it must say.
    """

    period: int
    theta: float


@dataclass(frozen=True)
class Architecture:
    """`settings`: what the file does not say, as fields of the spec. `tensors`: names beyond `TENSORS`.

    `scaled_embedding`: embeddings are multiplied by sqrt(hidden). `width_scaled`: numbers of layers of the models whose
    attention scale is 1 / sqrt(hidden / heads), not 1 / sqrt(head_dim).
    """

    settings: dict[str, Any]
    tensors: dict[str, str] = field(default_factory=dict)
    scaled_embedding: bool = False
    width_scaled: tuple[int, ...] = ()
    window: WindowRule | None = None


# Key after "<architecture>." -> field of the spec.
NUMBERS = {
    "context_length": "sizes.context",
    "embedding_length": "sizes.hidden",
    "block_count": "sizes.layers",
    "feed_forward_length": "sizes.ffn",
    "attention.head_count": "attention.heads",
    "attention.head_count_kv": "attention.kv_heads",
    "attention.layer_norm_rms_epsilon": "norm.eps",
    "attention.key_length": "attention.head_dim",
    "attention.value_length": "attention.head_dim",
    "rope.freq_base": "position.theta",
    "rope.scaling.factor": "position.factor",
    "attention.scale": "attention.scale",
    "vocab_size": "sizes.vocab",
}
REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
# Where the architecture has a WindowRule; where not, a window must be absent or 0.
WINDOW_NUMBERS = {"attention.sliding_window": "window.size", "rope.freq_base_swa": "window.theta"}
WINDOW_PERIOD = "attention.sliding_window_pattern"
ROTATED = "rope.dimension_count"  # how much of a head rope turns: all of it
SCALING = "rope.scaling.type"  # "none" takes the factor back; absent means linear
# Keys that must have one of these values: any other changes the model in a way llmc does not know.
ONLY: dict[str, tuple[Any, ...]] = {
    SCALING: ("none", "linear"),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
}
NO_WINDOW: dict[str, tuple[Any, ...]] = {"attention.sliding_window": (0,)}
DEFAULT_THETA = 10000.0

_LAYER = "blk.{layer}"
TENSORS = {
    "embedding": "token_embd.weight",
    "layers.{layer}.attention_norm": f"{_LAYER}.attn_norm.weight",
    "layers.{layer}.q": f"{_LAYER}.attn_q.weight",
    "layers.{layer}.k": f"{_LAYER}.attn_k.weight",
    "layers.{layer}.v": f"{_LAYER}.attn_v.weight",
    "layers.{layer}.o": f"{_LAYER}.attn_output.weight",
    "layers.{layer}.mlp_norm": f"{_LAYER}.ffn_norm.weight",
    "layers.{layer}.gate": f"{_LAYER}.ffn_gate.weight",
    "layers.{layer}.up": f"{_LAYER}.ffn_up.weight",
    "layers.{layer}.down": f"{_LAYER}.ffn_down.weight",
    "final_norm": "output_norm.weight",
}
# Tensors that a file has or has not: field of the spec -> what it is with and without them, and their names.
OPTIONAL: dict[str, tuple[bool, bool, dict[str, str]]] = {
    "attention.bias": (True, False, {f"layers.{{layer}}.{x}_bias": f"{_LAYER}.attn_{x}.bias" for x in "qkv"}),
    "attention.output_bias": (True, False, {"layers.{layer}.o_bias": f"{_LAYER}.attn_output.bias"}),
    "mlp.bias": (
        True,
        False,
        {f"layers.{{layer}}.{x}_bias": f"{_LAYER}.ffn_{x}.bias" for x in ("gate", "up", "down")},
    ),
    "head.tied": (False, True, {"head": "output.weight"}),
}
_QK_NORM = {f"layers.{{layer}}.{x}_norm": f"{_LAYER}.attn_{x}_norm.weight" for x in "qk"}
_POST_NORMS = {
    "layers.{layer}.attention_post_norm": f"{_LAYER}.post_attention_norm.weight",
    "layers.{layer}.mlp_post_norm": f"{_LAYER}.post_ffw_norm.weight",
}

# Names in the file whose refusal deserves a reason.
TENSOR_NOTES = {"rope_freqs.weight": "rope_freqs scales rope, which llmc does not know yet"}

_SILU = {"mlp.activation": "silu"}
ARCHITECTURES: dict[str, Architecture] = {
    # The converter permutes q and k for this layout (convert_hf_to_gguf.py, permute; llama_model_rope_type).
    "llama": Architecture({**_SILU, "position.layout": "interleaved"}),
    "qwen2": Architecture({**_SILU, "position.layout": "half"}),
    "qwen3": Architecture({**_SILU, "position.layout": "half", "attention.qk_norm": "head"}, _QK_NORM),
    # The converter adds the one that its norms' weights lack, so they are plain here.
    "gemma3": Architecture(
        {
            "mlp.activation": "gelu_tanh",
            "position.layout": "half",
            "attention.qk_norm": "head",
            "norm.place": "sandwich",
        },
        _QK_NORM | _POST_NORMS,
        scaled_embedding=True,
        width_scaled=(62,),
        window=WindowRule(period=6, theta=10000.0),
    ),
}
