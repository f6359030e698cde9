"""The queries of an engine, from their coming to their end: what steps make of them, and what is told of it.

A step is planned (scheduler.py), run (step.py), and its effects are made in one place (advance.py). Where the layers
are in several stages, as many steps are under way, and a turn ends the one that was begun first. Where all that goes on
are answers that take the greatest token, a device may begin the next step before the host has seen what this one gave.
"""

from __future__ import annotations

from collections import Counter, deque

from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.engine.advance import advance, say
from llmc.runtime.engine.policies import FirstCome
from llmc.runtime.engine.query import Query
from llmc.runtime.engine.results import StepResult
from llmc.runtime.engine.room import Room
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.engine.step import Stepper, Work
from llmc.runtime.errors import LlmcError
from llmc.runtime.text.tokenizer import Tokenizer


class Queries:
    """Runs steps for its queries. Only who has the turn calls it; others look, add to `open`, and take from `fresh`.

    open: those that have not ended, by id. fresh: those that nobody follows, with results for `Engine.infer`. tokens:
    made for all of them so far.
    """

    def __init__(self, room: Room, policy: FirstCome, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.open: dict[int, Query] = {}
        self.fresh: dict[int, Query] = {}
        self.tokens = 0
        self.stepper = Stepper(room.runner, scheduler)
        self._room = room
        self._policy = policy
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._under_way: deque[Work] = deque()

    def schedule(self, query: Query) -> None:
        """Take a new query in, unless it has ended since it was asked: a fault of the engine ends all there are."""
        if query.state != "ended":
            self._scheduler.add(query)

    def step(self) -> bool:
        """Run a step: begin as many as there are stages, and end the first; whether there was one."""
        try:
            begun = self._begin()
            if self._under_way:
                self._go_ahead()
                self._settle()
            elif not begun:
                return False
        except Exception as error:  # a fault of the engine itself must leave nobody waiting
            self._under_way.clear()
            for query in list(self.open.values()):
                self._fail(query, error)
        except BaseException:
            self._recover()
            raise
        return True

    def commit(self, query: Query, choice: Choice, ends: bool) -> None:
        """Go on with a token that the caller chose; `ends`: it is the last."""
        (answer,) = query.answers
        if query.state != "ended" and answer.row is not None:  # nobody else was faster
            self._tell(query, [say(query, answer, choice, ends, self._room)])

    def cancel(self, query: Query) -> None:
        """End a query that is not wanted any more; if somebody follows it, the end is told."""
        if query.state != "ended":
            self._end(query, "cancelled", StepResult(query.id) if query.followed else None)

    def _begin(self) -> bool:
        """Have as many steps under way as there are stages, if there are queries for them; whether there were any."""
        any_plan = False
        while len(self._under_way) < self._room.runner.stages:
            plan = self._scheduler.plan()
            any_plan = any_plan or bool(plan.failed or plan.queries)
            for query, error in plan.failed.items():
                self._fail(query, error)
            if not plan.queries:
                break
            work = Work(plan)
            self._under_way.append(work)
            self.stepper.begin(work, self._fail)
        return any_plan

    def _go_ahead(self) -> None:
        """Have the step behind the only one under way begin, if it is of all queries there are."""
        (work, *others), scheduler = self._under_way, self._scheduler
        if others or scheduler.waiting or len(work.plan.portions) != sum(len(q.speaking) for q in scheduler.running):
            return
        ahead = self.stepper.follow(work)
        if ahead is not None:
            self._under_way.append(ahead)

    def _settle(self) -> None:
        """End the step that was begun first."""
        work = self._under_way[0]
        self.stepper.end(work)
        read = Counter[Query]()  # tokens of prompts
        for portion in work.plan.portions:
            if portion.arrives and portion.rows > 1:
                read[portion.query] += portion.rows
        drafts = [answer.draft for query in work.plan.queries for answer in query.answers if answer.draft is not None]
        for query in work.plan.queries:
            if query.state == "running":
                self._advance(query, read[query])
        for draft in drafts:
            self._scheduler.drafter.learn(draft)
        self._under_way.popleft()
        if self._under_way and self._under_way[0].follows and not self.stepper.is_wanted(self._under_way[0]):
            self._under_way.popleft()
        self.stepper.tidy(idle=not self.open)

    def _advance(self, query: Query, read: int) -> None:
        """Make the effects of a step on one query."""
        try:
            results = advance(query, self._room, self._tokenizer.stream)
        except Exception as error:  # the choice of a token may fail; others have nothing to do with it
            self._fail(query, error)
            return
        said = sum(result.choice is not None for result in results)
        self._policy.charge(query, read, said)
        if read:
            self._room.keep(query)
        self._tell(query, results)

    def _fail(self, query: Query, error: Exception) -> None:
        """End a query that cannot go on."""
        if query.state != "ended":
            query.error = error if isinstance(error, LlmcError) else _failure(error)
            self._end(query, "error", StepResult(query.id, error=query.error))

    def _tell(self, query: Query, results: list[StepResult]) -> None:
        """Hand results out; with its last answer a query ends."""
        self.tokens += sum(result.choice is not None for result in results)
        ended = results and not query.going
        for result in results[:-1] if ended else results:
            self._deliver(query, result)
        if ended:
            self._end(query, "", results[-1])

    def _end(self, query: Query, reason: str, last: StepResult | None) -> None:
        """End a query, for this reason where its answers have none of their own, and tell it with a last result."""
        for answer in query.going:
            answer.pieces.append(answer.finish(reason))
        self._room.drop(query)
        self._scheduler.remove(query)
        self._scheduler.drafter.leave(query)
        query.state = "ended"
        if last is not None:
            self._deliver(query, last._replace(done=query.result()))
        self.open.pop(query.id, None)

    def _deliver(self, query: Query, result: StepResult) -> None:
        query.outbox.append(result)
        if not query.followed:
            self.fresh[query.id] = query

    def _recover(self) -> None:
        """After Ctrl-C within a step: what is under way is read again, or ends if a token was half said."""
        queries = [query for work in self._under_way for query in work.plan.queries]
        self._under_way.clear()
        for query in queries:
            if query.torn:
                self._fail(query, LlmcError("it was interrupted in the middle of a token"))
            elif query.state == "running":
                self._scheduler.send_back(query)


def _failure(error: Exception) -> LlmcError:
    """What to tell of an error that is nobody's request, with the error as its cause."""
    failure = LlmcError(f"the step failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    failure.__cause__ = error
    return failure
