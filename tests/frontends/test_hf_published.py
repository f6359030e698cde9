"""Published models' config.json, with keys of many years: none is unknown, and what they say comes out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from llmc.compiler.spec import Latent, ModelSpec, cached_heads, weight_count
from llmc.frontends.hf.config import derive_spec

GPT2 = """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
"n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
"summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
"task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257}"""

PYTHIA_70M = """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
"hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
"max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
"transformers_version": "4.24.0", "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}"""

BLOOM_560M = """{"apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
"attention_softmax_in_fp32": true, "architectures": ["BloomForCausalLM"], "bias_dropout_fusion": true,
"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0,
"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": true, "model_type": "bloom",
"n_embed": 1024, "n_inner": null, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
"skip_bias_add": true, "skip_bias_add_qkv": false, "slow_but_exact": false, "transformers_version": "4.20.0",
"use_cache": true, "vocab_size": 250880, "seq_length": 2048}"""

OPT_350M = """{"_remove_final_layer_norm": false, "activation_dropout": 0.0, "activation_function": "relu",
"architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": false,
"dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0,
"max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16, "num_hidden_layers": 24,
"pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.20.0.dev0",
"use_cache": true, "vocab_size": 50272, "word_embed_proj_dim": 512}"""

LLAMA_31_8B = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
"vocab_size": 128256}"""

GEMMA_2_2B = """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
"max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
"num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
"rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
"use_cache": true, "vocab_size": 256000}"""

PHI_2 = """{"architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
"eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
"intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
"qk_layernorm": false, "resid_pdrop": 0.1, "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false,
"torch_dtype": "float16", "transformers_version": "4.37.0", "use_cache": true, "vocab_size": 51200}"""

CHATGLM2_6B = """{"architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": false,
"add_qkv_bias": true, "apply_query_key_layer_scaling": true, "apply_residual_connection_post_layernorm": false,
"attention_dropout": 0.0, "attention_softmax_in_fp32": true, "auto_map": {"AutoModel":
"modeling_chatglm.ChatGLMForConditionalGeneration"}, "bias_dropout_fusion": true, "eos_token_id": 2,
"ffn_hidden_size": 13696, "fp32_residual_connection": false, "hidden_dropout": 0.0, "hidden_size": 4096,
"kv_channels": 128, "layernorm_epsilon": 1e-05, "multi_query_attention": true, "multi_query_group_num": 2,
"num_attention_heads": 32, "num_layers": 28, "original_rope": true, "pad_token_id": 0, "padded_vocab_size": 65024,
"post_layer_norm": true, "pre_seq_len": null, "prefix_projection": false, "quantization_bit": 0, "rmsnorm": true,
"seq_length": 32768, "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0",
"use_cache": true, "vocab_size": 65024}"""

BAICHUAN2_13B = """{"architectures": ["BaichuanForCausalLM"], "auto_map": {"AutoConfig":
"configuration_baichuan.BaichuanConfig", "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
"tokenizer_class": "BaichuanTokenizer", "bos_token_id": 1, "eos_token_id": 2, "gradient_checkpointing": [false],
"_from_model_config": true, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
"intermediate_size": 13696, "model_max_length": 4096, "model_type": "baichuan", "num_attention_heads": 40,
"num_hidden_layers": 40, "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.29.2", "use_cache": true, "vocab_size": 125696}"""

DEEPSEEK_MOE_16B = """{"architectures": ["DeepseekForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
"eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 4096, "model_type": "deepseek",
"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
"norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
"num_key_value_heads": 16, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000,
"scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.36.0", "use_cache": true, "vocab_size": 102400}"""

BERT_MULTILINGUAL = """{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
"directionality": "bidi", "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
"initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
"model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "pooler_fc_size": 768,
"pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
"pooler_type": "first_token_transform", "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
"type_vocab_size": 2, "use_cache": true, "vocab_size": 119547}"""

DEEPSEEK_V2_LITE = """{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
"eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
"model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
"n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6,
"num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
"rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
"tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
"transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}"""

DEEPSEEK_V3 = """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
"initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
"n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {
"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
"rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false,
"topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
"use_cache": true, "v_head_dim": 128, "vocab_size": 129280}"""


def derive(text: str) -> ModelSpec:
    config: dict[str, Any] = json.loads(text)
    return derive_spec(config, {}, "x", None)


@pytest.mark.parametrize(
    ("text", "sizes"),  # vocab, hidden, layers, ffn, context
    [
        (GPT2, (50257, 768, 12, 3072, 1024)),
        (PYTHIA_70M, (50304, 512, 6, 2048, 2048)),
        (BLOOM_560M, (250880, 1024, 24, 4096, 2048)),
        (OPT_350M, (50272, 1024, 24, 4096, 2048)),
        (LLAMA_31_8B, (128256, 4096, 32, 14336, 131072)),
        (GEMMA_2_2B, (256000, 2304, 26, 9216, 8192)),
        (PHI_2, (51200, 2560, 32, 10240, 2048)),
        (CHATGLM2_6B, (65024, 4096, 28, 13696, 32768)),
        (BAICHUAN2_13B, (125696, 5120, 40, 13696, 4096)),
        (DEEPSEEK_MOE_16B, (102400, 2048, 28, 10944, 4096)),
        (BERT_MULTILINGUAL, (119547, 768, 12, 3072, 512)),
        (DEEPSEEK_V2_LITE, (102400, 2048, 27, 10944, 163840)),
        (DEEPSEEK_V3, (129280, 7168, 61, 18432, 163840)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    found = derive(text).sizes
    assert (found.vocab, found.hidden, found.layers, found.ffn, found.context) == sizes


def test_what_is_special() -> None:
    assert derive(GPT2).head.tied
    assert (derive(PYTHIA_70M).position.rotary_dim, derive(PYTHIA_70M).wiring.order) == (16, "parallel")
    assert derive(BLOOM_560M).position.kind == "alibi"
    assert (derive(OPT_350M).embedding.width, derive(OPT_350M).norm.place) == (512, "sum")
    scaling = derive(LLAMA_31_8B).scaling
    assert scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("llama3", 8.0, 8192)
    gemma = derive(GEMMA_2_2B)
    assert (gemma.attention.soft_cap, gemma.head.soft_cap, gemma.attention.scale) == (50.0, 30.0, 1 / 16)
    assert gemma.window
    assert gemma.window.layers == tuple(range(0, 26, 2))
    assert derive(PHI_2).position.rotary_dim == 32
    glm = derive(CHATGLM2_6B)
    assert (glm.attention.kv_heads, glm.position.rotary_dim, glm.position.layout) == (2, 64, "interleaved")
    baichuan = derive(BAICHUAN2_13B)
    assert (baichuan.position.kind, baichuan.tensors["head"]) == ("alibi", "lm_head.weight | normalized")
    experts = derive(DEEPSEEK_MOE_16B).experts
    assert (experts.count, experts.used, experts.ffn, experts.shared_ffn) == (64, 6, 1408, 2816)
    assert experts.layers == tuple(range(1, 28))
    assert not experts.renormalize
    assert derive(BERT_MULTILINGUAL).head.transform


def test_latent_attention() -> None:
    lite, large = derive(DEEPSEEK_V2_LITE), derive(DEEPSEEK_V3)
    assert lite.latent == Latent(q_rank=0, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
    assert large.latent == Latent(q_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
    assert cached_heads(lite) == cached_heads(large) == (1, 576)
    for spec, mscale in ((lite, 0.707), (large, 1.0)):
        assert spec.attention.scale == pytest.approx((1 + 0.1 * mscale * math.log(40)) ** 2 / math.sqrt(192))
        assert spec.scaling
        assert (spec.scaling.kind, spec.scaling.magnitude) == ("yarn", 1.0)
    assert (large.experts.groups, large.experts.groups_used, large.experts.routing) == (8, 4, "sigmoid")
    assert weight_count(lite) == 15_706_484_224
    assert weight_count(large) == 671_026_419_200
