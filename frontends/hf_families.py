"""What the keys of config.json mean, per `model_type`: rows of data, no code.

Source: transformers/models/<model_type>/configuration_<model_type>.py for names and defaults, and
modeling_<model_type>.py for tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """`numbers` and `flags`: config key -> fields of the spec. `only`: key -> its allowed values.

    `defaults`: what an absent key means; a key of `numbers` without one must be there.
    """

    numbers: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    only: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any]
    tensors: dict[str, str]
    ignored_tensors: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)  # why a value of `only` is refused


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

# Checkpoints of transformers before 4.31 carry the rotary frequencies, which follow from theta.
_INV_FREQ = (f"{_LAYER}.self_attn.rotary_emb.inv_freq",)

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        numbers=_NUMBERS,
        flags={
            "attention_bias": ("attention.bias", "attention.output_bias"),
            "mlp_bias": ("mlp.bias",),
            "tie_word_embeddings": ("head.tied",),
        },
        only={"hidden_act": ("silu", "swish"), "rope_interleaved": (False,)},
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": None,  # as many as num_attention_heads
            "attention_bias": False,
            "mlp_bias": False,
            "rope_interleaved": False,
        },
        tensors=_TENSORS,
        ignored_tensors=_INV_FREQ,
    ),
    "mistral": Family(
        numbers=_NUMBERS,
        flags={"tie_word_embeddings": ("head.tied",)},
        only={"hidden_act": ("silu", "swish"), "sliding_window": (None,)},
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        tensors=_TENSORS,
        ignored_tensors=_INV_FREQ,
        notes={"sliding_window": "llmc has no sliding window yet; an absent key means 4096"},
    ),
}

# Keys that say nothing about what the model computes in inference.
IRRELEVANT = frozenset(
    (
        "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
        "_attn_implementation", "chunk_size_feed_forward", "dtype", "finetuning_task",
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
    "quantization_config": "the weights are quantized in a format llmc does not read; "
    "use the unquantized model and --quant",
    "add_cross_attention": "llmc has no cross-attention yet",
    "is_encoder_decoder": "llmc has no encoder-decoder models yet",
    "cross_attention_hidden_size": "llmc has no cross-attention yet",
    "tie_encoder_decoder": "llmc has no encoder-decoder models yet",
    "pruned_heads": "llmc reads models with all heads",
    "attention_chunk_size": "llmc has no chunked attention yet",
}
