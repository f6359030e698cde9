"""What goes into the next step: a token of every answer that is going on, then as much of prompts as there is room for.

So a long prompt is read in chunks beside the answers and never holds them up (Sarathi-Serve,
https://arxiv.org/abs/2403.02310 section 4; SplitFuse, https://arxiv.org/abs/2401.08671).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.runtime.engine.drafts import Draft, Drafter
from llmc.runtime.engine.policies import FirstCome
from llmc.runtime.engine.query import Answer, Query
from llmc.runtime.engine.room import Room
from llmc.runtime.errors import CacheFull
from llmc.runtime.loading.manifest import PAGE_TOKENS
from llmc.runtime.runner import Runner

_FAR_SLOTS = 512  # a row that far into its text takes about twice the time of one at its beginning
_LEAST_ROWS = 32  # of prompts are read together even if a stage waits meanwhile: fewer take nearly as long
_PASSED_OVER = 64  # queries that may be passed over in a step while others read what they begin with


class Portion(NamedTuple):
    """The next `rows` tokens to feed to an answer; `through`: parts of the layers for its passage, 0: all layers.

    arrives: whether they come through the last layer, and so are fed. draft: what is fed behind them, as a guess.
    """

    query: Query
    answer: Answer
    rows: int
    through: int = 0
    arrives: bool = True
    draft: Draft | None = None

    @property
    def last(self) -> bool:
        """Whether logits are wanted: when nothing is left to feed, and nobody has them already."""
        answer = self.answer
        more = self.rows < len(answer.todo) or (self.query.unborn and answer.ids)
        return self.arrives and not more and answer.row is None


@dataclass(frozen=True)
class Plan:
    """A step: sources to encode, each of them whole, and then portions to feed; and queries that cannot go on."""

    sources: list[Query] = field(default_factory=list)
    portions: list[Portion] = field(default_factory=list)
    failed: dict[Query, Exception] = field(default_factory=dict)

    @property
    def queries(self) -> list[Query]:
        """All that it is about, each once."""
        return list(dict.fromkeys([*self.sources, *(portion.query for portion in self.portions)]))

    def of_running(self) -> Plan:
        """The same without queries that have given way since they were planned."""
        portions = [portion for portion in self.portions if portion.query.state == "running"]
        return Plan([query for query in self.sources if query.state == "running"], portions, self.failed)


class Scheduler:
    """Queries that wait and that run, and who is next. rows: a step's rows at most, unless more answers go on."""

    def __init__(self, room: Room, policy: FirstCome, rows: int, most_running: int, drafter: Drafter) -> None:
        self.room = room
        self.policy = policy
        self.drafter = drafter
        self.rows = rows
        self.most_running = most_running
        self.stages = room.runner.stages
        self.waiting: list[Query] = []
        self.running: list[Query] = []
        self.preempted = 0

    def add(self, query: Query) -> None:
        """Take a new query in."""
        self.policy.arrive(query)
        self._wait(query)

    def remove(self, query: Query) -> None:
        """Forget a query that has ended."""
        self.policy.leave(query)
        for queries in (self.waiting, self.running):
            if query in queries:
                queries.remove(query)

    def send_back(self, query: Query) -> None:
        """Have a running query wait, and read again all that it had read."""
        self.room.drop(query)
        self._wait(query)

    def give_way(self) -> None:
        """Take the pages of the running query that is to give way first."""
        last = self._last
        self.room.put_out(last)
        self._wait(last)
        self.preempted += 1

    def plan(self) -> Plan:
        """What to do next; empty when there is nothing."""
        plan = Plan()
        budget = self._continue(plan)
        plan = plan.of_running()  # before any of those that gave way is let in again
        self._let_in(plan, budget)
        return plan.of_running()

    @property
    def _last(self) -> Query:
        """The running query that gives way first."""
        return max(self.running, key=self.policy.standing)

    def _wait(self, query: Query) -> None:
        """Have a query wait that holds no pages."""
        query.state = "waiting"
        if query in self.running:
            self.running.remove(query)
        bisect.insort(self.waiting, query, key=self.policy.rank)

    def _continue(self, plan: Plan) -> int:
        """Feed those that run; how many rows are left then."""
        reading: list[tuple[Query, Answer]] = []
        going, elsewhere = list[Portion](), 0  # answers that go on: in this step or a next one, in one under way
        for query in sorted(self.running, key=self.policy.standing):
            if query.source_ids is not None and not query.source_read:
                plan.sources.append(query)
            for answer in query.speaking:
                if answer.under_way and (answer.awaits or not answer.todo):
                    elsewhere += 1
                elif not self._slide(plan, query, answer) or not answer.todo:
                    continue
                elif len(answer.todo) == 1:
                    going.append(Portion(query, answer, 1))
                else:
                    reading.append((query, answer))
        going = going[: -(-(len(going) + elsewhere) // self.stages)]
        paced = bool(going or elsewhere)
        budget = max(1, self._share() - len(going))  # prompts get on however many answers there are
        beside = min(budget, sum(len(answer.todo) for _, answer in reading)) if reading else 0
        plan.portions.extend(self.drafter.extend(going, beside))
        budget = max(1, budget - sum(len(each.draft.tokens) for each in plan.portions if each.draft))
        for query, answer in reading:
            if query.state == "running":  # it may have given way meanwhile
                budget -= self._read(plan, query, answer, budget, paced)
        return budget

    def _share(self) -> int:
        """Rows of the next step: with several stages an equal part of what there is to read, so that each has some."""
        if self.stages == 1:
            return self.rows
        total = 0
        for query in (*self.running, *self.waiting):
            if query.state == "waiting":
                total += len(query.source_ids or query.opening)
            for answer in query.speaking:
                total += len(answer.todo) + sum(fed.rows for fed in answer.under_way)
            if total >= self.rows * self.stages:
                break
        return min(self.rows, max(_LEAST_ROWS, -(-total // self.stages)))

    def _slide(self, plan: Plan, query: Query, answer: Answer) -> bool:
        """Make room in a text without end; whether the query still runs."""
        window = answer.window

        def fed() -> list[int]:
            reads = query.reads(answer)
            return reads[: len(reads) - len(answer.todo)]

        while window is not None and answer.sequence is not None and not window.rows(answer.sequence):
            try:
                again = window.make_room(self.room.runner, answer.sequence, fed)
            except CacheFull as error:
                if len(self.running) == 1:
                    plan.failed[query] = error
                    return False
                self.give_way()
                continue
            except Exception as error:  # whatever it was, it is this query's own
                plan.failed[query] = error
                return False
            answer.todo, answer.slid = again + answer.todo, True
        return query.state == "running"

    def _read(self, plan: Plan, query: Query, answer: Answer, budget: int, paced: bool) -> int:
        """Plan as much of what an answer has to read as the budget allows; what that takes of it."""
        if budget <= 0:
            return 0
        assert answer.sequence is not None
        slot = answer.sequence.length
        most = len(answer.todo) if query.whole else rows_within(budget, slot, paced)
        rows = self._at_most(most, query, answer)
        if rows > 0:
            plan.portions.append(Portion(query, answer, rows))
        return cost(rows, slot, paced)

    def _at_most(self, rows: int, query: Query, answer: Answer) -> int:
        """As many of these rows as an answer has to read, and may be fed at once."""
        assert answer.sequence is not None
        rows = min(rows, len(answer.todo))
        if not query.whole:
            rows = min(rows, query.options.prefill_chunk or rows)
        return rows if answer.window is None else min(rows, answer.window.rows(answer.sequence))

    def _let_in(self, plan: Plan, budget: int) -> None:
        """Let those in that wait, in the policy's order, as far as there are rows and pages for them."""
        if budget <= 0 or not self.waiting:
            return
        paced = bool(plan.portions) or any(answer.under_way for query in self.running for answer in query.speaking)
        passed_over = 0
        promised = self.room.promised(self.running)
        if not self.policy.fixed:
            self.waiting.sort(key=self.policy.rank)
        for query in list(self.waiting):
            at_once = len(query.opening if query.whole else query.source_ids or ())  # rows that cannot be divided
            others = plan.portions if query.whole else plan.sources  # in the same call of a compiled function
            if budget <= 0 or (at_once > budget and others) or passed_over > _PASSED_OVER:
                return
            if self._is_being_read(query):
                passed_over += 1
                continue
            before = self.preempted
            try:
                if not self._admit(query, promised):
                    return
            except Exception as error:  # whatever it was, it is this query's own
                plan.failed[query] = error
                continue
            promised = self.room.promised(self.running) if self.preempted > before else promised
            promised += self.room.promised([query])
            self.waiting.remove(query)
            self.running.append(query)
            if query.source_ids is not None and not query.source_read:
                plan.sources.append(query)
                budget -= len(query.source_ids)
            for answer in query.speaking:
                if answer.todo and budget > 0:
                    budget -= self._read(plan, query, answer, budget, paced)

    def _admit(self, query: Query, promised: int) -> bool:
        """Let a query in, in place of others if the policy says so; whether there is room for it."""
        while True:
            room = promised if self.running else None
            if len(self.running) < self.most_running and self.room.let_in(query, room):
                return True
            if not self.policy.displaces(query, self._last):
                return False
            self.give_way()
            promised = self.room.promised(self.running)

    def _is_being_read(self, query: Query) -> bool:
        """Whether a running query is about to read a page that this one begins with: it will be kept for this one."""
        if self.room.tree is None or query.whole or query.source_ids is not None or query.copies:
            return False
        ids = query.first_reads()
        for other in self.running:
            if other.salt != query.salt or other.source_ids is not None or other.whole:
                continue
            for answer in other.speaking:
                assert answer.sequence is not None
                under_way = sum(fed.rows for fed in answer.under_way)
                end = ((answer.sequence.length - under_way) // PAGE_TOKENS + 1) * PAGE_TOKENS
                reads = answer.sequence.length + len(answer.todo)
                if answer.slid or under_way + len(answer.todo) < 2 or not end <= min(reads, len(ids) - 1):
                    continue
                if other.reads(answer)[:end] == ids[:end]:
                    return True
        return False


def step_rows(runner: Runner) -> int:
    """Rows of a step at most: where several are under way, all of them have the runner's together."""
    return max(1, runner.prefill_chunk // runner.stages)


def cost(rows: int, slot: int, paced: bool) -> int:
    """What `rows` rows from `slot` on take of a step's budget: more the further in, if others wait for the step.

    >>> cost(100, 0, False), cost(100, 0, True), cost(100, 5120, True)
    (100, 109, 1109)
    """
    return rows + (rows * slot + rows * rows // 2) // _FAR_SLOTS if paced else rows


def rows_within(budget: int, slot: int, paced: bool) -> int:
    """The rows from `slot` on that a budget lasts for; a page at least, if it has so many.

    >>> rows_within(512, 0, False), rows_within(512, 0, True), rows_within(512, 5120, True)
    (512, 374, 46)
    """
    if not paced:
        return budget
    dear = 1 + slot / _FAR_SLOTS
    rows = int(_FAR_SLOTS * (math.sqrt(dear * dear + 2 * budget / _FAR_SLOTS) - dear))
    return max(min(budget, PAGE_TOKENS), rows)
