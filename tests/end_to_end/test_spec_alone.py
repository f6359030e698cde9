"""Two families that frontends/families/ lacks, each by a TOML spec alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import llmc
from llmc.cli import command
from llmc.frontends.hf.families import known_families
from llmc.runtime.engine import Feed

sys.path.insert(0, str(Path(__file__).parent))
from reference import is_greedy, logits, saved_reference

SIZES = """
[sizes]
vocab = 320
hidden = 64
layers = 2
ffn = FFN
context = 256

[tokens]
bos = 1
eos = [2]
add_bos = false

[position]
kind = "learned"

[attention]
kind = "gqa"
heads = 4
kv_heads = 4
head_dim = 16
scale = 0.25
bias = true
output_bias = true
"""

# https://doi.org/10.1093/bib/bbac409, transformers/models/biogpt
BIOGPT = """
name = "BioGPT"

[norm]
kind = "layer"
eps = 1e-5
bias = true

[mlp]
kind = "plain"
activation = "gelu"
bias = true

[embedding]
scale = 8.0  # the root of 64

[head]
tied = true

[tensors]
embedding = "biogpt.embed_tokens.weight"
positions = "biogpt.embed_positions.weight | skip 2"
"layers.{layer}.attention_norm" = "biogpt.layers.{layer}.self_attn_layer_norm.weight"
"layers.{layer}.attention_norm_bias" = "biogpt.layers.{layer}.self_attn_layer_norm.bias"
"layers.{layer}.q" = "biogpt.layers.{layer}.self_attn.q_proj.weight"
"layers.{layer}.q_bias" = "biogpt.layers.{layer}.self_attn.q_proj.bias"
"layers.{layer}.k" = "biogpt.layers.{layer}.self_attn.k_proj.weight"
"layers.{layer}.k_bias" = "biogpt.layers.{layer}.self_attn.k_proj.bias"
"layers.{layer}.v" = "biogpt.layers.{layer}.self_attn.v_proj.weight"
"layers.{layer}.v_bias" = "biogpt.layers.{layer}.self_attn.v_proj.bias"
"layers.{layer}.o" = "biogpt.layers.{layer}.self_attn.out_proj.weight"
"layers.{layer}.o_bias" = "biogpt.layers.{layer}.self_attn.out_proj.bias"
"layers.{layer}.mlp_norm" = "biogpt.layers.{layer}.final_layer_norm.weight"
"layers.{layer}.mlp_norm_bias" = "biogpt.layers.{layer}.final_layer_norm.bias"
"layers.{layer}.up" = "biogpt.layers.{layer}.fc1.weight"
"layers.{layer}.up_bias" = "biogpt.layers.{layer}.fc1.bias"
"layers.{layer}.down" = "biogpt.layers.{layer}.fc2.weight"
"layers.{layer}.down_bias" = "biogpt.layers.{layer}.fc2.bias"
final_norm = "biogpt.layer_norm.weight"
final_norm_bias = "biogpt.layer_norm.bias"
"""

# The first GPT: each sum is normed, and nothing before the head. transformers/models/openai
GPT = """
name = "GPT"

[norm]
kind = "layer"
eps = 1e-5
bias = true
place = "sum"
final = false

[mlp]
kind = "plain"
activation = "gelu_tanh"
bias = true

[head]
tied = true

[tensors]
embedding = "transformer.tokens_embed.weight"
positions = "transformer.positions_embed.weight"
"layers.{layer}.q" = "transformer.h.{layer}.attn.c_attn.weight | transposed | q k v"
"layers.{layer}.k" = "transformer.h.{layer}.attn.c_attn.weight | transposed | q k v"
"layers.{layer}.v" = "transformer.h.{layer}.attn.c_attn.weight | transposed | q k v"
"layers.{layer}.q_bias" = "transformer.h.{layer}.attn.c_attn.bias | q k v"
"layers.{layer}.k_bias" = "transformer.h.{layer}.attn.c_attn.bias | q k v"
"layers.{layer}.v_bias" = "transformer.h.{layer}.attn.c_attn.bias | q k v"
"layers.{layer}.o" = "transformer.h.{layer}.attn.c_proj.weight | transposed"
"layers.{layer}.o_bias" = "transformer.h.{layer}.attn.c_proj.bias"
"layers.{layer}.attention_post_norm" = "transformer.h.{layer}.ln_1.weight"
"layers.{layer}.attention_post_norm_bias" = "transformer.h.{layer}.ln_1.bias"
"layers.{layer}.up" = "transformer.h.{layer}.mlp.c_fc.weight | transposed"
"layers.{layer}.up_bias" = "transformer.h.{layer}.mlp.c_fc.bias"
"layers.{layer}.down" = "transformer.h.{layer}.mlp.c_proj.weight | transposed"
"layers.{layer}.down_bias" = "transformer.h.{layer}.mlp.c_proj.bias"
"layers.{layer}.mlp_post_norm" = "transformer.h.{layer}.ln_2.weight"
"layers.{layer}.mlp_post_norm_bias" = "transformer.h.{layer}.ln_2.bias"
"""


@pytest.mark.parametrize(("model_type", "text", "ffn"), [("biogpt", BIOGPT, 160), ("openai-gpt", GPT, 256)])
def test_a_spec_is_enough(
    model_type: str, text: str, ffn: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert model_type not in known_families()
    folder = tiny_model(model_type, tie_word_embeddings=True)
    spec, artifact = tmp_path / "model.toml", tmp_path / "tiny.llmc"
    spec.write_text(text + SIZES.replace("FFN", str(ffn)))
    arguments = ["compile", folder, "-o", artifact, "--quant", "f32", "--no-check"]
    refused = CliRunner().invoke(command, [*map(str, arguments)])
    assert refused.exit_code == 1
    assert f"model_type is '{model_type}'" in refused.stderr
    result = CliRunner().invoke(command, [*map(str, arguments), "--spec", str(spec)])
    assert result.exit_code == 0, result.output
    ids = np.random.default_rng(0).integers(3, 320, 33).tolist()
    twin = saved_reference(folder)
    with llmc.load(artifact) as model:
        made = model.generate(ids, max_tokens=32, ignore_eos=True)
        whole = [*ids, *made.ids]
        expected = logits(twin, whole)
        assert is_greedy(expected, ids, list(made.ids))
        sequence = model.engine.new_sequence()
        got = model.engine.step([Feed(sequence, whole, "all")]).logits
        np.testing.assert_allclose(got, expected, atol=1e-3, rtol=0)
