"""Text and ids, and text piece by piece: never a part of a character, never more or less than the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.text.tokenizer import Tokenizer

MakeJson = Callable[..., bytes]
MAKE: list[MakeJson] = []


@pytest.fixture(autouse=True)
def _make(make_tokenizer_json: MakeJson) -> None:
    MAKE[:] = [make_tokenizer_json]


@cache
def pair(kind: str) -> tuple[Tokenizer, Backend]:
    data = MAKE[0](kind)
    return Tokenizer(data), Backend.from_buffer(data)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("kind", ["byte-level", "fallback", "wordpiece"])
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=40))
def test_pieces_join_to_the_whole(kind: str, ids: list[int]) -> None:
    """Ids may be any, also of bytes that are no UTF-8, special tokens, and ids without a token."""
    tokenizer, backend = pair(kind)
    made = pieces(tokenizer, ids)
    assert "".join(made) == tokenizer.decode(ids)
    known = [i for i in ids if backend.id_to_token(i) is not None]
    whole = backend.decode(known, skip_special_tokens=True)
    if kind == "byte-level" or (kind == "fallback" and "\ufffd" not in whole):
        assert "".join(made) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in made)


@pytest.mark.parametrize("kind", ["byte-level", "fallback"])
@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁\x00<"), max_size=30))
def test_any_text_survives(kind: str, text: str) -> None:
    """But what special tokens, which begin with <, are written as."""
    tokenizer, backend = pair(kind)
    ids = tokenizer.encode(text, bos=False)
    made = pieces(tokenizer, ids)
    assert "".join(made) == backend.decode(ids)
    if kind == "byte-level":
        assert "".join(made) == text
        assert all(piece in text for piece in made)
    stream = tokenizer.stream()
    seen = b""
    for i in ids:  # all bytes but those of the one open character are out at once
        seen += tokenizer.token_bytes(i)
        stream.push(i)
    assert len(stream.finish()) <= 1


def test_an_emoji_comes_whole() -> None:
    tokenizer, _ = pair("byte-level")
    ids = tokenizer.encode("a🦜b", bos=False)
    made = pieces(tokenizer, ids)
    assert len(ids) > 3
    assert [piece for piece in made if piece] == ["a", "🦜", "b"]


def test_an_unfinished_character_is_flushed() -> None:
    tokenizer, _ = pair("byte-level")
    ids = tokenizer.encode("x🦜", bos=False)[:-1]
    made = pieces(tokenizer, ids)
    assert made[0] == "x"
    assert made[-1] == "\ufffd"
    assert "".join(made) == "x\ufffd"


def test_a_leading_space_is_dropped_once() -> None:
    tokenizer, backend = pair("fallback")
    ids = tokenizer.encode("The cat sat", bos=False)
    made = pieces(tokenizer, ids)
    assert "".join(made) == backend.decode(ids) == "The cat sat"


def test_special_tokens_are_written_only_on_demand() -> None:
    tokenizer, _ = pair("byte-level")
    ids = tokenizer.encode("<|im_start|>hi", bos=False)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, special=True) == "<|im_start|>hi"


def test_bos_is_added_where_the_model_wants_it(make_tokenizer_json: MakeJson) -> None:
    tokenizer = Tokenizer(make_tokenizer_json(), bos=0)
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.encode("hi")[1:] == tokenizer.encode("hi", bos=False)
    assert tokenizer.encode("") == [0]


@pytest.mark.parametrize("bad", ["a\ud800b", b"bytes", 5, None])
def test_prompts_that_are_no_text(bad: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        pair("byte-level")[0].encode(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"version":"1.0"}'])
def test_files_that_are_no_tokenizer(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer(data)


def test_a_pattern_that_gives_up_is_the_prompt_s_error(make_tokenizer_json: MakeJson) -> None:
    """The library panics, which is no Exception; what it prints itself cannot be kept from standard error."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    document = json.loads(make_tokenizer_json()) | {"pre_tokenizer": split}
    tokenizer = Tokenizer(json.dumps(document).encode())
    with pytest.raises(RequestError, match="cannot split this text"):
        tokenizer.encode("a" * 40 + "b")
    with pytest.raises(RequestError, match="cannot split this text"):
        tokenizer.encode_chat("</s>" + "a" * 40 + "b" + tokenizer.mark("</s>"), 10**6)
