"""Hugging Face folders: what open_model makes of them, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, processors

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import Window, from_toml, to_toml
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parent))
from folders import edit, refusal, resave

Tiny = Callable[..., Path]


@pytest.fixture
def folder(tiny_llama: Tiny, tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_llama(), tmp_path / "model"))


@pytest.fixture
def sharded(tiny_llama: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama(shards=3), tmp_path / "sharded"))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {
            "hidden_size": 72,
            "head_dim": 80,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
)
def test_every_weight_of_transformers_is_read(tiny_llama: Tiny, config: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM

    folder = tiny_llama(**config)
    weights = LlamaForCausalLM.from_pretrained(folder).state_dict()
    with open_model(folder) as source:
        spec = source.spec
        assert spec.position.layout == "half"
        assert spec.position.theta == config.get("rope_parameters", {}).get("rope_theta", 10000.0)
        assert spec.head.tied == config.get("tie_word_embeddings", False)
        assert spec.attention.output_bias == config.get("attention_bias", False)
        assert spec.mlp.bias == config.get("mlp_bias", False)
        assert spec.attention.head_dim == config.get("head_dim", 16)
        assert spec.attention.scale == spec.attention.head_dim**-0.5
        assert from_toml(to_toml(spec)) == spec
        tied = {"lm_head.weight"} if spec.head.tied else set()
        assert {tensor.name for tensor in source.tensors.values()} == set(weights) - tied
        for tensor in source.tensors.values():
            np.testing.assert_array_equal(tensor.read(), weights[tensor.name].numpy())


def test_shards_are_one_model(tiny_llama: Tiny) -> None:
    with open_model(tiny_llama()) as one, open_model(tiny_llama(shards=3)) as many:
        assert many.spec.sizes == one.spec.sizes
        assert len({tensor.file.name for tensor in many.tensors.values()}) > 1
        for name, tensor in one.tensors.items():
            np.testing.assert_array_equal(many.tensors[name].read(), tensor.read())


def test_text_side(folder: Path) -> None:
    with open_model(folder) as source:
        own = json.loads((folder / "tokenizer.json").read_bytes())
        own["model"]["merges"] = [" ".join(merge) for merge in own["model"]["merges"]]
        assert json.loads(source.tokenizer_json) == own
        assert source.chat_template is not None
        assert "<|im_start|>" in source.chat_template
        assert source.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
        assert source.generation == {}
        assert (source.spec.tokens.bos, source.spec.tokens.eos) == (1, (2,))
        assert not source.spec.tokens.add_bos
    (folder / "chat_template.jinja").write_text("from the file")
    with open_model(folder) as source:
        assert source.chat_template == "from the file"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    with open_model(folder) as source:
        assert source.chat_template == "D"
    for absent in (..., [], [{"name": ["default"]}], [3]):
        edit(folder / "tokenizer_config.json", chat_template=absent)
        with open_model(folder) as source:
            assert source.chat_template is None


def test_generation_config(folder: Path) -> None:
    path = folder / "generation_config.json"
    edit(path, eos_token_id=[4, 2], do_sample=True, temperature=0.6, top_k=20, top_p=0.9)
    with open_model(folder) as source:
        assert source.spec.tokens.eos == (4, 2)
        assert source.generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    edit(path, do_sample=False)
    with open_model(folder) as source:
        assert source.generation == {}
    for bad in (-1, 10**400, 1e300, True, [1]):
        edit(path, do_sample=True, temperature=bad)
        assert "temperature = " in refusal(folder)
    edit(path, temperature="hot")
    assert "temperature = 'hot'" in refusal(folder)


def test_a_tokenizer_that_adds_bos(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    start, end = ("<s>", 1), ("</s>", 2)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [start])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(path))
    with open_model(folder) as source:
        assert source.spec.tokens.add_bos
        clean = Tokenizer.from_buffer(source.tokenizer_json)
        assert clean.truncation is None
        assert len(clean.encode("one two three four five six seven").ids) > 5
    edit(folder / "config.json", bos_token_id=3)
    assert "bos_token_id = 3, but tokenizer.json starts a text with id 1" in refusal(folder)
    edit(folder / "config.json", bos_token_id=None)
    edit(folder / "generation_config.json", bos_token_id=...)
    with open_model(folder) as source:
        assert source.spec.tokens.bos == 1
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [start, end])
    tokenizer.save(str(path))
    assert "adds ids round a text" in refusal(folder)


THETA = {"rope_type": "default", "rope_theta": 10000.0}
BAD_CONFIG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "negative": ({"hidden_size": -64}, ["hidden_size = -64, wanted a whole number from 1"]),
    "zero": ({"num_hidden_layers": 0}, ["num_hidden_layers = 0"]),
    "huge": ({"num_hidden_layers": 10**9}, ["num_hidden_layers = 1000000000"]),
    "astronomic": ({"vocab_size": 10**400}, ["vocab_size = "]),
    "boolean": ({"hidden_size": True}, ["hidden_size = True"]),
    "float": ({"hidden_size": 64.0}, ["hidden_size = 64.0"]),
    "text": ({"hidden_size": "64"}, ["hidden_size = '64'"]),
    "null": ({"hidden_size": None}, ["hidden_size = None"]),
    "list": ({"hidden_size": [64]}, ["hidden_size = [64]"]),
    "missing": ({"hidden_size": ..., "vocab_size": ...}, ["key hidden_size", "key vocab_size"]),
    "eps": ({"rms_norm_eps": 0}, ["rms_norm_eps = 0"]),
    "eps huge": ({"rms_norm_eps": 1e300}, ["rms_norm_eps = 1e+300"]),
    "heads": ({"num_attention_heads": 3, "head_dim": 16}, ["no multiple of num_key_value_heads"]),
    "head size": ({"num_attention_heads": 6, "head_dim": None}, ["and head_dim is not given"]),
    "odd": ({"head_dim": 15}, ["head_dim = 15, wanted an even number"]),
    "activation": ({"hidden_act": "xielu"}, ["hidden_act = 'xielu', llmc knows: 'silu'"]),
    "flag": ({"attention_bias": "yes"}, ["attention_bias = 'yes', wanted true or false"]),
    "code": ({"auto_map": {"AutoModel": "x.Y"}}, ["auto_map is set: the model runs its own"]),
    "quantized": ({"quantization_config": {"bits": 4}}, ["quantization_config.quant_method is None"]),
    "family": ({"model_type": "mamba"}, ["model_type is 'mamba'", "llmc knows: ", " llama, "]),
    "family a list": ({"model_type": []}, ["model_type is []"]),
    "no family": ({"model_type": ...}, ["model_type is None"]),
    "unknown": (
        {"hiden_size": 1, "logit_softcap": 30, "no\n\x1b[2Jpe": 0},
        ["'hiden_size' (near: hidden_size)", "'logit_softcap'", r"'no\n\x1b[2Jpe'"],
    ),
    "rope kind": (
        {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}},
        ["rope_parameters is", "'ntk'", "'default', 'linear', "],
    ),
    "old rope kind": ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ["'ntk'"]),
    "linear factor": ({"rope_parameters": THETA | {"rope_type": "linear"}}, ["rope_parameters.factor = None"]),
    "linear 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor = 0, wanted"]),
    "factors": (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        ["rope_parameters.factor = 1.0, rope_scaling.factor = 2 disagree"],
    ),
    "softcap": ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping is set: llmc has no softcapping"]),
    "k is v": ({"attention_k_eq_v": True}, ["attention_k_eq_v is set"]),
    "window": ({"sliding_window": 8}, ["unknown keys 'sliding_window'"]),
    "no type": ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling is"]),
    "factor": ({"rope_parameters": THETA | {"factor": 2.0}}, ["unknown keys 'factor'"]),
    "partial": ({"rope_parameters": THETA | {"partial_rotary_factor": 0.5}}, ["= 0.5, wanted 1"]),
    "rope a list": ({"rope_scaling": [1]}, ["rope_scaling = [1]"]),
    "disagree": (
        {"rope_theta": 500000.0, "rope_parameters": THETA},
        ["rope_parameters.rope_theta = 10000.0, rope_theta = 500000.0 disagree"],
    ),
    "theta": ({"rope_parameters": THETA | {"rope_theta": -1}}, ["rope_theta = -1"]),
    "theta text": ({"rope_theta": "1e4", "rope_parameters": None}, ["rope_theta = '1e4'"]),
    "eos": ({"eos_token_id": [2, 320]}, ["eos_token_id = 320, wanted a token id"]),
    "eos negative": ({"eos_token_id": -1}, ["eos_token_id = -1"]),
    "eos text": ({"eos_token_id": ["</s>"]}, ["eos_token_id = '</s>'"]),
    "eos many": ({"eos_token_id": [2] * 10**5}, ["eos_token_id has 100000 ids"]),
    "bos": ({"bos_token_id": True}, ["bos_token_id = True"]),
    "several": ({"hidden_size": 0, "vocab_size": -1, "x": 1}, ["hidden_size = 0", "= -1", "'x'"]),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config(folder: Path, case: str) -> None:
    changes, messages = BAD_CONFIG[case]
    edit(folder / "config.json", **changes)
    message = refusal(folder)
    assert message.startswith("config.json: ")
    for wanted in messages:
        assert wanted in message


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a":1,"a":2}', '{"hidden_size": NaN}', "\ufeff{}", '{"a":"\\ud800"}', '{"\\uDfff":1}']
)
def test_config_that_is_not_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert refusal(folder).startswith("config.json: ")


def test_old_and_new_ways_to_write_theta(folder: Path) -> None:
    path = folder / "config.json"
    for changes in (
        {"rope_parameters": ..., "rope_theta": 5e5},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": THETA | {"rope_theta": 5e5}, "rope_theta": 500000},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": ...},
    ):
        edit(path, **{"rope_scaling": ..., **changes})
        with open_model(folder) as source:
            assert source.spec.position.theta == 5e5


def test_linear_scaling_of_rope(folder: Path) -> None:
    for changes in (
        {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 4.0}},
    ):
        edit(folder / "config.json", **changes)
        with open_model(folder) as source:
            assert source.spec.position.factor == 4.0
            assert source.spec.position.theta == 10000.0


def test_mistral_is_a_row_of_the_table(folder: Path) -> None:
    remove = dict.fromkeys(("attention_bias", "mlp_bias"), ...)
    path = folder / "config.json"
    edit(path, model_type="mistral", sliding_window=None, **remove)
    with open_model(folder) as source:
        assert source.spec.attention.kv_heads == 2
        assert source.spec.window is None
    for size, wanted in ((8, 8), (..., 4096)):  # absent means transformers' default
        edit(path, sliding_window=size)
        with open_model(folder) as source:
            assert source.spec.window == Window(size=wanted, layers=(0, 1), theta=10000.0)
    edit(path, sliding_window="8")
    assert "sliding_window = '8', wanted a whole number" in refusal(folder)


def test_a_given_spec_replaces_config(folder: Path) -> None:
    with open_model(folder) as source:
        spec = source.spec
    edit(folder / "config.json", model_type="nosuch")
    with open_model(folder, spec) as source:
        assert source.spec == spec


def test_tensors_that_do_not_fit(folder: Path) -> None:
    q = "model.layers.{}.self_attn.q_proj.weight"
    resave(folder, **{q.format(0): ..., q.format(1): ..., "extra": np.ones(3, np.float32)})
    message = refusal(folder)
    assert "missing model.layers.{0-1}.self_attn.q_proj.weight" in message
    assert "not read by any block extra" in message


def test_saved_copies_that_mean_nothing(tiny_llama: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama(tie_word_embeddings=True), tmp_path / "model"))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    resave(folder, **{"lm_head.weight": embedding, inv_freq: np.ones(8, np.float32)})
    with open_model(folder) as source:
        assert "head" not in source.tensors
    resave(folder, **{"lm_head.weight": embedding + 1})
    assert "not read by any block lm_head.weight" in refusal(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_links_that_leave_the_folder(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    assert f"{name}: a link that leaves the folder" in refusal(folder)


def test_links_of_the_hugging_face_cache(folder: Path) -> None:
    home = folder.parent / "models--x"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots" / "0123").mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(home / "blobs" / str(number))
        (home / "snapshots" / "0123" / path.name).symlink_to(f"../../blobs/{number}")
    with open_model(home / "snapshots" / "0123") as source:
        assert source.tensors["final_norm"].read().shape == (64,)


BAD_PLACES = ["../outside", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "x\0y", "c:x", "a\nb", "1" * 5000]


@pytest.mark.parametrize("place", BAD_PLACES)
def test_shard_names_that_leave_the_folder(sharded: Path, place: str) -> None:
    index = sharded / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=places | {"model.norm.weight": place})
    assert "wanted a plain name in the folder" in refusal(sharded)


def test_shards_that_do_not_fit(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    first, last = places["model.embed_tokens.weight"], places["model.norm.weight"]
    assert first != last
    edit(index, weight_map=places | {"model.norm.weight": first})
    assert f"'model.norm.weight' is in {last}, not in '{first}'" in refusal(sharded)
    edit(index, weight_map=places | {"ghost": first})
    assert "'ghost' is in no shard" in refusal(sharded)
    edit(index, weight_map=[1])
    assert "weight_map is [1]" in refusal(sharded)
    edit(index, weight_map=places)
    outside = sharded.parent / "outside"
    (sharded / last).rename(outside)
    assert "are not in the folder; fetch them" in refusal(sharded)
    (sharded / last).symlink_to(outside)
    assert "a link that leaves the folder" in refusal(sharded)
    (sharded / last).unlink()
    (sharded / last).symlink_to(last)
    assert last in refusal(sharded)
    (sharded / "model.safetensors").write_bytes(b"")
    assert "remove the stale one" in refusal(sharded)


def test_tokenizers_that_do_not_fit(folder: Path) -> None:
    path = folder / "tokenizer.json"
    whole = path.read_text()
    table = json.loads(whole)
    extra = {**table["added_tokens"][0], "content": "<big>", "id": 5000}
    path.write_text(json.dumps(table | {"added_tokens": [*table["added_tokens"], extra]}))
    assert "added token '<big>' has id 5000, but the tokenizer gives it" in refusal(folder)
    model = table["model"] | {"vocab": table["model"]["vocab"] | {"big": 5000}}
    path.write_text(json.dumps(table | {"model": model}))
    assert "beyond the model's vocabulary of 320, first 'big' = 5000" in refusal(folder)
    path.write_text(json.dumps(table | {"added_tokens": table["added_tokens"] * 2}))
    assert "two entries with the same content" in refusal(folder)
    path.write_text(json.dumps(table | {"model": {"type": "nosuch"}}))
    assert "tokenizer.json: not a tokenizer" in refusal(folder)
    model = table["model"] | {"merges": [["a", "<" * 99]]}  # longer than any token
    path.write_text(json.dumps(table | {"model": model}))
    assert "does not make a token of the vocabulary" in refusal(folder)
    model = table["model"] | {"continuing_subword_prefix": "\u00e9"}  # the library would cut merges inside a letter
    path.write_text(json.dumps(table | {"model": model}))
    assert "does not begin with the model's continuing_subword_prefix 'é'" in refusal(folder)
    path.write_text(whole[: len(whole) // 2])
    assert "tokenizer.json: not valid JSON" in refusal(folder)
    path.write_text(whole)
    edit(folder / "tokenizer_config.json", bos_token={"content": "<nosuch>"})
    assert "bos_token is '<nosuch>', which is not in the tokenizer" in refusal(folder)
    edit(
        folder / "tokenizer_config.json",
        bos_token="<s>",
        added_tokens_decoder={"7": {"content": "<s>"}},
    )
    assert "added token '7' is '<s>', but not so in tokenizer.json" in refusal(folder)
    edit(folder / "tokenizer_config.json", added_tokens_decoder=..., chat_template=5)
    assert "chat_template is 5" in refusal(folder)


def test_weights_in_other_formats_are_named(folder: Path) -> None:
    weights = (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(SourceError, match="bin or model.onnx, .*; convert other weights"):
        open_model(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model.bin: .*, wanted a pickle of protocol 2 to 5"):
        open_model(folder)
