"""The files in frontends/families/: read strictly, one at a time, and what their rules make of a config."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec import ModelSpec
from llmc.frontends.hf import families as hf_families
from llmc.frontends.hf.config import derive_spec
from llmc.frontends.hf.families import evaluate, is_one_of, known_families, load_family
from llmc.frontends.hf.positions import position_keys
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parent))
from folders import edit, refusal, resave

Tiny = Callable[..., Path]
SIZES = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 96, "max_position_embeddings": 128}


def derive(model_type: str, **config: Any) -> ModelSpec:
    return derive_spec({"model_type": model_type, **config}, {}, "x", None)


def faults_of(model_type: str, **config: Any) -> str:
    with pytest.raises(LlmcError) as caught:
        derive(model_type, **config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model_type", known_families())
def test_every_file_is_read_and_names_its_family(model_type: str) -> None:
    family = load_family(model_type)
    assert family.title
    assert family.head_name()
    assert all("{layer}" in name for name in family.tensors() if name.startswith("layers."))


BASE = """
title = "Toy"
like = "_llama"
"""
BAD_FILES = {
    "unknown table": ("[nubmers]\na = 'sizes.hidden'", r"unknown key 'nubmers' \(near: numbers\)"),
    "unknown rule": ("[numbers]\na = { sets = 'sizes.hidden', add = 1 }", "unknown key numbers.a.'add'"),
    "no field": ("[numbers]\na = { absent = 1 }", "missing key numbers.a.sets"),
    "unknown field": ("[numbers]\na = 'sizes.hiden'", r"unknown field 'sizes.hiden' \(near: sizes.hidden\)"),
    "unknown name": ("[derived]\n'sizes.ffn' = 'sizes.width * 4'", "unknown field 'sizes.width'"),
    "absent": ("[numbers]\na = { sets = 'sizes.hidden', absent = 'x' }", "absent = 'x', wanted a number or 'derived'"),
    "flag": ("[flags]\na = { sets = 'mlp.bias', absent = false }", "sets = 'mlp.bias', wanted a list of texts"),
    "tensor": ("[layer_modules]\nquery = 'q'", "unknown tensor 'layers.{layer}.query'"),
    "windows": ("[windows]\nrule = 'some'\nsize = 3", "rule = 'some', wanted one of all, after"),
    "case": ("[[cases]]\nwhen = { a = 1 }", "when: 'a' is no key of values"),
    "case's key": ("[[cases]]\nwhen = {}\nsetting = {}", r"unknown key cases.'setting' \(near: settings\)"),
    "values": ("[values]\na = 1", "values.a is no list"),
    "a value": ("[rope]\ntheta = 'x'", "rope.theta = 'x', wanted a number"),
    "a text for a table": ("rope = 'x'", "rope. = 'x', wanted a table"),
    "syntax": ("title = 3", "families/toy.toml: not TOML"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_with_a_fault_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = BAD_FILES[case]
    for name in ("_decoder.toml", "_llama.toml"):
        shutil.copy(hf_families.FOLDER / name, tmp_path / name)
    (tmp_path / "toy.toml").write_text(BASE + text)
    monkeypatch.setattr(hf_families, "FOLDER", tmp_path)
    assert known_families() == ["toy"]
    with pytest.raises(SourceError, match=message):
        load_family("toy")


def test_only_the_file_that_is_needed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = hf_families.read_text

    def record(path: Path, what: str) -> str:
        read.append(path.stem)
        return real(path, what)

    monkeypatch.setattr(hf_families, "read_text", record)
    derive("qwen3", **LLAMA, head_dim=12, num_key_value_heads=2)
    assert read == ["qwen3", "_llama", "_decoder"]


def test_formulas() -> None:
    numbers = {"value": 4, "sizes.hidden": 48, "attention.heads": 4, "attention.kv_heads": 5}
    assert evaluate("sizes.hidden / attention.heads", numbers) == 12
    assert isinstance(evaluate("sizes.hidden / attention.heads", numbers), int)
    assert evaluate("sizes.hidden / attention.kv_heads", numbers) == 9.6
    assert evaluate("1 / root value", numbers) == 0.5
    assert evaluate("value * sizes.hidden / 2", numbers) == 96
    assert evaluate("value * sizes.ffn", numbers) is None


def test_values_of_json_and_toml() -> None:
    assert is_one_of(None, ["null", 1])
    assert not is_one_of(None, [False])
    assert is_one_of(1, [1.0])
    assert not is_one_of(True, [1])
    assert not is_one_of(0, [False])
    assert not is_one_of([], ["null"])


def test_numbers_that_need_others() -> None:
    spec = derive("granite", **LLAMA, logits_scaling=8.0, residual_multiplier=0.5, attention_multiplier=0.25)
    assert (spec.head.scale, spec.wiring.residual_scale, spec.attention.scale) == (0.125, 0.5, 0.25)
    assert "logits_scaling = 0, wanted a number above 0" in faults_of("granite", **LLAMA, logits_scaling=0)
    tiny = faults_of("granite", **LLAMA, logits_scaling=1e9)
    assert "logits_scaling = 1000000000.0 makes head.scale = 1e-09, wanted a number from" in tiny
    assert derive("gpt2", n_positions=9, vocab_size=64, n_embd=48, n_layer=3, n_head=4).sizes.ffn == 192
    uneven = faults_of("gpt2", n_positions=9, vocab_size=64, n_embd=48, n_layer=3, n_head=5)
    assert "n_embd = 48 is no multiple of n_head = 5, and head_dim is not given" in uneven
    missing = faults_of("gpt2", vocab_size=64)
    assert missing.count("missing key") == 4


def test_a_number_that_switches_something_off() -> None:
    opt = {**SIZES, "ffn_dim": 96, "max_position_embeddings": 128}
    assert derive("opt", **opt).embedding.width == 0
    assert derive("opt", **opt, word_embed_proj_dim=48).embedding.width == 0
    narrow = derive("opt", **opt, word_embed_proj_dim=24)
    assert narrow.embedding.width == 24
    assert {"project_in", "project_out"} <= set(narrow.tensors)
    assert derive("gptj", **SIZES, n_positions=9, rotary_dim=12).position.rotary_dim == 0
    assert derive("gptj", **SIZES, n_positions=9, rotary_dim=None).position.rotary_dim == 0
    assert derive("gptj", **SIZES, n_positions=9, rotary_dim=4).position.rotary_dim == 4


def test_other_names_of_a_key() -> None:
    sizes = {"vocab_size": 64, "n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    assert derive("bloom", **sizes).sizes.hidden == 48
    assert derive("bloom", **sizes, seq_length=77).sizes.context == 77
    assert derive("bloom", **sizes, hidden_size=48).sizes.hidden == 48
    both = faults_of("bloom", **sizes, hidden_size=64)
    assert "n_embed = 48, hidden_size = 64 disagree; keep the right one" in both


def test_names_of_activations() -> None:
    assert derive("llama", **LLAMA, hidden_act="gelu").mlp.activation == "gelu"
    gemma = LLAMA | {"num_key_value_heads": 2}
    for name in ("gelu", "gelu_pytorch_tanh"):
        assert derive("gemma", **gemma, hidden_act=name).mlp.activation == "gelu_tanh"
    assert derive("gemma", **gemma, hidden_act="relu").mlp.activation == "relu"


def test_keys_inside_a_table() -> None:
    sizes = {"vocab_size": 64, "d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 9}
    assert derive("mpt", **sizes, attn_config={"clip_qkv": 6.0, "attn_pdrop": 0.5}).attention.clip == 6.0
    assert derive("mpt", **sizes).attention.clip == 0
    assert "attn_config.alibi = False, llmc knows: True" in faults_of("mpt", **sizes, attn_config={"alibi": False})
    assert "unknown keys 'attn_config.clip'" in faults_of("mpt", **sizes, attn_config={"clip": 6.0})
    assert "unknown keys 'attn_config'" in faults_of("mpt", **sizes, attn_config=[])


def test_cases() -> None:
    seven = derive("falcon", **SIZES)
    assert (seven.wiring.order, seven.attention.kv_heads) == ("shared", 1)
    forty = derive("falcon", **SIZES, new_decoder_architecture=True, num_kv_heads=2)
    assert (forty.wiring.order, forty.attention.kv_heads) == ("parallel", 2)
    assert forty.tensors["layers.{layer}.mlp_norm"] == "transformer.h.{layer}.ln_mlp.weight"
    eleven = derive("falcon", **SIZES, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)
    assert eleven.wiring.order == "shared"
    old = derive("falcon", **SIZES, multi_query=False, parallel_attn=False, num_kv_heads=2)
    assert (old.wiring.order, old.attention.kv_heads) == ("sequential", 4)
    assert derive("falcon", **SIZES, alibi=True).position.kind == "scaled_alibi"
    odd = faults_of("falcon", **SIZES, new_decoder_architecture=True, parallel_attn=False)
    assert "new_decoder_architecture = True, parallel_attn = False: llmc knows no such Falcon" in odd
    assert "num_ln_in_parallel_attn = 3, llmc knows: null, 1, 2" in faults_of(
        "falcon", **SIZES, num_ln_in_parallel_attn=3
    )


def test_cases_of_absent_keys() -> None:
    """The generations and sizes of Baichuan: what tells them apart, and that nothing else is taken for one of them."""
    sizes = {**LLAMA, "vocab_size": 64000}
    first = derive("baichuan", **sizes)
    assert (first.position.kind, first.tensors["head"], first.sizes.context) == ("rope", "lm_head.weight", 128)
    second = derive("baichuan", **{**sizes, "vocab_size": 125696})
    assert (second.position.kind, second.tensors["head"]) == ("rope", "lm_head.weight | normalized")
    del sizes["max_position_embeddings"]
    assert derive("baichuan", **sizes).position.kind == "alibi"
    assert derive("baichuan", **sizes).sizes.context == 4096
    assert derive("baichuan", **sizes, model_max_length=77).sizes.context == 77
    assert "vocab_size = 64, llmc knows: 64000, 125696" in faults_of("baichuan", **LLAMA)
    assert "tie_word_embeddings = True, llmc knows: False" in faults_of("baichuan", **sizes, tie_word_embeddings=True)


def test_files_of_a_base_model(tiny_model: Tiny, tmp_path: Path) -> None:
    """As the first GPT-2 was saved: names without the stem, and with masks."""
    import numpy as np

    folder = Path(shutil.copytree(tiny_model("gpt2", tie_word_embeddings=True), tmp_path / "model"))
    path = folder / "model.safetensors"
    weights = {name.removeprefix("transformer."): values for name, values in load_file(path).items()}
    weights["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    path.unlink()
    save_file(weights, path)
    with open_model(folder) as source:
        assert source.spec.tensors["embedding"] == "wte.weight"
        np.testing.assert_array_equal(source.tensors["positions"].read(), weights["wpe.weight"])
    resave(folder, **{"h.0.attn.odd": np.ones(3, np.float32)})
    assert "not read by any block h.0.attn.odd" in refusal(folder)


def test_a_head_saved_though_it_is_tied(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("gpt_neox", tie_word_embeddings=True), tmp_path / "model"))
    embedding = load_file(folder / "model.safetensors")["gpt_neox.embed_in.weight"]
    resave(folder, **{"embed_out.weight": embedding})
    with open_model(folder) as source:
        assert "head" not in source.tensors
    edit(folder / "config.json", tie_word_embeddings=False)
    with open_model(folder) as source:
        assert source.tensors["head"].name == "embed_out.weight"


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from((10**400, 2**64, -1, 0.0, 0.5, 1.0, 1e-300, 1e300, math.inf)),
    st.floats(0, 1e4),
    st.sampled_from(("", "silu", "yarn", "longrope", "llama3", "full_attention", "linear", "x" * 300, "null")),
)
ROPE = st.dictionaries(
    st.sampled_from(
        (
            "rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", "low_freq_factor", "high_freq_factor",
            "beta_fast", "mscale", "mscale_all_dim", "attention_factor", "original_max_position_embeddings",
            "short_factor", "long_factor", "full_attention", "sliding_attention", "truncate",
        )
    ),
    SCALARS | st.lists(SCALARS, max_size=4) | st.just({"rope_type": "yarn", "factor": 2.0}),
)  # fmt: skip
VALUES = SCALARS | ROPE | st.lists(SCALARS, max_size=4) | st.just([[["global", "local"], 2]])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_config_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever the keys of a family hold: a spec, or an LlmcError of one line."""
    model_type = data.draw(st.sampled_from(known_families()))
    family = load_family(model_type)
    meant = [*family.numbers, *family.flags, *family.values, *position_keys(family), *family.aliases]
    # Sound numbers to begin with, so that what comes after them is reached too.
    config: dict[str, Any] = {key: 4 for key, number in family.numbers.items() if number.absent is None}
    for key, value in data.draw(st.dictionaries(st.sampled_from(meant), VALUES, max_size=5)).items():
        table, _, name = key.rpartition(".")
        if table:
            config.setdefault(table, {})[name] = value
        else:
            config[key] = value
    said = ""
    try:
        derive_spec({"model_type": model_type, **config}, {}, "x", None)
    except LlmcError as error:
        said = str(error)
    assert "\n" not in said


def test_the_page_is_up_to_date(script: Callable[[str], ModuleType]) -> None:
    maker = script("docs/make_families_page.py")
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run: python docs/make_families_page.py"
