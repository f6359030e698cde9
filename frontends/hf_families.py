"""What the keys of config.json mean, per `model_type`: rows of data, no code.

Source: transformers/models/<model_type>/configuration_<model_type>.py for names and defaults, and
modeling_<model_type>.py for tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WindowRule:
    """Which layers have a sliding window of `sliding_window` tokens: those that `layer_types` says, or else by `kind`.

    "all"; "after": those from `max_window_layers` on; "every": all but every `sliding_window_pattern`-th. `keys` are
    the keys that the family reads for this, with what an absent one means.
    """

    kind: str
    keys: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """`numbers` and `flags`: config key -> fields of the spec. `only`: key -> its allowed values.

    `defaults`: what an absent key means; a key of `numbers` without one must be there. `settings`: fields of the spec
    that no key says. `window_theta`: layers with a window have rope of their own, of this base unless a key says
    otherwise. `scaled_embedding`: embeddings are multiplied by sqrt(hidden).
    """

    numbers: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    only: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any]
    tensors: dict[str, str]
    ignored_tensors: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    activation: str = "hidden_act"  # its key
    theta: float = 10000.0  # of rope; transformers PreTrainedConfig.default_theta
    windows: WindowRule | None = None
    window_theta: float | None = None
    scaled_embedding: bool = False


_NUMBERS = {
    "vocab_size": "sizes.vocab",
    "hidden_size": "sizes.hidden",
    "num_hidden_layers": "sizes.layers",
    "intermediate_size": "sizes.ffn",
    "max_position_embeddings": "sizes.context",
    "num_attention_heads": "attention.heads",
    "num_key_value_heads": "attention.kv_heads",
    "head_dim": "attention.head_dim",
    "rms_norm_eps": "norm.eps",
}

_LAYER = "model.layers.{layer}"
_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "layers.{layer}.attention_norm": f"{_LAYER}.input_layernorm.weight",
    "layers.{layer}.q": f"{_LAYER}.self_attn.q_proj.weight",
    "layers.{layer}.k": f"{_LAYER}.self_attn.k_proj.weight",
    "layers.{layer}.v": f"{_LAYER}.self_attn.v_proj.weight",
    "layers.{layer}.q_bias": f"{_LAYER}.self_attn.q_proj.bias",
    "layers.{layer}.k_bias": f"{_LAYER}.self_attn.k_proj.bias",
    "layers.{layer}.v_bias": f"{_LAYER}.self_attn.v_proj.bias",
    "layers.{layer}.o": f"{_LAYER}.self_attn.o_proj.weight",
    "layers.{layer}.o_bias": f"{_LAYER}.self_attn.o_proj.bias",
    "layers.{layer}.mlp_norm": f"{_LAYER}.post_attention_layernorm.weight",
    "layers.{layer}.gate": f"{_LAYER}.mlp.gate_proj.weight",
    "layers.{layer}.up": f"{_LAYER}.mlp.up_proj.weight",
    "layers.{layer}.down": f"{_LAYER}.mlp.down_proj.weight",
    "layers.{layer}.gate_bias": f"{_LAYER}.mlp.gate_proj.bias",
    "layers.{layer}.up_bias": f"{_LAYER}.mlp.up_proj.bias",
    "layers.{layer}.down_bias": f"{_LAYER}.mlp.down_proj.bias",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}

_QK_NORM = {
    "layers.{layer}.q_norm": f"{_LAYER}.self_attn.q_norm.weight",
    "layers.{layer}.k_norm": f"{_LAYER}.self_attn.k_norm.weight",
}
_SANDWICH = {
    "layers.{layer}.attention_post_norm": f"{_LAYER}.post_attention_layernorm.weight",
    "layers.{layer}.mlp_norm": f"{_LAYER}.pre_feedforward_layernorm.weight",
    "layers.{layer}.mlp_post_norm": f"{_LAYER}.post_feedforward_layernorm.weight",
}

# Checkpoints of transformers before 4.31 carry the rotary frequencies, which follow from theta.
_INV_FREQ = (f"{_LAYER}.self_attn.rotary_emb.inv_freq",)

# Config values -> `mlp.activation`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "head_dim": None,  # hidden_size / num_attention_heads
    "num_key_value_heads": None,  # as many as num_attention_heads
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_BIASED = ("attention.bias", "attention.output_bias")
_QWEN_WINDOWS = WindowRule(
    "after",
    {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None},
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        numbers=_NUMBERS,
        flags={
            "attention_bias": _BIASED,
            "mlp_bias": ("mlp.bias",),
            "tie_word_embeddings": ("head.tied",),
        },
        only={"rope_interleaved": (False,)},
        defaults={**_DEFAULTS, "attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
        tensors=_TENSORS,
        ignored_tensors=_INV_FREQ,
    ),
    "mistral": Family(
        numbers=_NUMBERS,
        flags={"tie_word_embeddings": ("head.tied",)},
        only={},
        defaults={**_DEFAULTS, "num_key_value_heads": 8},
        tensors=_TENSORS,
        ignored_tensors=_INV_FREQ,
        windows=WindowRule("all", {"sliding_window": 4096}),
    ),
    "qwen2": Family(
        numbers=_NUMBERS,
        flags={"tie_word_embeddings": ("head.tied",)},
        only={},
        defaults={**_DEFAULTS, "num_key_value_heads": 32},
        tensors=_TENSORS,
        ignored_tensors=_INV_FREQ,
        settings={"attention.bias": True},
        windows=_QWEN_WINDOWS,
    ),
    "qwen3": Family(
        numbers=_NUMBERS,
        flags={"attention_bias": _BIASED, "tie_word_embeddings": ("head.tied",)},
        only={},
        defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        tensors=_TENSORS | _QK_NORM,
        settings={"attention.qk_norm": "head"},
        windows=_QWEN_WINDOWS,
    ),
    "gemma3_text": Family(
        numbers={**_NUMBERS, "query_pre_attn_scalar": "attention.scale"},
        flags={"attention_bias": _BIASED, "tie_word_embeddings": ("head.tied",)},
        only={},
        defaults={
            "rms_norm_eps": 1e-6,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        tensors=_TENSORS | _QK_NORM | _SANDWICH,
        settings={"attention.qk_norm": "head", "norm.place": "sandwich", "norm.weight": "plus_one"},
        activation="hidden_activation",
        theta=1e6,
        windows=WindowRule("every", {"sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None}),
        window_theta=10000.0,
        scaled_embedding=True,
    ),
}

# Numbers whose field of the spec is one over their root.
INVERSE_ROOTS = frozenset(("query_pre_attn_scalar",))

# Keys that say nothing about what the model computes in inference.
IRRELEVANT = frozenset(
    (
        "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
        "_attn_implementation", "_sliding_window_pattern", "cache_implementation",
        "chunk_size_feed_forward", "dtype", "finetuning_task",
        "hidden_dropout", "id2label", "initializer_range", "is_llama_config",
        "keys_to_ignore_at_inference", "label2id", "max_length", "min_length", "name_or_path",
        "output_attentions", "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp",
        "problem_type", "return_dict", "return_dict_in_generate", "sep_token_id",
        "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
        "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache",
    )
)  # fmt: skip

# Keys of any family that must be off, and why. `None`, `False`, `{}` and `[]` are off.
MUST_BE_OFF = {
    "auto_map": "the model runs its own Python code, which llmc never does",
    "add_cross_attention": "llmc has no cross-attention yet",
    "is_encoder_decoder": "llmc has no encoder-decoder models yet",
    "cross_attention_hidden_size": "llmc has no cross-attention yet",
    "tie_encoder_decoder": "llmc has no encoder-decoder models yet",
    "pruned_heads": "llmc reads models with all heads",
    "attention_chunk_size": "llmc has no chunked attention yet",
    "attention_k_eq_v": "llmc reads models whose values have weights of their own",
    "attn_logit_softcapping": "llmc has no softcapping yet",
    "final_logit_softcapping": "llmc has no softcapping yet",
    "use_bidirectional_attention": "llmc has causal attention only",
    "use_mrope": "llmc has rope over one axis of positions only",
}
