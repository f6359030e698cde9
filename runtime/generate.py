"""The loop that makes text: prefill the prompts, then one step per token for all sequences, until each ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Integral

from llmc.runtime.engine import Engine, Output, checked_logits
from llmc.runtime.errors import RequestError
from llmc.runtime.kv_cache import Sequence, pages_for
from llmc.runtime.manifest import PAGE_TOKENS
from llmc.runtime.sampling import Sampler, Sampling
from llmc.runtime.tokenizer import Tokenizer

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Options:
    """What a generation can be asked for; `runtime/sampling.py` explains the four about chance.

    max_tokens: tokens made at most. ignore_eos: go on after an end token. prefill_chunk: rows of a step at most while
    the prompt is read; None for the model's default. Raises RequestError for values out of range.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    prefill_chunk: int | None = None
    sampling: Sampling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "prefill_chunk"):
            value = getattr(self, name)
            good = isinstance(value, Integral) and not isinstance(value, bool)
            if (not good or not 1 <= value <= _MAX_TOKENS) and (value is not None or name == "max_tokens"):
                raise RequestError(f"{name}: wanted a whole number in 1..{_MAX_TOKENS}")
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        object.__setattr__(self, "sampling", sampling)

    def with_seed(self, seed: int | None) -> Options:
        """The same with another seed."""
        fields = ("max_tokens", "temperature", "top_k", "top_p", "ignore_eos", "prefill_chunk")
        return Options(**{name: getattr(self, name) for name in fields}, seed=seed)


@dataclass(frozen=True)
class Generation:
    """What was generated.

    ids: every token made, the end token included; text: what they say without special tokens. finish_reason: "stop" at
    an end token, "length" at max_tokens, "context" where the model's context (or the cache) ends. timings, in seconds
    since the call: prefill_s until the prompt was read (of all prompts of a batch), first_token_s until the first
    token, decode_s from there to this sequence's last; and prefill_tokens, decode_tokens: tokens that passed in each.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    timings: dict[str, float]


class _Speaker:
    """One sequence of a batch while it is generated."""

    def __init__(
        self, prompt: list[int], options: Options, limit: int, tokenizer: Tokenizer, eos: frozenset[int]
    ) -> None:
        self.prompt = prompt
        self.sequence = Sequence()
        self.ids: list[int] = []
        self.finish_reason = ""
        self.end_time = 0.0
        self._options = options
        self._limit = limit  # tokens of prompt and answer together
        self._stop = frozenset() if options.ignore_eos else eos
        self._sampler = Sampler(options.sampling)
        self._stream = tokenizer.stream()
        self._pieces: list[str] = []

    @property
    def most_tokens(self) -> int:
        """Tokens that its sequence can come to hold."""
        return min(self._limit, len(self.prompt) + self._options.max_tokens)

    def take(self, output: Output, row: int) -> str:
        """Choose the next token from a row of logits; the text that is now certain."""
        token = self._sampler.next_token(checked_logits(output, row), int(output.argmax[row]))
        self.ids.append(token)
        if token in self._stop:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._options.max_tokens:
            self.finish_reason = "length"
        elif len(self.prompt) + len(self.ids) >= self._limit:
            self.finish_reason = "context"
        piece = "" if self.finish_reason == "stop" else self._stream.push(token)
        if self.finish_reason:
            piece += self._stream.finish()
            self.end_time = time.perf_counter()
        self._pieces.append(piece)
        return piece

    def result(self, start: float, prefilled: float, first: float) -> Generation:
        """The finished generation; times are those of the whole batch."""
        timings = {
            "prefill_s": prefilled - start,
            "first_token_s": first - start,
            "decode_s": self.end_time - first,
            "prefill_tokens": len(self.prompt),
            "decode_tokens": len(self.ids) - 1,
        }
        return Generation("".join(self._pieces), self.ids, self.prompt, self.finish_reason, timings)


@dataclass
class Generator:
    """Generates for prompts that are token ids. One object serves any number of calls."""

    engine: Engine
    tokenizer: Tokenizer
    eos: frozenset[int]
    results: list[Generation] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Tokens that a sequence can have: the model's context, or the whole cache if that is smaller."""
        return min(self.engine.context, self.engine.pool.num_pages * PAGE_TOKENS)

    def run(self, prompts: list[list[int]], options: list[Options], start: float) -> Iterator[tuple[int, str]]:
        """Generate for all prompts; yields (index, piece) as text becomes certain, and fills `results` in the end.

        Prompts that do not fit in the cache together are generated one group after the other. `start` is when the call
        began (time.perf_counter). Pages are given back however it ends.
        """
        speakers = [self._speaker(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
        results: list[Generation] = []
        for group in self._groups(speakers):
            members = [speakers[index] for index in group]
            self.engine.pool.reserve_all([(s.sequence, s.most_tokens) for s in members])
            try:
                for index, piece in self._run_group(members, options[group[0]].prefill_chunk, start, results):
                    yield group[index], piece
            finally:
                for speaker in members:
                    self.engine.release(speaker.sequence)
            start = time.perf_counter()
        self.results = results

    def _speaker(self, prompt: list[int], options: Options) -> _Speaker:
        if len(prompt) >= self.limit:
            what = "context" if self.limit == self.engine.context else "cache_tokens"
            raise RequestError(f"prompt: {len(prompt)} tokens leave no room for an answer in a {what} of {self.limit}")
        return _Speaker(prompt, options, self.limit, self.tokenizer, self.eos)

    def _groups(self, speakers: list[_Speaker]) -> Iterator[list[int]]:
        """Indices of speakers that fit in the cache together, in order."""
        group: list[int] = []
        pages = 0
        for index, speaker in enumerate(speakers):
            wanted = pages_for(speaker.most_tokens)
            if group and pages + wanted > self.engine.pool.num_pages:
                yield group
                group, pages = [], 0
            group.append(index)
            pages += wanted
        if group:
            yield group

    def _run_group(
        self, speakers: list[_Speaker], chunk: int | None, start: float, results: list[Generation]
    ) -> Iterator[tuple[int, str]]:
        output = self.engine.prefill([(s.sequence, s.prompt) for s in speakers], chunk)
        prefilled = time.perf_counter()
        going = list(range(len(speakers)))
        first = 0.0
        while going:
            pieces = [(index, speakers[index].take(output, row)) for row, index in enumerate(going)]
            first = first or time.perf_counter()
            yield from ((index, piece) for index, piece in pieces if piece)
            going = [index for index in going if not speakers[index].finish_reason]
            if going:
                output = self.engine.step([(speakers[i].sequence, speakers[i].ids[-1:]) for i in going])
        results += [speaker.result(start, prefilled, first) for speaker in speakers]


class TextStream:
    """Pieces of text as they are generated; `result` is the Generation once the pieces are used up.

    Closing it early, or dropping it, stops the generation and gives its cache pages back.
    """

    def __init__(self, generator: Generator, prompt: list[int], options: Options, start: float) -> None:
        self._generator = replace(generator, results=[])
        self._pieces = self._generator.run([prompt], [options], start)

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)[1]

    def close(self) -> None:
        """Stop here."""
        self._pieces.close()  # type: ignore[attr-defined]  # it is a generator

    @property
    def result(self) -> Generation:
        """The whole generation. Raises RequestError before the last piece was taken."""
        if not self._generator.results:
            raise RequestError("the stream is not used up, so it has no result yet")
        return self._generator.results[0]
