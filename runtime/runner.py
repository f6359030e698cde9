"""Runs the compiled step: turns "these tokens of these sequences" into its index arrays, and keeps the KV cache true.

One call serves prefill, chunked prefill, decode and any mixture. Letters: N rows (tokens) of the step, S sequences,
P pages listed, R rows that want logits, V vocabulary. All index arrays are int32:
tokens (N,), positions (N,), seqs (N,), slots (N,), holes (S, 2), page_indptr (S + 1,), page_ids (P,) for each group of
layers, logit_rows (R,). Where the model has an encoder, the step also gets the sources that its sequences answer to,
with Q pages in all: source_lengths (S,), source_indptr (S + 1,), source_ids (Q,). Its other function, encode, gets the
arrays before these alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool, Sequence
from llmc.runtime.decoding.candidates import Row
from llmc.runtime.errors import RequestError
from llmc.runtime.index_arrays import aligned, index_arrays, source_arrays
from llmc.runtime.parts import Parts, Passage

Ids = SequenceOf[int] | NDArray[np.integer[Any]]
# Arrays in the order above -> logits (R, V), or `Rows` of them, top ids and values (R, K), normalizers (R,); of a model
# without logits vectors (R, C) and argmax (R,). Where there are several stages, not yet that but what waits for it and
# gives it.
Step = Callable[..., Any]

_UNKNOWN = np.zeros(1, np.int32)  # stands for a token that nobody knows yet
PREFILL_CHUNK = 512  # rows of one step at most, which bounds its working memory
DEVICE_CHUNK = 2048  # on a GPU, of which fewer rows leave multiprocessors idle


class Feed(NamedTuple):
    """Tokens to append to a sequence, and the rows of them that want logits: "last", "all" or "none".

    With a `passage`, of a step in parts, they go `through` so many of the parts that lie ahead of them; when they have
    come through the last, they are appended and have logits.
    """

    sequence: Sequence
    ids: Ids
    logits: str = "last"
    passage: Passage | None = None
    through: int = 0

    @property
    def arrives(self) -> bool:
        """Whether the tokens come through the last layer."""
        return self.passage is None or self.through == self.passage.left


class Rows(Protocol):
    """Logits (R, V) that may be where the step left them until somebody asks for an array of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(R, V)."""
        ...

    def __getitem__(self, rows: slice) -> Rows: ...

    def __array__(self, dtype: Any = None) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Output:
    """Logits (R, V) for the wanted rows in the order fed, and what the step says of each of them.

    top_ids, top_values (R, K): its K greatest logits, the greatest first, of equal ones that of the lower id first.
    normalizers (R,): log of the sum of e^logit; no number where one of the logits is none.
    """

    rows: Rows
    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]
    normalizers: NDArray[np.float32]

    @cached_property
    def logits(self) -> NDArray[np.float32]:
        """All of them, as an array."""
        return np.asarray(self.rows)

    def row(self, at: int) -> Row:
        """What it says of one row."""
        return Row(
            self.rows.shape[1], partial(self._logits_of, at), self.top_ids[at], self.top_values[at],
            float(self.normalizers[at]),
        )  # fmt: skip

    def _logits_of(self, at: int) -> NDArray[np.float32]:
        rows = self.rows[at : at + 1]
        return np.asarray(rows)[0]

    @property
    def argmax(self) -> NDArray[np.int32]:
        """(R,)."""
        return self.top_ids[:, 0]

    @staticmethod
    def with_best(rows: NDArray[np.float32], argmax: NDArray[np.int32]) -> Output:
        """Rows (R, V) of which only the place of the greatest (R,) is known; their normalizers are no numbers."""
        best = argmax[:, None]
        return Output(rows, best, np.take_along_axis(rows, best, 1), np.full(len(rows), np.nan, np.float32))


@dataclass(eq=False)
class Begun:
    """A step that has begun: its sequences have advanced. `wanted`: rows that have logits.

    ones: its sequences, if each was fed one token and wants logits; None for any other step.
    """

    given: Callable[[], Any]
    wanted: int
    lock: threading.Lock
    ones: list[Sequence] | None = None

    def wait(self) -> Output:
        """What the step gives. It may be asked again if it was interrupted; nobody needs to ask."""
        with self.lock:
            found = [array[: self.wanted] for array in self.given()]
        return Output.with_best(*found) if len(found) == 2 else Output(*found)


@dataclass
class Runner:
    """A loaded step with its cache. `step_function`: see `Step`; bound.py binds the real one.

    `encode_function`: of a model with an encoder, what reads a source and leaves in its pages what the step looks at.
    `turn_function`: see `turn`; None where keys do not know positions. `endless`: how a text can go on in a full cache.
    `parts`: the step in parts, where it was compiled so, for feeds with a passage. `stages`: into how many the layers
    are cut, so that as many steps may be under way; where there are several, functions give what waits (`Step`).
    """

    step_function: Step
    pool: PagePool
    vocab: int
    context: int
    prefill_chunk: int = PREFILL_CHUNK
    encode_function: Step | None = None
    turn_function: Step | None = None
    endless: tuple[str, ...] = ()
    parts: Parts | None = None
    stages: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: weakref.ref[Begun] | None = field(default=None, init=False)  # the step that was begun last

    def new_sequence(self, source: Sequence | None = None) -> Sequence:
        """An empty sequence; it holds no pages until it is fed. `source`: what it answers to, see `encode`."""
        return self.pool.new_sequence(source)

    def step(self, feeds: Iterable[Feed | tuple[Sequence, Ids]]) -> Output:
        """Append tokens to sequences in one call of the compiled step.

        Raises RequestError when a token id, a length or the cache does not allow it. After any error no sequence has
        advanced and no page has changed hands.
        """
        return self.begin(feeds).wait()

    def begin(self, feeds: Iterable[Feed | tuple[Sequence, Ids]]) -> Begun:
        """`step`, but for what comes at its end: the sequences have advanced, and may be fed, forked, released again.

        All functions and copies of pages are done in the order in which they are called for, on every device.
        """
        batch = [feed if isinstance(feed, Feed) else Feed(*feed) for feed in feeds]
        ids = [as_ids(feed.ids, self.vocab) for feed in batch]
        self._check(batch, ids)
        if any(feed.passage is not None for feed in batch):
            return self._pass(batch, ids)
        if self.encode_function is None:
            return self._call(self._begins(self.step_function), batch, ids)
        if any(feed.sequence.source is None or not feed.sequence.source.length for feed in batch):
            raise RequestError("a sequence of a model with an encoder needs a source that was encoded")
        return self._call(self._begins(self.step_function), batch, ids, sources=True)

    def follow(self, begun: Begun) -> Begun | None:
        """Begin the step behind one that has begun: its sequences go on with the greatest token of their rows.

        Nobody needs to know these, so the step before may still be running, and its logits are gone then but for the
        greatest. None where that is not to be had, for a step that others were begun behind, or want of room: then
        nothing has changed.
        """
        follow = getattr(self.step_function, "follow", None)
        if follow is None or begun.ones is None or self._latest is None or self._latest() is not begun:
            return None
        batch, ids = [Feed(sequence, _UNKNOWN) for sequence in begun.ones], [_UNKNOWN] * len(begun.ones)
        try:
            self._check(batch, ids)
            return self._call(follow, batch, ids)
        except (RequestError, _NotNow):
            return None

    def encode(self, feeds: Iterable[tuple[Sequence, Ids]]) -> None:
        """Read sources, each of them whole, in one call of the compiled encoder; errors as of `step`."""
        if self.encode_function is None:
            raise RequestError("the model has no encoder")
        batch = [Feed(sequence, ids, "none") for sequence, ids in feeds]
        ids = [as_ids(feed.ids, self.vocab) for feed in batch]
        self._check(batch, ids)
        if any(feed.sequence.length for feed in batch):
            raise RequestError("a source is encoded as a whole: release its sequence before it takes another one")
        self._call(self._begins(self.encode_function), batch, ids)

    def _begins(self, function: Step) -> Step:
        """The function as one that gives what waits for it, as those of a device and of several stages do."""
        if self.stages > 1:
            return function
        begin: Step = getattr(function, "begin", None) or partial(_done, function)
        return begin

    def _call(self, begin: Step, batch: list[Feed], ids: list[NDArray[np.int32]], sources: bool = False) -> Begun:
        """Feed checked tokens to what begins one of the compiled functions; _NotNow where that gives nothing."""
        with self.lock:
            lengths = [f.sequence.length + len(i) for f, i in zip(batch, ids, strict=True)]
            with self.pool.reserving([(f.sequence, n) for f, n in zip(batch, lengths, strict=True)]):
                given = begin(*_arrays(batch, ids), *(_source_arrays(batch) if sources else ()))
                if given is None:
                    raise _NotNow
            for feed, length in zip(batch, lengths, strict=True):
                feed.sequence.position += length - feed.sequence.length
                feed.sequence.length = length
            wanted = sum(_wanted(feed, len(i)) for feed, i in zip(batch, ids, strict=True))
            begun = Begun(given, wanted, self.lock)
            if not sources and wanted == len(batch) == sum(map(len, ids)):
                begun.ones = [feed.sequence for feed in batch]
            self._latest = weakref.ref(begun)
        return begun

    def _pass(self, batch: list[Feed], ids: list[NDArray[np.int32]]) -> Begun:
        """`_call` of the step in parts, where some tokens do not come through to the end."""
        if self.parts is None:
            raise RequestError("a passage wants an artifact whose layers were compiled in groups too (--layer-groups)")
        for feed, new in zip(batch, ids, strict=True):
            passage = feed.passage
            if passage is not None and (len(new) != passage.rows or not 1 <= feed.through <= passage.left):
                raise RequestError(
                    f"a feed of {len(new)} tokens through {feed.through} parts, whose passage has {passage.rows} and "
                    f"{passage.left} ahead of it"
                )

        def arrays_of(numbers: SequenceOf[int]) -> list[NDArray[np.int32]]:
            return _arrays([batch[n] for n in numbers], [ids[n] for n in numbers])

        wanted = [(feed.sequence, feed.sequence.length + len(new)) for feed, new in zip(batch, ids, strict=True)]
        arriving = [(feed, len(new)) for feed, new in zip(batch, ids, strict=True) if feed.arrives]
        with self.lock:
            with self.pool.reserving(wanted):
                found = self.parts.step(batch, arrays_of)
            for feed, count in arriving:
                feed.sequence.position += count
                feed.sequence.length += count
        none = np.empty((0, self.vocab), np.float32)
        found = found or [none, none.astype(np.int32), none, none[:, 0]]
        return Begun(lambda: found, len(found[0]), self.lock)

    def prefill(self, feeds: Iterable[tuple[Sequence, Ids]], chunk: int | None = None) -> Output:
        """Append prompts of any length in steps of at most `chunk` rows; logits (S, V) of the last row of each.

        After an error the sequences keep the chunks that were done.
        """
        rows = self.prefill_chunk if chunk is None else chunk
        if rows < 1:
            raise RequestError(f"prefill_chunk: got {rows}, wanted a positive number of rows")
        outputs, under_way = [], deque[Begun]()
        for part in _chunks(list(feeds), rows):
            under_way.append(self.begin(part))
            if len(under_way) == self.stages:
                outputs.append(under_way.popleft().wait())
        outputs += [begun.wait() for begun in under_way]
        outputs = [output for output in outputs if len(output.top_ids)]
        if len(outputs) == 1:
            return outputs[0]
        return Output(*(np.concatenate([getattr(each, one.name) for each in outputs]) for one in fields(Output)))

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens; neither is copied until one of them goes on in a page of both."""
        with self.lock:
            return self.pool.fork(sequence)

    def truncate(self, sequence: Sequence, slots: int) -> int:
        """Take back all but the first `slots` tokens; how many are left: fewer where the model's windows want more.

        Feed the sequence from there on.
        """
        with self.lock:
            return self.pool.truncate(sequence, slots)

    def turn(self, by: Ids, sources: Ids, targets: Ids) -> None:
        """Copy n pages of the first group of layers to n others, or to themselves, their keys turned by rope.

        by (16 n,): positions that each token of them goes forward, or back. The caller holds `lock`.
        """
        if self.turn_function is None:
            raise RequestError("the keys of this model are not turned by rope")
        arrays = aligned([len(by), len(sources), len(targets)])
        for array, values in zip(arrays, (by, sources, targets), strict=True):
            array[:] = values
        self.turn_function(*arrays)

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
            first, after = feed.sequence.hole
            seen = feed.sequence.length - (after - first) + len(new)
            if seen > self.context:
                raise RequestError(f"{seen} tokens, and the model's context is {self.context}")


class _NotNow(Exception):
    """A step cannot be followed."""


def _done(function: Step, *arrays: NDArray[np.int32]) -> Callable[[], Any]:
    """Call a function whose results are there when it returns."""
    found = function(*arrays)
    return lambda: found


def as_ids(ids: Ids, vocab: int) -> NDArray[np.int32]:
    """Token ids (n,) int32, all of them in the vocabulary. Raises RequestError naming the first that is not."""
    if isinstance(ids, list) and len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < vocab:  # most feeds are this
        return np.array(ids, np.int32)
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


def _wanted(feed: Feed, rows: int) -> int:
    return {"last": 1, "all": rows, "none": 0}[feed.logits]


def _arrays(batch: list[Feed], ids: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    wanted = [_wanted(feed, len(new)) for feed, new in zip(batch, ids, strict=True)]
    return index_arrays([feed.sequence for feed in batch], ids, wanted)


def _source_arrays(batch: list[Feed]) -> list[NDArray[np.int32]]:
    return source_arrays([feed.sequence.source for feed in batch if feed.sequence.source is not None])


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
