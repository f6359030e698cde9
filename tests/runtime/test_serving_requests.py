"""Bodies of requests: what is understood, and that everything else is refused by name."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.errors import RequestError
from llmc.runtime.serving.failures import Refused
from llmc.runtime.serving.requests import chat_request, embedding_request, text_request

HELLO = [{"role": "user", "content": "Hello"}]
MOST = 100


def test_openai_fields_become_options() -> None:
    asked = chat_request(
        {
            "model": "m", "messages": HELLO, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "n": 2,
            "stop": ["a", "b"], "seed": 3, "logit_bias": {"17": -100}, "logprobs": True, "top_logprobs": 4,
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "user": "u", "stream": True, "min_p": 0.1,
            "stream_options": {"include_usage": True}, "tools": [], "response_format": {"type": "text"},
            "metadata": None, "store": False,
        },
        MOST,
    )  # fmt: skip
    options = asked.options
    assert (options.max_tokens, options.temperature, options.top_p, options.n, options.seed) == (7, 0.5, 0.9, 2, 3)
    assert (options.stop, options.logit_bias, options.logprobs, options.min_p) == (("a", "b"), ((17, -100),), 4, 0.1)
    assert (asked.chat, asked.model, asked.streamed, asked.usage, asked.user) == (True, "m", True, True, "u")


def test_response_formats() -> None:
    def form(value: Any) -> str | None:
        schema = chat_request({"messages": HELLO, "response_format": value}, MOST).options.json_schema
        return None if schema is None else str(schema)

    assert form({"type": "text"}) is None
    assert form({"type": "json_object"}) == '{"type": "object"}'
    own = {"name": "n", "strict": True, "schema": {"type": "integer"}}
    assert form({"type": "json_schema", "json_schema": own}) == '{"type": "integer"}'


def test_predictions() -> None:
    def prediction(value: Any) -> str | None:
        return chat_request({"messages": HELLO, "prediction": value}, MOST).options.prediction

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prediction({"type": "content", "content": "ab"}) == "ab"
    assert prediction({"type": "content", "content": parts}) == "ab"
    assert prediction(None) is None
    assert text_request({"prompt": "Once", "prediction": "upon"}, MOST).options.prediction == "upon"
    for wrong, told in (
        ({"type": "image", "content": "ab"}, "prediction.type: got 'image'"),
        ({"type": "content"}, "missing key 'content'"),
        ({"type": "content", "content": 7}, "prediction: got 7, wanted a text"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content[0]"),
        (7, "prediction: got 7, wanted a text"),
    ):
        with pytest.raises((Refused, RequestError), match=re.escape(told)):
            prediction(wrong)


def test_what_is_not_said_is_openais_default() -> None:
    options = text_request({"prompt": "Once"}, MOST).options
    assert (options.temperature, options.max_tokens, options.n, options.logprobs) == (1.0, MOST, 1, None)
    assert text_request({"prompt": "Once", "temperature": 0}, MOST).options.greedy
    assert text_request({"prompt": "Once", "strategy": "greedy"}, MOST).options.greedy


@pytest.mark.parametrize(
    ("content", "text"),
    [("Hi", "Hi"), ([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}], "Hi")],
)
def test_content_is_text_or_parts_of_it(content: Any, text: str) -> None:
    message = {"role": "developer", "content": content, "refusal": None, "tool_calls": []}
    assert chat_request({"messages": [message]}, MOST).prompts == [[{"role": "system", "content": text}]]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts_are_texts_or_ids(prompt: Any, prompts: Any) -> None:
    assert text_request({"prompt": prompt}, MOST).prompts == prompts


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, ["messages: missing"]),
        ({"messages": HELLO, "wat": 1, "hm": 2}, ["wat: unknown field", "hm: unknown field"]),
        ({"messages": HELLO, "tools": [{"type": "function"}], "x": 1}, ["tools: [{", "not served", "x: unknown"]),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, ["response_format.type: got 'xml'"]),
        ({"messages": HELLO, "response_format": "json"}, ["response_format.type: got None"]),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, ["missing key 'json_schema'"]),
        (
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"strikt": 1}}},
            ["unknown key 'strikt'", "json_schema.schema: got None"],
        ),
        ({"messages": HELLO, "response_format": {"type": "json_object"}, "json_schema": True}, ["give one of them"]),
        ({"messages": HELLO, "response_format": {"type": "json_object"}, "regex": "a"}, ["an answer has one form"]),
        ({"messages": HELLO, "temperature": "hot", "top_p": 7}, ["temperature: got 'hot'", "top_p: got 7"]),
        ({"messages": HELLO, "max_tokens": MOST + 1}, ["max_tokens: got 101", "at most 100"]),
        ({"messages": HELLO, "top_logprobs": 3}, ["needs logprobs"]),
        ({"messages": HELLO, "stream": "yes"}, ["stream: got 'yes'"]),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, ["needs stream"]),
        ({"messages": HELLO, "stream": True, "stream_options": {"more": 1}}, ["unknown key 'more'"]),
        ({"messages": HELLO, "logit_bias": {"cat": 1}}, ["logit_bias"]),
        ({"messages": HELLO, "user": 7}, ["user: got int"]),
        ({"messages": HELLO, "model": 7}, ["model: got int"]),
        ({"messages": HELLO, "n": 300}, ["n: 300 answers"]),
        ({"messages": "Hello"}, ["messages: wanted a list"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ["reads text alone"]),
        ({"messages": [{"role": "user", "content": []}]}, ["it is empty"]),
    ],
)
def test_wrong_requests_are_refused_by_name(wrong: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((Refused, RequestError)) as caught:
        chat_request(wrong, MOST)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "prompt: missing"), ({"prompt": []}, "prompt: wanted"), ({"prompt": [True]}, "prompt: wanted"),
        ({"prompt": {"a": 1}}, "prompt: wanted"), ({"prompt": ["a"] * 257}, "at most 256"),
        ({"prompt": "a", "best_of": 3}, "best_of"), ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"), ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)  # fmt: skip
def test_wrong_texts_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((Refused, RequestError), match=words):
        text_request(wrong, MOST)


def test_embeddings() -> None:
    assert embedding_request({"input": "a", "model": "m"}) == ("m", ["a"], False)
    assert embedding_request({"input": ["a", "b"], "encoding_format": "base64"}) == (None, ["a", "b"], True)
    for wrong in ({}, {"input": 7}, {"input": "a", "dimensions": 3}, {"input": "a", "encoding_format": "int8"}):
        with pytest.raises(Refused):
            embedding_request(wrong)


_NAMES = st.sampled_from(
    ["messages", "prompt", "input", "model", "max_tokens", "temperature", "n", "stop", "stream", "stream_options",
     "logprobs", "top_logprobs", "logit_bias", "user", "tools", "echo", "seed", "banned", "beams", "strategy"]
)  # fmt: skip
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
_VALUES = st.recursive(_LEAVES | st.just(HELLO), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=5), inner, max_size=3), max_leaves=8)  # fmt: skip


@given(body=st.dictionaries(_NAMES | st.text(max_size=5), _VALUES, max_size=6))
def test_no_body_is_anything_but_understood_or_refused(body: dict[str, Any]) -> None:
    for read in (lambda b: chat_request(b, MOST), lambda b: text_request(b, MOST), embedding_request):
        with contextlib.suppress(Refused, RequestError):
            read(body)
