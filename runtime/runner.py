"""Runs the compiled step: turns "these tokens of these sequences" into its index arrays, and keeps the KV cache true.

One call serves prefill, chunked prefill, decode and any mixture. Letters: N rows (tokens) of the step, S sequences,
P pages listed, R rows that want logits, V vocabulary. All index arrays are int32:
tokens (N,), positions (N,), seqs (N,), slots (N,), page_indptr (S + 1,), page_ids (P,), logit_rows (R,).
Where the model has an encoder, the step also gets the sources that its sequences answer to, with Q pages in all:
source_lengths (S,), source_indptr (S + 1,), source_ids (Q,). Its other function, encode, gets the first seven alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool, Sequence, pages_for
from llmc.runtime.errors import LlmcError, RequestError

Ids = SequenceOf[int] | NDArray[np.integer[Any]]
Step = Callable[..., Any]  # arrays in the order above, then kv and weights -> (logits (R, V), argmax (R,))

PREFILL_CHUNK = 512  # rows of one step at most, which bounds its working memory
_ALIGN_INTS = 16  # 64 bytes


@dataclass(frozen=True)
class Feed:
    """Tokens to append to a sequence, and the rows of them that want logits: "last", "all" or "none"."""

    sequence: Sequence
    ids: Ids
    logits: str = "last"


@dataclass(frozen=True)
class Output:
    """Logits (R, V) float32 and their argmax (R,) int32, for the wanted rows in the order fed."""

    logits: NDArray[np.float32]
    argmax: NDArray[np.int32]


@dataclass
class Runner:
    """A loaded step with its cache. `step_function` takes NumPy arrays and returns two; model.py binds the real one.

    `encode_function`: of a model with an encoder, what reads a source and leaves in its pages what the step looks at.
    """

    step_function: Step
    pool: PagePool
    vocab: int
    context: int
    prefill_chunk: int = PREFILL_CHUNK
    encode_function: Step | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def new_sequence(self, source: Sequence | None = None) -> Sequence:
        """An empty sequence; it holds no pages until it is fed. `source`: what it answers to, see `encode`."""
        return Sequence(source)

    def step(self, feeds: Iterable[Feed | tuple[Sequence, Ids]]) -> Output:
        """Append tokens to sequences in one call of the compiled step.

        Raises RequestError when a token id, a length or the cache does not allow it. After any error no sequence has
        advanced and no page has changed hands.
        """
        batch = [feed if isinstance(feed, Feed) else Feed(*feed) for feed in feeds]
        ids = [as_ids(feed.ids, self.vocab) for feed in batch]
        self._check(batch, ids)
        if self.encode_function is None:
            return self._call(self.step_function, batch, ids)
        if any(feed.sequence.source is None or not feed.sequence.source.length for feed in batch):
            raise RequestError("a sequence of a model with an encoder needs a source that was encoded")
        return self._call(self.step_function, batch, ids, sources=True)

    def encode(self, feeds: Iterable[tuple[Sequence, Ids]]) -> None:
        """Read sources, each of them whole, in one call of the compiled encoder; errors as of `step`."""
        if self.encode_function is None:
            raise RequestError("the model has no encoder")
        batch = [Feed(sequence, ids, "none") for sequence, ids in feeds]
        ids = [as_ids(feed.ids, self.vocab) for feed in batch]
        self._check(batch, ids)
        if any(feed.sequence.length for feed in batch):
            raise RequestError("a source is encoded as a whole: release its sequence before it takes another one")
        self._call(self.encode_function, batch, ids)

    def _call(self, function: Step, batch: list[Feed], ids: list[NDArray[np.int32]], sources: bool = False) -> Output:
        """Feed checked tokens to one of the compiled functions."""
        with self.lock:
            held = [len(feed.sequence.pages) for feed in batch]
            lengths = [f.sequence.length + len(i) for f, i in zip(batch, ids, strict=True)]
            self.pool.reserve_all([(f.sequence, n) for f, n in zip(batch, lengths, strict=True)])
            try:
                arrays = _index_arrays(batch, ids)
                logits, argmax = function(*arrays, *(_source_arrays(batch) if sources else ()))
            except BaseException:
                for feed, pages in zip(batch, held, strict=True):
                    self.pool.shrink(feed.sequence, pages)
                raise
            for feed, length in zip(batch, lengths, strict=True):
                feed.sequence.position += length - feed.sequence.length
                feed.sequence.length = length
        wanted = sum(_wanted(feed, len(i)) for feed, i in zip(batch, ids, strict=True))
        return Output(logits[:wanted], argmax[:wanted])

    def prefill(self, feeds: Iterable[tuple[Sequence, Ids]], chunk: int | None = None) -> Output:
        """Append prompts of any length in steps of at most `chunk` rows; logits (S, V) of the last row of each.

        After an error the sequences keep the chunks that were done.
        """
        rows = self.prefill_chunk if chunk is None else chunk
        if rows < 1:
            raise RequestError(f"prefill_chunk: got {rows}, wanted a positive number of rows")
        outputs = [self.step(part) for part in _chunks(list(feeds), rows)]
        outputs = [output for output in outputs if len(output.argmax)]
        if len(outputs) == 1:
            return outputs[0]
        return Output(
            np.concatenate([output.logits for output in outputs]),
            np.concatenate([output.argmax for output in outputs]),
        )

    def release(self, sequence: Sequence) -> None:
        """Give the pages of a sequence back."""
        with self.lock:
            self.pool.release(sequence)

    def _check(self, batch: list[Feed], ids: list[NDArray[np.int32]]) -> None:
        if not batch:
            raise RequestError("a step needs at least one sequence")
        if len({id(feed.sequence) for feed in batch}) != len(batch):
            raise RequestError("a step takes each sequence once")
        for feed, new in zip(batch, ids, strict=True):
            if feed.logits not in ("last", "all", "none"):
                raise RequestError(f"logits: got {feed.logits!r}, wanted last, all or none")
            if len(new) == 0:
                raise RequestError("a step needs at least one token of each sequence")
            if feed.sequence.length + len(new) > self.context:
                raise RequestError(
                    f"{feed.sequence.length + len(new)} tokens, and the model's context is {self.context}"
                )


def as_ids(ids: Ids, vocab: int) -> NDArray[np.int32]:
    """Token ids (n,) int32, all of them in the vocabulary. Raises RequestError naming the first that is not."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError, TypeError) as error:
        raise RequestError(f"token ids: wanted a flat list of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"token ids: got {array.dtype}{array.shape}, wanted a flat list of integers")
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        at = int(wrong[0])
        raise RequestError(f"token ids: got {array[at]} at place {at}, wanted 0..{vocab - 1}")
    return array.astype(np.int32, copy=False)


def checked_logits(output: Output, row: int) -> NDArray[np.float32]:
    """Logits (V,) of one row; raises LlmcError if the model computed something that is no number there."""
    logits = output.logits[row]
    if not np.isfinite(logits[output.argmax[row]]):
        raise LlmcError("the model computed logits that are not finite; its weights may be damaged or not fit its spec")
    return logits


def _wanted(feed: Feed, rows: int) -> int:
    return {"last": 1, "all": rows, "none": 0}[feed.logits]


def _index_arrays(batch: list[Feed], ids: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """The seven index arrays of a step (see the top). The compiled step wants R >= 1, so row 0 stands in for none."""
    counts = [len(new) for new in ids]
    pages = [pages_for(feed.sequence.length + n) for feed, n in zip(batch, counts, strict=True)]
    wanted = max(1, sum(_wanted(feed, n) for feed, n in zip(batch, counts, strict=True)))
    rows = sum(counts)
    arrays = _aligned([rows, rows, rows, rows, len(batch) + 1, sum(pages), wanted])
    tokens, positions, seqs, slots, page_indptr, page_ids, logit_rows = arrays
    page_indptr[0] = row = page = at = 0
    logit_rows[0] = 0
    for index, (feed, new) in enumerate(zip(batch, ids, strict=True)):
        after, sequence = row + len(new), feed.sequence
        tokens[row:after] = new
        seqs[row:after] = index
        slots[row:after] = np.arange(sequence.length, sequence.length + len(new))
        positions[row:after] = np.arange(sequence.position, sequence.position + len(new))
        page_ids[page : page + pages[index]] = sequence.pages[: pages[index]]
        page += pages[index]
        page_indptr[index + 1] = page
        asked = _wanted(feed, len(new))
        logit_rows[at : at + asked] = np.arange(after - asked, after)
        at += asked
        row = after
    return arrays


def _source_arrays(batch: list[Feed]) -> list[NDArray[np.int32]]:
    """The three arrays of sources (see the top). A source that several sequences share is listed for each."""
    sources = [feed.sequence.source for feed in batch if feed.sequence.source is not None]
    lengths = [source.length for source in sources]
    counts = [pages_for(length) for length in lengths]
    arrays = _aligned([len(batch), len(batch) + 1, sum(counts)])
    source_lengths, source_indptr, source_ids = arrays
    source_lengths[:] = lengths
    source_indptr[0] = 0
    source_indptr[1:] = np.cumsum(counts)
    at = 0
    for source, count in zip(sources, counts, strict=True):
        source_ids[at : at + count] = source.pages[:count]
        at += count
    return arrays


def _aligned(lengths: list[int]) -> list[NDArray[np.int32]]:
    """Uninitialised int32 arrays of these lengths, each starting at a multiple of 64 bytes."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += -(-length // _ALIGN_INTS) * _ALIGN_INTS
    memory = np.empty(at + _ALIGN_INTS, np.int32)
    shift = (-memory.ctypes.data % (4 * _ALIGN_INTS)) // 4
    return [memory[shift + start : shift + start + n] for start, n in zip(starts, lengths, strict=True)]


def _chunks(feeds: list[tuple[Sequence, Ids]], rows: int) -> Iterable[list[Feed]]:
    """Steps of at most `rows` rows that feed everything in order; only the last token of a prompt wants logits."""
    part: list[Feed] = []
    room = rows
    for sequence, ids in feeds:
        start = 0
        while start < len(ids) or start == 0:
            taken = ids[start : start + room]
            start += max(1, len(taken))
            part.append(Feed(sequence, taken, "last" if start >= len(ids) else "none"))
            room -= len(taken)
            if room <= 0:
                yield part
                part, room = [], rows
    if part:
        yield part
