"""`llmc translate` and what other commands say of a translator, with a model that shouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmc.runtime
from llmc.cli import command
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Part


class _Translator:
    """Says each text in capitals, a word a part; all but the first text of a call are done in reverse order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __enter__(self) -> _Translator:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def translate_parts(self, texts: list[str], *languages: Any, **options: Any) -> Iterator[Part]:
        self.calls.append((texts, *languages, options))
        if languages[1] == "xx":
            raise RequestError("target_language: got 'xx', wanted one of de, fr")
        for number in [0, *range(len(texts) - 1, 0, -1)]:
            words = texts[number].upper().split(" ")
            for word in words[:-1]:
                yield Part(number, word + " ", None)
            whole = Generation(" ".join(words), [1, 2], [3], "stop", {})
            yield Part(number, words[-1], whole)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> _Translator:
    fake = _Translator()
    monkeypatch.setattr(llmc.runtime, "load", lambda path, **_: fake)
    return fake


def translate(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(command, ["translate", "m.llmc", *arguments], input=stdin)


def test_texts_come_out_in_the_order_given(model: _Translator) -> None:
    result = translate("one two", "three", "four", "--from", "en", "--to", "de", "--max-tokens", "7", "--truncate")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "ONE TWO\nTHREE\nFOUR\n", "")
    texts, source, target, truncate, options = model.calls[0]
    assert (texts, source, target, truncate) == (["one two", "three", "four"], "en", "de", True)
    assert options["max_tokens"] == 7


def test_one_text_is_printed_as_it_is_made(model: _Translator) -> None:
    assert translate("one two").stdout == "ONE TWO\n"
    assert translate(stdin="piped\n").stdout == "PIPED\n"
    assert translate("-", stdin="piped").stdout == "PIPED\n"


def test_lines_stay_on_their_lines(model: _Translator, tmp_path: Path) -> None:
    """Blank lines are not translated; a text's own breaks, and those that only some tools split at, make no line."""
    text = "one\n\n  \r\ntwo\x0bthree\u2028\r\nfour\n"
    (tmp_path / "texts").write_bytes(text.encode())
    result = translate("--lines", str(tmp_path / "texts"))
    assert result.stdout.split("\n") == ["ONE", "", "", "TWO THREE", "FOUR", ""]
    assert model.calls[0][0] == ["one", "two\x0bthree\u2028", "four"]
    assert translate("zero", "--lines", "-", stdin="one\n").stdout == "ZERO\nONE\n"


def test_json_has_an_entry_for_each_line(model: _Translator) -> None:
    found = json.loads(translate("--json", stdin="a\n\nb").stdout)
    assert list(found) == ["translations"]
    assert [list(each) for each in found["translations"]] == [["text", "ids", "finish_reason"]] * 3
    assert [each["text"] for each in found["translations"]] == ["A", "", "B"]
    assert json.loads(translate("a", "--json").stdout)["translations"][0]["ids"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "said"),
    [
        (("a", "--to", "xx"), None, 1, "wanted one of de, fr"),
        ((), "", 2, "what was given is empty"),
        (("--lines", "/nowhere/x"), None, 1, "no such file"),
        (("a\ud800",), None, 2, "not valid UTF-8"),
        (("a", "--max-tokens", "0"), None, 2, "--max-tokens"),
    ],
)
def test_refusals_are_one_line(
    model: _Translator, arguments: tuple[str, ...], stdin: str | None, code: int, said: str
) -> None:
    result = translate(*arguments, stdin=stdin)
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in line


def test_inspect_says_what_it_translates(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.cli_inspect import _translator

    manifest = {
        "task": "translate",
        "spec": {"encoder": {"layers": 6, "ffn": 2048, "own_embedding": False}},
        "languages": {"fr": 1, "de": 2},
        "prefixes": {},
    }
    rows = dict(_translator(manifest))
    assert rows == {"encoder": "layers 6, ffn 2048", "languages": "de, fr"}
    assert _translator({"task": "generate"}) == []
