"""The same model in transformers, from the same (dequantized) tensors: what an artifact must reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmc.frontends.source import Source, open_model

# Our names, per layer, in transformers' Llama.
_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_OUTER = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def _halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (2i, 2i + 1) to halves (i, i + D/2), which transformers rotates."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(weight.shape)


def _name(ours: str) -> str:
    if ours in _OUTER:
        return f"{_OUTER[ours]}.weight"
    _, layer, part = ours.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def _state(source: Source) -> dict[str, Any]:
    interleaved = source.spec.position.layout == "interleaved"
    state = {}
    for ours, tensor in source.tensors.items():
        values = tensor.read()
        if interleaved and ours.split(".")[-1] in ("q", "k"):
            values = _halves(values, source.spec.attention.head_dim)
        state[_name(ours)] = torch.from_numpy(values.copy())
    return state


def reference(path: Path) -> LlamaForCausalLM:
    """A float32 transformers model with the weights of the model at `path`."""
    with open_model(path) as source:
        spec = source.spec
        config = LlamaConfig(
            vocab_size=spec.sizes.vocab, hidden_size=spec.sizes.hidden, intermediate_size=spec.sizes.ffn,
            num_hidden_layers=spec.sizes.layers, num_attention_heads=spec.attention.heads,
            num_key_value_heads=spec.attention.kv_heads, head_dim=spec.attention.head_dim,
            max_position_embeddings=spec.sizes.context, rms_norm_eps=spec.norm.eps,
            rope_theta=spec.position.theta, tie_word_embeddings=spec.head.tied,
        )  # fmt: skip
        model = LlamaForCausalLM(config).float().eval()
        missing, unexpected = model.load_state_dict(_state(source), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def logits(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    """(n, V) float32 logits of every place of a text."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def is_greedy(expected: np.ndarray, prompt: list[int], answer: list[int]) -> bool:
    """Whether `answer` is what greedy decoding by the reference gives, token for token.

    `expected` are the reference's logits of prompt and answer: each token must be the argmax after all before it.
    """
    best = expected.argmax(-1)
    return best[len(prompt) - 1 : -1].tolist() == list(answer)
