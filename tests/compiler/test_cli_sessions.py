"""`llmc chat` keeps conversations: /save and /load, with a fake in place of the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmc.runtime
from llmc.cli import command
from llmc.runtime.errors import ArtifactError


class _Stream:
    """Says how many messages there were."""

    def __init__(self, count: int) -> None:
        self.result = SimpleNamespace(text=f"<{count}>", finish_reason="stop")
        self._pieces = iter([self.result.text])

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)


class _Model:
    """A model whose sessions are text files of ids and a note."""

    manifest = {"chat_template": "chat_template.jinja"}

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def chat_stream(self, messages: list[dict[str, str]], **_: Any) -> _Stream:
        return _Stream(len(messages))

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(m["content"]) for m in messages]

    def save_session(self, path: str, ids: list[int], note: str) -> None:
        Path(path).write_text(json.dumps([ids, note]), encoding="utf-8")

    def load_session(self, path: str) -> tuple[list[int], str]:
        if not Path(path).exists():
            raise ArtifactError(f"{path}: cannot be read")
        ids, note = json.loads(Path(path).read_text(encoding="utf-8"))
        return ids, note


@pytest.fixture(autouse=True)
def _fake_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llmc.runtime, "load", lambda path, **_: _Model())
    monkeypatch.chdir(tmp_path)


def chat(stdin: str) -> Result:
    return CliRunner().invoke(command, ["chat", "m.llmc"], input=stdin)


def test_a_conversation_goes_on_where_it_was_saved() -> None:
    assert chat("a\nb\n/save my talk\nc\n/load my talk\nd\n").stdout == "<1>\n<3>\n<5>\n<5>\n"
    ids, note = json.loads(Path("my talk").read_text(encoding="utf-8"))
    assert ids == [1, 3, 1, 3]
    assert [m["role"] for m in json.loads(note)] == ["user", "assistant"] * 2
    assert chat("/load my talk\ne\n").stdout == "<5>\n"


@pytest.mark.parametrize(
    "note", ["", "no JSON", "3", '"text"', "{}", '[{"role": "user"}]', '[{"role": 1, "content": ""}]', "[[]]"]
)
def test_a_session_of_something_else_is_no_conversation(note: str) -> None:
    Path("other").write_text(json.dumps([[1], note]), encoding="utf-8")
    assert "not of a conversation" in _refused(chat("/load other\n"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [("/save", "name of a file"), ("/load ", "name of a file"), ("/save x", "nothing was said"), ("/load x", "cannot")],
)
def test_what_cannot_be_kept_is_said(line: str, reason: str) -> None:
    assert reason in _refused(chat(f"{line}\n"))
    assert not Path("x").exists()


def test_a_message_may_begin_like_a_command() -> None:
    assert chat("/saved is a word\n").stdout == "<1>\n"


def _refused(result: Result) -> str:
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("llmc: ")
    return line
