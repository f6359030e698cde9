"""GGUF files, good ones: what open_model makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec import from_toml, tensor_shapes, to_toml
from llmc.frontends.gguf.file import TENSOR_TYPES
from llmc.frontends.source import open_model
from llmc.frontends.tensor import READABLE

Write = Callable[..., Path]


@pytest.mark.model
def test_demo_model(smollm2_gguf: Path) -> None:
    with open_model(smollm2_gguf) as source:
        spec = source.spec
        assert (spec.sizes.layers, spec.sizes.hidden, spec.sizes.ffn) == (30, 576, 1536)
        assert (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) == (
            9,
            3,
            64,
        )
        assert (spec.sizes.vocab, spec.sizes.context) == (49152, 8192)
        assert (spec.position.theta, spec.position.layout) == (100000.0, "interleaved")
        assert spec.head.tied
        assert (spec.tokens.bos, spec.tokens.eos, spec.tokens.add_bos) == (1, (2,), False)
        assert not spec.attention.bias
        assert from_toml(to_toml(spec)) == spec
        assert list(source.tensors) == list(tensor_shapes(spec))
        assert source.special_tokens["bos_token"] == "<|im_start|>"
        assert source.chat_template is not None
        assert "<|im_start|>" in source.chat_template


@pytest.mark.model
def test_demo_tensors_equal_the_gguf_package(smollm2_gguf: Path) -> None:
    reader = gguf.GGUFReader(smollm2_gguf)
    wanted = {tensor.name: tensor for tensor in reader.tensors}
    with open_model(smollm2_gguf) as source:
        for name in ["layers.0.q", "layers.29.down", "layers.7.mlp_norm", "final_norm"]:
            ours = source.tensors[name]
            theirs = wanted[ours.name]
            values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(ours.read(), values)
            assert ours.nbytes == theirs.n_bytes
            assert ours.stored == theirs.tensor_type.name
        embedding = source.tensors["embedding"]
        part = gguf.quants.dequantize(wanted["token_embd.weight"].data[1000:1003], 8)
        np.testing.assert_array_equal(embedding.read_rows(1000, 1003), part)


def test_type_table_equals_the_gguf_package() -> None:
    for id_, (name, *size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(id_)
        assert (kind.name, tuple(size)) == (name, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_writable_type_is_read(tiny_gguf: Write, quant: str) -> None:
    path = tiny_gguf(quant=quant)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_model(path) as source:
        for tensor in source.tensors.values():
            theirs = reader[tensor.name]
            values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            read = tensor.read()
            assert (read.dtype, read.shape) == (np.float32, tensor.shape)
            assert read.flags.c_contiguous
            np.testing.assert_array_equal(read, values.reshape(tensor.shape))
        assert source.tensors["layers.0.q"].stored == quant


@pytest.mark.parametrize("quant", sorted(set(READABLE) - {"F32", "F16", "BF16", "MXFP4"}))
def test_every_other_type_is_read(quant: str) -> None:
    """The package cannot write these: random blocks, read by us and by it, must agree."""
    from llmc.frontends.tensor import decode_values

    _, size = READABLE[quant]
    raw = np.random.default_rng(1).integers(0, 64, (5, 2 * size), dtype=np.uint8)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[quant])
    np.testing.assert_array_equal(decode_values(raw, quant), wanted)


def test_rows_are_the_rows_of_the_whole(tiny_gguf: Write) -> None:
    with open_model(tiny_gguf(quant="Q8_0")) as source:
        tensor = source.tensors["layers.1.down"]
        np.testing.assert_array_equal(tensor.read_rows(3, 9), tensor.read()[3:9])
        norm = source.tensors["final_norm"]
        np.testing.assert_array_equal(norm.read_rows(3, 9), norm.read()[3:9])
        assert tensor.read_rows(4, 4).shape == (0, 96)
        with pytest.raises(SourceError, match="rows 3 to 65 of 64"):
            tensor.read_rows(3, 65)


def test_own_head_and_biases_follow_from_the_tensors(tiny_gguf: Write) -> None:
    vocab = 264
    extra: dict[str, np.ndarray] = {"output.weight": np.ones((vocab, 64), np.float32)}
    for layer in range(2):
        for name, width in {"q": 64, "k": 32, "v": 32, "output": 64}.items():
            extra[f"blk.{layer}.attn_{name}.bias"] = np.ones(width, np.float32)
        for name, width in {"gate": 96, "up": 96, "down": 64}.items():
            extra[f"blk.{layer}.ffn_{name}.bias"] = np.ones(width, np.float32)
    with open_model(tiny_gguf(tensors=extra)) as source:
        spec = source.spec
        assert not spec.head.tied
        assert spec.attention.bias
        assert spec.attention.output_bias
        assert spec.mlp.bias
        assert source.tensors["layers.1.k_bias"].shape == (32,)
        assert source.tensors["head"].shape == (vocab, 64)


def test_explicit_head_size_and_scale(tiny_gguf: Write) -> None:
    wide = {
        f"blk.{layer}.attn_{name}.weight": np.ones(shape, np.float32)
        for layer in range(2)
        for name, shape in {
            "q": (128, 64),
            "k": (64, 64),
            "v": (64, 64),
            "output": (64, 128),
        }.items()
    }
    keys = {
        "llama.attention.key_length": np.uint32(32),
        "llama.attention.value_length": np.uint32(32),
        "llama.rope.dimension_count": np.uint32(32),
        "llama.attention.scale": np.float32(0.25),
    }
    with open_model(tiny_gguf(keys, wide)) as source:
        assert source.spec.attention.head_dim == 32
        assert source.spec.attention.scale == 0.25


def test_linear_scaling_of_rope(tiny_gguf: Write) -> None:
    factor = {"llama.rope.scaling.factor": np.float32(4)}
    for kind, wanted in ((None, 4.0), ("linear", 4.0), ("none", 1.0)):
        with open_model(tiny_gguf(factor | {"llama.rope.scaling.type": kind})) as source:
            assert source.spec.position.factor == wanted


def test_a_given_spec_replaces_the_derived_one(tiny_gguf: Write) -> None:
    path = tiny_gguf({"llama.new_thing": np.uint32(3)})
    with pytest.raises(SourceError, match="new_thing"):
        open_model(path)
    with open_model(tiny_gguf()) as source:
        spec = source.spec
    with open_model(tiny_gguf({"llama.new_thing": np.uint32(3)}), spec) as source:
        assert source.spec == spec


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn'"),
        ({"llama.rope.scaling.attn_factor": np.float32(4)}, "llama.'rope.scaling.attn_factor'"),
        ({"llama.rope.scaling.factor": np.float32(0)}, "rope.scaling.factor = 0.0"),
        ({"llama.rope.freq_base_swa": np.float32(1e4)}, "llama.'rope.freq_base_swa'"),
        ({"llama.attention.sliding_window": np.uint32(64)}, "sliding_window = 64, llmc knows: 0"),
        ({"llama.expert_count": np.uint32(8)}, "expert_count = 8"),
        ({"llama.atention.scale": np.float32(1)}, "near: attention.scale"),
        ({"llama.block_count": None}, "missing key llama.block_count"),
        ({"llama.block_count": np.uint32(10**9)}, "block_count = 1000000000"),
        ({"llama.block_count": np.uint32(0)}, "block_count = 0"),
        ({"llama.block_count": "two"}, "block_count = 'two'"),
        ({"llama.block_count": True}, "block_count = True"),
        ({"llama.embedding_length": np.uint32(2**32 - 1)}, "embedding_length = 4294967295"),
        ({"llama.attention.head_count": np.uint32(3)}, "no multiple"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv = \[2, 1\]"),
        ({"llama.attention.head_count_kv": np.uint32(3)}, "no multiple of kv_heads"),
        ({"llama.attention.layer_norm_rms_epsilon": np.float32("nan")}, "epsilon = nan"),
        ({"llama.rope.freq_base": np.float32("inf")}, "freq_base = inf"),
        ({"llama.rope.freq_base": np.float32(-1)}, "freq_base = -1.0"),
        ({"llama.rope.dimension_count": np.uint32(8)}, "dimension_count = 8, wanted head_dim = 16"),
        ({"llama.vocab_size": np.uint32(5)}, "vocab_size = 5, but the tokenizer has 264"),
        ({"tokenizer.ggml.bos_token_id": np.uint32(264)}, "bos_token_id = 264"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token = True"),
        ({"tokenizer.ggml.pre": "nosuch"}, "pre is 'nosuch', llmc knows: default, gpt-2"),
        ({"tokenizer.ggml.pre": None}, "pre is None"),
        ({"tokenizer.ggml.model": "rwkv"}, "model is 'rwkv', llmc knows: gpt2, llama"),
        ({"tokenizer.ggml.merges": ["h q"]}, "'h q' does not join"),
        ({"tokenizer.ggml.merges": ["hq"]}, "'hq' does not join"),
        ({"tokenizer.ggml.merges": None}, "merges is None"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type is"),
        ({"tokenizer.ggml.token_type": [9] * 264}, "token_type is"),
        ({"tokenizer.ggml.tokens": ["a"] * 264}, "'a' appears twice"),
        ({"tokenizer.ggml.tokens": [1] * 264}, "tokens is"),
        ({"tokenizer.ggml.nosuch": True}, "unknown keys 'tokenizer.ggml.nosuch'"),
        ({"tokenizer.chat_template": True}, "chat_template is True"),
        ({"general.type": "adapter"}, "general.type = 'adapter'"),
        ({"clip.vision": True}, "unknown keys 'clip.vision'"),
        ({"split.count": np.uint32(3)}, "one of several parts .split.no = None, split.count = 3., which are called"),
    ],
)
def test_metadata_that_is_refused(tiny_gguf: Write, keys: dict[str, object], message: str) -> None:
    with pytest.raises(LlmcError, match=message) as caught:
        open_model(tiny_gguf(keys))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("tiny.gguf: ")


def test_other_architectures_are_refused(tiny_gguf: Write) -> None:
    path = tiny_gguf()
    path.write_bytes(path.read_bytes().replace(b"llama", b"lhama", 1))
    with pytest.raises(SourceError, match=r"general.architecture is 'lhama', llmc knows: .*llama.*--spec"):
        open_model(path)


def test_all_tensor_faults_are_told_at_once(tiny_gguf: Write) -> None:
    tensors = {
        "blk.0.attn_q.weight": None,
        "blk.1.attn_q.weight": None,
        "blk.1.attn_k.weight": np.ones((16, 64), np.float32),
        "blk.0.extra.weight": np.ones(8, np.float32),
    }
    with pytest.raises(SourceError) as caught:
        open_model(tiny_gguf(tensors=tensors))
    message = str(caught.value)
    assert "missing blk.{0-1}.attn_q.weight" in message
    assert "not read by any block" in message
    assert "blk.0.extra.weight" in message
    assert "shape of blk.1.attn_k.weight is [16, 64], wanted [32, 64]" in message
    assert "\n" not in message


def test_factors_of_rope_are_read_from_their_tensor(tiny_gguf: Write) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = tiny_gguf(tensors={"rope_freqs.weight": factors})
    with open_model(path) as source:
        scaling = source.spec.scaling
        assert scaling is not None
        assert scaling.kind == "longrope"
        assert scaling.short == scaling.long == tuple(factors.tolist())
        spec = source.spec
    with open_model(path, spec) as source:
        assert source.spec == spec
    with pytest.raises(SourceError, match="not read by any block rope_freqs.weight"):
        open_model(path, replace(spec, scaling=None))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"rope_freqs.weight": np.ones(7, np.float32)}, "wanted 8 numbers above 0"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "wanted 8 numbers above 0"),
        ({"rope_freqs.weight": np.full(8, np.nan, np.float32)}, "rope_freqs.weight has NaN"),
        ({"rope_freqs.weight": np.ones((2, 8), np.float32)}, r"rope_freqs.weight of shape \[2, 8\]"),
        ({"rope_factors_long.weight": np.ones(8, np.float32)}, "scaling.short"),
    ],
)
def test_factors_of_rope_that_are_refused(tiny_gguf: Write, tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(LlmcError, match=message):
        open_model(tiny_gguf(tensors=tensors))


def test_types_that_cannot_be_read_are_named(tiny_gguf: Write) -> None:
    path = tiny_gguf()
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
    assert data[at] == 0  # F32
    data[at] = 26  # I32, of the same size
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"blk.0.attn_norm.weight stored as I32, wanted one of F32"):
        open_model(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_numbers_are_refused(tiny_gguf: Write, bad: float) -> None:
    norm = np.ones(64, np.float32)
    norm[5] = bad
    with (
        open_model(tiny_gguf(tensors={"output_norm.weight": norm})) as source,
        pytest.raises(SourceError, match="output_norm.weight has NaN or infinite values"),
    ):
        source.tensors["final_norm"].read()


def test_close_twice_and_read_after_close(tiny_gguf: Write) -> None:
    source = open_model(tiny_gguf())
    kept = source.tensors["final_norm"].read()
    source.close()
    source.close()
    assert np.isfinite(kept).all()
    with pytest.raises(SourceError, match="closed"):
        source.tensors["final_norm"].read()
