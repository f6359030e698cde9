"""Layers with convolutions in config.json and GGUF files: which they are, how wide MLPs are, and what is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import Convolution, ModelSpec
from llmc.frontends.gguf.convolutions import convolution_settings
from llmc.frontends.hf.config import derive_spec
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from folder_to_gguf import write_gguf

ATTENDING = [2, 5, 8, 10, 12, 14]
# LFM2-1.2B's config.json, but for what says nothing about the model.
PUBLISHED: dict[str, Any] = {
    "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": ATTENDING, "hidden_size": 2048, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip


def derive(**changes: Any) -> ModelSpec:
    return derive_spec(PUBLISHED | changes, {}, "x", None)


def test_a_published_config() -> None:
    spec = derive()
    assert spec.convolution == Convolution(3, tuple(sorted(set(range(16)) - set(ATTENDING))))
    assert spec.sizes.ffn == 8192
    assert (spec.attention.head_dim, spec.attention.qk_norm, spec.head.tied) == (64, "head", True)
    assert (spec.norm.eps, spec.position.theta) == (1e-5, 1e6)


def test_layers_by_their_types() -> None:
    types = ["conv", "full_attention"] * 8
    spec = derive(layer_types=types, full_attn_idxs=None, block_auto_adjust_ff_dim=False)
    assert spec.convolution is not None
    assert spec.convolution.layers == tuple(range(0, 16, 2))
    assert spec.sizes.ffn == 12288


def test_attention_everywhere() -> None:
    spec = derive(full_attn_idxs=list(range(16)))
    assert spec.convolution is None
    assert "layers.{layer}.conv" not in spec.tensors


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["conv"]}, "layer_types = .*, wanted 16 times full_attention or conv"),
        ({"full_attn_idxs": [16]}, r"full_attn_idxs = \[16\], wanted a list of layers from 0 to 15"),
        ({"conv_L_cache": "3"}, "conv_L_cache = '3', wanted a whole number from 2 to 64"),
        ({"conv_bias": True}, "conv_bias is set: llmc has convolutions without biases"),
        ({"use_pos_enc": False}, "use_pos_enc = False, llmc knows: True"),
        ({"block_multiple_of": 0}, "block_multiple_of = 0, wanted a whole number from 1"),
        ({"block_ffn_dim_multiplier": 1e9}, "block_ffn_dim_multiplier = .*, wanted a number from 0.01 to 100"),
        ({"block_auto_adjust_ff_dim": 1}, "block_auto_adjust_ff_dim = 1, wanted true or false"),
    ],
)
def test_what_a_config_cannot_say(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LlmcError, match=reason):
        derive(**changes)


def test_layers_without_kv_heads_in_a_gguf_file() -> None:
    faults: list[str] = []
    own = {"attention.head_count_kv": [0, 8, 0], "block_count": 3, "shortconv.l_cache": 3}
    found = convolution_settings(own, "lfm2", faults)
    assert found == ({**own, "attention.head_count_kv": 8}, {"convolution.layers": (0, 2)})
    assert not faults


@pytest.mark.parametrize("heads", [[0, 8, 4], [0, 0, 0], [0, 8], [0, 8, "8"], [0, [8], 8], [False, 8, 8]])
def test_heads_that_cannot_be(heads: list[Any]) -> None:
    faults: list[str] = []
    convolution_settings({"attention.head_count_kv": heads, "block_count": 3}, "lfm2", faults)
    assert faults == [
        f"lfm2.attention.head_count_kv = {heads}, wanted a number for each layer, 0 or the same as others"
    ]


def test_a_size_that_is_missing() -> None:
    faults: list[str] = []
    convolution_settings({"attention.head_count_kv": [0, 8], "block_count": 2}, "lfm2", faults)
    assert faults == ["missing key lfm2.shortconv.l_cache"]


def test_one_number_of_heads_is_attention_everywhere() -> None:
    assert convolution_settings({"attention.head_count_kv": 8, "shortconv.l_cache": 3}, "lfm2", []) == (
        {"attention.head_count_kv": 8},
        {},
    )


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("lfm2", num_hidden_layers=3, full_attn_idxs=[1], tie_word_embeddings=True)


def test_the_taps_of_both_files(tiny: Path, tmp_path: Path) -> None:
    """transformers has (channels, 1, tokens), llama.cpp (channels, tokens), here a token is a row."""
    write_gguf(tiny, tmp_path / "tiny.gguf")
    stored = next(t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.0.shortconv.conv.weight")
    wanted = load_file(tiny / "model.safetensors")["model.layers.0.conv.conv.weight"][:, 0].T
    np.testing.assert_array_equal(stored.data.T, wanted)
    for source in (tiny, tmp_path / "tiny.gguf"):
        with open_model(source) as model:
            np.testing.assert_array_equal(model.tensors["layers.0.conv"].read(), wanted)


def test_taps_as_mlx_has_them(tiny: Path, tmp_path: Path) -> None:
    """(channels, tokens, 1)."""
    folder = shutil.copytree(tiny, tmp_path / "mlx")
    weights = load_file(folder / "model.safetensors")
    turned = {name: w.swapaxes(1, 2).copy() if w.ndim == 3 else w for name, w in weights.items()}
    save_file(turned, folder / "model.safetensors")
    with open_model(folder) as model:
        wanted = weights["model.layers.0.conv.conv.weight"][:, 0].T
        np.testing.assert_array_equal(model.tensors["layers.0.conv"].read(), wanted)


def test_layers_that_must_be_listed() -> None:
    with pytest.raises(LlmcError, match="missing key layer_types"):
        derive_spec({**PUBLISHED, "model_type": "lfm3"}, {}, "x", None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv": "q8"}, "--kv q8: a model with convolutions keeps f32 or bf16; leave it out"),
        ({"devices": "0&1"}, "--devices 0&1: a model with convolutions is divided by layer only, as 0;1"),
    ],
)
def test_what_they_cannot_do_is_refused(options: dict[str, Any], reason: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=reason):
        compile_model(tiny, tmp_path / "a.llmc", **options)
    assert not (tmp_path / "a.llmc").exists()
