"""Runs a plan. A call of the compiled step that fails moves nobody; then only the query at fault must end.

Where the layers are in several stages, a plan is begun, others are begun behind it, and its end is waited for then: so
each stage has something to do. With one stage a call has ended when it has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from llmc.runtime.engine.freed_memory import EVERY_ROWS, EVERY_STEPS, IDLE_ROWS, give_back, keep_for_the_next_step
from llmc.runtime.engine.query import Fed, Query
from llmc.runtime.engine.scheduler import Plan, Portion, Scheduler
from llmc.runtime.errors import CacheFull
from llmc.runtime.runner import Begun, Feed, Runner

Item = TypeVar("Item", Query, Portion)
Fail = Callable[[Query, Exception], None]
Call = tuple[Begun, list[tuple[Portion, Feed, Fed]]]  # a call of the compiled step, and what it was given


@dataclass
class Work:
    """A plan that is under way: the calls that were begun for it, in order.

    follows: it was begun with the tokens that the one before it was to give, and is for nothing if that ends all.
    start: when it was begun.
    """

    plan: Plan
    calls: list[Call] = field(default_factory=list)
    follows: bool = False
    start: float = field(default_factory=time.perf_counter)

    @property
    def rows_of_answers(self) -> int:
        """Rows of a step that is of answers that go on alone, and was begun by itself in one call; else 0."""
        if self.follows or len(self.calls) != 1 or self.plan.sources:
            return 0
        fed = self.calls[0][1]
        alone = all(portion.rows == 1 and not portion.through for portion, *_ in fed)
        return sum(len(feed.ids) for _, feed, _ in fed) if alone else 0


def goes_on(portion: Portion) -> bool:
    """Whether an answer that is fed its last token goes on with the greatest of the row that this gives, and then more.

    It may still end there, by what the token is.
    """
    query, answer = portion.query, portion.answer
    if portion.rows != 1 or portion.through or answer.todo or answer.window is not None or answer.finish_reason:
        return False
    if query.state != "running" or query.by_caller or query.search is not None or query.unborn or query.whole:
        return False
    if answer.chooser is None or not answer.chooser.is_plain:
        return False
    said = len(answer.ids) + 1  # with the token that is under way
    return said < query.options.max_tokens and len(query.opening) + said < query.limit


class Stepper:
    """Runs plans and counts what they took: `steps` calls of the compiled functions, `rows` tokens through them."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.steps = 0
        self.rows = 0
        self._tidied = (0, 0)  # steps and rows when freed memory was given back
        keep_for_the_next_step()

    def begin(self, work: Work, fail: Fail) -> None:
        """Encode its plan's sources, then feed the portions, as far as their queries still run.

        If a call fails, its queries are tried again in halves, and one that fails by itself is given to `fail`. If it
        fails for want of pages, a query gives way.
        """
        plan = work.plan
        self._in_parts(plan.sources, lambda query: query, self._encode, fail)
        self._in_parts(plan.portions, lambda portion: portion.query, lambda part: self._feed(work, part), fail)

    def follow(self, work: Work) -> Work | None:
        """Begin the step behind one that is under way, of the same answers, before anybody knows their tokens.

        None where that cannot be done, where it is known that an answer has its last one by then, or where tokens are
        guessed, for which they are to be known.
        """
        if len(work.calls) != 1 or work.plan.sources or self.scheduler.drafter.most:
            return None
        begun, fed = work.calls[0]
        if not all(under_way.wants and goes_on(portion) for portion, _, under_way in fed):
            return None
        ahead = self.runner.follow(begun)
        if ahead is None:
            return None
        self.steps += 1
        self.rows += len(fed)
        again = [(portion, feed, Fed(1, True)) for portion, feed, _ in fed]
        for portion, _, under_way in again:
            portion.answer.under_way.append(under_way)
        return Work(work.plan, [(ahead, again)], follows=True)

    def is_wanted(self, work: Work) -> bool:
        """Whether there is an answer left that waits for something of it."""
        return any(under_way in portion.answer.under_way for _, fed in work.calls for portion, _, under_way in fed)

    def end(self, work: Work) -> None:
        """Wait for what was begun, and hand logits out; none to answers that have lost their pages meanwhile."""
        for begun, fed in work.calls:
            output, at = begun.wait(), 0
            for portion, feed, under_way in fed:
                answer, first = portion.answer, at
                if under_way.wants:
                    at += len(feed.ids) if feed.logits == "all" else 1
                if under_way not in answer.under_way:
                    continue
                answer.under_way.remove(under_way)
                if under_way.wants and portion.query.whole:
                    portion.query.rows = output.logits[first:at]
                elif under_way.wants:
                    answer.row, answer.draft = output.row(first), portion.draft
                if portion.draft is not None:
                    portion.draft.rows = [output.row(each) for each in range(first + 1, at)]
        if self.runner.stages == 1 and (rows := work.rows_of_answers):
            self.scheduler.drafter.pace.took(rows, time.perf_counter() - work.start)

    def tidy(self, idle: bool) -> None:
        """Give freed memory back now and then; `idle`: no query is left."""
        steps, rows = self.steps - self._tidied[0], self.rows - self._tidied[1]
        if steps >= EVERY_STEPS or rows >= (IDLE_ROWS if idle else EVERY_ROWS):
            give_back()
            self._tidied = (self.steps, self.rows)

    def _in_parts(
        self, items: list[Item], query_of: Callable[[Item], Query], call: Callable[[list[Item]], None], fail: Fail
    ) -> None:  # fmt: skip
        parts = [items]
        while parts:
            part = [item for item in parts.pop() if query_of(item).state == "running"]
            queries = list(dict.fromkeys(map(query_of, part)))
            if not queries:
                continue
            try:
                call(part)
            except Exception as error:
                if isinstance(error, CacheFull) and len(self.scheduler.running) > 1:
                    self.scheduler.give_way()
                    parts.append(part)
                elif len(queries) == 1:
                    fail(queries[0], error)
                else:
                    first = set(queries[: len(queries) // 2])
                    parts.append([item for item in part if query_of(item) not in first])
                    parts.append([item for item in part if query_of(item) in first])

    def _encode(self, queries: list[Query]) -> None:
        self.runner.encode([(query.source, query.source_ids) for query in queries if query.source and query.source_ids])
        self.steps += 1
        for query in queries:
            query.source_read = True
            self.rows += len(query.source_ids or ())

    def _feed(self, work: Work, portions: list[Portion]) -> None:
        feeds = [_feed_of(portion) for portion in portions]
        try:
            begun = self.runner.begin(feeds)
        except CacheFull:
            if not any(portion.draft for portion in portions):
                raise
            # No guess is worth that somebody gives way.
            self._feed(work, [portion._replace(draft=None) for portion in portions])
            return
        self.steps += 1
        fed = []
        for portion, feed in zip(portions, feeds, strict=True):
            answer, rows = portion.answer, portion.rows
            under_way = Fed(len(feed.ids), portion.arrives and feed.logits != "none")
            fed.append((portion, feed, under_way))
            answer.under_way.append(under_way)
            if portion.arrives:
                answer.passage = None
                self.rows += len(feed.ids)
                del answer.todo[:rows]
        work.calls.append((begun, fed))


def _feed_of(portion: Portion) -> Feed:
    answer, draft = portion.answer, portion.draft
    assert answer.sequence is not None
    ids = answer.todo[: portion.rows]
    if draft is not None:
        return Feed(answer.sequence, ids + draft.tokens, "all")
    wish = "all" if portion.query.whole else "last" if portion.last else "none"
    return Feed(answer.sequence, ids, wish, answer.passage if portion.through else None, portion.through)
