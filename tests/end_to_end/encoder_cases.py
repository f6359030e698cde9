"""Tiny encoders of every family, by model_type and config: the list that test_encoders.py runs over."""

from __future__ import annotations

from typing import Any

_BERT = {
    "bos_token_id": 2, "eos_token_id": 3, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", {**_BERT, "max_position_embeddings": 64}),
    "RoBERTa": ("roberta", {**_BERT, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}),
    "RoBERTa of two types": ("roberta", {**_BERT, "max_position_embeddings": 66, "pad_token_id": 1}),
    "XLM-RoBERTa": ("xlm-roberta", {**_BERT, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}),
    "CamemBERT": ("camembert", {**_BERT, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}),
    "ModernBERT": (
        "modernbert",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "pad_token_id": 1,
        },
    ),
    "DistilBERT": ("distilbert", {**_DISTILBERT, "max_position_embeddings": 64}),
}
