"""A tiny Hugging Face folder as a GGUF file, as llama.cpp's convert_hf_to_gguf.py writes it.

Names and keys are those of the `gguf` package, llama.cpp's own. What the converter does to weights is here, by
architecture: pairs of rope moved, ones added to norms, fused matrices in another order, transposed ones turned.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent))
from gguf_experts import dbrx_blocks, describe_experts, stacked, ungated
from gguf_latent import describe_latent, with_ups_apart

# model_type -> general.architecture, where the two differ
ARCHITECTURES = {
    "gemma3_text": "gemma3", "phi": "phi2", "gpt_neox": "gptneox", "cohere": "command-r", "lfm2_moe": "lfm2moe",
}  # fmt: skip

_PERMUTED = (
    "llama",
    "granite",
    "granitemoe",
    "minicpm",
    "internlm2",
    "smollm3",
    "xverse",
    "arcee",
    "olmo",
    "deepseek",
    "baichuan",
)  # q and k, from halves to pairs
_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")  # norms
_GROUPED = ("gptneox", "bloom", "falcon")  # attn_qkv, from groups to q k v
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # GPT-2's Conv1D
_CONVOLVED = ("lfm2", "lfm2moe")
_FUSED = ("qwen",)  # q, k and v are one; and the MLP's width is told twice as large

_CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_FFN = ("intermediate_size", "ffn_hidden_size", "n_inner")
_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def write_gguf(folder: Path, path: Path, kind: str = "") -> None:
    """Float32 tensors and metadata. `kind`: an architecture whose file says the same in other words."""
    config = AutoConfig.from_pretrained(folder)
    kind = kind or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, kind)
    _describe(writer, kind, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config.vocab_size)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    weights = load_file(folder / "model.safetensors")
    if kind == "dbrx":
        weights = dbrx_blocks(weights, config.ffn_config.moe_num_experts)
    weights = stacked(weights)
    if kind == "apertus":
        weights = _without_slopes(writer, weights, config.num_hidden_layers)
    if kind == "deepseek":
        weights = ungated(weights)
    if kind in _FUSED:
        weights = _with_fused(weights)
    if kind == "deepseek2" and config.q_lora_rank:
        weights = with_ups_apart(weights, config)
    for name, values in _rope_factors(config).items():
        writer.add_tensor(name, values)
    for name, values in weights.items():
        base, suffix = name.removeprefix("transformer." if kind == "bloom" else "").rsplit(".", 1)
        changed = np.ascontiguousarray(_changed(base, suffix, values, kind, config))
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", changed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """What config has under the first of these names that it has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _describe(writer: Any, kind: str, config: Any) -> None:
    writer.add_context_length(_first(config, _CONTEXT))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    ffn = _first(getattr(config, "ffn_config", config), _FFN) or 4 * config.hidden_size
    if kind == "lfm2" and config.block_auto_adjust_ff_dim:
        multiple = config.block_multiple_of
        ffn = -(-int(config.block_ffn_dim_multiplier * int(2 * ffn / 3)) // multiple) * multiple
    writer.add_feed_forward_length(2 * ffn if kind in _FUSED else ffn)
    writer.add_head_count(config.num_attention_heads)
    if kind == "deepseek2":
        describe_latent(writer, config, apart=config.q_lora_rank is not None)
    elif kind in _CONVOLVED:
        kept = {"full_attention": config.num_key_value_heads, "conv": 0}
        writer.add_head_count_kv([kept[layer] for layer in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(_kv_heads(config))
    eps = getattr(config, "norm_eps" if kind in _CONVOLVED else "rms_norm_eps", None)
    if eps is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(_first(config, _EPS) or 1e-5)
    head_dim = getattr(config, "head_dim", None)
    if "head_dim" in config.to_dict() and head_dim and kind != "deepseek2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope := getattr(config, "rope_parameters", None):
        _describe_rope(
            writer, rope.get("full_attention", rope), head_dim or config.hidden_size // config.num_attention_heads
        )
    _describe_more(writer, kind, config)
    describe_experts(writer, kind, config)


def _describe_rope(writer: Any, rope: dict[str, Any], head_dim: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _describe_more(writer: Any, kind: str, config: Any) -> None:
    """What only some architectures say."""
    if kind in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss", "afmoe", "phimoe"):
        writer.add_sliding_window(config.sliding_window or 0)
    if kind in ("exaone4", "exaone-moe") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind in ("stablelm", "gptneox"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind == "phi3":
        context, original = config.max_position_embeddings, config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if config.rope_parameters["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(context / original) / math.log(original)))
    if kind == "falcon":
        writer.add_tensor_data_layout("jploski")
    if kind == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        if config.attn_config.clip_qkv is not None:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
    _describe_scales(writer, kind, config)


def _describe_scales(writer: Any, kind: str, config: Any) -> None:
    """Multipliers and bounds."""
    if kind == "dbrx":
        writer.add_clamp_kqv(config.attn_config.clip_qkv)
    if kind == "olmo" and config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)
    if kind in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind in ("granite", "granitemoe", "minicpm"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _kv_heads(config: Any) -> int:
    if config.model_type == "falcon":
        return int(config.num_kv_heads) if config.new_decoder_architecture else 1
    if config.model_type == "gpt_bigcode":
        return 1
    if config.model_type == "dbrx":
        return int(config.attn_config.kv_n_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _changed(base: str, suffix: str, values: np.ndarray, kind: str, config: Any) -> np.ndarray:
    """A tensor's values as the converter writes them."""
    module = base.rsplit(".", 1)[-1]
    if kind in _PLUS_ONE and suffix == "weight" and module.endswith("norm"):
        return values + np.float32(1)
    if kind == "gpt2" and suffix == "weight" and module in _TRANSPOSED:
        return values.T
    if kind in _CONVOLVED and values.ndim == 3 and module == "conv":
        return values[:, 0]
    if kind in _PERMUTED and module in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if module == "q_proj" else _kv_heads(config)
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if kind in _GROUPED and module == "query_key_value":
        groups = _kv_heads(config)
        size = values.shape[0] // (config.num_attention_heads + 2 * groups)
        by_group = values.reshape(groups, -1, size, *values.shape[1:])
        parts = (by_group[:, :-2], by_group[:, -2], by_group[:, -1])
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    return values


def _rope_factors(config: Any) -> dict[str, np.ndarray]:
    """What the frequencies of rope are divided by, where the converter writes that."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{x}.weight": np.array(rope[f"{x}_factor"], np.float32) for x in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (
        2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    )
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - keep) / rope["factor"] + keep)).astype(np.float32)}


def _without_slopes(writer: Any, weights: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The weights without the numbers of xIELU, which the file has as keys."""
    for key in ("alpha_p", "alpha_n", "beta", "eps"):
        numbers = [weights[f"model.layers.{layer}.mlp.act_fn.{key}"].item() for layer in range(layers)]
        writer.add_array(f"xielu.{key}", [float(number) for number in numbers])
    return {name: values for name, values in weights.items() if ".act_fn." not in name}


def _with_fused(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Llama's q, k and v as one tensor, c_attn of Qwen 1."""
    found = dict(weights)
    for name in [name for name in found if ".self_attn.q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", module)) for module in ("q_proj", "k_proj", "v_proj")]
        fused = name.replace("model.layers", "transformer.h").replace("self_attn.q_proj", "attn.c_attn")
        found[fused] = np.concatenate(parts)
    return found


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], vocab_size: int) -> None:
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    for token, id_ in vocab.items():
        tokens[id_] = token
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 if tokens[i] in vocab else 5 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
