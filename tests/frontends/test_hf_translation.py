"""Configs of published encoder-decoders -> specs; how answers begin, languages, words before a source."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import ModelSpec, tensor_shapes
from llmc.frontends.hf.config import derive_spec
from llmc.frontends.hf.families import known_families, load_family
from llmc.frontends.hf.translation import languages, prefixes
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from tiny_translator import save_translator
from translator_cases import TRANSLATORS

T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "task_specific_params": {
        "summarization": {"max_length": 200, "prefix": "summarize: "},
        "translation_en_to_de": {"max_length": 300, "prefix": "translate English to German: "},
    },
    "vocab_size": 32128,
}  # fmt: skip
FLAN = {
    **T5_SMALL, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 8, "num_layers": 8, "num_heads": 6,
    "relative_attention_max_distance": 128, "tie_word_embeddings": False, "d_ff": 1024,
}  # fmt: skip
_FAIRSEQ = {
    "activation_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 0, "decoder_layerdrop": 0.0, "dropout": 0.1,
    "encoder_layerdrop": 0.0, "init_std": 0.02, "is_encoder_decoder": True, "use_cache": True, "eos_token_id": 2,
    "pad_token_id": 1, "decoder_start_token_id": 2, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
    "d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "encoder_layers": 12, "decoder_layers": 12,
    "num_hidden_layers": 12, "max_position_embeddings": 1024, "forced_eos_token_id": 2, "gradient_checkpointing": False,
}  # fmt: skip
BART_CNN = {
    **_FAIRSEQ, "_num_labels": 3, "activation_function": "gelu", "add_bias_logits": False, "early_stopping": True,
    "add_final_layer_norm": False, "classif_dropout": 0.0, "force_bos_token_to_be_generated": True,
    "forced_bos_token_id": 0, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False,
    "num_beams": 4, "output_past": True, "prefix": " ", "scale_embedding": False, "vocab_size": 50264,
}  # fmt: skip
OPUS = {
    **_FAIRSEQ, "activation_function": "swish", "bad_words_ids": [[58100]], "decoder_vocab_size": 58101,
    "decoder_start_token_id": 58100, "eos_token_id": 0, "forced_eos_token_id": 0, "model_type": "marian",
    "normalize_before": False, "normalize_embedding": False, "pad_token_id": 58100, "scale_embedding": True,
    "share_encoder_decoder_embeddings": True, "static_position_embeddings": True, "vocab_size": 58101,
}  # fmt: skip
NLLB = {
    **_FAIRSEQ, "activation_function": "relu", "max_length": 200, "model_type": "m2m_100", "scale_embedding": True,
    "tokenizer_class": "NllbTokenizer", "vocab_size": 256206,
}  # fmt: skip
PEGASUS = {
    **_FAIRSEQ, "activation_function": "relu", "add_final_layer_norm": True, "extra_pos_embeddings": 0,
    "model_type": "pegasus", "normalize_before": True, "scale_embedding": True, "static_position_embeddings": True,
    "vocab_size": 96103, "encoder_layers": 16, "length_penalty": 0.6,
}  # fmt: skip
MBART50 = {
    **_FAIRSEQ, "_num_labels": 3, "activation_function": "relu", "add_final_layer_norm": True, "model_type": "mbart",
    "normalize_before": True, "normalize_embedding": True, "scale_embedding": True, "vocab_size": 250054,
}  # fmt: skip


def derive(config: dict[str, Any], generation: dict[str, Any] | None = None, end: int | None = 1) -> ModelSpec:
    return derive_spec(config, generation or {}, "m", None, end)


def test_t5_as_published() -> None:
    spec = derive(T5_SMALL)
    assert (spec.encoder.layers, spec.encoder.ffn, spec.sizes.layers) == (6, 2048, 6)  # type: ignore[union-attr]
    assert (spec.position.kind, spec.position.buckets, spec.position.distance) == ("relative", 32, 128)
    assert (spec.attention.scale, spec.attention.head_dim) == (1.0, 64)
    assert (spec.mlp.kind, spec.mlp.activation) == ("plain", "relu")
    assert spec.head.tied
    assert spec.head.scale == pytest.approx(512**-0.5)
    assert (spec.tokens.start, spec.tokens.end, spec.tokens.eos, spec.tokens.forced) == (0, 1, (1,), ())
    assert tensor_shapes(spec)["encoder.layers.5.up"] == (2048, 512)
    assert spec.tensors["encoder.layers.{layer}.down"] == "encoder.block.{layer}.layer.1.DenseReluDense.wo.weight"
    assert spec.tensors["layers.{layer}.down"] == "decoder.block.{layer}.layer.2.DenseReluDense.wo.weight"


def test_flan_t5_scales_no_logits_however_its_config_is_saved() -> None:
    for config in (FLAN, {**FLAN, "tie_word_embeddings": True, "scale_decoder_outputs": False}):
        spec = derive(config)
        assert spec.head.scale == 1
        assert (spec.mlp.kind, spec.mlp.activation, spec.sizes.layers) == ("gated", "gelu_tanh", 8)


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
@pytest.mark.parametrize(
    ("config", "scaled"),
    [
        ({}, True),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
    ],
)
def test_logits_are_scaled_as_old_and_new_configs_say(model_type: str, config: dict[str, Any], scaled: bool) -> None:
    given = {key: value for key, value in FLAN.items() if key != "tie_word_embeddings"}
    spec = derive({**given, **config, "model_type": model_type})
    assert spec.head.scale == pytest.approx(512**-0.5 if scaled else 1.0)


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_a_scale_of_logits_that_is_neither_is_refused(model_type: str) -> None:
    with pytest.raises(SourceError, match="scale_decoder_outputs = 0.5, llmc knows: True, False"):
        derive({**FLAN, "model_type": model_type, "scale_decoder_outputs": 0.5})


def test_fairseq_models_as_published() -> None:
    bart = derive(BART_CNN, end=2)
    assert (bart.norm.place, bart.norm.embedding, bart.norm.final, bart.position.kind) == (
        "sum",
        True,
        False,
        "learned",
    )
    assert (bart.tokens.start, bart.tokens.forced, bart.tokens.bos) == (2, (0,), 0)
    opus = derive(OPUS, end=0)
    assert (opus.position.kind, opus.position.offset, opus.position.pairs) == ("sinusoidal", 0, 0)
    assert (opus.tokens.start, opus.tokens.suppressed, opus.embedding.scale) == (58100, (58100,), 32.0)
    nllb = derive(NLLB, end=2)
    assert (nllb.norm.place, nllb.position.offset, nllb.position.pairs, nllb.head.bias) == ("pre", 2, 511, False)
    pegasus = derive(PEGASUS)
    assert pegasus.encoder is not None
    assert (pegasus.position.pairs, pegasus.encoder.layers, pegasus.sizes.layers) == (0, 16, 12)
    assert derive(MBART50, end=2).norm.embedding


@pytest.mark.parametrize("model_type", [name for name in known_families() if load_family(name).encoder_layers])
def test_absent_keys_mean_what_transformers_makes_of_them(model_type: str) -> None:
    sizes = {
        "sizes.vocab": 400000, "sizes.hidden": 4096, "encoder.layers": 8, "sizes.layers": 8, "encoder.ffn": 512,
        "sizes.ffn": 512, "attention.heads": 32, "attention.head_dim": 128,
    }  # fmt: skip
    family = load_family(model_type)
    given: dict[str, Any] = {key: sizes[number.sets] for key, number in family.numbers.items() if number.absent is None}
    given |= {alias: given[key] for alias, key in family.aliases.items()}
    given |= {"decoder_start_token_id": 2, "bos_token_id": None, "eos_token_id": 2}
    whole = json.loads(CONFIG_MAPPING[model_type](**given).to_json_string(use_diff=False))
    assert derive({**given, "model_type": model_type}) == derive(whole)


def test_how_an_answer_begins() -> None:
    assert derive(NLLB, {"decoder_start_token_id": 5, "forced_bos_token_id": 7}).tokens.forced == (7,)
    assert derive(NLLB, {"decoder_start_token_id": 5}).tokens.start == 5
    assert derive({**NLLB, "decoder_start_token_id": None}).tokens.start == NLLB["bos_token_id"]
    long_words = {"bad_words_ids": [[4, 5], [6]], "suppress_tokens": [7, 6]}
    assert derive(NLLB, long_words).tokens.suppressed == (6, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_start_token_id": None, "bos_token_id": None}, "missing key decoder_start_token_id"),
        ({"decoder_start_token_id": 256206}, "decoder_start_token_id = 256206, wanted a token id below"),
        ({"forced_bos_token_id": True}, "forced_bos_token_id = True, wanted a token id below"),
        ({"suppress_tokens": ["a"]}, r"bad_words_ids and suppress_tokens = \['a'\], wanted at most 64 token ids"),
        ({"encoder_attention_heads": 8}, "encoder_attention_heads = 8, decoder_attention_heads = 16 disagree"),
        ({"normalize_before": False}, "normalize_before = False, llmc knows: True"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder = False, llmc knows: True"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder is set"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        derive({**NLLB, **change})


def test_two_vocabularies_are_refused() -> None:
    with pytest.raises(SourceError, match="decoder_vocab_size = 7, vocab_size = 58101 disagree"):
        derive({**OPUS, "decoder_vocab_size": 7})


def test_languages() -> None:
    added = [
        {"content": "__fr__", "id": 7, "special": True}, {"content": "fra_Latn", "id": 8, "special": True},
        {"content": "__de__", "id": 9, "special": False}, {"content": "<s>", "id": 0, "special": True},
        {"content": "fr_XX", "id": 10, "special": True},
    ]  # fmt: skip
    text = json.dumps({"added_tokens": added}).encode()
    assert languages(load_family("m2m_100"), text) == {"fr": 7, "fra_Latn": 8}
    assert languages(load_family("mbart"), text) == {"fr_XX": 10}
    assert languages(load_family("bart"), text) == languages(None, text) == {}


def test_words_before_a_source() -> None:
    assert prefixes(T5_SMALL) == {"en to de": "translate English to German: "}
    bad = {"translation_en_to_fr": {"prefix": "a\n"}, "translation_en_to_de": 3, "translation_en_to_ro": {"prefix": 3}}
    assert prefixes({"task_specific_params": bad}) == prefixes({"task_specific_params": None}) == prefixes({}) == {}


def resaved(folder: Path, change: dict[str, np.ndarray]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file(weights | change, path)


def test_tables_that_files_repeat_are_not_read_and_others_not_ignored(tmp_path: Path) -> None:
    save_translator(tmp_path, *TRANSLATORS["Pegasus"], seed=0)
    shared = load_file(tmp_path / "model.safetensors")["model.shared.weight"]
    tables = ("model.encoder.embed_tokens.weight", "lm_head.weight")
    resaved(tmp_path, dict.fromkeys(tables, shared))
    with open_model(tmp_path) as source:
        assert "positions" not in source.spec.tensors
        assert source.spec.head.tied
    for name in (*tables, "model.decoder.embed_positions.weight"):
        old = load_file(tmp_path / "model.safetensors")[name]
        resaved(tmp_path, {name: old + 0.1})
        with pytest.raises(SourceError, match=f"not read by any block {name}"):
            open_model(tmp_path)
        resaved(tmp_path, {name: old})


def test_a_head_in_the_file_is_a_head_of_its_own(tmp_path: Path) -> None:
    save_translator(tmp_path, *TRANSLATORS["T5"], seed=0)
    shared = load_file(tmp_path / "model.safetensors")["shared.weight"]
    for head, tied in ((shared, True), (shared + 1, False)):
        resaved(tmp_path, {"lm_head.weight": head, "decoder.embed_tokens.weight": shared})
        with open_model(tmp_path) as source:
            assert source.spec.head.tied == tied
            assert ("head" in source.tensors) != tied
