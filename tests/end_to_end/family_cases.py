"""Families and variants of them: what test_families.py compiles, and docs/families.md lists.

CASES: name -> model_type and what differs from the tiny model of tests/conftest.py. Two layers of width 64, or as many
as it takes to have one of each kind. Windows and original contexts are shorter than the test's texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0, 8.0, 16.0],
}  # fmt: skip

_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "Llama, heads of 100": ("llama", {"head_dim": 100}),
    "Llama, linear scaling": ("llama", {"rope_parameters": _LINEAR}),
    "Llama, dynamic scaling": ("llama", {"rope_parameters": _LINEAR | {"rope_type": "dynamic"}}),
    "Llama 3.1 (llama3 scaling)": ("llama", {"rope_parameters": _LLAMA3}),
    "Mistral 0.2, without windows": ("mistral", {"sliding_window": None}),
    "Mistral": ("mistral", {"sliding_window": 7}),
    "Qwen 1.5": ("qwen2", {"num_key_value_heads": 4}),
    "Qwen 2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen 2.5, yarn scaling": ("qwen2", {"rope_parameters": _YARN}),
    "Qwen 2.5, yarn scaling, spelled out": (
        "qwen2",
        {"rope_parameters": _YARN | {"truncate": False, "beta_fast": 3.0, "beta_slow": 0.5, "attention_factor": 1.3}},
    ),
    "Qwen 2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "Qwen 3": ("qwen3", {"head_dim": 24}),
    "Gemma 3": (
        "gemma3_text",
        {
            "head_dim": 40, "query_pre_attn_scalar": 24, "sliding_window": 16, "tie_word_embeddings": True,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "Gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "Gemma 2": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 9}),
    "VaultGemma": ("vaultgemma", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 9}),
    "GPT-2": ("gpt2", {}),
    "GPT-2, unscaled scores": ("gpt2", {"scale_attn_weights": False, "n_inner": 100, "tie_word_embeddings": True}),
    "GPT-BigCode": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "GPT-BigCode, all heads": ("gpt_bigcode", {"multi_query": False}),
    "GPT-Neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 9}),
    "GPT-NeoX": ("gpt_neox", {}),
    "Pythia, one after another": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "GPT-J": ("gptj", {"rotary_dim": 8}),
    "CodeGen": ("codegen", {"rotary_dim": 8}),
    "Phi": ("phi", {}),
    "Phi 3": ("phi3", {"sliding_window": 9}),
    "Phi 3.5, longrope": (
        "phi3",
        {"original_max_position_embeddings": 16, "rope_parameters": _LONGROPE},
    ),
    "OPT": ("opt", {"ffn_dim": 100, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
    "OPT 350M": (
        "opt",
        {"ffn_dim": 100, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "tie_word_embeddings": True},
    ),
    "OPT without biases and weights of norms": (
        "opt",
        {"ffn_dim": 100, "word_embed_proj_dim": 64, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "BLOOM": ("bloom", {"tie_word_embeddings": True}),
    "BLOOM, odd number of heads": ("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "MPT": ("mpt", {"max_seq_len": 256}),
    "MPT, clipped": (
        "mpt",
        {
            "hidden_size": 96, "num_attention_heads": 6, "max_seq_len": 256,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
        },
    ),
    "Falcon 7B": ("falcon", {"ffn_hidden_size": 200}),
    "Falcon 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True}),
    "Falcon 11B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "Falcon 1B": ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "Falcon, sequential": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    "StableLM": ("stablelm", {"use_qkv_bias": True}),
    "StableLM, parallel": ("stablelm", {"use_parallel_residual": True}),
    "StarCoder 2": ("starcoder2", {"sliding_window": 9}),
    "OLMo": ("olmo", {"clip_qkv": 0.7}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": (
        "olmo3",
        {
            "sliding_window": 9, "layer_types": [SLIDING, FULL],
            "rope_parameters": {FULL: _YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    "Granite": (
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 3.0},
    ),
    "HyperCLOVA X": ("hyperclovax", {"logits_scaling": 0.5, "residual_multiplier": 0.5}),
    "HyperCLOVA X without post norms": ("hyperclovax", {"use_post_norm": False}),
    "SmolLM 3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "SmolLM 3, windows": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "Cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "Cohere, norms of queries and keys": ("cohere", {"use_qk_norm": True}),
    "Cohere 2": ("cohere2", {"sliding_window": 9, "layer_types": [SLIDING, FULL], "tie_word_embeddings": True}),
    "GLM 4": ("glm", {"head_dim": 16}),
    "GLM 4 0414": ("glm4", {"head_dim": 24}),
    "Nemotron": ("nemotron", {"head_dim": 24}),
    "InternLM 3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "EXAONE 4": ("exaone4", {"sliding_window": 9, "layer_types": [SLIDING, FULL]}),
    "EXAONE 4 without windows": ("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    "Helium": ("helium", {"head_dim": 16}),
    "Ministral": ("ministral", {"head_dim": 24, "sliding_window": 9, "layer_types": [SLIDING, FULL]}),
    "Seed-OSS": ("seed_oss", {"head_dim": 24}),
    "Arcee": ("arcee", {}),
    "Jais 2": ("jais2", {}),
    "ERNIE 4.5": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "IQuest-Coder": ("iquestcoder", {}),
    "CWM": (
        "cwm",
        {"head_dim": 24, "sliding_window": 9, "layer_types": [FULL, SLIDING], "rope_parameters": _LLAMA3},
    ),
    "Mixtral": ("mixtral", {"num_local_experts": 5, "intermediate_size": 96}),
    "Mixtral, windows": ("mixtral", {"num_local_experts": 3, "intermediate_size": 112, "sliding_window": 9}),
    "Qwen 1.5 MoE": ("qwen2_moe", {**_FEW, "shared_expert_intermediate_size": 80}),
    "Qwen 2 MoE, layers without experts": (
        "qwen2_moe",
        {
            **_FEW, "shared_expert_intermediate_size": 33, "num_hidden_layers": 5, "decoder_sparse_step": 2,
            "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False,
        },
    ),
    "Qwen 3 MoE": ("qwen3_moe", {**_FEW, "head_dim": 24, "norm_topk_prob": True}),
    "OLMoE": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64}),
    "Granite 3 MoE": (
        "granitemoe",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48, "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
        },
    ),
    "Granite MoE, a shared expert": (
        "granitemoeshared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "shared_intermediate_size": 80},
    ),
    "GLM 4.5": ("glm4_moe", {**_GROUPED, "num_hidden_layers": 3, "use_qk_norm": True, "head_dim": 24}),
    "GLM 4.5, one group": ("glm4_moe", {**_GROUPED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "ERNIE 4.5 MoE": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "num_hidden_layers": 4,
            "moe_layer_end_index": 2, "moe_num_shared_experts": 2,
        },
    ),
}  # fmt: skip


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
                **_FEW, "num_hidden_layers": 3, "mlp_only_layers": [0], "shared_expert_intermediate_size": 96,
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
    "EXAONE 3": Remote(
        "exaone",
        ("llama", {"rope_parameters": _LLAMA3}),
        {
            "vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 160, "max_position_embeddings": 256, "layer_norm_epsilon": 1e-5,
            "activation_function": "silu", "rope_theta": 10000, "tie_word_embeddings": False,
            "rope_scaling": {key: value for key, value in _LLAMA3.items() if key != "rope_theta"},
        },
        {
            r"model\.embed_tokens": "transformer.wte", r"model\.norm": "transformer.ln_f",
            r"model\.layers": "transformer.h", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
            r"self_attn\.(.)_proj": r"attn.attention.\1_proj", r"attention\.o_proj": "attention.out_proj",
            "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj",
        },
    ),
}  # fmt: skip
