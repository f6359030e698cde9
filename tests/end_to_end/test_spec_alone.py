"""Two families that frontends/families/ lacks, each by a TOML spec alone: a decoder and an encoder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner
from transformers import AutoModel

import llmc
from llmc.cli import command
from llmc.frontends.hf.families import known_families
from llmc.runtime.runner import Feed

sys.path.insert(0, str(Path(__file__).parent))
from reference import is_greedy, logits, saved_reference

# transformers/models/flint: sinks, norms of each head, windows with rope and whole layers without, experts weighed by
# their sigmoids beside one that all tokens go through.
FLINT = """
name = "Flint"

[sizes]
vocab = 320
hidden = 64
layers = 2
ffn = 160
context = 256

[norm]
kind = "rms"
eps = 1e-5

[attention]
kind = "gqa"
heads = 4
kv_heads = 2
head_dim = 16
scale = 0.25
qk_norm = "head"
sinks = true

[position]
kind = "rope"
plain_layers = [0]

[window]
size = 16
layers = [1]
theta = 10000.0

[mlp]
kind = "gated"
activation = "silu"

[experts]
count = 4
used = 2
ffn = 32
layers = [1]
routing = "sigmoid"
renormalize = true
shared_ffn = 48

[head]
tied = false

[tokens]
bos = 1
eos = [2]
add_bos = false

[tensors]
embedding = "model.embed_tokens.weight"
"layers.{layer}.attention_norm" = "model.layers.{layer}.input_layernorm.weight"
"layers.{layer}.q" = "model.layers.{layer}.self_attn.q_proj.weight"
"layers.{layer}.k" = "model.layers.{layer}.self_attn.k_proj.weight"
"layers.{layer}.v" = "model.layers.{layer}.self_attn.v_proj.weight"
"layers.{layer}.q_norm" = "model.layers.{layer}.self_attn.q_norm.weight"
"layers.{layer}.k_norm" = "model.layers.{layer}.self_attn.k_norm.weight"
"layers.{layer}.sinks" = "model.layers.{layer}.self_attn.softmax_offset"
"layers.{layer}.o" = "model.layers.{layer}.self_attn.o_proj.weight"
"layers.{layer}.mlp_norm" = "model.layers.{layer}.post_attention_layernorm.weight"
"layers.{layer}.gate" = "model.layers.{layer}.mlp.gate_proj.weight"
"layers.{layer}.up" = "model.layers.{layer}.mlp.up_proj.weight"
"layers.{layer}.down" = "model.layers.{layer}.mlp.down_proj.weight"
"layers.{layer}.router" = "model.layers.{layer}.mlp.gate.weight"
"layers.{layer}.experts.gate" = "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"
"layers.{layer}.experts.up" = "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
"layers.{layer}.experts.down" = "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
"layers.{layer}.shared.gate" = "model.layers.{layer}.mlp.shared_expert.gate_proj.weight"
"layers.{layer}.shared.up" = "model.layers.{layer}.mlp.shared_expert.up_proj.weight"
"layers.{layer}.shared.down" = "model.layers.{layer}.mlp.shared_expert.down_proj.weight"
final_norm = "model.norm.weight"
head = "lm_head.weight"
"""
FLINT_CONFIG = {
    "layer_types": ["full_attention", "sliding_attention"], "mlp_only_layers": [0], "sliding_window": 16,
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip

# https://arxiv.org/abs/2003.10555, transformers/models/electra
ELECTRA = """
name = "ELECTRA"

[sizes]
vocab = 320
hidden = 64
layers = 2
ffn = 160
context = 256

[norm]
kind = "layer"
eps = 1e-5
bias = true
place = "sum"
embedding = true
final = false

[attention]
kind = "gqa"
heads = 4
kv_heads = 4
head_dim = 16
scale = 0.25
bias = true
output_bias = true
causal = false

[position]
kind = "learned"

[embedding]
bias = true  # the type of all tokens of a text by itself

[mlp]
kind = "plain"
activation = "gelu"
bias = true

[head]
tied = true
kind = "hidden"

[pooling]
kind = "mean"

[tokens]
bos = 1
eos = []
add_bos = true
end = 2

[tensors]
embedding = "embeddings.word_embeddings.weight"
embedding_bias = "embeddings.token_type_embeddings.weight | row 0 of 2"
positions = "embeddings.position_embeddings.weight"
embedding_norm = "embeddings.LayerNorm.weight"
embedding_norm_bias = "embeddings.LayerNorm.bias"
"layers.{layer}.q" = "encoder.layer.{layer}.attention.self.query.weight"
"layers.{layer}.q_bias" = "encoder.layer.{layer}.attention.self.query.bias"
"layers.{layer}.k" = "encoder.layer.{layer}.attention.self.key.weight"
"layers.{layer}.k_bias" = "encoder.layer.{layer}.attention.self.key.bias"
"layers.{layer}.v" = "encoder.layer.{layer}.attention.self.value.weight"
"layers.{layer}.v_bias" = "encoder.layer.{layer}.attention.self.value.bias"
"layers.{layer}.o" = "encoder.layer.{layer}.attention.output.dense.weight"
"layers.{layer}.o_bias" = "encoder.layer.{layer}.attention.output.dense.bias"
"layers.{layer}.attention_post_norm" = "encoder.layer.{layer}.attention.output.LayerNorm.weight"
"layers.{layer}.attention_post_norm_bias" = "encoder.layer.{layer}.attention.output.LayerNorm.bias"
"layers.{layer}.up" = "encoder.layer.{layer}.intermediate.dense.weight"
"layers.{layer}.up_bias" = "encoder.layer.{layer}.intermediate.dense.bias"
"layers.{layer}.down" = "encoder.layer.{layer}.output.dense.weight"
"layers.{layer}.down_bias" = "encoder.layer.{layer}.output.dense.bias"
"layers.{layer}.mlp_post_norm" = "encoder.layer.{layer}.output.LayerNorm.weight"
"layers.{layer}.mlp_post_norm_bias" = "encoder.layer.{layer}.output.LayerNorm.bias"
"""
TEXTS = ["The capital of France is Paris.", "one two three", "x"]


def _compiled(folder: Path, text: str, model_type: str, work: Path) -> Path:
    """The artifact that `llmc compile` makes of the folder with the spec, after it refuses the folder without."""
    assert model_type not in known_families()
    spec, artifact = work / "model.toml", work / "tiny.llmc"
    spec.write_text(text)
    arguments = ["compile", str(folder), "-o", str(artifact), "--quant", "f32", "--no-check"]
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code == 1
    assert f"model_type is '{model_type}'" in refused.stderr
    result = CliRunner().invoke(command, [*arguments, "--spec", str(spec)])
    assert result.exit_code == 0, result.output
    return artifact


def test_a_spec_is_enough_for_a_decoder(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("flint", **FLINT_CONFIG)
    artifact = _compiled(folder, FLINT, "flint", tmp_path)
    ids = np.random.default_rng(0).integers(3, 320, 33).tolist()
    twin = saved_reference(folder)
    with llmc.load(artifact) as model:
        made = model.generate(ids, max_tokens=32, ignore_eos=True)
        whole = [*ids, *made.ids]
        expected = logits(twin, whole)
        assert is_greedy(expected, ids, list(made.ids))
        got = model.runner.step([Feed(model.runner.new_sequence(), whole, "all")]).logits
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_a_spec_is_enough_for_an_encoder(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_model("electra", embedding_size=64, is_decoder=True)
    twin = AutoModel.from_pretrained(whole, dtype=torch.float32, is_decoder=False).eval()
    folder = tmp_path / "electra"  # without a head
    twin.save_pretrained(folder)
    shutil.copy(whole / "tokenizer.json", folder)
    artifact = _compiled(folder, ELECTRA, "electra", tmp_path)
    with llmc.load(artifact) as model:
        for text, vector in zip(TEXTS, model.embed(TEXTS), strict=True):
            ids = [*model.encode(text), 2]
            with torch.no_grad():
                expected = twin(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
            np.testing.assert_allclose(vector, expected, atol=1e-4, rtol=0)
