"""Families with experts: name -> model_type and what differs from the tiny model of tests/conftest.py."""

from __future__ import annotations

from typing import Any

from family_lists.dense import FULL, LONGROPE, SLIDING, YARN

FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2,
}  # fmt: skip

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", {"num_local_experts": 5, "intermediate_size": 96}),
    "Mixtral, windows": ("mixtral", {"num_local_experts": 3, "intermediate_size": 112, "sliding_window": 9}),
    "Qwen 1.5 MoE": ("qwen2_moe", {**FEW, "shared_expert_intermediate_size": 80}),
    "Qwen 2 MoE, layers without experts": (
        "qwen2_moe",
        {
            **FEW, "shared_expert_intermediate_size": 33, "num_hidden_layers": 5, "decoder_sparse_step": 2,
            "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False,
        },
    ),
    "LFM2 MoE": (
        "lfm2_moe",
        {
            **FEW, "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "Qwen 3 MoE": ("qwen3_moe", {**FEW, "head_dim": 24, "norm_topk_prob": True}),
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
    "Sarvam 30B": ("sarvam_moe", {**_GROUPED, "num_hidden_layers": 3, "head_dim": 24}),
    "Sarvam 30B with biases, rope on half a head, without norms of queries": (
        "sarvam_moe",
        {
            **_GROUPED, "head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": False,
            "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
        },
    ),
    "ERNIE 4.5 MoE": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "num_hidden_layers": 4,
            "moe_layer_end_index": 2, "moe_num_shared_experts": 2,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16,
            "sliding_window": 9, "rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 0.7,
        },
    ),
    "HunYuan MoE": (
        "hunyuan_v1_moe", {"num_experts": 5, "moe_topk": 2, "intermediate_size": 48, "head_dim": 16}
    ),
    "AFMoE": (
        "afmoe",
        {
            **FEW, "num_dense_layers": 1, "sliding_window": 9, "layer_types": [SLIDING, FULL], "head_dim": 16,
            "mup_enabled": True, "route_scale": 2.0, "num_shared_experts": 1,
        },
    ),
    "Phi 3.5 MoE": (
        "phimoe",
        {
            "num_local_experts": 5, "intermediate_size": 48, "router_jitter_noise": 0.3, "attention_bias": True,
            "lm_head_bias": True,
            # Up to the original context, above which transformers' own still scales by the short factors.
            "rope_parameters": LONGROPE
            | {
                "short_factor": LONGROPE["long_factor"], "short_mscale": 1.1, "long_mscale": 1.3,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "DBRX": (
        "dbrx",
        {
            "d_model": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "FlexOlmo": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "dots.llm1": ("dots1", {**_GROUPED, "sliding_window": None, "first_k_dense_replace": 1}),
    "K-EXAONE": (
        "exaone_moe",
        {
            **FEW, "sliding_window": 9, "layer_types": [SLIDING, FULL], "num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "Solar Open": ("solar_open", {**_GROUPED, "head_dim": 16}),
    "Hy 3": ("hy_v3", {**FEW, "head_dim": 16, "num_shared_experts": 2}),
    "Mellum 2": ("mellum", {**FEW, "head_dim": 16, "sliding_window": 9, "layer_types": [FULL, SLIDING]}),
    "MiniMax M2": (
        "minimax_m2",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "Kolibri": (
        "kolibri1",
        {
            **FEW, "head_dim": 16, "shared_expert_intermediate_size": 48, "sliding_window": 9,
            "layer_types": [FULL, SLIDING],
        },
    ),
    "Granite MoE, windows and sinks": (
        "granitemoe_swa",
        {
            "sliding_window": 9, "layer_types": [FULL, SLIDING], "num_local_experts": 4, "num_experts_per_tok": 2,
            "intermediate_size": 48, "shared_intermediate_size": 80,
        },
    ),
}  # fmt: skip
