"""Draft models of compiled artifacts: the same answers, and artifacts that cannot guess for a model are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import llmc
from llmc.cli import command as cli
from llmc.compiler.driver import compile_model
from llmc.runtime.errors import LlmcError

pytestmark = pytest.mark.usefixtures("plain_code")

PROMPT = list(range(7, 40))
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.3}]


@pytest.fixture(scope="module")
def artifacts(
    tiny_model: Callable[..., Path], tiny_translator: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A model, the same with fewer bits, one whose token ids mean something else, and one that has an encoder."""
    folder = tmp_path_factory.mktemp("drafts")
    llama = tiny_model("llama")
    made = {
        "model": (llama, "f32"),
        "small": (llama, "q4"),
        "other": (tiny_model("llama", vocab_size=301), "f32"),
        "translator": (tiny_translator, "f32"),
    }
    return {
        name: str(compile_model(source, folder / f"{name}.llmc", quant=quant).path)
        for name, (source, quant) in made.items()
    }


def test_answers_are_the_same(artifacts: dict[str, str]) -> None:
    with llmc.load(artifacts["model"], threads=1, drafts=0) as model:
        wanted = [model.generate(PROMPT, max_tokens=50, ignore_eos=True, **way).ids for way in WAYS]
    with llmc.load(artifacts["model"], threads=1, draft_model=artifacts["small"]) as model:
        asking = model.engine._drafter.asking
        asking._best = lambda asked, rows, expected: 1e9  # always worth its time
        found = [model.generate(PROMPT, max_tokens=50, ignore_eos=True, **way) for way in WAYS]
        assert asking.model.pace.known
    assert [each.ids for each in found] == wanted
    assert sum(each.timings["accepted_tokens"] for each in found) > 0


def test_the_command_takes_one(artifacts: dict[str, str]) -> None:
    arguments = ["run", artifacts["model"], "--raw", "a b c", "--max-tokens", "9", "--ignore-eos", "--json"]
    alone, drafted = (
        CliRunner().invoke(cli, [*arguments, *more]) for more in ([], ["--draft-model", artifacts["small"]])
    )
    assert alone.exit_code == drafted.exit_code == 0
    assert json.loads(alone.output)["ids"] == json.loads(drafted.output)["ids"]


def test_copied_weights_say_the_same(artifacts: dict[str, str]) -> None:
    arguments = ["run", artifacts["model"], "--raw", "a b c", "--max-tokens", "9", "--ignore-eos", "--json"]
    untold, mapped, copied, both = (
        CliRunner().invoke(cli, [*arguments, *more])
        for more in (
            [],
            ["--no-copy-weights"],
            ["--copy-weights"],
            ["--copy-weights", "--draft-model", artifacts["small"]],
        )
    )
    assert [each.exit_code for each in (untold, mapped, copied, both)] == [0] * 4
    ids = json.loads(untold.stdout)["ids"]
    assert all(json.loads(each.stdout)["ids"] == ids for each in (mapped, copied, both))


@pytest.mark.parametrize(
    ("model", "draft", "more", "message"),
    [
        ("model", "other", {}, "token ids of .* do not mean what those of .* do"),
        ("model", "translator", {}, "wanted two decoders"),
        ("model", "small", {"drafts": 0}, "drafts: got 0, with which a draft model has nothing to do"),
        ("model", "nowhere", {}, "nowhere"),
    ],
)
def test_what_cannot_guess_is_refused(
    artifacts: dict[str, str], model: str, draft: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(LlmcError, match=message):
        llmc.load(artifacts[model], draft_model=artifacts.get(draft, draft), **more)
