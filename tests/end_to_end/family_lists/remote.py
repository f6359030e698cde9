"""Families that transformers has not, each with one that computes the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from family_lists.experts import FEW
from latent_cases import EXPERTS, LATENT


@dataclass(frozen=True)
class Remote:
    """A family that transformers has not, and a `twin` of its that computes the same from other names.

    `config`: what its config.json is. `names`: pattern -> replacement for names of the twin's tensors, in order.
    `fused`: name -> the twin's modules that lie in it one after another; `grouped`: so for every KV head.
    `alibi`: the twin has ALiBi in place of rope; `normalized`: the rows of its head have length 1; `ungated`: its
    shared experts have a gate of one half for every token, which lies in the file's matrices.
    """

    model_type: str
    twin: tuple[str, dict[str, Any]]
    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    grouped: bool = False
    alibi: bool = False
    normalized: bool = False
    ungated: bool = False


_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "auto_map": {"AutoModelForCausalLM": "modeling.X"},
}  # fmt: skip
_LLAMA = _SIZES | {
    "num_key_value_heads": 2, "intermediate_size": 160, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PACKED: dict[str, Any] = {"fused": {"self_attn.W_pack": _QKV}}
# As both of 7B have it; 13B has only the second key for its length. Another number of heads than a power of two.
_BAICHUAN_7B = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | {
    "hidden_size": 32, "model_max_length": 256
}  # fmt: skip
_BAICHUAN_13B = {key: value for key, value in _BAICHUAN_7B.items() if key != "max_position_embeddings"} | {
    "hidden_size": 48, "num_attention_heads": 6, "_from_model_config": True, "gradient_checkpointing": [False],
}  # fmt: skip
_TWIN_7B = {"hidden_size": 32, "num_key_value_heads": 4}
_TWIN_13B = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
_FIRST, _SECOND = {"vocab_size": 64000}, {"vocab_size": 125696}

REMOTE: dict[str, Remote] = {
    "InternLM": Remote(
        "internlm",
        ("llama", {"attention_bias": True}),
        _LLAMA | {"bias": True, "rotary": {"base": 10000, "type": "dynamic"}},
    ),
    "InternLM 2": Remote(
        "internlm2",
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
        _LLAMA | {"bias": False, "rope_theta": 5e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {
            "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
            "self_attn.o_proj": "attention.wo", "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        },
        {"attention.wqkv": _QKV},
        grouped=True,
    ),
    "InternLM 20B, without biases": Remote("internlm", ("llama", {}), _LLAMA | {"bias": False}),
    "Baichuan 1 7B": Remote("baichuan", ("llama", _TWIN_7B | _FIRST), _BAICHUAN_7B | _FIRST, **_PACKED),
    "Baichuan 1 13B": Remote("baichuan", ("llama", _TWIN_13B | _FIRST), _BAICHUAN_13B | _FIRST, **_PACKED, alibi=True),
    "Baichuan 2 7B": Remote(
        "baichuan", ("llama", _TWIN_7B | _SECOND), _BAICHUAN_7B | _SECOND, **_PACKED, normalized=True
    ),
    "Baichuan 2 13B": Remote(
        "baichuan", ("llama", _TWIN_13B | _SECOND), _BAICHUAN_13B | _SECOND, **_PACKED, alibi=True, normalized=True
    ),
    "DeepSeek MoE": Remote(
        "deepseek",
        (
            "qwen2_moe",
            {
                **FEW, "num_hidden_layers": 3, "mlp_only_layers": [0], "shared_expert_intermediate_size": 96,
                "qkv_bias": False,
            },
        ),
        _LLAMA | {
            "num_hidden_layers": 3, "attention_bias": False, "first_k_dense_replace": 1, "moe_intermediate_size": 48,
            "moe_layer_freq": 1, "n_routed_experts": 5, "n_shared_experts": 2, "norm_topk_prob": False,
            "num_experts_per_tok": 2, "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True,
            "rope_scaling": None, "rope_theta": 10000,
        },
        {"shared_expert": "shared_experts"},
        ungated=True,
    ),
    "Kimi K2": Remote(
        "kimi_k2",
        ("deepseek_v3", {**LATENT, **EXPERTS, "rms_norm_eps": 1e-5}),
        {key: value for key, value in _LLAMA.items() if key != "hidden_act"} | LATENT | EXPERTS | {
            "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "norm_topk_prob": True, "rope_scaling": None,
            "num_nextn_predict_layers": 0, "rope_theta": 10000.0, "scoring_func": "sigmoid", "seq_aux": True,
            "topk_method": "noaux_tc", "attention_bias": False,
        },
    ),
    "Orion": Remote("orion", ("stablelm", {"partial_rotary_factor": 1.0}), _LLAMA),
    "XVERSE": Remote("xverse", ("llama", {}), _LLAMA | {"max_tokenizer_truncation": 200}),
    "Aquila": Remote("aquila", ("llama", {}), _LLAMA | {"rope_scaling": None}),
    "DeepSeek MoE without shared experts": Remote(
        "deepseek",
        ("mixtral", {"num_local_experts": 5, "intermediate_size": 48, "rms_norm_eps": 1e-5, "rope_theta": 1e4}),
        _LLAMA | {
            "moe_intermediate_size": 48, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": None,
            "first_k_dense_replace": 0, "moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": True,
            "rope_theta": 1e4,
        },
        names={
            "block_sparse_moe": "mlp", r"\.w1\.": ".gate_proj.", r"\.w2\.": ".down_proj.", r"\.w3\.": ".up_proj.",
        },
    ),
    "MiniCPM": Remote(
        "minicpm",
        (
            "granite",
            {
                "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 1.4 / 2**0.5,
                "logits_scaling": 4.0, "tie_word_embeddings": True,
            },
        ),
        _LLAMA | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": True},
    ),
    "ChatGLM 2": Remote(
        "chatglm",
        ("glm", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-5}),
        {
            "padded_vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "kv_channels": 16,
            "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 160, "seq_length": 256,
            "layernorm_epsilon": 1e-5, "add_qkv_bias": True, "rmsnorm": True, "post_layer_norm": True,
            "original_rope": True, "pre_seq_len": None, "quantization_bit": 0, "eos_token_id": 2,
            "apply_query_key_layer_scaling": True, "tie_word_embeddings": False,
        },
        {
            r"model\.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
            r"model\.norm": "transformer.encoder.final_layernorm", r"model\.layers": "transformer.encoder.layers",
            "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        {"self_attention.query_key_value": _QKV},
    ),
    "Qwen": Remote(
        "qwen",
        ("qwen2", {"num_key_value_heads": 4}),
        _SIZES | {
            "intermediate_size": 320, "seq_length": 256, "kv_channels": 16, "layer_norm_epsilon": 1e-5, "no_bias": True,
            "rotary_emb_base": 10000, "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True,
            "scale_attn_weights": True,
        },
        {
            r"model\.embed_tokens": "transformer.wte", r"model\.norm": "transformer.ln_f",
            r"model\.layers": "transformer.h", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
            "self_attn.o_proj": "attn.c_proj", "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
        },
        {"attn.c_attn": _QKV},
    ),
}  # fmt: skip
