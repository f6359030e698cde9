"""Answers of a form: whatever the model would like to say, and however tokens are chosen, they match."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.runtime.decoding.candidates import Row
from llmc.runtime.decoding.grammar import Grammars
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation
from llmc.runtime.text.tokenizer import Tokenizer

MakeEngine = Callable[..., Engine]
END, VOCAB = 1, 97  # of the engine's tokens: three special ones, and the printable characters of ASCII
PROMPT = [5, 9, 40]

CHOICES: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 2.0, "top_p": 0.8, "seed": 2},
    {"strategy": "mirostat", "seed": 3}, {"strategy": "fsd"}, {"strategy": "random_fsd", "seed": 4},
    {"repetition_penalty": 1.3, "logit_bias": {7: 3}},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.1, "typical_p": 0.9, "seed": 5},
]  # fmt: skip

_SMALL = st.sampled_from(
    [{"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"}, {"type": "null"}, {"const": "x"},
     {"enum": ["red", "green", 3, None]}, {"type": "string", "maxLength": 5},
     {"type": "string", "pattern": "^[a-c]{2}$"}]
)  # fmt: skip


def _lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda each, most: {"type": "array", "items": each, "maxItems": most}, inner, st.integers(0, 2))


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(values: list[Any], needed: int) -> dict[str, Any]:
        properties = {f"k{number}": value for number, value in enumerate(values)}
        required = list(properties)[:needed]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(made, st.lists(inner, max_size=2), st.integers(0, 2))


SCHEMAS = st.recursive(_SMALL, lambda inner: _lists(inner) | _objects(inner), max_leaves=3)


def generate(engine: Engine, **options: Any) -> Generation:
    stream = engine.stream(engine.add_query(PROMPT, Options(max_tokens=100, **options)))
    text = "".join(stream)
    assert stream.result.text == text
    return stream.result


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, choice=st.sampled_from(CHOICES))
def test_every_whole_answer_is_of_its_schema(make_engine: MakeEngine, schema: dict[str, Any], choice: Any) -> None:
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}  # these tokens have no space
    answer = generate(make_engine(eos=(END,)), json_schema=compact, **choice)
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), schema)
    else:
        assert answer.finish_reason in ("length", "context")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"regex": "(yes|no)"}, "yes|no"),
        ({"regex": "[0-9]{3}-[0-9]{4}"}, r"\d{3}-\d{4}"),
        ({"lark": 'start: "<" name ">"\nname: /[a-z]{1,8}/'}, "<[a-z]{1,8}>"),
        ({"json_schema": '{"enum": ["red", "green"]}'}, '"(red|green)"'),
    ],
)
def test_answers_match(make_engine: MakeEngine, form: dict[str, Any], wanted: str, choice: dict[str, Any]) -> None:
    answer = generate(make_engine(eos=(END,)), **form, **choice)
    assert re.fullmatch(wanted, answer.text), answer.text
    assert (answer.finish_reason, answer.ids[-1]) == ("stop", END)


@pytest.fixture(scope="module")
def grammars(make_tokenizer_json: Callable[..., bytes]) -> Grammars:
    return Grammars(Tokenizer(make_tokenizer_json()), 400, [END])


@pytest.mark.parametrize("seed", range(20))
def test_a_row_with_less_is_the_obvious_one(grammars: Grammars, seed: int) -> None:
    random = np.random.default_rng(seed)
    grammar = grammars.of(Options(regex="[a-f]{4}|cat sat on the mat"))
    assert grammar is not None
    if seed % 2:
        grammar.accept(int(np.flatnonzero(_may(grammar))[0]))
    logits = random.normal(0, 5, 400).astype(np.float32)
    whole = Row.of(logits, 64 if seed % 3 else 4)
    row = grammar.allowed(whole)
    obvious = Row.of(np.where(_may(grammar), logits, -np.inf).astype(np.float32))
    np.testing.assert_array_equal(row.logits, obvious.logits)
    count = int(np.isfinite(row.values).sum())
    np.testing.assert_array_equal(row.ids[:count], obvious.ids[:count])
    assert row.normalizer == pytest.approx(obvious.normalizer, abs=1e-5)


def _may(grammar: Any) -> np.ndarray:
    bits = np.frombuffer(grammar._matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:400].astype(bool)


def test_several_answers_and_others_in_the_step_go_their_own_way(make_engine: MakeEngine) -> None:
    form = {"regex": "[a-z]{3,9}[.]", "temperature": 1.5, "seed": 7}
    alone = [generate(make_engine(eos=(END,)), **{**form, "seed": 7 + number}).text for number in range(4)]
    engine = make_engine(eos=(END,), pages=12)
    other = engine.add_query([8] * 30, Options(max_tokens=60, ignore_eos=True))
    together = generate(engine, **form, n=4)
    assert [together.text, *(one.text for one in together.others)] == alone
    engine.cancel(other)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_gives_pages_up_goes_on_in_the_same_place(make_engine: MakeEngine, preemption: str) -> None:
    options = Options(regex="[a-z]{60}[.]", max_tokens=90)
    alone = make_engine(eos=(END,))
    prompts = [[number, 9, 40] for number in range(5, 9)]
    wanted = []
    for prompt in prompts:
        stream = alone.stream(alone.add_query(prompt, options))
        wanted.append("".join(stream))
    engine = make_engine(eos=(END,), pages=9, settings={"preemption": preemption})
    streams = [engine.stream(engine.add_query(prompt, options)) for prompt in prompts]
    assert ["".join(stream) for stream in streams] == wanted
    assert engine.stats.preempted > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": 7}, "json_schema: got 7"), ({"json_schema": "{"}, "json_schema: it is not JSON"),
        ({"json_schema": "[" * 100_000}, "nested too deeply"), ({"regex": 7}, "regex: got 7"),
        ({"lark": "x" * (1 << 21)}, "at most 1048576"), ({"regex": "a", "lark": "b"}, "one form"),
        ({"regex": "a", "beams": 2}, "beams"), ({"regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_wrong_forms_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": {"type": "wat"}}, "json_schema: .*wat"), ({"regex": "("}, "regex: .*unclosed"),
        ({"lark": "start: foo"}, "lark: .*foo"), ({"json_schema": {"$ref": "http://x/y"}}, "json_schema: "),
        ({"regex": "(a{1000}){1000}"}, "regex: "), ({"regex": "ü"}, "no token|regex"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_ends_in_a_line(make_engine: MakeEngine, options: dict[str, Any], words: str) -> None:
    engine = make_engine(eos=(END,))
    with pytest.raises(RequestError, match=words) as caught:
        generate(engine, **options)
    assert "\n" not in str(caught.value)
    assert engine.stats.running == engine.stats.waiting == 0


def test_what_would_take_all_memory_ends_soon(make_engine: MakeEngine) -> None:
    engine = make_engine(eos=(END,))
    with pytest.raises(RequestError, match="regex: .*too many") as caught:
        generate(engine, regex="(a?){300}a{300}")
    assert "Tokens" not in str(caught.value)
    assert engine.stats.running == engine.stats.waiting == 0


def test_who_has_no_end_or_no_bytes_or_chooses_is_refused(
    make_engine: MakeEngine, make_tokenizer_json: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="no end token"):
        generate(make_engine(), regex="a")
    with pytest.raises(RequestError, match="no bytes of their own"):
        Grammars(Tokenizer(make_tokenizer_json("wordpiece")), 90, [END])
    with pytest.raises(RequestError, match="a caller chooses"):
        make_engine(eos=(END,)).add_query(PROMPT, Options(regex="a"), choose="caller")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=re.escape("pip install 'llmc[grammar]'")):
        generate(make_engine(eos=(END,)), regex="a")
