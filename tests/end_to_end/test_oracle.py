"""The oracle on compiled models: schedules as tests/runtime/test_oracle.py has them, every token as it is alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime import Engine, Model
from llmc.runtime.decoding.lookup import Lookup
from llmc.runtime.engine.learned import Odds

pytestmark = pytest.mark.usefixtures("plain_code")

SCHEDULES = 20
_WINDOWS = {"sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
# What is particular -> model_type, its config, format of weights, format of pages.
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "f32": ("llama", {}, "f32", "f32"),
    "q4, windows in one layer": ("gemma3_text", _WINDOWS, "q4", "q8"),
    "q8, convolutions": ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1]}, "q8", "bf16"),
}


@pytest.fixture(scope="module")
def schedules(script: Callable[[str], ModuleType]) -> ModuleType:
    """The module schedules.py."""
    return script("tests/runtime/schedules.py")


@pytest.fixture(scope="module", params=MODELS)
def artifact(request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: Any) -> str:
    """The artifact of one of MODELS."""
    model_type, config, quant, kv = MODELS[request.param]
    target = tmp_path_factory.mktemp("oracle") / "tiny.llmc"
    return str(compile_model(tiny_model(model_type, **config), target, quant=quant, kv=kv, layer_groups=2).path)


def engine_of(model: Model, schedules: ModuleType, **settings: Any) -> Engine:
    return Engine(model.runner, model.engine._intake.tokenizer, schedules.EOS, **settings)


def test_a_query_says_what_it_says_alone(artifact: str, schedules: ModuleType) -> None:
    preempted = finished = 0
    for number in range(SCHEDULES):
        with llmc.load(artifact, threads=1, cache_tokens=16 * 16, deterministic=True) as model:
            schedule = replace(schedules.draw(number, model.runner.endless), pages=16)
            model.runner.prefill_chunk = schedule.chunk
            preempted += schedules.play(schedule, engine_of(model, schedules, **schedule.settings))
            model.runner.prefill_chunk = 512
            alone = engine_of(model, schedules, keep_prefixes=False)
            finished += schedules.compare(schedule, alone, f"schedule {number}")
    assert finished > 3 * SCHEDULES
    assert preempted > SCHEDULES


def test_what_is_drafted_changes_nothing(artifact: str, schedules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are what queries say without them, but for some tokens."""
    monkeypatch.setattr(Odds, "of", lambda odds, agreed: 0.9)
    known: list[list[int]] = []
    monkeypatch.setattr(Lookup, "guess", schedules.guess_from(known))
    compared = drafted = accepted = 0
    for number in range(0, SCHEDULES, 4):
        plain, guessed = schedules.draw(number, ()), schedules.draw(number, ())
        with llmc.load(artifact, threads=1, cache_tokens=16 * 16, drafts=0) as model:
            schedules.play(replace(plain, failing=set()), engine_of(model, schedules, **plain.settings))
            known[:] = [text for arrival in plain.arrivals for text in schedules.texts_of(arrival)]
            engine = engine_of(model, schedules, **guessed.settings, drafts=2 + number % 6)
            schedules.play(replace(guessed, failing=set()), engine)
            drafted += engine.stats.drafted
            accepted += engine.stats.accepted
        for one, other in zip(plain.arrivals, guessed.arrivals, strict=True):
            if one.done is not None and other.done is not None:
                assert schedules.told(one.done) == schedules.told(other.done)
                compared += 1
    assert compared > 2 * SCHEDULES // 4
    assert drafted > accepted > 2 * SCHEDULES
