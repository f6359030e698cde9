"""Keys of config.json that mean the same in every family: nothing, or something that must be off."""

from __future__ import annotations

# Config values -> `mlp.activation`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
    "relu2": "relu_squared",
}

# Keys that say nothing about what the model computes in inference: dropout, initial weights, how some runtime shall
# run it, who made it, other tasks than the next token.
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
        "activation_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout", "dropout",
        "embd_pdrop", "embed_dropout", "embedding_dropout", "gradient_checkpointing", "hidden_dropout_prob", "init_std",
        "layerdrop", "resid_dropout", "resid_pdrop", "residual_dropout", 
        # How to generate, which older versions of transformers saved here.
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "is_decoder", "length_penalty", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
        "temperature", "tf_legacy_loss", "top_k", "top_p", "typical_p",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    )
)  # fmt: skip

_SOFTCAP = "llmc has no softcapping in this family"

# Keys of any family that must be off unless it reads them, and why. `None`, `False`, `{}` and `[]` are off.
MUST_BE_OFF = {
    "auto_map": "the model runs its own Python code, which llmc never does",
    "add_cross_attention": "llmc has no cross-attention in this family",
    "is_encoder_decoder": "llmc has no encoder in this family",
    "cross_attention_hidden_size": "llmc has encoders as wide as their decoders only",
    "tie_encoder_decoder": "llmc reads encoders with weights of their own",
    "pruned_heads": "llmc reads models with all heads",
    "attention_chunk_size": "llmc has no chunked attention yet",
    "attention_k_eq_v": "llmc reads models whose values have weights of their own",
    "attn_logit_softcapping": _SOFTCAP,
    "final_logit_softcapping": _SOFTCAP,
    "use_bidirectional_attention": "llmc has causal attention only",
    "use_mrope": "llmc has rope over one axis of positions only",
}
