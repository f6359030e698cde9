"""T5 in GGUF files: what its keys and the names of its tensors say, what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import Encoder
from llmc.frontends.gguf.encoder_decoder import never_used

sys.path.insert(0, str(Path(__file__).parent))
from test_gguf_spec import LAYERS, derive


def test_both_stacks_have_as_many_layers_unless_told() -> None:
    spec = derive("t5")
    assert (spec.encoder, spec.sizes.layers) == (Encoder(LAYERS, ffn=96), LAYERS)
    spec = derive("t5", decoder_block_count=3)
    assert (spec.encoder, spec.sizes.layers) == (Encoder(LAYERS, ffn=96), 3)
    assert spec.tensors["encoder.layers.{layer}.o"] == "enc.blk.{layer}.attn_o.weight"
    assert spec.tensors["layers.{layer}.cross_norm"] == "dec.blk.{layer}.cross_attn_norm.weight"


def test_what_keys_say() -> None:
    spec = derive("t5", decoder_start_token_id=1, attention__layer_norm_epsilon=1e-6)
    assert (spec.tokens.start, spec.norm.kind, spec.norm.eps) == (1, "rms", 1e-6)
    assert (spec.position.kind, spec.position.buckets, spec.position.distance) == ("relative", 8, 128)
    assert spec.attention.causal


def test_what_tensors_say() -> None:
    spec = derive("t5")
    assert (spec.mlp.kind, spec.mlp.activation, spec.head.tied, spec.head.scale) == ("plain", "relu", True, 48**-0.5)
    assert spec.tensors["encoder.relative_bias"] == "enc.blk.0.attn_rel_b.weight"
    spec = derive("t5", ["output.weight", "enc.blk.0.ffn_gate.weight"])
    assert (spec.mlp.kind, spec.mlp.activation, spec.head.tied, spec.head.scale) == ("gated", "gelu_tanh", False, 1)
    for stack in ("enc", "dec"):
        spec = derive("t5", [f"{stack}.blk.{layer}.attn_rel_b.weight" for layer in (0, 1)])
        assert spec.position.per_layer
        assert spec.tensors["layers.{layer}.relative_bias"] == "dec.blk.{layer}.attn_rel_b.weight"
        assert "relative_bias" not in spec.tensors


def test_a_table_that_is_never_used() -> None:
    names = ["dec.blk.0.cross_attn_rel_b.weight", "dec.blk.0.attn_rel_b.weight", "enc.blk.0.cross_attn_rel_b.weight"]
    assert never_used(names) == {names[0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_start_token_id": -1}, "t5.decoder_start_token_id = -1, wanted an id"),
        ({"decoder_start_token_id": True}, "t5.decoder_start_token_id = True, wanted an id"),
        ({"decoder_start_token_id": 9}, "tokens.start"),
        ({"decoder_block_count": 0}, "t5.decoder_block_count = 0, wanted"),
        ({"block_count": "x"}, "t5.block_count = 'x', wanted"),
        ({"block_count": None}, "missing key t5.block_count"),
        (
            {"attention__layer_norm_epsilon": 1e-5},
            "layer_norm_epsilon = 1e-05, but t5.attention.layer_norm_rms_epsilon",
        ),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon = nan, wanted"),
        ({"attention__relative_buckets_count": 6}, "position.buckets = 6"),
        ({"attention__scale": 0.5}, "t5.attention.scale = 0.5, llmc knows: 1.0"),
        ({"feed_forward_length": "x"}, "t5.feed_forward_length = 'x', wanted"),
        ({"decoder_layers": 3}, "unknown keys t5.'decoder_layers'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError) as caught:
        derive("t5", **changes)
    assert message in str(caught.value)
