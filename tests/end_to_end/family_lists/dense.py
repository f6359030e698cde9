"""Families without experts: name -> model_type and what differs from the tiny model of tests/conftest.py."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0, 8.0, 16.0],
}  # fmt: skip

_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

_LFM2 = {"num_hidden_layers": 3, "block_ffn_dim_multiplier": 1.1}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "Llama, heads of 100": ("llama", {"head_dim": 100}),
    "Llama, linear scaling": ("llama", {"rope_parameters": _LINEAR}),
    "Llama, dynamic scaling": ("llama", {"rope_parameters": _LINEAR | {"rope_type": "dynamic"}}),
    "Llama 3.1 (llama3 scaling)": ("llama", {"rope_parameters": LLAMA3}),
    "Mistral 0.2, without windows": ("mistral", {"sliding_window": None}),
    "Mistral": ("mistral", {"sliding_window": 7}),
    "Qwen 1.5": ("qwen2", {"num_key_value_heads": 4}),
    "Qwen 2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen 2.5, yarn scaling": ("qwen2", {"rope_parameters": YARN}),
    "Qwen 2.5, yarn scaling, spelled out": (
        "qwen2",
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 3.0, "beta_slow": 0.5, "attention_factor": 1.3}},
    ),
    "Qwen 2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "Qwen 3": ("qwen3", {"head_dim": 24}),
    "LFM2": ("lfm2", {**_LFM2, "layer_types": ["conv", FULL, "conv"], "block_multiple_of": 32}),
    "LFM2, wide convolutions, tied": (
        "lfm2",
        {
            **_LFM2, "full_attn_idxs": [1], "num_key_value_heads": 1, "conv_L_cache": 5, "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "LFM3": (
        "lfm3",
        {
            "num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", SLIDING], "head_dim": 32, "conv_L_cache": 7,
            "sliding_window": 9,
        },
    ),
    "LFM3, without gates and second norms": (
        "lfm3",
        {
            "layer_types": [FULL, "conv"], "head_dim": 48, "use_sandwich_norm": False, "use_attention_gate": False,
            "attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True,
        },
    ),
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
        {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
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
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
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
    "Ministral 3": (
        "ministral3",
        {
            "head_dim": 24,
            "rope_parameters": YARN | {
                "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "Seed-OSS": ("seed_oss", {"head_dim": 24}),
    "Arcee": ("arcee", {}),
    "Jais 2": ("jais2", {}),
    "ERNIE 4.5": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "IQuest-Coder": ("iquestcoder", {}),
    "CWM": (
        "cwm",
        {"head_dim": 24, "sliding_window": 9, "layer_types": [FULL, SLIDING], "rope_parameters": LLAMA3},
    ),
    "HunYuan": ("hunyuan_v1_dense", {"head_dim": 24}),
    "HunYuan, alpha": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "nanochat": ("nanochat", {}),
    "Apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "Apertus 1.5": ("apertus1p5_text", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "EXAONE 3": ("exaone", {"rope_parameters": LLAMA3}),
    "EXAONE 3 with biases, tied": (
        "exaone", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "Persimmon": ("persimmon", {"num_key_value_heads": 4}),
    "Persimmon without norms of queries": ("persimmon", {"num_key_value_heads": 4, "qk_layernorm": False}),
    "Phi, norms of queries and keys": ("phi", {"qk_layernorm": True}),
    "BioGPT": ("biogpt", {}),
    "XGLM": ("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}),
    "GPT": ("openai-gpt", {}),
    "CTRL": ("ctrl", {"dff": 96, "layer_norm_epsilon": 1e-6}),
    "ModernBERT decoder": (
        "modernbert-decoder", {"num_hidden_layers": 3, "local_attention": 16, "global_attn_every_n_layers": 2}
    ),
    "StableLM 2 12B, norms of each head": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "Granite, windows and sinks": (
        "granite_swa",
        {
            "sliding_window": 9, "layer_types": [FULL, SLIDING, FULL], "num_hidden_layers": 3,
            "attention_multiplier": 0.2, "layer_rope_theta": [1e4, 5e3, 0],
        },
    ),
}  # fmt: skip
