"""The step in parts: rows that come through the layers part by part have the bits of the whole step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.runtime.errors import RequestError
from llmc.runtime.parts import Passage
from llmc.runtime.runner import Feed

sys.path.insert(0, str(Path(__file__).parent))
from family_cases import CASES

pytestmark = pytest.mark.usefixtures("plain_code")

# Family -> format of its weights; others are in test_oracle.py.
MODELS = {"GPT-2": "f32", "OLMoE": "q4"}
LAYERS = {"num_hidden_layers": 3}


@pytest.mark.thorough_if(case=lambda family: family == "OLMoE")
@pytest.mark.parametrize("family", MODELS)
def test_rows_that_pass_by_parts_have_the_bits_of_the_whole_step(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, config = CASES[family]
    folder = tiny_model(model_type, **{**config, **LAYERS})
    compile_model(folder, tmp_path / "tiny.llmc", quant=MODELS[family], layer_groups=3)
    ids = np.random.default_rng(0).integers(3, 300, 70).tolist()
    with llmc.load(tmp_path / "tiny.llmc", prefill="layered") as model:
        runner = model.runner
        whole, answer, twin, long = (runner.new_sequence() for _ in range(4))
        wanted = runner.step([Feed(whole, ids, "all")]).logits.copy()
        runner.step([(answer, ids[:5]), (twin, ids[:5])])
        passage = Passage(len(ids), 3)
        for number in range(3):
            feeds = [Feed(answer, [number + 9]), Feed(long, ids, "all" if number == 2 else "none", passage, 1)]
            beside = runner.step([Feed(twin, [number + 9])]).logits.copy()
            found = runner.step(feeds).logits
            np.testing.assert_array_equal(found[:1], beside)
        np.testing.assert_array_equal(found[1:], wanted)
        np.testing.assert_array_equal(runner.step([(long, [9])]).logits, runner.step([(whole, [9])]).logits)


@pytest.mark.thorough
def test_parts_share_all_weights_with_the_step(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_llama(num_hidden_layers=3, tie_word_embeddings=True)
    plain, cut = tmp_path / "plain.llmc", tmp_path / "cut.llmc"
    compile_model(folder, plain, quant="q4")
    compile_model(folder, cut, quant="q4", layer_groups=2)
    facts = [json.loads((path / "manifest.json").read_text()) for path in (plain, cut)]
    assert [sorted(fact["weights"]["order"]) for fact in facts] == [sorted(facts[0]["weights"]["order"])] * 2
    assert [fact["parts"] for fact in facts] == [[], [1, 2]]
    assert {*facts[1]["functions"]} - {*facts[0]["functions"]} == {"embed", "part_0", "part_1", "head"}
    with pytest.raises(RequestError, match="--layer-groups"):
        llmc.load(plain, prefill="layered")


@pytest.mark.parametrize("groups", [-1, 0, 1, 3])
def test_groups_that_cannot_be_are_refused(groups: int, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=rf"--layer-groups {groups}: wanted 2\.\.2, as this model has 2 layers"):
        compile_model(tiny_llama(), tmp_path / "tiny.llmc", layer_groups=groups)
    assert not (tmp_path / "tiny.llmc").exists()


def test_a_model_that_goes_on_with_no_text_has_no_groups(tiny_translator: Path, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match="--layer-groups: only for a model that reads a prompt"):
        compile_model(tiny_translator, tmp_path / "tiny.llmc", layer_groups=2)
