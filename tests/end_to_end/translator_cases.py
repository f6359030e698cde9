"""Encoder-decoders: one tiny random model of transformers for each family, and for what differs within one.

Case -> (model_type, keys of its config).
"""

from __future__ import annotations

from typing import Any

VOCAB = 320
_SIZES = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 96,
    "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 1, "num_decoder_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "layer_norm_epsilon": 0.02,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20,
}  # fmt: skip

TRANSLATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("t5", {**T5, "feed_forward_proj": "relu"}),
    "FLAN-T5: gated, a head of its own": (
        "t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mT5": ("mt5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umT5": ("umt5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umT5, logits as they are": (
        "umt5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "BART": ("bart", {**_SIZES, "forced_bos_token_id": 1, "decoder_ffn_dim": 80}),
    "PLBart": ("plbart", _SIZES),
    "mBART": ("mbart", _SIZES),
    "M2M100, NLLB": ("m2m_100", {**_SIZES, "pad_token_id": 3, "bad_words_ids": [[3]]}),
    "Marian": ("marian", {**_SIZES, "activation_function": "swish", "bad_words_ids": [[0]], "scale_embedding": True}),
    "Marian, two tables": ("marian", {**_SIZES, "share_encoder_decoder_embeddings": False}),
    "Pegasus": ("pegasus", {**_SIZES, "scale_embedding": True, "activation_function": "relu"}),
    "Blenderbot": ("blenderbot", _SIZES),
    "MVP": ("mvp", _SIZES),
}  # fmt: skip
