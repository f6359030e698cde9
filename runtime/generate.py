"""The loop that makes text: read the prompts, then one step per token for all sequences, until each ends."""

from __future__ import annotations

import time
from collections import abc, deque
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Integral

import numpy as np

from llmc.runtime.cache.pages import Sequence, pages_for
from llmc.runtime.decoding.sampling import Sampler, Sampling
from llmc.runtime.encoder import batches, check_source
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import PAGE_TOKENS
from llmc.runtime.runner import Output, Runner, checked_logits
from llmc.runtime.text.tokenizer import Tokenizer

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Options:
    """What a generation can be asked for; `runtime/decoding/sampling.py` explains the four about chance.

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
    since the call, or since the prompt was let in if it had to wait for room: prefill_s until the prompt was read (of
    all that were let in with it), first_token_s until the first token, decode_s from there to this sequence's last; and
    prefill_tokens, decode_tokens: tokens that passed in each.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    timings: dict[str, float]


class _Speaker:
    """One sequence of a batch while it is generated. Where the model has an encoder, `prompt` is its source."""

    def __init__(self, prompt: list[int], options: Options, generator: Generator, limit: int) -> None:
        self.prompt = prompt
        self.source = Sequence() if generator.lead else None
        self.sequence = Sequence(self.source)
        self.opening = list(generator.lead) or prompt
        self.ids: list[int] = []
        self.finish_reason = ""
        self.times = (0.0, 0.0, 0.0)  # it was let in, its prompt was read, its group had first tokens
        self._options = options
        self._limit = limit  # tokens of its opening and its answer together
        self._stop = frozenset() if options.ignore_eos else generator.eos
        self._suppressed = list(generator.suppressed)
        self._sampler = Sampler(options.sampling)
        self._stream = generator.tokenizer.stream()
        self._pieces: list[str] = []
        self._end_time = 0.0

    def room(self) -> list[tuple[Sequence, int]]:
        """Its sequences, and the tokens that each can come to hold."""
        answer = (self.sequence, min(self._limit, len(self.opening) + self._options.max_tokens))
        return [answer] if self.source is None else [answer, (self.source, len(self.prompt))]

    def take(self, output: Output, row: int) -> str:
        """Choose the next token from a row of logits; the text that is now certain."""
        logits, likeliest = checked_logits(output, row), int(output.argmax[row])
        if self._suppressed:
            logits = logits.copy()
            logits[self._suppressed] = -np.inf
            likeliest = int(logits.argmax())
        token = self._sampler.next_token(logits, likeliest)
        self.ids.append(token)
        if token in self._stop:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._options.max_tokens:
            self.finish_reason = "length"
        elif len(self.opening) + len(self.ids) >= self._limit:
            self.finish_reason = "context"
        piece = "" if self.finish_reason == "stop" else self._stream.push(token)
        if self.finish_reason:
            piece += self._stream.finish()
            self._end_time = time.perf_counter()
        self._pieces.append(piece)
        return piece

    def result(self) -> Generation:
        """The finished generation; times are those of the group that was let in with it."""
        start, prefilled, first = self.times
        timings = {
            "prefill_s": prefilled - start,
            "first_token_s": first - start,
            "decode_s": self._end_time - first,
            "prefill_tokens": len(self.prompt),
            "decode_tokens": len(self.ids) - 1,
        }
        return Generation("".join(self._pieces), self.ids, self.prompt, self.finish_reason, timings)


@dataclass(frozen=True)
class Part:
    """What one step added to the answer of prompt number `index`; with its last part comes the whole of it."""

    index: int
    text: str
    done: Generation | None


@dataclass
class Generator:
    """Generates for prompts that are token ids. One object serves any number of calls.

    `lead`: where the model has an encoder, what an answer begins with; the prompts are then sources. `suppressed`: ids
    that are never chosen.
    """

    runner: Runner
    tokenizer: Tokenizer
    eos: frozenset[int]
    lead: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    results: list[Generation] = field(default_factory=list)

    def run(self, prompts: list[list[int]], options: list[Options], start: float) -> abc.Iterator[tuple[int, str]]:
        """`parts` that have text, as (index, text); fills `results` in the end."""
        done: dict[int, Generation] = {}
        with closing(self.parts(prompts, options, start)) as parts:
            for part in parts:
                if part.done is not None:
                    done[part.index] = part.done
                if part.text:
                    yield part.index, part.text
        self.results = [done[index] for index in range(len(prompts))]

    def parts(self, prompts: list[list[int]], options: list[Options], start: float) -> abc.Generator[Part, None, None]:
        """Generate for all prompts, in common steps.

        Prompts that do not fit in the cache together wait, in order, until others have ended. `start` is when the call
        began (time.perf_counter). Pages are given back however it ends.
        """
        speakers = [self._speaker(n, *each) for n, each in enumerate(zip(prompts, options, strict=True))]
        waiting, going = deque(range(len(speakers))), list[int]()
        try:
            while waiting or going:
                new = self._let_in(speakers, waiting, bool(going))
                group = new or going
                members = [speakers[index] for index in group]
                output = self._read(members, options[group[0]].prefill_chunk) if new else self._step(members)
                read = time.perf_counter()
                pieces = [speaker.take(output, row) for row, speaker in enumerate(members)]
                for speaker in members if new else ():
                    speaker.times = (start, read, time.perf_counter())
                ended = [index for index in group if speakers[index].finish_reason]
                for index in ended:
                    self._release(speakers[index])
                going = [index for index in (going + new) if index not in ended]
                for index, piece in zip(group, pieces, strict=True):
                    yield Part(index, piece, speakers[index].result() if index in ended else None)
                start = time.perf_counter()
        finally:
            for speaker in speakers:
                self._release(speaker)

    def _speaker(self, number: int, prompt: list[int], options: Options) -> _Speaker:
        pages, context = self.runner.pool.num_pages, self.runner.context
        if self.lead:
            check_source(number, len(prompt), context)
            pages -= pages_for(len(prompt))
        limit = min(context, pages * PAGE_TOKENS)  # tokens that the sequence can have
        speaker = _Speaker(prompt, options, self, limit)
        if len(speaker.opening) >= limit:
            what = f"context of {limit}" if limit == context else f"cache_tokens of {pages * PAGE_TOKENS}"
            raise RequestError(f"prompt: {len(prompt)} tokens leave no room for an answer in a {what}")
        return speaker

    def _let_in(self, speakers: list[_Speaker], waiting: deque[int], others: bool) -> list[int]:
        """Take the next prompts that the cache has room for from `waiting`, and give them their pages.

        While others are going on, half of the cache must be free first: reading few prompts costs as much as many.
        """
        free = self.runner.pool.free_pages
        new: list[int] = []
        if others and 2 * free < self.runner.pool.num_pages:
            return new
        room: list[tuple[Sequence, int]] = []
        while waiting:
            wanted = speakers[waiting[0]].room()
            free -= sum(pages_for(tokens) for _, tokens in wanted)
            if free < 0 and (new or others):
                break
            room += wanted
            new.append(waiting.popleft())
        self.runner.pool.reserve_all(room)
        return new

    def _read(self, speakers: list[_Speaker], chunk: int | None) -> Output:
        """Read prompts, or sources and then what their answers begin with; logits (S, V) of the last row of each."""
        sources = [(s.source, s.prompt) for s in speakers if s.source is not None]
        for batch in batches([ids for _, ids in sources], chunk or self.runner.prefill_chunk):
            self.runner.encode([sources[number] for number in batch])
        return self.runner.prefill([(s.sequence, s.opening) for s in speakers], chunk)

    def _step(self, speakers: list[_Speaker]) -> Output:
        return self.runner.step([(s.sequence, s.ids[-1:]) for s in speakers])

    def _release(self, speaker: _Speaker) -> None:
        for sequence, _ in speaker.room():
            self.runner.release(sequence)


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
