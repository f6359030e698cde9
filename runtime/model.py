"""A loaded artifact: text in, text out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.encoder import F32, Guess, best, encode_rows, pool
from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.generate import Generation, Generator, Options, Part, TextStream
from llmc.runtime.loading import library
from llmc.runtime.loading.artifact import Artifact, open_artifact
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.loading.manifest import PAGE_TOKENS, Manifest
from llmc.runtime.loading.weights import ALIGN, map_weights
from llmc.runtime.quality import WINDOW, Evaluation, Subject, evaluate
from llmc.runtime.runner import PREFILL_CHUNK, Runner, Step, as_ids
from llmc.runtime.text.chat import render_chat
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.translator import Direction, direction

Prompt = str | SequenceOf[int]
Message = Mapping[str, str]

_MAX_THREADS = 1024
_CACHED_CONTEXTS = 8  # full sequences the cache holds unless asked otherwise, memory permitting


def load(
    path: str | os.PathLike[str],
    threads: int | None = None,
    cache_tokens: int | None = None,
    verify: str = "auto",
    progress: Progress | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Model:
    """Load the artifact folder at `path`, after checking it.

    threads: kernels run on this many; default, and at most, the CPUs this process may use. cache_tokens: tokens of all
    sequences together that the KV cache holds; its memory is taken only as it fills. verify: "auto" hashes the weights
    when they were not found intact before, "always" at every load. progress(stage, done, total) is called while it
    hashes. prefill_chunk: rows of one step at most. Raises ArtifactError or RequestError.
    """
    most = default_threads()  # TVM's threads wait by spinning: more of them than CPUs makes steps endless
    threads = most if threads is None else min(most, _bounded("threads", threads, _MAX_THREADS))
    _bounded("prefill_chunk", prefill_chunk, 2**20)
    if verify not in ("auto", "always"):
        raise RequestError(f"verify: got {verify!r}, wanted auto or always")
    artifact = open_artifact(path, always_hash=verify == "always", progress=progress)
    manifest = artifact.manifest
    tokenizer = Tokenizer(artifact.read(manifest.tokenizer), manifest.bos if manifest.add_bos else None)
    template = _template(artifact)
    tokens = _default_cache(manifest) if cache_tokens is None else _bounded("cache_tokens", cache_tokens, 2**31 - 1)
    pages = PagePool(manifest.kv, tokens)
    weights = map_weights(artifact.path(manifest.weights), manifest.order)
    step, encode = _bind(artifact, pages, weights, threads)
    runner = Runner(step, pages, manifest.vocab, manifest.context, prefill_chunk, encode)
    return Model(manifest, runner, tokenizer, template)


class Model:
    """A model ready to generate. Use `load`; use as a context manager, or call `close`, to give its memory back.

    Where it has an encoder, a prompt is the text that it answers to, read as a whole. Every method that generates takes
    the fields of `generate.Options` as keywords: max_tokens, temperature, top_k, top_p, seed, ignore_eos,
    prefill_chunk. Calls from several threads are safe and take turns step by step.
    """

    def __init__(self, manifest: Manifest, runner: Runner, tokenizer: Tokenizer, template: str | None) -> None:
        self.manifest: dict[str, Any] = manifest.raw
        self._facts = manifest
        self._runner: Runner | None = runner
        self._template = template
        self._tokenizer = tokenizer

    @property
    def runner(self) -> Runner:
        """The low-level interface: sequences, steps, logits. Raises RequestError after `close`."""
        if self._runner is None:
            raise RequestError("the model is closed")
        return self._runner

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.manifest["name"])

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue `prompt`, a text or token ids."""
        return _drained(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: Any) -> TextStream:
        """`generate`, piece by piece: iterate for text, then read `.result`."""
        start = time.perf_counter()
        return TextStream(self._writer(), self._prompt_ids(prompt), Options(**options), start)

    def chat(self, messages: SequenceOf[Message], **options: Any) -> Generation:
        """The assistant's answer to a conversation of {"role": ..., "content": ...}."""
        return _drained(self.chat_stream(messages, **options))

    def chat_stream(self, messages: SequenceOf[Message], **options: Any) -> TextStream:
        """`chat`, piece by piece."""
        start = time.perf_counter()
        return TextStream(self._writer(), self.chat_prompt(messages), Options(**options), start)

    def generate_batch(
        self, prompts: SequenceOf[Prompt], seeds: SequenceOf[int | None] | None = None, **options: Any
    ) -> list[Generation]:
        """`generate` for several prompts in common steps. `seeds` gives each its own seed in place of `seed`."""
        start = time.perf_counter()
        if isinstance(prompts, (str, bytes)) or not len(prompts):
            raise RequestError("prompts: wanted a list of at least one prompt")
        common = Options(**options)
        if seeds is not None and len(seeds) != len(prompts):
            raise RequestError(f"seeds: got {len(seeds)}, wanted one for each of {len(prompts)} prompts")
        each = [common] * len(prompts) if seeds is None else [common.with_seed(seed) for seed in seeds]
        generator = self._writer()
        for _ in generator.run([self._prompt_ids(prompt) for prompt in prompts], each, start):
            pass
        return generator.results

    def chat_prompt(self, messages: SequenceOf[Message]) -> list[int]:
        """Token ids of a conversation as the model's chat template writes it."""
        if self._template is None:
            raise RequestError(f"{self.name} has no chat template; use generate with a plain prompt")
        marked = render_chat(self._template, messages, self._facts.special, self._tokenizer.mark)
        return self._prompt_ids(self._tokenizer.encode_chat(marked, self._facts.context))

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
        parts = self.translate_parts(texts, source_language, target_language, truncate, **options)
        done = {part.index: part.done for part in parts}  # the last part of each text has it
        return [whole for index in range(len(texts)) if (whole := done[index]) is not None]

    def translate_parts(
        self, texts: SequenceOf[str], source_language: str | None = None, target_language: str | None = None,
        truncate: bool = False, **options: Any,
    ) -> Iterator[Part]:  # fmt: skip
        """`translate`, piece by piece: which text it is of, what was added, and with its last piece the whole."""
        start = time.perf_counter()
        self._check_task("translate")
        if isinstance(texts, (str, bytes)) or not len(texts):
            raise RequestError("texts: wanted a list of at least one text")
        way = direction(self._facts, source_language, target_language)
        sources = way.sources(texts, self._tokenizer, self._facts.context, truncate)
        return self._writer(way).parts(sources, [Options(**options)] * len(sources), start)

    def evaluate(self, text: Prompt, window: int = WINDOW, against: Model | None = None, **options: Any) -> Evaluation:
        """Perplexity of `text`, and divergence `against` another model; options and errors as `quality.evaluate`."""
        other = None if against is None else against._subject()
        return evaluate(self._subject(), text, window, other, **options)

    def embed(self, texts: SequenceOf[str], truncate: bool = False) -> F32:
        """A vector (C,) for each text, (n, C) float32; `truncate` cuts texts that are longer than the model reads.

        Raises RequestError for a model that is no encoder with a pooling.
        """
        self._check_task("embed")
        if isinstance(texts, (str, bytes)) or not len(texts):
            raise RequestError("texts: wanted a list of at least one text")
        assert self._facts.pooling is not None
        found: list[F32 | None] = [None] * len(texts)
        for number, rows in encode_rows(self.runner, [self._framed(text, truncate) for text in texts]):
            found[number] = pool(self._facts.pooling, rows)
        return np.stack([vector for vector in found if vector is not None])

    def fill(self, text: str, top: int = 5) -> list[list[Guess]]:
        """The `top` likeliest tokens for each mask in `text`, best first.

        Raises RequestError for a text without a mask, or a model that is no masked language model.
        """
        self._check_task("fill")
        mask = self._facts.special.get("mask_token", "[MASK]")
        ids = self._framed(text, False)
        places = [place for place, id_ in enumerate(ids) if id_ == self._tokenizer.id_of(mask)]
        if not places:
            raise RequestError(f"text: it has no {mask}, the mark of a place to fill")
        ((_, rows),) = encode_rows(self.runner, [ids])
        guesses = [best(rows[place], top) for place in places]
        return [[Guess(id_, self._tokenizer.token(id_), p) for id_, p in row] for row in guesses]

    def step(self, rows: Iterable[Any]) -> Any:
        """`runner.step`: append tokens to sequences and get logits."""
        return self.runner.step(rows)

    def close(self) -> None:
        """Give weights, cache and library back; the model cannot be used afterwards."""
        self._runner = None

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

    def _writer(self, way: Direction | None = None) -> Generator:
        """What generates; `way`: in a model with an encoder, the direction of the call."""
        facts = self._facts
        if facts.task != "translate":
            self._check_task("generate")
            return Generator(self.runner, self._tokenizer, facts.eos)
        lead = (way or direction(facts)).lead
        return Generator(self.runner, self._tokenizer, facts.eos, lead, facts.suppressed)

    def _subject(self) -> Subject:
        self._check_task("generate", "predict a text")
        return Subject(self.runner, self._tokenizer, self._facts.bos, self._facts.add_bos)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and self._facts.task == "translate":
            return direction(self._facts).sources([prompt], self._tokenizer, self._facts.context, False)[0]
        if isinstance(prompt, str):
            self._tokenizer.check_length(prompt, self._facts.context)
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        checked: list[int] = as_ids(ids, self._facts.vocab).tolist()
        if checked:
            return checked
        if self._facts.bos is None:
            raise RequestError("prompt: it is empty, and this model has no first token to begin with")
        return [self._facts.bos]


def _drained(stream: TextStream) -> Generation:
    for _ in stream:
        pass
    return stream.result


def _bounded(name: str, value: object, most: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
        raise RequestError(f"{name}: wanted a whole number in 1..{most}")
    return int(value)


def _template(artifact: Artifact[Manifest]) -> str | None:
    name = artifact.manifest.chat_template
    if name is None:
        return None
    try:
        return artifact.read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{artifact.path(name)}: not UTF-8 at byte {error.start}") from error


def _default_cache(manifest: Manifest) -> int:
    """Tokens of a cache for several full sequences, and their sources, in at most half of the machine's memory.

    The texts of a model that is an encoder alone leave after their step, and each holds whole pages.
    """
    if manifest.task not in ("generate", "translate"):
        return manifest.context + PREFILL_CHUNK * PAGE_TOKENS
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = _CACHED_CONTEXTS * manifest.context * (2 if manifest.task == "translate" else 1)
    return max(1, min(wanted, memory // 2 // manifest.kv.token_bytes))


def _bind(
    artifact: Artifact[Manifest], pool: PagePool, weights: list[NDArray[Any]], threads: int
) -> tuple[Step, Step | None]:
    """The compiled step, and encode where there is one, of index arrays alone: cache, weights and threads are bound."""
    library.set_most_threads(threads)
    ffi = library.import_ffi()
    names = ("step", "encode") if artifact.manifest.task == "translate" else ("step",)
    step, *encode = library.load_functions(artifact, names)

    def tensors(arrays: list[NDArray[Any]]) -> Any:
        return ffi.Array([ffi.from_dlpack(a, require_alignment=ALIGN, require_contiguous=True) for a in arrays])

    cache, stored = tensors(pool.layers), tensors(weights)

    def call(function: Callable[..., Any], *arrays: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any]]:
        library.use_threads(threads)
        logits, argmax, *_ = function(*map(ffi.from_dlpack, arrays), cache, stored)  # what follows only had to happen
        return np.asarray(np.from_dlpack(logits)), np.asarray(np.from_dlpack(argmax))

    return partial(call, step), partial(call, encode[0]) if encode else None
