"""Encoder-decoders, compiled from their folders with no spec: what transformers computes of them, and generates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.frontends.hf.families import known_families, load_family
from llmc.runtime.errors import RequestError

sys.path.insert(0, str(Path(__file__).parent))
from tiny_translator import save_translator
from translator_cases import TRANSLATORS
from translator_check import check_translator, generated, twin_of

pytestmark = pytest.mark.usefixtures("plain_code")


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
@pytest.mark.thorough_if(case=lambda case: case not in ("T5", "umT5", "BART", "M2M100, NLLB", "Marian", "Pegasus"))
def test_family(case: str, translator: Callable[..., Path], tmp_path: Path) -> None:
    folder = translator(case)
    twin = twin_of(folder)
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32")
    check_translator(tmp_path / "tiny.llmc", twin, len(case))


def test_languages_are_tokens(translator: Callable[..., Path], tmp_path: Path) -> None:
    """A source is framed by its language and an end, and its answer begins with the other language."""
    folder = translator("M2M100, NLLB", languages=("eng_Latn", "deu_Latn", "__fr__"))
    twin = twin_of(folder)
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32")
    with llmc.load(tmp_path / "tiny.llmc") as model:
        assert model.manifest["languages"] == {"eng_Latn": 4, "deu_Latn": 5, "fr": 6}
        for source, target in (("eng_Latn", "deu_Latn"), ("fr", "eng_Latn")):
            ids = [model.manifest["languages"][language] for language in (source, target)]
            made = model.translate(["one two", "3"], source, target, max_tokens=12, ignore_eos=True)
            for text, answer in zip(("one two", "3"), made, strict=True):
                twin.generation_config.forced_bos_token_id = ids[1]
                expected = generated(twin, [ids[0], *model.encode(text), 2])
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
