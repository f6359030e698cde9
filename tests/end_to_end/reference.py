"""The same model in transformers, from the same (dequantized) tensors: what an artifact must reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

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
# What differs from that in its Gemma 3.
_GEMMA3 = {
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_OUTER = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def _halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (2i, 2i + 1) to halves (i, i + D/2), which transformers rotates."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(weight.shape)


def _name(ours: str, parts: dict[str, str]) -> str:
    if ours in _OUTER:
        return f"{_OUTER[ours]}.weight"
    _, layer, part = ours.split(".")
    return f"model.layers.{layer}.{parts[part]}.weight"


def _state(source: Source) -> dict[str, Any]:
    interleaved = source.spec.position.layout == "interleaved"
    state = {}
    for ours, tensor in source.tensors.items():
        values = tensor.read()
        if interleaved and ours.split(".")[-1] in ("q", "k"):
            values = _halves(values, source.spec.attention.head_dim)
        state[_name(ours, _LAYER)] = torch.from_numpy(values.copy())
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
        return _filled(LlamaForCausalLM(config), _state(source))


def gemma3_reference(path: Path) -> Gemma3ForCausalLM:
    """A float32 Gemma 3 of transformers with the weights of the GGUF file at `path`."""
    with open_model(path) as source:
        spec = source.spec
        assert spec.window is not None
        full = {"rope_type": "linear", "factor": spec.position.factor, "rope_theta": spec.position.theta}
        config = Gemma3TextConfig(
            vocab_size=spec.sizes.vocab, hidden_size=spec.sizes.hidden, intermediate_size=spec.sizes.ffn,
            num_hidden_layers=spec.sizes.layers, num_attention_heads=spec.attention.heads,
            num_key_value_heads=spec.attention.kv_heads, head_dim=spec.attention.head_dim,
            max_position_embeddings=spec.sizes.context, rms_norm_eps=spec.norm.eps,
            query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6,
            rope_parameters={
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            tie_word_embeddings=spec.head.tied, attn_implementation="eager",
        )  # fmt: skip
        state = {}
        for ours, tensor in source.tensors.items():
            # The file's converter added one to the norms; transformers adds it itself.
            values = tensor.read() - (1 if ours.endswith("norm") else 0)
            state[_name(ours, _LAYER | _GEMMA3)] = torch.from_numpy(values.astype(np.float32))
        return _filled(Gemma3ForCausalLM(config), state)


def saved_reference(folder: Path, attention: str = "eager") -> PreTrainedModel:
    """The float32 model that transformers itself makes of a folder, whatever its family."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def _filled(model: Any, state: dict[str, Any]) -> Any:
    model = model.float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """(n, V) float32 logits of every place of a text."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def is_greedy(expected: np.ndarray, prompt: list[int], answer: list[int]) -> bool:
    """Whether `answer` is what greedy decoding by the reference gives, token for token.

    `expected` are the reference's logits of prompt and answer: each token must be the argmax after all before it.
    """
    best = expected.argmax(-1)
    return best[len(prompt) - 1 : -1].tolist() == list(answer)
