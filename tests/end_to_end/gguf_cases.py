"""Architectures of GGUF files and variants of them: what test_gguf_families.py writes and compiles.

Variant -> general.architecture, and the tiny model: model_type and what differs from that of tests/conftest.py. Where
transformers has a model of the architecture's own name, it is that one; else one that computes the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from latent_cases import LATENT, YARN

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0, 8.0, 16.0],
}  # fmt: skip

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}  # fmt: skip

ENCODERS = {  # those of test_gguf_encoders.py
    "BERT (vectors)": "bert",
    "Nomic Embed (vectors)": "nomic-bert",
    "ModernBERT (vectors)": "modern-bert",
}
ENCODER_TYPES = {"bert": "bert", "nomic-bert": "nomic_bert", "modern-bert": "modernbert"}  # their model_type
TRANSLATORS: dict[str, tuple[str, str, dict[str, Any]]] = {  # those of test_gguf_translators.py
    "T5": ("t5", "t5", {"feed_forward_proj": "relu"}),
    "FLAN-T5": ("t5", "t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umT5": ("t5", "umt5", {"feed_forward_proj": "gated-gelu", "num_layers": 2}),
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 3.1 (llama3 scaling)": ("llama", "llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "Qwen 2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "Qwen 2.5, yarn": ("qwen2", "qwen2", {"rope_parameters": _YARN}),
    "Qwen 3": ("qwen3", "qwen3", {"head_dim": 24}),
    "LFM2": ("lfm2", "lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "tie_word_embeddings": True}),
    "LFM2 MoE": (
        "lfm2moe",
        "lfm2_moe",
        {
            "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1, "tie_word_embeddings": True,
        },
    ),
    "Gemma": ("gemma", "gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "Gemma 2": (
        "gemma2",
        "gemma2",
        {
            "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9, "tie_word_embeddings": True,
            "attn_logit_softcapping": 7.0, "final_logit_softcapping": 5.0, "num_hidden_layers": 3,
        },
    ),
    "Gemma 3": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 6,
            "tie_word_embeddings": True,
        },
    ),
    "GPT-2": ("gpt2", "gpt2", {"tie_word_embeddings": True}),
    "GPT-2, a head of its own": ("gpt2", "gpt2", {}),
    "Phi 2": ("phi2", "phi", {}),
    "Phi 3": ("phi3", "phi3", {"sliding_window": 9}),
    "Phi 3.5, longrope": (
        "phi3",
        "phi3",
        {"sliding_window": 200, "original_max_position_embeddings": 16, "rope_parameters": _LONGROPE},
    ),
    "Phi 4": ("phi3", "phi3", {"sliding_window": None}),
    "StarCoder 1": ("starcoder", "gpt_bigcode", {"tie_word_embeddings": True}),
    "StarCoder 2": ("starcoder2", "starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "Qwen": ("qwen", "qwen2", {"num_key_value_heads": 4}),
    "StableLM": ("stablelm", "stablelm", {"use_qkv_bias": True}),
    "StableLM, parallel": ("stablelm", "stablelm", {"use_parallel_residual": True}),
    "GPT-NeoX": ("gptneox", "gpt_neox", {}),
    "GPT-NeoX, one after another": ("gptneox", "gpt_neox", {"use_parallel_residual": False}),
    "BLOOM": ("bloom", "bloom", {"hidden_size": 96, "num_attention_heads": 6, "seq_length": 256}),
    "Falcon 7B": ("falcon", "falcon", {"tie_word_embeddings": True}),
    "Falcon 40B": ("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon 11B": (
        "falcon",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "MPT": ("mpt", "mpt", {"max_seq_len": 256, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}),
    "MPT, clipped": (
        "mpt",
        "mpt",
        {"max_seq_len": 256, "tie_word_embeddings": True, "attn_config": {"clip_qkv": 0.5}},
    ),
    "OLMo": ("olmo", "olmo", {}),
    "OLMo, clipped": ("olmo", "olmo", {"clip_qkv": 0.7, "tie_word_embeddings": True}),
    "OLMo 2": ("olmo2", "olmo2", {}),
    "Command-R": ("command-r", "cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "Cohere 2": (
        "cohere2",
        "cohere2",
        {"sliding_window": 9, "num_hidden_layers": 5, "logit_scale": 0.25, "tie_word_embeddings": True},
    ),
    "Granite": (
        "granite",
        "granite",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
            "logits_scaling": 3.0, "tie_word_embeddings": True,
        },
    ),
    "InternLM 2": ("internlm2", "llama", {}),
    "XVERSE": ("xverse", "llama", {}),
    "ERNIE 4.5": ("ernie4_5", "ernie4_5", {"head_dim": 24, "tie_word_embeddings": True}),
    "Arcee": ("arcee", "arcee", {}),
    "Orion": ("orion", "stablelm", {"partial_rotary_factor": 1.0}),
    "Seed-OSS": ("seed_oss", "seed_oss", {"head_dim": 24}),
    "EXAONE 3": ("exaone", "exaone", {"rope_parameters": _LLAMA3}),
    "SmolLM 3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "GLM 4 0414": ("glm4", "glm4", {"head_dim": 24, "attention_bias": True}),
    "Nemotron": ("nemotron", "nemotron", {}),
    "MiniCPM": (
        "minicpm",
        "granite",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.3,
            "logits_scaling": 2.0, "tie_word_embeddings": True,
        },
    ),
    "EXAONE 4": (
        "exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": _LLAMA3},
    ),
    "EXAONE 4, windows": (
        "exaone4",
        "exaone4",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _LLAMA3},
    ),
    "ChatGLM": ("chatglm", "glm", {"head_dim": 16, "attention_bias": True}),
    "Baichuan 7B": ("baichuan", "llama", {"num_key_value_heads": 4}),
    "Apertus": ("apertus", "apertus", {"rope_parameters": _LLAMA3}),
    "Jais 2": ("jais2", "jais2", {}),
    "HunYuan": ("hunyuan-dense", "hunyuan_v1_dense", {"head_dim": 24}),
    "PanGu": ("pangu-embedded", "llama", {"attention_bias": True}),
    "Mixtral": ("llama", "mixtral", {"num_local_experts": 5, "intermediate_size": 96}),
    "Qwen 1.5 MoE": ("qwen2moe", "qwen2_moe", {**_FEW, "shared_expert_intermediate_size": 80}),
    "Qwen 3 MoE": ("qwen3moe", "qwen3_moe", {**_FEW, "head_dim": 24, "norm_topk_prob": True}),
    "OLMoE": ("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64}),
    "Granite 3 MoE": (
        "granitemoe",
        "granitemoe",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48, "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 3.0,
        },
    ),
    "Granite MoE, a shared expert": (
        "granitemoe",
        "granitemoeshared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "shared_intermediate_size": 80},
    ),
    "DeepSeek MoE": (
        "deepseek",
        "qwen2_moe",
        {
            **_FEW, "shared_expert_intermediate_size": 96, "qkv_bias": False, "num_hidden_layers": 3,
            "mlp_only_layers": [0],
        },
    ),
    "ERNIE 4.5 MoE": (
        "ernie4_5-moe",
        "ernie4_5_moe",
        {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "num_hidden_layers": 3,
            "moe_num_shared_experts": 2,
        },
    ),
    "GLM 4.5": ("glm4moe", "glm4_moe", {**_ROUTED, "use_qk_norm": True, "head_dim": 24}),
    "dots.llm1": ("dots1", "dots1", _ROUTED),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16,
            "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "K-EXAONE": (
        "exaone-moe",
        "exaone_moe",
        {
            **_FEW, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
            "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "Trinity": (
        "afmoe",
        "afmoe",
        {
            **_FEW, "num_dense_layers": 1, "sliding_window": 9, "num_hidden_layers": 4, "head_dim": 24,
            "mup_enabled": True, "route_scale": 2.0, "num_shared_experts": 2,
        },
    ),
    "MiniMax M2": (
        "minimax-m2",
        "minimax_m2",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "DBRX": (
        "dbrx",
        "dbrx",
        {
            "d_model": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "Phi 3.5 MoE": (
        "phimoe",
        "phimoe",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48, "attention_bias": True,
            "lm_head_bias": True, "router_jitter_noise": 0.01, "sliding_window": None,
        },
    ),
    "HunYuan MoE": (
        "hunyuan-moe",
        "hunyuan_v1_moe",
        {"num_experts": 5, "moe_topk": 2, "intermediate_size": 48, "head_dim": 24},
    ),
    "DeepSeek V2 Lite, keys and values in one, yarn scaling": (
        "deepseek2",
        "deepseek_v2",
        {
            **LATENT, **_ROUTED, "q_lora_rank": None, "norm_topk_prob": False,
            "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.9},
        },
    ),
    "DeepSeek V3": ("deepseek2", "deepseek_v3", {**LATENT, **_ROUTED, "n_group": 2}),
}  # fmt: skip
