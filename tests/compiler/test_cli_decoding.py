"""The decoding options of the command line: what is passed on, what is refused, and how help shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmc.runtime
from llmc.cli import command
from llmc.decoding_options import GROUPS
from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.decoding.options import Options
from llmc.runtime.generate import Generation


class _Model:
    """Says "hi!", with the log-probabilities and the other answers that it is told to have."""

    manifest: dict[str, Any] = {}

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[Choice] | None = None
        self.others: list[Generation] = []

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def decode(self, ids: list[int], special: bool) -> str:
        assert special
        return "".join(f"<{id_}>" for id_ in ids)

    def stream(self, prompt: str, **options: Any) -> _Stream:
        self.calls.append(options)
        return _Stream(self)


class _Stream:
    def __init__(self, model: _Model) -> None:
        self.result = Generation("hi!", [5], [1], "stop", {}, model.logprobs, None, model.others)

    def __iter__(self) -> Iterator[str]:
        yield from ("hi", "!")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> _Model:
    """A fake in place of whatever `llmc.runtime.load` would open."""
    fake = _Model()
    monkeypatch.setattr(llmc.runtime, "load", lambda path, **_: fake)
    return fake


def llmc_run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def test_run_passes_every_decoding_option_on(model: _Model) -> None:
    """By its field's name, as its field's type."""
    flags = (
        "--strategy random_fsd --temperature 2 --top-k 9 --top-p 0.9 --min-p 0.1 --typical-p 0.8 --tail-free 0.7 "
        "--max-k 4 "
        "--fsd-k 5 --fsd-alpha 0.4 --fsd-n 2 --fsd-beta 0.8 --fsd-random-tokens 7 --fsd-random-share 0.3 -n 3 --seed 4 "
        "--min-tokens 2 --stop a --stop b --repetition-penalty 1.1 --presence-penalty -1 --frequency-penalty 0.5 "
        "--logit-bias 7=-1.5 --logit-bias 8=2 --banned 3 --banned 4 --logprobs 2 --endless sinks --n-keep 1 "
        "--n-discard 16 --window 64 --json"
    )
    assert llmc_run("run", "m.llmc", "hi", *flags.split()).exit_code == 0
    passed = model.calls[0]
    assert passed == {
        "strategy": "random_fsd", "temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8,
        "tail_free": 0.7, "max_k": 4, "fsd_k": 5, "fsd_alpha": 0.4, "fsd_n": 2, "fsd_beta": 0.8, "fsd_random_tokens": 7,
        "fsd_random_share": 0.3, "n": 3, "seed": 4, "min_tokens": 2, "stop": ("a", "b"), "repetition_penalty": 1.1,
        "presence_penalty": -1.0, "frequency_penalty": 0.5, "logit_bias": ((7, -1.5), (8, 2.0)), "banned": (3, 4),
        "logprobs": 2, "endless": "sinks", "n_keep": 1, "n_discard": 16, "window": 64,
    }  # fmt: skip
    others = "--beams 3 --length-penalty 2 --early-stopping never --mirostat-tau 3 --mirostat-eta 0.2 --max-tokens 4"
    seen = {
        flag
        for flag in (flags + " " + others + " --ignore-eos").split()
        if flag.startswith("-") and not flag[1:2].isdigit()
    }
    elsewhere = {"--prefill-chunk", "--json-schema", "--regex", "--lark", "--prediction"}  # the last four below
    fields = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Options) if f.init} - elsewhere
    assert seen - {"--json"} == fields - {"--n"} | {"-n"}
    llmc_run("run", "m.llmc", "hi", "--beams", "3", "--length-penalty", "2", "--early-stopping", "never")
    assert model.calls[1] == {"beams": 3, "length_penalty": 2.0, "early_stopping": "never"}


def test_run_shows_other_answers_and_logprobs(model: _Model) -> None:
    model.others = [Generation("two", [8], [1], "length", {})]
    assert llmc_run("run", "m.llmc", "hi", "-n", "2", "--temperature", "1").stdout == "hi!\n---\ntwo\n"
    model.logprobs = [Choice(5, -0.5, ((5, -0.5), (6, -1.0)))]
    answer = json.loads(llmc_run("run", "m.llmc", "hi", "--json", "--logprobs", "2").stdout)
    assert answer["others"] == [{"text": "two", "ids": [8], "finish_reason": "length"}]
    likely = [{"id": 5, "text": "<5>", "logprob": -0.5}, {"id": 6, "text": "<6>", "logprob": -1.0}]
    assert answer["logprobs"] == [{**likely[0], "top": likely}]


def test_help_shows_every_option_once_and_under_its_heading() -> None:
    text = llmc_run("run", "--help").stdout
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", *GROUPS]
    for flag in (flag for flags in GROUPS.values() for flag in flags):
        name = f"--{flag.name.replace('_', '-')} " if len(flag.name) > 1 else "-n "
        assert text.count(f"\n  {name}") == 1, name
    assert "--endless" not in llmc_run("translate", "--help").stdout
    assert "  -n " not in llmc_run("chat", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "m", "x", "--top-k", "1.5"], "'1.5' is not a whole number"),
        (["run", "m", "x", "--top-p", "x"], "'x' is not a number"),
        (["run", "m", "x", "--seed", "9" * 400], "wanted a whole number in 0..18446744073709551615"),
        (["run", "m", "x", "--strategy", "beam"], "got 'beam', wanted greedy, sample, top_k"),
        (["run", "m", "x", "--logit-bias", "7"], "'7' is not ID=NUMBER"),
        (["run", "m", "x", "--logit-bias", "7=nan"], "logit_bias: token 7: got nan"),
        (["run", "m", "x", "--min-p", "0.1"], "min_p: it needs a temperature"),
        (["run", "m", "x", "--beams", "3", "--stop", "x"], "beams: a search does not go with stop"),
        (["chat", "m", "--logprobs", "3"], "--logprobs needs --json"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_is_loaded(arguments: list[str], hint: str) -> None:
    result = llmc_run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert hint in line


def test_the_form_of_an_answer_comes_from_files(model: _Model, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "a"')
    assert llmc_run("run", "m.llmc", "hi", "--json-schema", str(schema)).exit_code == 0
    assert llmc_run("run", "m.llmc", "hi", "--lark", str(grammar)).exit_code == 0
    assert llmc_run("run", "m.llmc", "hi", "--regex", "a|b").exit_code == 0
    assert model.calls == [{"json_schema": '{"type": "integer"}'}, {"lark": 'start: "a"'}, {"regex": "a|b"}]
    assert llmc_run("run", "m.llmc", "hi", "--prediction", str(grammar)).exit_code == 0
    assert model.calls[3:] == [{"prediction": 'start: "a"'}]
    schema.write_bytes(b"\xff")
    for arguments, told in (
        (["--json-schema", str(schema)], "not valid UTF-8: byte 0 is 0xff"),
        (["--json-schema", str(tmp_path / "none")], "none: no such file or folder"),
        (["--json-schema", str(grammar)], "json_schema: it is not JSON"),
        (["--lark", str(grammar), "--regex", "a"], "an answer has one form"),
    ):
        done = llmc_run("run", "m.llmc", "hi", *arguments)
        assert done.exit_code in (1, 2)
        assert told in done.output
