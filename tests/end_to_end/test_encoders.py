"""Encoders: vectors and masked words are those of transformers, and a real embedding model finds what it should."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

import llmc
from llmc.cli import command
from llmc.compiler.driver import check, compile_model
from llmc.compiler.errors import SourceError
from llmc.frontends.source import open_model
from llmc.runtime.errors import RequestError
from llmc.runtime.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from encoder_cases import ENCODERS

WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "aeiourst")]
TEXTS = ["a cat", "the dog is a big dog", "x", "rats rats rats and cats, stirred", "a cat"]

# A small search task: the text that answers each question is the one at the same place.
QUESTIONS = [
    "How do I bake bread?",
    "What is the capital of France?",
    "Why is the sky blue?",
    "How can I fix a flat bicycle tyre?",
    "Who wrote Pride and Prejudice?",
    "How many legs does a spider have?",
]
ANSWERS = [
    "Mix flour, water, salt and yeast, let the dough rise, and put it in a hot oven for forty minutes.",
    "Paris has been the seat of the French government for centuries.",
    "Air scatters short wavelengths of sunlight more than long ones, a law that Rayleigh found.",
    "Take the wheel off, pull out the inner tube, find the hole and glue a patch on it.",
    "Jane Austen's novel about Elizabeth Bennet and Mr Darcy appeared in 1813.",
    "Arachnids walk on eight of them, unlike insects.",
]


def _tokenizer() -> bytes:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(WORDS[:5])
    return tokenizer.to_str().encode()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Path]:
    """A function `(name, auto class) -> folder` of a random encoder."""

    def folder(name: str, kind: Any) -> Path:
        model_type, config = ENCODERS[name]
        path = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(0)
        model = kind.from_config(AutoConfig.for_model(model_type, vocab_size=len(WORDS), **config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(path)
        (path / "tokenizer.json").write_bytes(_tokenizer())
        (path / "special_tokens_map.json").write_text(json.dumps({"mask_token": "[MASK]"}))
        (path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
        return path

    return folder


def _compiled(folder: Path, quant: str = "f32") -> Model:
    return llmc.load(compile_model(folder, folder.parent / f"{folder.name}-{quant}.llmc", quant=quant).path)


def _rows(folder: Path, kind: Any, ids: list[int]) -> np.ndarray:
    """(n, C) hidden states or (n, V) logits of transformers."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.tensor([ids]))
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0].numpy()


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors(name: str, encoder: Callable[[str, Any], Path]) -> None:
    folder = encoder(name, AutoModel)
    with _compiled(folder) as model:
        vectors = model.embed(TEXTS)
        ids = [[*model.encode(text), 3] for text in TEXTS]
        alone = np.stack([model.embed([text])[0] for text in TEXTS])
    expected = np.stack([_rows(folder, AutoModel, each).mean(0) for each in ids])
    np.testing.assert_allclose(vectors, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(vectors, alone, atol=1e-5 * np.abs(expected).max())
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    np.testing.assert_array_equal(vectors[0], vectors[4])


@pytest.mark.parametrize("name", ENCODERS)
def test_masks(name: str, encoder: Callable[[str, Any], Path]) -> None:
    folder = encoder(name, AutoModelForMaskedLM)
    with _compiled(folder) as model:
        found = model.fill("a [MASK] is [MASK] big", top=len(WORDS))
        ids = [*model.encode("a [MASK] is [MASK] big"), 3]
        with pytest.raises(RequestError, match="no \\[MASK\\]"):
            model.fill("a cat")
        with pytest.raises(RequestError, match="cannot embed: it was compiled to fill"):
            model.embed(["a"])
    logits = torch.tensor(_rows(folder, AutoModelForMaskedLM, ids)).softmax(-1).numpy()
    places = [place for place, id_ in enumerate(ids) if id_ == 4]
    assert len(found) == len(places) == 2
    for guesses, place in zip(found, places, strict=True):
        np.testing.assert_allclose([g.probability for g in guesses], np.sort(logits[place])[::-1], atol=1e-5)
        assert [g.id for g in guesses][:3] == (-logits[place]).argsort(kind="stable")[:3].tolist()
        assert guesses[0].token == WORDS[guesses[0].id]


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForMaskedLM])
def test_a_check_reads_a_text_at_once(
    kind: Any, encoder: Callable[[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of a token depends on those behind it, however few rows a causal model is compared in."""
    monkeypatch.setattr(check, "ROWS", 8)
    loss = compile_model(encoder("BERT", kind), tmp_path / "a.llmc", quant="f32", check=True).loss
    assert loss is not None
    assert loss.tokens > 2 * check.ROWS
    lost = loss.kl if loss.cosine is None else 1 - loss.cosine
    assert lost is not None
    assert abs(lost) < 1e-6


def test_older_names_of_norms(encoder: Callable[[str, Any], Path]) -> None:
    """As multilingual BERT was saved: gamma and beta, and what its other tasks read."""
    folder = encoder("BERT", AutoModelForMaskedLM)
    with _compiled(folder) as model:
        expected = model.fill("a [MASK] is big", top=len(WORDS))
    path = folder / "model.safetensors"
    weights = {
        re.sub("LayerNorm.weight$", "LayerNorm.gamma", re.sub("LayerNorm.bias$", "LayerNorm.beta", name)): values
        for name, values in load_file(path).items()
    }
    assert sum(name.endswith("LayerNorm.gamma") for name in weights) == 6
    others = {"bert.pooler.dense": (32, 32), "cls.seq_relationship": (2, 32)}
    for name, shape in others.items():
        weights |= {f"{name}.weight": np.ones(shape, np.float32), f"{name}.bias": np.ones(shape[0], np.float32)}
    path.unlink()
    save_file(weights, path)
    config = json.loads((folder / "config.json").read_text())
    pooler = {"pooler_fc_size": 768, "pooler_type": "first_token_transform", "directionality": "bidi"}
    (folder / "config.json").write_text(json.dumps(config | pooler))
    with _compiled(folder) as model:
        assert model.fill("a [MASK] is big", top=len(WORDS)) == expected
    with open_model(folder) as source:
        assert source.spec.tensors["head_norm_bias"] == "cls.predictions.transform.LayerNorm.beta"


def test_what_an_encoder_is_not_for(encoder: Callable[[str, Any], Path]) -> None:
    with _compiled(encoder("BERT", AutoModel)) as model:
        for call in (lambda: model.generate("a"), lambda: model.evaluate("a cat " * 40)):
            with pytest.raises(RequestError, match="it was compiled to embed"):
                call()
        with pytest.raises(RequestError, match="text 2: it has 82 tokens, and the model reads 64"):
            model.embed(["a", "a " * 80])
        assert model.embed(["a", "a " * 80], truncate=True).shape == (2, 32)
        with pytest.raises(RequestError, match="at least one text"):
            model.embed([])
        many = model.embed(["a b c d"] * 600)
        np.testing.assert_allclose(many, np.repeat(many[:1], 600, 0), atol=1e-5)


@pytest.mark.parametrize(
    ("modules", "mode", "message"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "llmc knows one of"),
        (["Transformer", "Pooling"], {}, "llmc knows one of"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "llmc knows Transformer, Pooling"),
        (["Transformer"], {"pooling_mode_cls_token": True}, "llmc knows Transformer, Pooling"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, None),
    ],
)
def test_poolings(
    modules: list[str], mode: dict[str, bool], message: str | None, encoder: Callable[[str, Any], Path]
) -> None:
    folder = encoder("BERT", AutoModel)
    table = [{"idx": i, "path": "1_Pooling", "type": f"x.{kind}"} for i, kind in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(table))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    if message is not None:
        with pytest.raises(SourceError, match=message):
            open_model(folder)
        return
    with _compiled(folder) as model:
        expected = _rows(folder, AutoModel, [*model.encode("a cat"), 3])[0]
        np.testing.assert_allclose(model.embed(["a cat"])[0], expected, atol=1e-4)


def test_the_longest_text(encoder: Callable[[str, Any], Path]) -> None:
    folder = encoder("BERT", AutoModel)
    modules = [{"path": "1_Pooling", "type": f"x.{kind}"} for kind in ("Transformer", "Pooling")]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    length = folder / "sentence_bert_config.json"
    for table, message in (
        ({"max_seq_length": 0}, "max_seq_length = 0, wanted"),
        ({"max_seq_length": "7"}, "max_seq_length = '7', wanted"),
        ({"max_seq_length": 7, "do_lower_case": True}, "do_lower_case is set"),
    ):
        length.write_text(json.dumps(table))
        with pytest.raises(SourceError, match=message):
            open_model(folder)
    for kept in (None, 64, 512):
        length.write_text(json.dumps({"max_seq_length": kept}))
        with open_model(folder) as source:
            assert source.spec.pooling is not None
            assert source.spec.pooling.tokens == 0
    length.write_text(json.dumps({"max_seq_length": 7, "do_lower_case": False}))
    with _compiled(folder) as model:
        with pytest.raises(RequestError, match="the model reads 7"):
            model.embed(["a cat and a dog and a rat"])
        cut = model.embed(["a cat and a dog and a rat"], truncate=True)[0]
        ids = [*model.encode("a cat and a dog and a rat")[:6], 3]
    expected = _rows(folder, AutoModel, ids).mean(0)
    np.testing.assert_allclose(cut, expected, atol=1e-4 * np.abs(expected).max())


NEAR = {"f32": (1e-4, 0.999999), "q8": (2e-2, 0.999)}  # quant -> how far numbers may be, and how near vectors have to


@pytest.fixture(scope="module")
def real(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real embedding model in f32 and a format: quant -> artifact."""
    folder = tmp_path_factory.mktemp("minilm")
    return {quant: compile_model(minilm, folder / f"{quant}.llmc", quant=quant).path for quant in NEAR}


def _reference(folder: Path, texts: list[str]) -> np.ndarray:
    """What sentence-transformers does with these files, by transformers: the mean of all tokens, length 1."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for text in texts:
        with torch.no_grad():
            rows = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(rows.mean(0), dim=0).numpy())
    return np.stack(vectors)


@pytest.mark.model
def test_a_real_embedding_model(minilm: Path, real: dict[str, Path]) -> None:
    expected = _reference(minilm, QUESTIONS + ANSWERS)
    ranks = (-expected[: len(QUESTIONS)] @ expected[len(QUESTIONS) :].T).argsort(1)
    assert ranks[:, 0].tolist() == list(range(len(QUESTIONS)))
    for quant, (tolerance, nearness) in NEAR.items():
        with llmc.load(real[quant]) as model:
            vectors = model.embed(QUESTIONS + ANSWERS)
        np.testing.assert_allclose(vectors, expected, atol=tolerance, err_msg=quant)
        assert (vectors * expected).sum(1).min() > nearness
        found = (-vectors[: len(QUESTIONS)] @ vectors[len(QUESTIONS) :].T).argsort(1)
        assert found[:, 0].tolist() == ranks[:, 0].tolist()
        if quant == "f32":
            np.testing.assert_array_equal(found, ranks)


@pytest.mark.model
def test_the_command(real: dict[str, Path], tmp_path: Path) -> None:
    run = CliRunner().invoke
    lines, output = tmp_path / "lines.txt", tmp_path / "v.npy"
    lines.write_text("\n".join(QUESTIONS) + "\n\n", encoding="utf-8")
    done = run(command, ["embed", str(real["f32"]), "--lines", str(lines), "-o", str(output), "--json"])
    assert done.exit_code == 0, done.output
    table = json.loads(done.stdout)
    np.testing.assert_array_equal(np.load(output), np.array(table["vectors"], np.float32))
    assert np.load(output).shape == (len(QUESTIONS), table["dimensions"])
    shown = run(command, ["embed", str(real["f32"]), "a cat", "a kitten", "a bus"]).stdout
    assert "a kitten" in shown
    assert "cosine to the first" in shown
    refused = run(command, ["run", str(real["f32"]), "hello"])
    assert refused.exit_code == 1
    assert "it was compiled to embed" in refused.stderr
    assert run(command, ["embed", str(real["f32"])]).exit_code == 2
