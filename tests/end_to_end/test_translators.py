"""Encoder-decoders, compiled from their folders with no spec: what transformers computes of them, and generates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

import llmc
from llmc.compiler.driver import compile_model
from llmc.frontends.hf.families import known_families, load_family
from llmc.runtime.engine import Feed
from llmc.runtime.errors import RequestError
from llmc.runtime.kv_cache import Sequence
from llmc.runtime.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from tiny_translator import save_translator
from translator_cases import TRANSLATORS, VOCAB

ANSWER = 32
TOLERANCE = 1e-4
SOURCES = [37, 5, 18]  # tokens


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function: case, and languages of the tokenizer -> the folder of its model."""

    def folder(case: str, **tokenizer: Any) -> Path:
        made = tmp_path_factory.mktemp("translator")
        model_type, config = TRANSLATORS[case]
        save_translator(made, model_type, config, seed=len(case), **tokenizer)
        return made

    return folder


def test_every_family_has_a_case() -> None:
    tested = {model_type for model_type, _ in TRANSLATORS.values()}
    assert sorted(tested) == [name for name in known_families() if load_family(name).encoder_layers]


@pytest.mark.parametrize("case", TRANSLATORS)
def test_family(case: str, translator: Callable[..., Path], tmp_path: Path) -> None:
    folder = translator(case)
    twin = _twin(folder)
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32")
    random = np.random.default_rng(len(case))
    sources = [[*random.integers(5, VOCAB, count - 1).tolist(), 2] for count in SOURCES]
    with llmc.load(tmp_path / "tiny.llmc") as model:
        answers = [_check(model, twin, source) for source in sources]
        batch = model.generate_batch(sources, max_tokens=ANSWER, ignore_eos=True)
        assert [answer.ids for answer in batch] == answers


def _twin(folder: Path) -> PreTrainedModel:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_languages_are_tokens(translator: Callable[..., Path], tmp_path: Path) -> None:
    """A source is framed by its language and an end, and its answer begins with the other language."""
    folder = translator("M2M100, NLLB", languages=("eng_Latn", "deu_Latn", "__fr__"))
    twin = _twin(folder)
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32")
    with llmc.load(tmp_path / "tiny.llmc") as model:
        assert model.manifest["languages"] == {"eng_Latn": 4, "deu_Latn": 5, "fr": 6}
        for source, target in (("eng_Latn", "deu_Latn"), ("fr", "eng_Latn")):
            ids = [model.manifest["languages"][language] for language in (source, target)]
            made = model.translate(["one two", "3"], source, target, max_tokens=12, ignore_eos=True)
            for text, answer in zip(("one two", "3"), made, strict=True):
                twin.generation_config.forced_bos_token_id = ids[1]
                expected = _generated(twin, [ids[0], *model.encode(text), 2])
                assert list(answer.ids) == expected[2:14]
        with pytest.raises(RequestError, match="wanted to be told|wants to be told"):
            model.translate(["one"])


def test_words_before_a_source(translator: Callable[..., Path], tmp_path: Path) -> None:
    folder = translator("T5")
    config = json.loads((folder / "config.json").read_text())
    tasks = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    (folder / "config.json").write_text(json.dumps({**config, "task_specific_params": tasks}))
    compile_model(folder, tmp_path / "tiny.llmc")  # as it is by default, quantized
    with llmc.load(tmp_path / "tiny.llmc") as model:
        asked = model.translate(["a house"], "en", "de", max_tokens=8)
        written = model.translate(["translate English to German: a house"], max_tokens=8)
        assert asked[0].ids == written[0].ids


def _check(model: Model, twin: PreTrainedModel, source: list[int]) -> Any:
    """One source's answer, after everything about it was found to be what the twin computes."""
    engine = model.engine
    made = model.generate(source, max_tokens=ANSWER, ignore_eos=True)
    expected = _generated(twin, source)
    lead = len(expected) - ANSWER
    assert list(made.ids) == expected[lead:]
    with torch.no_grad():
        output = twin(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([expected[:-1]]))
    read = engine.new_sequence()
    engine.encode([(read, source)])
    hidden = output.encoder_last_hidden_state[0].numpy()
    np.testing.assert_allclose(_encoded(model, read, source), hidden, atol=TOLERANCE, rtol=0)
    for chunk in (len(expected), 7, 1):
        answer = engine.new_sequence(read)
        parts = [expected[:-1][i : i + chunk] for i in range(0, len(expected) - 1, chunk)]
        rows = [engine.step([Feed(answer, part, "all")]).logits.copy() for part in parts]
        np.testing.assert_allclose(np.concatenate(rows), output.logits[0].numpy(), atol=TOLERANCE, rtol=0)
        engine.release(answer)
    engine.release(read)
    return made.ids


def _encoded(model: Model, read: Sequence, source: list[int]) -> np.ndarray:
    """(n, C): what the encoder gives for every token of a source that was read into these pages."""
    count, pages = len(source), len(read.pages)
    places = np.arange(count, dtype=np.int32)
    assert model.engine.encode_function is not None
    hidden, _ = model.engine.encode_function(
        np.array(source, np.int32), places, np.zeros(count, np.int32), places,
        np.array([0, pages], np.int32), np.array(read.pages, np.int32), places,
    )  # fmt: skip
    return np.array(hidden)


def _generated(twin: PreTrainedModel, source: list[int]) -> list[int]:
    """What transformers generates: the first token, those that are forced, then ANSWER of its own."""
    config = twin.generation_config
    forced = [] if config.forced_bos_token_id is None else [config.forced_bos_token_id]
    config.forced_eos_token_id = None
    count = len(forced) + ANSWER
    with torch.no_grad():
        ids = twin.generate(
            torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=count, min_new_tokens=count,
            eos_token_id=VOCAB + 1, encoder_no_repeat_ngram_size=0, no_repeat_ngram_size=0, use_cache=False,
        )  # fmt: skip
    made: list[int] = ids[0].tolist()
    assert made[1 : 1 + len(forced)] == forced
    return made
