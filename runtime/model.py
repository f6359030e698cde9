"""A loaded artifact: text in, text out."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.streams import TextStream
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation, Options, Part
from llmc.runtime.loading.manifest import Manifest
from llmc.runtime.runner import Runner, as_ids
from llmc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.runtime.encoder import F32, Guess
    from llmc.runtime.quality import Evaluation, Subject
    from llmc.runtime.translator import Direction
    from llmc.runtime.workers.front import Front

Prompt = str | SequenceOf[int]
Message = Mapping[str, str]

_ENDLESS_TOKENS = 2**24  # of a prompt for a text without end: what is longer is taken for a mistake


class Model:
    """A model ready to generate. Use `load`; use as a context manager, or call `close`, to give its memory back.

    Where it has an encoder, a prompt is the text that it answers to, read as a whole. Every method that generates takes
    the fields of `Options` (docs/decoding.md) as keywords. Calls from several threads are safe, and share steps.
    """

    def __init__(
        self, manifest: Manifest, runner: Runner, tokenizer: Tokenizer, template: str | None,
        front: Front | None = None, **engine: Any,
    ) -> None:  # fmt: skip
        self.manifest: dict[str, Any] = manifest.raw
        self._facts = manifest
        self._runner: Runner | None = runner
        self._template = template
        self._front = front
        self._tokenizer = tokenizer
        self._engine: Engine | None = Engine(
            runner, tokenizer, manifest.eos, lead=_lead(manifest), suppressed=manifest.suppressed, **engine
        )

    @property
    def runner(self) -> Runner:
        """The low-level interface: sequences, steps, logits. Raises RequestError after `close`."""
        if self._runner is None:
            raise RequestError("the model is closed")
        return self._runner

    @property
    def engine(self) -> Engine:
        """What runs queries: add some, and take what each step says of them. Raises RequestError after `close`."""
        if self._engine is None:
            raise RequestError("the model is closed")
        return self._engine

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.manifest["name"])

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue `prompt`, a text or token ids."""
        return _drained(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: Any) -> TextStream:
        """`generate`, piece by piece: iterate for text, then read `.result`."""
        wishes = Options.of(options)
        return self.engine.stream(self._add(self.prompt_ids(prompt, wishes.endless), wishes))

    def chat(self, messages: SequenceOf[Message], **options: Any) -> Generation:
        """The assistant's answer to a conversation of {"role": ..., "content": ...}."""
        return _drained(self.chat_stream(messages, **options))

    def chat_stream(self, messages: SequenceOf[Message], **options: Any) -> TextStream:
        """`chat`, piece by piece."""
        wishes = Options.of(options)
        return self.engine.stream(self._add(self.chat_prompt(messages, wishes.endless), wishes))

    def add(self, prompt: Prompt, options: Options | None = None, user: str = "", salt: str = "") -> int:
        """Have the `engine` continue a prompt; the query's id. user, salt: as of `Engine.add_query`."""
        wishes = options or Options()
        return self._add(self.prompt_ids(prompt, wishes.endless), wishes, user=user, salt=salt)

    def generate_batch(
        self, prompts: SequenceOf[Prompt], seeds: SequenceOf[int | None] | None = None, **options: Any
    ) -> list[Generation]:
        """`generate` for several prompts in common steps. `seeds` gives each its own seed in place of `seed`.

        Where the model fails for one of them, that one has the finish_reason "error".
        """
        if isinstance(prompts, (str, bytes)) or not len(prompts):
            raise RequestError("prompts: wanted a list of at least one prompt")
        common = Options.of(options)
        if seeds is not None and len(seeds) != len(prompts):
            raise RequestError(f"seeds: got {len(seeds)}, wanted one for each of {len(prompts)} prompts")
        each = [common] * len(prompts) if seeds is None else [common.with_seed(seed) for seed in seeds]
        ids = [self.prompt_ids(prompt, common.endless) for prompt in prompts]
        return _wholes(self._parts(ids, each))

    def save_session(self, path: str | os.PathLike[str], prompt: Prompt, salt: str = "", note: str = "") -> None:
        """Write what the cache has of `prompt` to a file, with a note; what it lacks is read first.

        Raises RequestError for a prompt that leaves no room in the context, or a path that cannot be written.
        """
        from llmc.runtime.engine.sessions import save_prefix

        self._check_task("generate", "save sessions")
        save_prefix(self.engine, path, self.prompt_ids(prompt), self._facts, salt, note)

    def load_session(self, path: str | os.PathLike[str], salt: str = "") -> tuple[list[int], str]:
        """Have prompts that begin as a saved one go on from there; its token ids, and the note.

        Raises ArtifactError for a file that is damaged or of another artifact, and RequestError if the cache is full.
        """
        from llmc.runtime.engine.sessions import load_prefix

        return load_prefix(self.engine, path, self._facts, salt)

    def chat_prompt(self, messages: SequenceOf[Message], endless: str = "") -> list[int]:
        """Token ids of a conversation as the model's chat template writes it; with `endless` of one of any length."""
        if self._template is None:
            raise RequestError(f"{self.name} has no chat template; use generate with a plain prompt")
        from llmc.runtime.text.chat import render_chat  # with a library that takes long to import

        marked = render_chat(self._template, messages, self._facts.special, self._tokenizer.mark)
        return self.prompt_ids(self._tokenizer.encode_chat(marked, self._longest(endless)))

    def prompt_ids(self, prompt: Prompt, endless: str = "") -> list[int]:
        """Token ids of a prompt as `generate` takes it, `endless` of any length. RequestError if it is too long."""
        if isinstance(prompt, str) and self._facts.task == "translate":
            return _direction(self._facts).sources([prompt], self._tokenizer, self._facts.context, False)[0]
        if isinstance(prompt, str):
            self._tokenizer.check_length(prompt, self._longest(endless))
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        checked: list[int] = as_ids(ids, self._facts.vocab).tolist()
        if checked:
            return checked
        if self._facts.bos is None:
            raise RequestError("prompt: it is empty, and this model has no first token to begin with")
        return [self._facts.bos]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the model's first token where it wants one."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of token ids; `special` writes special tokens too."""
        return self._tokenizer.decode(as_ids(list(ids), self._facts.vocab).tolist(), special)

    def translate(
        self, texts: SequenceOf[str], source_language: str | None = None, target_language: str | None = None,
        truncate: bool = False, **options: Any,
    ) -> list[Generation]:  # fmt: skip
        """What a model with an encoder makes of each text, in common steps; languages as its manifest names them.

        `truncate` cuts texts that are longer than the model reads. Raises RequestError for a language the model does
        not know, one it wants to be told, or a model without an encoder.
        """
        return _wholes(self.translate_parts(texts, source_language, target_language, truncate, **options))

    def translate_parts(
        self, texts: SequenceOf[str], source_language: str | None = None, target_language: str | None = None,
        truncate: bool = False, **options: Any,
    ) -> Iterator[Part]:  # fmt: skip
        """`translate`, piece by piece: which text it is of, what was added, and with its last piece the whole."""
        self._check_task("translate")
        if isinstance(texts, (str, bytes)) or not len(texts):
            raise RequestError("texts: wanted a list of at least one text")
        way = _direction(self._facts, source_language, target_language)
        sources = way.sources(texts, self._tokenizer, self._facts.context, truncate)
        return self._parts(sources, [Options.of(options)] * len(sources), way)

    def evaluate(
        self, text: Prompt, window: int | None = None, against: Model | None = None, **options: Any
    ) -> Evaluation:
        """Perplexity of `text`, and divergence `against` another model; options and errors as `quality.evaluate`."""
        from llmc.runtime.quality import WINDOW, evaluate

        other = None if against is None else against._subject()
        return evaluate(self._subject(), text, WINDOW if window is None else window, other, **options)

    def embed(self, texts: SequenceOf[str], truncate: bool = False) -> F32:
        """A vector (C,) for each text, (n, C) float32; `truncate` cuts texts that are longer than the model reads.

        Raises RequestError for a model that is no encoder with a pooling.
        """
        from llmc.runtime.encoder import encode_rows, pool  # only encoders need it

        self._check_task("embed")
        if isinstance(texts, (str, bytes)) or not len(texts):
            raise RequestError("texts: wanted a list of at least one text")
        assert self._facts.pooling is not None
        found: list[F32 | None] = [None] * len(texts)
        for number, rows in encode_rows(self.engine, [self._framed(text, truncate) for text in texts]):
            found[number] = pool(self._facts.pooling, rows)
        return np.stack([vector for vector in found if vector is not None])

    def fill(self, text: str, top: int = 5) -> list[list[Guess]]:
        """The `top` likeliest tokens for each mask in `text`, best first.

        Raises RequestError for a text without a mask, or a model that is no masked language model.
        """
        from llmc.runtime.encoder import Guess, best, encode_rows

        self._check_task("fill")
        mask = self._facts.special.get("mask_token", "[MASK]")
        ids = self._framed(text, False)
        places = [place for place, id_ in enumerate(ids) if id_ == self._tokenizer.id_of(mask)]
        if not places:
            raise RequestError(f"text: it has no {mask}, the mark of a place to fill")
        ((_, rows),) = encode_rows(self.engine, [ids])
        guesses = [best(rows[place], top) for place in places]
        return [[Guess(id_, self._tokenizer.token(id_), p) for id_, p in row] for row in guesses]

    def step(self, rows: Iterable[Any]) -> Any:
        """`runner.step`: append tokens to sequences and get logits."""
        return self.runner.step(rows)

    def close(self) -> None:
        """End all queries, and give weights, cache and library back; the model cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._runner = None
        if self._front is not None:
            self._front.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_task(self, task: str, wish: str = "") -> None:
        own = self._facts.task
        if own != task:
            raise RequestError(f"{self.name} cannot {wish or task}: it was compiled to {own}")

    def _framed(self, text: str, truncate: bool) -> list[int]:
        """Ids of an encoder's text, between the marks it wants at both ends."""
        ids = self._tokenizer.encode(text)
        end = [] if self._facts.end is None else [self._facts.end]
        return (ids[: self._facts.context - len(end)] if truncate else ids) + end

    def _add(
        self, prompt: list[int], options: Options, way: Direction | None = None, user: str = "", salt: str = ""
    ) -> int:  # fmt: skip
        """Have the engine answer; `way`: in a model with an encoder, the direction of the call."""
        if self._facts.task != "translate":
            self._check_task("generate")
            return self.engine.add_query(prompt, options, user=user, salt=salt)
        lead = (way or _direction(self._facts)).lead
        return self.engine.add_query(lead, options, source=prompt, user=user, salt=salt)

    def _parts(
        self, prompts: list[list[int]], options: list[Options], way: Direction | None = None
    ) -> Generator[Part, None, None]:
        """Answers to all prompts in common steps, part by part."""
        engine, number = self.engine, dict[int, int]()
        try:
            for index, each in enumerate(zip(prompts, options, strict=True)):
                try:
                    number[self._add(*each, way)] = index
                except RequestError as error:
                    raise RequestError(f"{_place(self._facts, index)}{error}") from None
            for result in engine.follow(number):
                if result.answer == 0 or result.done:
                    yield Part(number[result.id], result.text if result.answer == 0 else "", result.done)
        finally:
            for query in number:
                engine.cancel(query)

    def _subject(self) -> Subject:
        self._check_task("generate", "predict a text")
        from llmc.runtime.quality import Subject

        return Subject(self.runner, self._tokenizer, self._facts.bos, self._facts.add_bos)

    def _longest(self, endless: str) -> int:
        """Tokens that a prompt may have."""
        return _ENDLESS_TOKENS if endless else self._facts.context


def _drained(stream: TextStream) -> Generation:
    for _ in stream:
        pass
    return stream.result


def _wholes(parts: Iterable[Part]) -> list[Generation]:
    """The generations, in the order of what was asked."""
    done = {part.index: part.done for part in parts if part.done is not None}
    return [done[index] for index in sorted(done)]


def _direction(manifest: Manifest, source: str | None = None, target: str | None = None) -> Direction:
    from llmc.runtime.translator import direction  # here, as most models do not translate

    return direction(manifest, source, target)


def _lead(manifest: Manifest) -> tuple[int, ...]:
    """What an answer of a model with an encoder begins with, if it need not be told a language."""
    if manifest.task != "translate":
        return ()
    try:
        return _direction(manifest).lead
    except RequestError:
        return ()


def _place(manifest: Manifest, index: int) -> str:
    """Which of several texts an error is about."""
    return f"text {index + 1}: " if manifest.task == "translate" else ""
