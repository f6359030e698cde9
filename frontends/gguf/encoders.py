"""Rows of gguf/architectures.py for encoders, and why others of them are refused.

What reads their vectors (llama.cpp's llama-embedding, its server) divides them by their length. Where a model's GELU is
exact it is so here; llama.cpp's is the approximation by tanh.
"""

from __future__ import annotations

from llmc.frontends.gguf.rules import Architecture, Found, WindowRule

_LAYER = "blk.{layer}"
# llama_pooling_type; 0 is none.
_POOLINGS = {number: {"pooling.kind": kind} for number, kind in ((1, "mean"), (2, "first"), (3, "last"))}
_VECTORS = {
    "norm.kind": "layer",
    "norm.embedding": True,
    "attention.causal": False,
    "head.kind": "hidden",
    "pooling.normalize": True,
}
_SUMS = _VECTORS | {"norm.bias": True, "norm.place": "sum", "norm.final": False}
_SUM_NORMS = {
    "embedding_norm": "token_embd_norm.weight",
    "embedding_norm_bias": "token_embd_norm.bias",
    "layers.{layer}.attention_post_norm": f"{_LAYER}.attn_output_norm.weight",
    "layers.{layer}.attention_post_norm_bias": f"{_LAYER}.attn_output_norm.bias",
    "layers.{layer}.mlp_post_norm": f"{_LAYER}.layer_output_norm.weight",
    "layers.{layer}.mlp_post_norm_bias": f"{_LAYER}.layer_output_norm.bias",
}
_GATE_UP = {f"layers.{{layer}}.{part}": f"{_LAYER}.ffn_up.weight | gate up" for part in ("gate", "up")}
_TOKEN_TYPES = Found(
    "token_types.weight", {"embedding.bias": True}, {"embedding_bias": "token_types.weight | row 0 of {rows}"}
)

ENCODERS: dict[str, Architecture] = {
    "bert": Architecture(
        _SUMS | {"position.kind": "learned", "mlp.kind": "plain", "mlp.activation": "gelu"},
        _SUM_NORMS | {"positions": "position_embd.weight"},
        flags={"pooling_type": _POOLINGS},
        only={"attention.causal": (False,)},
        required=("pooling_type",),
        found=(_TOKEN_TYPES,),
    ),
    "nomic-bert": Architecture(
        _SUMS | {"position.layout": "half", "mlp.activation": "silu"},
        _SUM_NORMS,
        flags={"pooling_type": _POOLINGS},
        only={"attention.causal": (False,)},
        required=("pooling_type",),
        found=(_TOKEN_TYPES,),
    ),
    "modern-bert": Architecture(
        _VECTORS | {"norm.first_plain": True, "position.layout": "half", "mlp.activation": "gelu"},
        _GATE_UP | {"embedding_norm": "token_embd_norm.weight"},
        stored={"attention.sliding_window": "sides"},
        flags={
            "pooling_type": _POOLINGS,
            "hidden_activation": {kind: {"mlp.activation": kind} for kind in ("gelu", "silu")},
        },
        only={"attention.causal": (False,)},
        required=("pooling_type",),
        window=WindowRule(period=3, theta=10000.0, size=0, first=True),
    ),
}

# general.architecture -> what llmc has no block for.
REFUSED = {
    "jina-bert-v2": "its gated MLP has a bias in the last of three matrices only",
    "nomic-bert-moe": "its experts are MLPs without a gate",
}
