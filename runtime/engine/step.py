"""Runs a plan. A call of the compiled step that fails moves nobody; then only the query at fault must end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llmc.runtime.decoding.candidates import Row
from llmc.runtime.engine.freed_memory import EVERY_STEPS, give_back
from llmc.runtime.engine.query import Query
from llmc.runtime.engine.scheduler import Plan, Portion, Scheduler
from llmc.runtime.errors import CacheFull
from llmc.runtime.runner import Feed, Output, Runner

Item = TypeVar("Item", Query, Portion)
Fail = Callable[[Query, Exception], None]


class Stepper:
    """Runs plans and counts what they took: `steps` calls of the compiled functions, `rows` tokens through them."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.steps = 0
        self.rows = 0

    def run(self, plan: Plan, fail: Fail) -> None:
        """Encode its sources, then feed its portions, as far as their queries still run.

        If a call fails, its queries are tried again in halves, and one that fails by itself is given to `fail`. If it
        fails for want of pages, a query gives way.
        """
        before = self.steps
        self._in_parts(plan.sources, lambda query: query, self._encode, fail)
        self._in_parts(plan.portions, lambda portion: portion.query, self._feed, fail)
        if before // EVERY_STEPS != self.steps // EVERY_STEPS:
            give_back()

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

    def _feed(self, portions: list[Portion]) -> None:
        feeds = []
        for portion in portions:
            answer = portion.answer
            assert answer.sequence is not None
            wish = "all" if portion.query.whole else "last" if portion.last else "none"
            passage = answer.passage if portion.through else None
            feeds.append(Feed(answer.sequence, answer.todo[: portion.rows], wish, passage, portion.through))
        output = self.runner.step(feeds)
        self.steps += 1
        at = 0
        for portion, feed in zip(portions, feeds, strict=True):
            answer, rows = portion.answer, portion.rows
            if not portion.arrives:
                continue
            answer.passage = None
            self.rows += rows
            del answer.todo[:rows]
            if feed.logits == "all":
                portion.query.rows = output.logits[at : at + rows]
                at += rows
            elif feed.logits == "last":
                answer.row = _row(output, at)
                at += 1


def _row(output: Output, at: int) -> Row:
    return Row(output.logits[at], output.top_ids[at], output.top_values[at], float(output.normalizers[at]))
