"""A discrete-event simulator: things happen in the order of their times, stations serve what comes in its order.

It is for what no formula gives: stages of unlike speed, queries that come at random, prompts beside answers. Where
there is a formula, tests compare the two.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

Action = Callable[[], None]


class Events:
    """What is to happen, by time; of the same time what was told first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def after(self, seconds: float, action: Action) -> None:
        """Do it so much later."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), action))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen, or until that is so."""
        while self._heap and not until():
            self.now, _, action = heapq.heappop(self._heap)
            action()


class Station:
    """Serves one at a time, first come first served: a stage's devices, or a link. `busy_s`: how long it has worked."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._free_at = self.busy_s = 0.0

    def serve(self, seconds: float, then: Action) -> None:
        """`then` happens when it has been served."""
        self._free_at = max(self._free_at, self._events.now) + seconds
        self.busy_s += seconds
        self._events.after(self._free_at - self._events.now, then)


def circulate(stage_s: Sequence[float], hop_s: Sequence[float], batches: int, rounds: int) -> float:
    """Seconds a round of `batches` micro-batches that go round all stages, again and again.

    The first half of the rounds is not counted: the pipeline fills.
    """
    events = Events()
    stations = [Station(events) for _ in stage_s]
    done: list[float] = []

    def arrive(batch: int, stage: int, left: int) -> None:
        def served() -> None:
            following = stage + 1
            if following < len(stations):
                events.after(hop_s[stage], lambda: arrive(batch, following, left))
                return
            events.after(hop_s[stage], lambda: end(batch, left))

        stations[stage].serve(stage_s[stage], served)

    def end(batch: int, left: int) -> None:
        if batch == batches - 1:
            done.append(events.now)
        if left > 1:
            arrive(batch, 0, left - 1)

    for batch in range(batches):
        arrive(batch, 0, rounds)
    events.run()
    half = len(done) // 2
    return (done[-1] - done[half]) / (len(done) - 1 - half)


@dataclass
class Query:
    """A query of a prompt and an answer of `new` tokens, with its times: when it came, its first and its last token."""

    came: float
    prompt: int
    new: int
    first: float = -1.0
    last: float = -1.0

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.first - self.came

    @property
    def token_s(self) -> float:
        """Seconds between tokens of the answer, on average."""
        return (self.last - self.first) / max(1, self.new - 1)


@dataclass(frozen=True)
class Speeds:
    """How an instance works: seconds of a step in each of its stages, and behind each stage.

    `step(decoding, context, prompt rows, before)`: queries that get a token, tokens that each looks back on, and rows
    of one prompt with `before` rows of it in the cache; any may be 0.
    """

    step: Callable[[int, float, int, int], tuple[float, Sequence[float]]]
    stages: int
    most: int  # queries that it has memory for


@dataclass
class Instance:
    """One replica: queries are read in chunks and answered, in as many steps side by side as it has stages.

    `reads` and `answers`: which of both it does. Who only reads hands a query over with `pass_on` when its first token
    is there; who does both reads a chunk of a prompt in the steps in which it answers (chunked prefill).
    """

    events: Events
    speeds: Speeds
    chunk: int
    reads: bool
    answers: bool
    pass_on: Callable[[Query], None]
    waiting: deque[Query] = field(default_factory=deque)  # for their prompt
    handed: deque[Query] = field(default_factory=deque)  # from elsewhere, for their answer
    tokens_made: int = 0

    def __post_init__(self) -> None:
        self._stations = [Station(self.events) for _ in range(self.speeds.stages)]
        self._lanes = [_Lane() for _ in range(self.speeds.stages)]
        self.load = 0

    def take(self, query: Query) -> None:
        """A query that comes, or is handed over."""
        self.load += 1
        (self.waiting if self.reads and query.first < 0 else self.handed).append(query)
        for lane in self._lanes:
            if not lane.busy:
                self._begin(lane)
                return

    def _begin(self, lane: _Lane) -> None:
        self._let_in(lane)
        rows = 0
        if lane.reading is not None:
            rows = min(self.chunk, lane.reading.prompt - lane.read)
        if not rows and not lane.answering:
            lane.busy = False
            return
        lane.busy = True
        context = lane.context / len(lane.answering) if lane.answering else 0.0
        overhead, times = self.speeds.step(len(lane.answering), context, rows, lane.read)
        self._pass(lane, times, overhead, 0, rows)

    def _pass(self, lane: _Lane, times: Sequence[float], overhead: float, stage: int, rows: int) -> None:
        def served() -> None:
            if stage + 1 < len(times):
                self._pass(lane, times, overhead, stage + 1, rows)
            else:
                self.events.after(overhead, lambda: self._end(lane, rows))

        self._stations[stage].serve(times[stage], served)

    def _let_in(self, lane: _Lane) -> None:
        room = max(1, self.speeds.most // len(self._lanes))
        while self.handed and len(lane.answering) < room:
            lane.add(self.handed.popleft())
        if lane.reading is None and self.waiting and (not self.answers or len(lane.answering) < room):
            lane.reading, lane.read = self.waiting.popleft(), 0

    def _end(self, lane: _Lane, rows: int) -> None:
        self.tokens_made += len(lane.answering)
        for query in lane.stepped():
            query.last = self.events.now
            self.load -= 1
        if lane.reading is not None:
            lane.read += rows
            if lane.read == lane.reading.prompt:
                self._has_read(lane, lane.reading)
        self._begin(lane)

    def _has_read(self, lane: _Lane, query: Query) -> None:
        lane.reading = None
        query.first = self.events.now
        self.tokens_made += 1
        if query.new == 1:
            query.last = self.events.now
            self.load -= 1
        elif self.answers:
            lane.add(query)
        else:
            self.load -= 1
            self.pass_on(query)


@dataclass
class _Lane:
    """One of the steps that are under way side by side."""

    busy: bool = False
    reading: Query | None = None
    read: int = 0
    steps: int = 0
    context: int = 0  # tokens that all answered queries have, together
    answering: list[tuple[int, int, Query]] = field(default_factory=list)  # a heap: the step that is its last

    def add(self, query: Query) -> None:
        """A query whose first token is there."""
        heapq.heappush(self.answering, (self.steps + query.new - 1, id(query), query))
        self.context += query.prompt + 1

    def stepped(self) -> list[Query]:
        """Those that have their last token by this step."""
        self.steps += 1
        self.context += len(self.answering)
        done = []
        while self.answering and self.answering[0][0] == self.steps:
            query = heapq.heappop(self.answering)[2]
            self.context -= query.prompt + query.new
            done.append(query)
        return done


def arrivals(rate: float, number: int, prompt: int, new: int, seed: int = 0) -> list[Query]:
    """Queries that come one by one, independently (a Poisson process), `rate` a second; the same for a seed."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(number):
        at += draw.expovariate(rate)
        found.append(Query(at, prompt, new))
    return found


def serve(
    queries: Sequence[Query],
    readers: Sequence[Speeds],
    answerers: Sequence[Speeds],
    chunk: int,
    transfer: Callable[[int], float],
) -> None:
    """Serve queries, filling in their times. With no `answerers` the readers answer too.

    `transfer`: seconds that the keys and values of a prompt of so many tokens are on the way between instances; an
    answerer receives one after another.
    """
    events = Events()
    answering = [Instance(events, each, chunk, False, True, lambda _: None) for each in answerers]
    doors = [Station(events) for _ in answering]

    def pass_on(query: Query) -> None:
        place = min(range(len(answering)), key=lambda i: (answering[i].load, i))
        answering[place].load += 1  # it is on the way

        def arrived() -> None:
            answering[place].load -= 1
            answering[place].take(query)

        doors[place].serve(transfer(query.prompt), arrived)

    reading = [Instance(events, each, chunk, True, not answerers, pass_on) for each in readers]

    def come(query: Query) -> None:
        min(reading, key=lambda instance: instance.load).take(query)

    for query in queries:
        events.after(query.came, lambda query=query: come(query))  # type: ignore[misc]
    events.run()
