"""What an architecture's name says beyond the keys, and the keys it brings: windows, norms, scales."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec, Window
from llmc.frontends.gguf_architectures import ARCHITECTURES
from llmc.frontends.gguf_spec import derive_spec

LAYERS = 7


def derive(kind: str, **changes: Any) -> ModelSpec:
    """The spec of a small file; "." is written "__", and None leaves a key out."""
    own = {
        "context_length": 64, "embedding_length": 48, "block_count": LAYERS, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 16,
        **({"attention.sliding_window": 8} if kind == "gemma3" else {}),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip
    metadata = {
        "general.architecture": kind,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.model": "gpt2",
        **{f"{kind}.{key}": value for key, value in own.items() if value is not None},
    }
    return derive_spec(metadata, ["blk.0.attn_q.bias"] if kind == "qwen2" else [], "x")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_gives_a_spec(kind: str) -> None:
    spec = derive(kind)
    assert spec.position.layout == ("interleaved" if kind == "llama" else "half")
    assert (spec.window is not None) == (kind == "gemma3")
    assert spec.attention.bias == (kind == "qwen2")
    assert (spec.attention.qk_norm == "head") == (kind in ("qwen3", "gemma3"))
    assert spec.attention.scale == 0.25


def test_which_layers_have_the_window() -> None:
    assert derive("gemma3").window == Window(size=8, layers=(0, 1, 2, 3, 4, 6), theta=10000.0)
    other = {"attention__sliding_window_pattern": 3, "rope__freq_base_swa": 5e4, "rope__scaling__factor": 8.0}
    spec = derive("gemma3", **other)
    assert spec.window == Window(size=8, layers=(0, 1, 3, 4, 6), theta=5e4)
    assert spec.position.factor == 8.0


def test_scales_that_no_key_says() -> None:
    assert derive("gemma3").embedding.scale == math.sqrt(48)
    assert derive("gemma3", block_count=62).attention.scale == 1 / math.sqrt(48 / 4)
    assert derive("llama", block_count=62).attention.scale == 0.25
    assert derive("llama").embedding.scale == 1


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma3", {"attention__sliding_window": None}, "missing key gemma3.attention.sliding_window"),
        ("gemma3", {"attention__sliding_window": 0}, r"gemma3.attention.sliding_window = 0, wanted a whole number"),
        ("gemma3", {"attention__sliding_window_pattern": 1}, "sliding_window_pattern = 1, wanted a whole number"),
        ("gemma3", {"attention__sliding_window_pattern": [True, False]}, r"sliding_window_pattern = \[True, False\]"),
        ("gemma3", {"attention__sliding_window_pattern": True}, "sliding_window_pattern = True"),
        ("gemma3", {"rope__freq_base_swa": -1.0}, "rope.freq_base_swa = -1.0"),
        ("gemma3", {"rope__scaling__type": "yarn"}, "rope.scaling.type = 'yarn', llmc knows: 'none', 'linear'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "unknown keys gemma3.'final_logit_softcapping'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "unknown keys gemma3.'attn_logit_softcapping'"),
        ("gemma3", {"attention__causal": False}, "attention.causal = False"),
        ("qwen2", {"attention__sliding_window": 8}, "attention.sliding_window = 8, llmc knows: 0"),
        ("qwen3", {"attention__sliding_window_pattern": 6}, "'attention.sliding_window_pattern'"),
        ("qwen3", {"expert_count": 8}, "expert_count = 8"),
    ],
)
def test_values_that_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        derive(kind, **changes)
    assert "\n" not in str(caught.value)
