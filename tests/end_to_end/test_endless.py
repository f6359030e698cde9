"""Text without end on compiled models of one layer, where a token's key is the same whatever it has seen.

So a row equals the last row of a text that is just the tokens it should see, each at its place among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.window import Window, window_of
from llmc.runtime.errors import RequestError
from llmc.runtime.runner import Feed, Runner

pytestmark = pytest.mark.usefixtures("plain_code")

SIZE = 32
TEXT = [int(i) for i in np.random.default_rng(3).integers(5, 300, 120)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}

# Kind of position -> model_type, its config, the modes it can, pages.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "rope": ("qwen2", {"rope_parameters": YARN}, ("sinks", "shift", "reevaluate"), "f32"),
    "rope, 8-bit pages": ("llama", {}, ("sinks", "shift", "reevaluate"), "q8"),
    "interleaved partial rope": ("gptj", {"rotary_dim": 8}, ("sinks", "shift", "reevaluate"), "f32"),
    "partial rope": ("gpt_neox", {}, ("sinks", "shift", "reevaluate"), "f32"),
    "alibi": ("bloom", {}, ("sinks", "reevaluate"), "f32"),
    "learned": ("gpt2", {}, ("reevaluate",), "f32"),
}
BOUNDS = {"f32": 2e-5, "q8": 0.03}  # of the greatest logit; 8-bit keys are rounded once more when they are turned


@pytest.fixture(scope="module")
def artifact(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function `(name in MODELS) -> artifact`; each is compiled once."""
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            model_type, config, _, kv = MODELS[name]
            folder = tiny_model(model_type, num_hidden_layers=1, **config)
            target = tmp_path_factory.mktemp("endless") / "tiny.llmc"
            made[name] = Path(compile_model(folder, target, quant="f32", kv=kv).path)
        return made[name]

    return path


def kept(mode: str, discard: int, count: int) -> list[list[int]]:
    """Which tokens each of `count` rows sees."""
    rows, seen = [], list[int]()
    for token in range(count):
        if len(seen) == SIZE:
            first = 12 if mode == "sinks" and seen == list(range(SIZE)) else 0
            seen = seen[:4] + seen[4 + max(discard, first) :]
        seen.append(token)
        rows.append(list(seen))
    return rows


def say(window: Window, runner: Runner, rows: int, beside: bool = False) -> list[np.ndarray]:
    """Logits (V,) of each row of TEXT, at most `rows` in a step; `beside`: with a plain query before it in each."""
    sequence, plain, found, at = runner.new_sequence(), runner.new_sequence(), [], 0
    while at < len(TEXT):
        again = window.make_room(runner, sequence, lambda at=at: TEXT[:at])
        if again:
            runner.prefill([(sequence, again)])
        new = TEXT[at : at + min(rows, window.rows(sequence))]
        feeds = [Feed(plain, new, "none")] if beside else []
        found += list(runner.step([*feeds, Feed(sequence, new, "all")]).logits)
        at += len(new)
    runner.release(sequence)
    runner.release(plain)
    runner.pool.check([])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_rows_see_what_they_should(name: str, artifact: Callable[[str], Path]) -> None:
    _, _, modes, kv = MODELS[name]
    with llmc.load(artifact(name)) as model:
        runner = model.runner
        assert runner.endless == modes
        for mode in set(modes) - ({"shift"} if kv == "q8" else set()):  # which rounds them at each shift
            for discard, rows in ((1, 1), (16, 7)):
                window = window_of(Options(endless=mode, n_discard=discard, window=SIZE), runner)
                assert window is not None
                got = say(window, runner, rows)
                for row, seen in list(enumerate(kept(mode, discard, len(TEXT))))[20::11]:
                    alone = runner.new_sequence()
                    wanted = runner.step([(alone, [TEXT[token] for token in seen])]).logits[0]
                    runner.release(alone)
                    assert np.abs(got[row] - wanted).max() < BOUNDS[kv] * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_a_plain_query_in_the_same_steps_changes_nothing(name: str, artifact: Callable[[str], Path]) -> None:
    with llmc.load(artifact(name)) as model:
        window = window_of(Options(endless="sinks", n_discard=3, window=SIZE), model.runner)
        assert window is not None
        np.testing.assert_array_equal(say(window, model.runner, 5, beside=True), say(window, model.runner, 1))


def test_layers_with_windows_go_on_beside_layers_that_see_everything(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The same bits in any steps, though pages behind the layers' own window are given back at other times."""
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 16}
    path = compile_model(tiny_model("gemma3_text", **config), tmp_path / "a.llmc", quant="f32", kv="f32").path
    with llmc.load(path) as model:
        runner = model.runner
        assert runner.endless == ("sinks", "reevaluate")
        window = window_of(Options(endless="sinks", n_discard=4, window=48), runner)
        assert window is not None
        one, many = say(window, runner, 1), say(window, runner, 9)
        np.testing.assert_array_equal(one, many)
        plain = runner.step([Feed(runner.new_sequence(), TEXT[:48], "all")]).logits
        np.testing.assert_array_equal(one[:48], plain)
        assert np.isfinite(one).all()
        with pytest.raises(
            RequestError, match="at least 32 to keep 4 and discard 1, beside the 16 that some layers see"
        ):
            window_of(Options(endless="sinks", n_discard=1, window=31), runner)


def test_layers_with_convolutions_go_on_beside_attention(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """They see the last tokens, which are never forgotten."""
    path = compile_model(tiny_model("lfm2", full_attn_idxs=[1]), tmp_path / "a.llmc", quant="f32", kv="f32").path
    with llmc.load(path) as model:
        runner = model.runner
        assert runner.endless == ("sinks", "reevaluate")
        window = window_of(Options(endless="sinks", n_discard=4, window=SIZE), runner)
        assert window is not None
        one, many = say(window, runner, 1), say(window, runner, 9)
        np.testing.assert_array_equal(one, many)
        plain = runner.step([Feed(runner.new_sequence(), TEXT[:SIZE], "all")]).logits
        np.testing.assert_array_equal(one[:SIZE], plain)


def test_where_all_layers_have_windows_nothing_changes_but_the_pages(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = compile_model(tiny_model("mistral", sliding_window=9), tmp_path / "a.llmc", quant="f32", kv="f32").path
    with llmc.load(path) as model:
        runner = model.runner
        assert runner.endless == ("sinks", "reevaluate")
        window = window_of(Options(endless="sinks", n_discard=16, window=29), runner)
        assert window is not None
        got = say(window, runner, 3)
        plain = runner.step([Feed(runner.new_sequence(), TEXT, "all")]).logits
        np.testing.assert_allclose(got, plain, atol=2e-5)


def test_an_answer_longer_than_the_context(artifact: Callable[[str], Path]) -> None:
    with llmc.load(artifact("rope"), cache_tokens=128) as model:
        assert model.generate(TEXT, max_tokens=200, ignore_eos=True).finish_reason == "context"
        answer = model.generate(TEXT, max_tokens=300, ignore_eos=True, endless="sinks")
        assert answer.finish_reason == "length"
        assert len(answer.ids) == 300 > model.runner.context
        long = "The capital of France is Paris. " * 300
        with pytest.raises(RequestError, match="characters cannot fit"):
            model.generate(long)
        assert len(model.generate(long, max_tokens=3, ignore_eos=True, endless="sinks").ids) == 3
        with pytest.raises(RequestError, match="cache has room for one of 85"):
            model.generate(TEXT, endless="sinks", window=86)
