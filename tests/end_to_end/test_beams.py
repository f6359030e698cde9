"""Beam search through the engine: the answers of transformers' num_beams, on compiled models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.compiler.driver import compile_model

sys.path.insert(0, str(Path(__file__).parent))
from reference import saved_reference
from tiny_translator import save_translator
from translator_cases import TRANSLATORS
from translator_check import twin_of

ENDS = [2, *range(200, 230)]  # many, so that answers end
WISHES: list[dict[str, Any]] = [
    {"beams": 4, "max_tokens": 12},
    {"beams": 3, "max_tokens": 20, "length_penalty": 2.0, "early_stopping": "yes", "repetition_penalty": 1.3},
    {"beams": 3, "max_tokens": 9, "early_stopping": "never", "min_tokens": 5},
]


def expected(twin: Any, ids: list[int], lead: int, wishes: dict[str, Any]) -> list[list[int]]:
    """Answers of transformers, best first, each to its end. lead: tokens of its output that are no answer."""
    stopping = {"no": False, "yes": True, "never": "never"}[wishes.get("early_stopping", "no")]
    twin.generation_config.forced_eos_token_id = None
    forced = 0 if twin.generation_config.forced_bos_token_id is None else 1
    found = twin.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        num_beams=wishes["beams"], num_return_sequences=wishes["beams"], early_stopping=stopping,
        max_new_tokens=wishes["max_tokens"] + forced, min_new_tokens=wishes.get("min_tokens", 0) + forced or None,
        length_penalty=wishes.get("length_penalty", 1.0), repetition_penalty=wishes.get("repetition_penalty", 1.0),
        no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, use_cache=False,
    ).tolist()  # fmt: skip
    ends = twin.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    answers = [each[lead:] for each in found]
    return [a[: next((i + 1 for i, id_ in enumerate(a) if id_ in ends), len(a))] for a in answers]


def test_a_decoder(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_llama(eos_token_id=ENDS)
    twin = saved_reference(folder)
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32")
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 200, count).tolist() for count in (3, 20)]
    with llmc.load(tmp_path / "tiny.llmc") as model:
        ended = 0
        for wishes in WISHES:
            wanted = [expected(twin, prompt, len(prompt), wishes) for prompt in prompts]
            batch = model.generate_batch(prompts, n=wishes["beams"], **wishes)
            assert [[each.ids, *(other.ids for other in each.others)] for each in batch] == wanted
            ended += sum(each.finish_reason == "stop" for each in batch)
            assert model.generate(prompts[1], **wishes).ids == wanted[1][0]
        assert ended
        model.engine.forget_prefixes()
        assert model.runner.pool.free_pages == model.runner.pool.num_pages


@pytest.mark.parametrize("case", ["T5", "M2M100, NLLB"])
def test_an_encoder_decoder(case: str, tmp_path: Path) -> None:
    """The second begins its answers with a language, which counts in their length."""
    model_type, config = TRANSLATORS[case]
    languages = ("__en__", "__fr__") if case != "T5" else ()
    save_translator(tmp_path, model_type, config, seed=4, languages=languages)
    twin = twin_of(tmp_path)
    compile_model(tmp_path, tmp_path / "tiny.llmc", quant="f32")
    with llmc.load(tmp_path / "tiny.llmc") as model:
        direction = ("en", "fr") if languages else ()
        for wishes in WISHES[1:]:
            made = model.translate(["one two"], *direction, n=wishes["beams"], **wishes)[0]
            if languages:
                ids = [model.manifest["languages"][language] for language in direction]
                twin.generation_config.forced_bos_token_id = ids[1]
            wanted = expected(twin, made.prompt_ids, 2 if languages else 1, wishes)
            assert [made.ids, *(other.ids for other in made.others)] == wanted
