"""Encoder-decoders in GGUF files, written as llama.cpp's converter does: what transformers computes, and generates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import llmc
from llmc.compiler.driver import compile_model

sys.path.insert(0, str(Path(__file__).parent))
from gguf_cases import TRANSLATORS
from t5_to_gguf import PIECES, write_t5
from tiny_translator import save_translator
from translator_cases import T5
from translator_check import check_translator, twin_of

pytestmark = pytest.mark.usefixtures("plain_code")


@pytest.mark.parametrize("case", TRANSLATORS)
def test_translator(case: str, tmp_path: Path) -> None:
    _, model_type, config = TRANSLATORS[case]
    save_translator(tmp_path, model_type, {**T5, "relative_attention_max_distance": 128, **config}, seed=len(case))
    write_t5(tmp_path, tmp_path / "tiny.gguf")
    compile_model(tmp_path / "tiny.gguf", tmp_path / "tiny.llmc", quant="f32")
    check_translator(tmp_path / "tiny.llmc", twin_of(tmp_path), len(case))
    with llmc.load(tmp_path / "tiny.llmc") as model:
        source = [*model.encode("the house"), 2]
        assert [PIECES[id_] for id_ in source] == ["\u2581the", "\u2581", "house", "</s>"]
        made = model.translate(["the house"], max_tokens=8, ignore_eos=True)
        assert made[0].ids == model.generate(source, max_tokens=8, ignore_eos=True).ids
