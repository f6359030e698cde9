"""Translations over a NumPy model: sources are read whole and answered in common steps. What stands around a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from llmc.runtime.cache.pages import pages_for
from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.generate import Generation, Options
from llmc.runtime.loading.manifest import KvLayout, Manifest
from llmc.runtime.model import Model
from llmc.runtime.runner import Feed, Runner
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.translator import direction

MakeRunner = Callable[..., Runner]
LEAD = (2, 30)
SOURCES = [[int(i) for i in np.random.default_rng(n).integers(0, 97, n)] for n in (3, 17, 40, 1, 9, 33)]


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """Words of the little model: "the", "cat", ... and w8 to w96."""
    words = ["?", "the", "cat", "a", "x", "translate", "English", "to", "German", ":"]
    vocab = {word: id_ for id_, word in enumerate([*words, *(f"w{n}" for n in range(len(words), 97))])}
    whole = Backend(models.WordLevel(vocab, unk_token="?"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(whole.to_str().encode())


@pytest.fixture
def answers(translator: ModuleType) -> list[list[int]]:
    """20 tokens for each of SOURCES, computed without a cache."""
    weights = translator.make_weights()
    found = [translator.greedy(weights, source, list(LEAD), 20) for source in SOURCES]
    assert len({tuple(ids) for ids in found}) == len(SOURCES)
    return found


def run(
    runner: Runner,
    backend: Tokenizer,
    sources: list[list[int]] = SOURCES,
    options: Options | None = None,
    **fields: Any,
) -> list[Generation]:
    """Greedy translations of 20 tokens; each text's parts must add up to it, and no page may be kept."""
    engine = Engine(runner, backend, lead=LEAD, **fields)
    queries = [engine.add_query(source, options or Options(max_tokens=20)) for source in sources]
    texts = dict.fromkeys(queries, "")
    done: dict[int, Generation] = {}
    for part in engine.follow(queries):
        assert part.id not in done
        texts[part.id] += part.text
        if part.done is not None:
            done[part.id] = part.done
    assert [done[query].text for query in queries] == list(texts.values())
    assert runner.pool.free_pages == runner.pool.num_pages
    return [done[query] for query in queries]


@pytest.mark.parametrize("chunk", [1, 20, 512])
def test_a_batch_is_the_model_s_greedy_in_any_chunks(
    make_translator: MakeRunner, backend: Tokenizer, answers: list[list[int]], chunk: int
) -> None:
    calls: list[tuple[str, int]] = []
    results = run(make_translator(chunk=chunk, calls=calls), backend)
    assert [result.ids for result in results] == answers
    assert [result.prompt_ids for result in results] == SOURCES
    encodes = [rows for name, rows in calls if name == "encode"]
    assert sum(encodes) == sum(map(len, SOURCES))
    wanted = {512: [103], 20: [3, 17, 40, 10, 33], 1: [3, 17, 40, 1, 9, 33]}  # a longer source has a step of its own
    assert encodes == wanted[chunk]


def test_texts_wait_for_room_and_then_join_the_others(
    make_translator: MakeRunner, backend: Tokenizer, answers: list[list[int]]
) -> None:
    calls: list[tuple[str, int]] = []
    runner = make_translator(pages=9, calls=calls)
    results = run(runner, backend)
    assert [result.ids for result in results] == answers
    assert [name for name, _ in calls].count("encode") > 1
    assert max(rows for name, rows in calls if name == "step") >= 2


def test_new_texts_are_read_while_others_go_on(make_translator: MakeRunner, backend: Tokenizer) -> None:
    """Of four that fit together one goes on for long: the others' places are taken before it ends."""
    calls: list[tuple[str, int]] = []
    runner = make_translator(pages=14, calls=calls)
    engine = Engine(runner, backend, lead=LEAD)
    options = [Options(max_tokens=60), *[Options(max_tokens=4)] * 9]
    queries = [engine.add_query([5, 6], each) for each in options]
    ends = [part.id for part in engine.follow(queries) if part.done is not None]
    assert sorted(ends) == queries
    assert ends[-1] == queries[0]
    assert 1 < [name for name, _ in calls].count("encode") < 9  # in groups, not one by one
    assert runner.pool.free_pages == 14


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_giving_way_changes_no_translation(
    make_translator: MakeRunner, backend: Tokenizer, answers: list[list[int]], preemption: str
) -> None:
    """Sources are dropped and encoded again, or copied out and back; greedy, drawn and searched answers."""
    asked = [{}, {"temperature": 1.2, "seed": 1, "n": 2}, {"beams": 3}]
    options = [Options(max_tokens=20, **asked[number % 3]) for number in range(len(SOURCES))]
    found = []
    for pages, settings in ((64, {}), (12, {"preemption": preemption})):
        engine = Engine(make_translator(pages=pages), backend, lead=LEAD, **settings)
        queries = [engine.add_query(source, each) for source, each in zip(SOURCES, options, strict=True)]
        done = {}
        while engine.query_count:
            done.update({result.id: result.done for result in engine.infer() if result.done})
            if pages == 12 and engine.stats.steps % 3 == 0 and engine.stats.running:
                engine._scheduler.give_way()
        found.append([[each.ids for each in (done[query], *done[query].others)] for query in queries])
        assert engine.stats.pages_free == pages
    assert engine.stats.preempted > 5
    assert found[0] == found[1]
    assert [found[0][number][0] for number in (0, 3)] == [answers[number] for number in (0, 3)]


def test_an_end_and_what_is_never_said(
    make_translator: MakeRunner, backend: Tokenizer, answers: list[list[int]]
) -> None:
    end = answers[1][4]
    stopped = run(make_translator(), backend, eos=frozenset([end]))[1]
    assert (stopped.finish_reason, stopped.ids) == ("stop", answers[1][: answers[1].index(end) + 1])
    silent = run(make_translator(), backend, suppressed=(end, answers[1][0]))
    assert not {end, answers[1][0]} & {token for result in silent for token in result.ids}
    hot = Options(max_tokens=20, temperature=50.0, seed=1)
    drawn = run(make_translator(), backend, [SOURCES[0]], hot, suppressed=tuple(range(90)))
    assert min(drawn[0].ids) >= 90


def test_what_is_too_long_is_refused_before_any_work(make_translator: MakeRunner, backend: Tokenizer) -> None:
    calls: list[tuple[str, int]] = []
    with pytest.raises(RequestError, match="it has 121 tokens, and the model reads 120"):
        run(make_translator(calls=calls), backend, [[1], [2] * 121])
    with pytest.raises(RequestError, match="no room for an answer in a cache_tokens of 0"):
        run(make_translator(pages=4, calls=calls), backend, [[1] * 64])
    assert not calls
    full = run(make_translator(), backend, [[1] * 120])
    assert full[0].finish_reason == "length"
    (short,) = run(make_translator(pages=3), backend, [[1] * 17], Options(max_tokens=1000))
    assert (short.finish_reason, len(short.ids)) == ("context", 14)


def test_a_source_is_shared_and_checked(make_translator: MakeRunner, translator: ModuleType) -> None:
    runner = make_translator()
    source = runner.new_sequence()
    for unread in (runner.new_sequence(), runner.new_sequence(source)):
        with pytest.raises(RequestError, match="needs a source"):
            runner.step([(unread, [1])])
    runner.encode([(source, SOURCES[1])])
    with pytest.raises(RequestError, match="as a whole"):
        runner.encode([(source, [1])])
    texts = [[1, 2, 3], [4] * 20]
    output = runner.step([Feed(runner.new_sequence(source), text) for text in texts])
    for row, text in enumerate(texts):
        wanted = translator.whole(translator.make_weights(), SOURCES[1], text)[-1]
        np.testing.assert_allclose(output.logits[row], wanted, atol=1e-4)


def test_a_failing_encoder_keeps_no_page(make_translator: MakeRunner, backend: Tokenizer) -> None:
    runner = make_translator()

    def broken(*_: Any) -> Any:
        raise RuntimeError("kernel failed")

    runner.encode_function = broken
    results = run(runner, backend)
    assert {(result.finish_reason, result.text) for result in results} == {("error", "")}
    assert {result.error for result in results} == {"the step failed: RuntimeError: kernel failed"}
    engine = Engine(runner, backend, lead=LEAD)
    with pytest.raises(LlmcError, match="kernel failed"):
        list(engine.stream(engine.add_query(SOURCES[0])))
    assert runner.pool.free_pages == runner.pool.num_pages


def test_a_model_without_an_encoder_has_nothing_to_encode(make_runner: MakeRunner) -> None:
    runner = make_runner()
    with pytest.raises(RequestError, match="no encoder"):
        runner.encode([(runner.new_sequence(), [1])])


def facts(**fields: Any) -> Manifest:
    """A translator's manifest; `fields` replaces what it says."""
    plain = Manifest(
        raw={"name": "tiny"}, sha256="", task="translate", pooling=None, vocab=97, context=120,
        kv=KvLayout(2, 2, 8, "f32"), variants=(), runtime="", weights="", chunk_bytes=0, chunks=(), order=(),
        bos=None, eos=frozenset(), add_bos=False, end=96, start=2, forced=(), suppressed=(), special={},
        languages={}, prefixes={}, tokenizer="", chat_template=None, files={},
        functions=("step", "encode"), parts=(), invariance="exact", endless=(),
    )  # fmt: skip
    return replace(plain, **fields)


MANY = {"fr_XX": 90, "de_DE": 91, "zho_Hans": 92, "zho_Hant": 93}
TOLD = {"en to de": "translate English to German: ", "en to fr": "translate English to French: "}


@pytest.mark.parametrize(
    ("fields", "languages", "before", "prefix", "lead"),
    [
        ({}, (None, None), (), "", (2,)),
        ({"bos": 0, "add_bos": True, "forced": (7,)}, (None, None), (0,), "", (2, 7)),
        ({"languages": MANY}, ("fr_XX", "de"), (90,), "", (2, 91)),
        ({"languages": MANY}, ("zho_hant", "FR"), (93,), "", (2, 90)),
        ({"languages": MANY, "bos": 90, "add_bos": True, "forced": (91,)}, (None, None), (90,), "", (2, 91)),
        ({"languages": MANY, "bos": 90, "add_bos": True, "forced": (91,)}, ("de", "fr"), (91,), "", (2, 90)),
        ({"prefixes": TOLD}, (None, None), (), "", (2,)),
        ({"prefixes": TOLD}, ("en", "fr"), (), TOLD["en to fr"], (2,)),
        ({"prefixes": TOLD}, (None, "de"), (), TOLD["en to de"], (2,)),
    ],
)
def test_directions(
    fields: dict[str, Any], languages: tuple[str | None, str | None], before: tuple[int, ...], prefix: str,
    lead: tuple[int, ...],
) -> None:  # fmt: skip
    way = direction(facts(**fields), *languages)
    assert (way.before, way.prefix, way.after, way.lead) == (before, prefix, (96,), lead)


@pytest.mark.parametrize(
    ("fields", "languages", "said"),
    [
        ({}, ("en", None), "does not let them be chosen"),
        ({"languages": MANY}, (None, "de"), "^source_language: this model wants to be told one of de_DE, fr_XX"),
        ({"languages": MANY}, ("de", None), "^target_language: this model wants"),
        ({"languages": MANY}, (None, None), "^source_language and target_language: this model wants to be told two"),
        ({"languages": MANY}, (None, "xx"), "^source_language: this .*; target_language: got 'xx'"),
        ({"languages": MANY}, ("xx", "yy"), "^source_language: got 'xx'.*; target_language: got 'yy'"),
        ({"languages": MANY}, ("zho", "de"), "got 'zho', wanted one of zho_Hans, zho_Hant"),
        ({"languages": MANY}, ("de_D", "de"), "got 'de_D', wanted one of de_DE"),
        ({"languages": {f"l{n:02}": 5 for n in range(20)}}, ("?", "de"), "l11 and 8 more"),
        ({"prefixes": TOLD}, ("en", None), "got en to any, wanted one of en to de, en to fr, or none"),
        ({"prefixes": TOLD}, ("fr", "en"), "got fr to en"),
    ],
)
def test_languages_a_model_does_not_know(
    fields: dict[str, Any], languages: tuple[str | None, str | None], said: str
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        direction(facts(**fields), *languages)
    assert "\n" not in str(caught.value)


@pytest.fixture
def model(make_translator: MakeRunner, backend: Tokenizer) -> Callable[..., Model]:
    """A function `(**fields of the manifest) -> Model`."""
    return lambda **fields: Model(facts(**fields), make_translator(), backend, None)


def test_a_model_translates_texts_and_generates_from_one(model: Callable[..., Model]) -> None:
    plain = model()
    both = plain.translate(["the cat", "a"], max_tokens=9)
    assert both[0].prompt_ids == [*plain.encode("the cat"), 96]
    assert [plain.generate(text, max_tokens=9).ids for text in ("the cat", "a")] == [each.ids for each in both]
    assert plain.generate_batch(["the cat", both[1].prompt_ids], max_tokens=9)[1].ids == both[1].ids
    assert plain.translate([""], max_tokens=1)[0].prompt_ids == [96]
    told = model(prefixes=TOLD).translate(["the cat"], target_language="de", max_tokens=9)[0]
    assert told.prompt_ids == [*plain.encode("translate English to German: the cat"), 96]


def test_long_texts_are_cut_where_that_is_asked_for(model: Callable[..., Model]) -> None:
    plain = model(languages=MANY)
    long = "x " * 600
    with pytest.raises(RequestError, match="text 2: it has .* and the model reads 120"):
        plain.translate(["a", "x " * 119], "fr", "de")
    with pytest.raises(RequestError, match="text 2: prompt: 1200 characters cannot fit"):
        plain.translate(["a", long], "fr", "de")
    (cut,) = plain.translate([long], "fr", "de", truncate=True, max_tokens=1)
    assert len(cut.prompt_ids) == 120
    assert (cut.prompt_ids[0], cut.prompt_ids[-1]) == (90, 96)


@pytest.mark.parametrize("bad", ["one text", b"bytes", [], [None], [5], ["a\ud800"]])
def test_texts_are_checked(model: Callable[..., Model], bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        model().translate(bad)
    assert "\n" not in str(caught.value)


def test_what_a_model_cannot_do(model: Callable[..., Model], make_runner: MakeRunner, backend: Tokenizer) -> None:
    with pytest.raises(RequestError, match="cannot embed: it was compiled to translate"):
        model().embed(["a"])
    decoder = Model(facts(task="generate", start=None), make_runner(), backend, None)
    with pytest.raises(RequestError, match="cannot translate: it was compiled to generate"):
        decoder.translate(["a"])
    with pytest.raises(RequestError, match="text 1: it is empty"):
        model(end=None).translate([""])
    with pytest.raises(RequestError, match="wants to be told"):
        model(languages=MANY).generate("a")


def test_pages_hold_sources_too(make_translator: MakeRunner, backend: Tokenizer) -> None:
    runner = make_translator()
    engine = Engine(runner, backend, lead=LEAD)
    parts = engine.follow([engine.add_query(SOURCES[2], Options(max_tokens=20))])
    next(parts)
    assert runner.pool.num_pages - runner.pool.free_pages == pages_for(40) + pages_for(len(LEAD))
    parts.close()
    assert runner.pool.free_pages == runner.pool.num_pages
