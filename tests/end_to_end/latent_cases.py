"""Families with latent attention; family_cases.py has what else test_families.py compiles."""

from __future__ import annotations

from typing import Any

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 1.3, 2.5, 8.0],
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 48,
    "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip

LATENT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek V2": ("deepseek_v2", {**LATENT, **EXPERTS, "topk_method": "group_limited_greedy"}),
    "DeepSeek V2 Lite, yarn scaling": (
        "deepseek_v2",
        {
            **LATENT, **EXPERTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
        },
    ),
    "DeepSeek V3": ("deepseek_v3", {**LATENT, **EXPERTS, "attention_bias": True}),
    "DeepSeek V3, rope by halves, yarn scaling": (
        "deepseek_v3",
        {
            **LATENT, **EXPERTS, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "MiniCPM 3": (
        "minicpm3",
        {**LATENT, "v_head_dim": None, "scale_emb": 3, "dim_model_base": 16, "rope_parameters": _LONGROPE},
    ),
    # transformers clears the row of the padding token after loading, which nothing else does.
    "Youtu-LLM": ("youtu", {**LATENT, "tie_word_embeddings": True, "pad_token_id": None}),
    "GLM 4.7 Flash": (
        "glm4_moe_lite",
        {**LATENT, **EXPERTS, "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "DeepSeek V3.2": (
        "deepseek_v32",
        {**LATENT, **EXPERTS, "index_topk": 128, "index_head_dim": 16, "index_n_heads": 2},
    ),
    "GLM 5": (
        "glm_moe_dsa",
        {
            **LATENT, **EXPERTS, "index_topk": 128, "index_head_dim": 16, "index_n_heads": 2,
            "indexer_types": ["full", "shared"],
        },
    ),
    "A.X K1": ("axk1", {**LATENT, **EXPERTS}),
    "Sarvam 105B": (
        "sarvam_mla",
        {
            **LATENT, **EXPERTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_key_value_heads": None,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "Sarvam 105B, queries of a latent, groups, rope by halves": (
        "sarvam_mla", {**LATENT, **EXPERTS, "rope_interleave": False, "norm_topk_prob": False},
    ),
}  # fmt: skip
