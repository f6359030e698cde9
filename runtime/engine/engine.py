"""The engine: queries in, results out, many at once through one compiled step.

Who has the turn (turns.py) runs a step (queries.py), and nobody else touches queries, sequences or pages: others leave
a wish in the inbox, whose reading begins every turn. Locks are taken in this order: the turn, the runner's lock, the
pool's lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.asking import MOST_ROWS
from llmc.runtime.engine.draft_model import DraftModel
from llmc.runtime.engine.drafts import Drafter
from llmc.runtime.engine.intake import Intake
from llmc.runtime.engine.layered import LayeredScheduler
from llmc.runtime.engine.policies import POLICIES
from llmc.runtime.engine.queries import Queries
from llmc.runtime.engine.query import Query
from llmc.runtime.engine.results import Stats, StepResult
from llmc.runtime.engine.room import Room
from llmc.runtime.engine.scheduler import Scheduler, step_rows
from llmc.runtime.engine.streams import AsyncTextStream, Results, TextStream
from llmc.runtime.engine.turns import Turns
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.one_thread import OneThread
from llmc.runtime.runner import Ids, Runner
from llmc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_PREEMPTIONS = ("recompute", "swap")
_PREFILLS = {"chunked": Scheduler, "layered": LayeredScheduler}


class Engine:
    """Runs queries together: whatever a step has room for goes into it. Safe to use from several threads.

    A query never waits for another one to end, only for pages of the cache. Nothing goes on behind it: whoever wants a
    result (`infer`, `follow`, `stream`, `astream`) runs the next step, for all queries, or waits for the one that
    someone else is running. Steps run in the thread that asked first, and for all other threads in one beside it.
    """

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, eos: frozenset[int] = frozenset(), *,
        lead: tuple[int, ...] = (), suppressed: tuple[int, ...] = (), policy: str = "fcfs",
        preemption: str = "recompute", most_running: int = 256, keep_prefixes: bool = True,
        prefill: str = "chunked", drafts: int = 0, draft_model: Runner | None = None,
    ) -> None:  # fmt: skip
        """An engine over a runner, which nothing else may feed with sequences of the engine.

        eos: tokens that end an answer. lead: in a model with an encoder, what an answer begins with unless the query
        says otherwise. suppressed: ids that are never chosen. policy: who goes first, "fcfs", "priority" or "fair".
        preemption: how a query gives its pages up when they are short, "recompute" or "swap". most_running: queries
        that run at most. keep_prefixes: keep the pages of what was read for queries that begin alike, and what was said
        for drafts. prefill: how long prompts are read beside answers, "chunked": some tokens a step, "layered": some
        layers a step, of an artifact that was compiled so. drafts: tokens of an answer that a step may guess ahead and
        check at once; what is said does not depend on it. draft_model: what guesses where the text itself does not say
        enough, the runner of a smaller model whose token ids mean the same.
        """
        if policy not in POLICIES:
            raise RequestError(f"policy: got {policy!r}, wanted one of {', '.join(POLICIES)}")
        if preemption not in _PREEMPTIONS:
            raise RequestError(f"preemption: got {preemption!r}, wanted one of {', '.join(_PREEMPTIONS)}")
        if prefill not in _PREFILLS:
            raise RequestError(f"prefill: got {prefill!r}, wanted one of {', '.join(_PREFILLS)}")
        if prefill == "layered" and runner.parts is None:
            raise RequestError("prefill: layered wants an artifact whose layers were compiled in groups too: compile "
                               "the model again with --layer-groups")  # fmt: skip
        if not 0 <= drafts < MOST_ROWS:
            raise RequestError(f"drafts: got {drafts}, wanted 0..{MOST_ROWS - 1}")
        if draft_model is not None and not drafts:
            raise RequestError("drafts: got 0, with which a draft model has nothing to do")
        if most_running < 1:
            raise RequestError(f"most_running: got {most_running}, wanted at least 1")
        self.runner = runner
        self.tree = PrefixTree(runner.pool) if keep_prefixes else None
        self._intake = Intake(runner, tokenizer, eos, lead, suppressed)
        self._room = Room(runner, self.tree, preemption == "swap")
        order = POLICIES[policy]()
        self._draft_model = None if draft_model is None else DraftModel(draft_model, runner.vocab, keep_prefixes)
        self._drafter = Drafter(drafts, keep_prefixes, self._draft_model)
        self._scheduler = _PREFILLS[prefill](self._room, order, step_rows(runner), most_running, self._drafter)
        self._queries = Queries(self._room, order, self._scheduler, tokenizer)
        self._turns = Turns()
        self._thread = OneThread()  # not the runner's: that one's calls wait for no lock, so a turn may wait for it
        self._inbox: deque[Callable[[], None]] = deque()
        self._ids = itertools.count(1)
        self._idle_at = -1  # wishes there had been when a step found nothing to do
        self._closed = False
        self._beside: ThreadPoolExecutor | None = None

    def add_query(
        self, prompt: str | Ids, options: Options | None = None, *, priority: int = 0, user: str = "",
        salt: str = "", source: Ids | None = None, choose: str = "engine",
    ) -> int:  # fmt: skip
        """Ask for a continuation of `prompt`; its id. Nothing is computed yet.

        priority: higher goes first under that policy. user: whose it is, under "fair". salt: prefixes are shared only
        between queries of the same salt. source: in a model with an encoder, the text that is answered to; without it
        the prompt is that text. choose: "caller" if tokens come through `commit`. Raises RequestError for a query that
        can never be served: too long, bad token ids, wishes that contradict each other.
        """
        wishes = options or Options()
        return self._add(self._intake.query(next(self._ids), prompt, wishes, source, choose, priority, user, salt))

    def add_text(self, ids: Ids) -> int:
        """Ask for an encoder's outputs of a whole text; its id. RequestError if it is longer than the model reads."""
        return self._add(self._intake.text(next(self._ids), ids))

    def infer(self) -> list[StepResult]:
        """Run one step; what queries that nobody follows got, since the last call if others have run steps between.

        Empty when a step told nothing, as one that read a part of a prompt, and when there was nothing to do: no query,
        or only such as wait for `commit`. `query_count` tells the two apart.
        """
        self._turns.take()
        try:
            self._thread.run(self._drive)
        finally:
            self._give_turn()
        results = []
        for id_ in list(self._queries.fresh):
            query = self._queries.fresh.pop(id_, None)
            while query is not None and not query.followed and query.outbox:
                results.append(query.outbox.popleft())
        return results

    def commit(self, chosen: Mapping[int, tuple[int, bool]]) -> None:
        """Query -> (its next token, whether it ends with it), of queries whose caller chooses.

        Raises RequestError, and takes none of them, where a query does not wait for a token or a token is none. Until
        it is called, their rows stay as they are and other queries go on.
        """
        choices: list[tuple[Query, Choice, bool]] = []
        for id_, (token, ends) in chosen.items():
            query = self._queries.open.get(id_)
            row = None if query is None else query.answers[0].row
            if query is None or row is None or not query.awaits_commit:
                raise RequestError(f"query {id_}: it does not wait for a token")
            chooser = query.answers[0].chooser
            assert chooser is not None
            choices.append((query, chooser.of(row, token), ends))
        for query, choice, ends in choices:
            query.awaits_commit = False
            self._wish(lambda query=query, choice=choice, ends=ends: self._queries.commit(query, choice, ends))  # type: ignore[misc]

    def cancel(self, query: int) -> None:
        """End a query: its pages go back before the next step at the latest. No effect on one that has ended."""
        found = self._queries.open.get(query)
        if found is not None:
            self._wish(lambda: self._queries.cancel(found))

    def follow(self, queries: Iterable[int]) -> Results:
        """Results of these queries, by `for` or `async for`, until all have ended; runs steps where nobody else does.

        Closing or dropping the iterator cancels what has not ended.
        """
        return Results(self, [self._followed(query) for query in queries])

    def stream(self, query: int) -> TextStream:
        """Text of one query as it comes; then `.result`. Raises what ended it, if it failed.

        Closing or dropping it early cancels the query.
        """
        return TextStream(self, self._followed(query))

    def astream(self, query: int) -> AsyncTextStream:
        """`stream` for asyncio: steps run in a thread beside the event loop. Cancelling the task cancels the query."""
        return AsyncTextStream(self, self._followed(query))

    @property
    def query_count(self) -> int:
        """Queries that have not ended, or whose end `infer` has not told yet."""
        queries = self._queries
        return len(queries.open) + sum(query not in queries.open for query in list(queries.fresh))

    @property
    def stats(self) -> Stats:
        """How it stands."""
        pool, scheduler, queries = self.runner.pool, self._scheduler, self._queries
        return Stats(
            running=len(scheduler.running), waiting=len(queries.open) - len(scheduler.running), pages=pool.num_pages,
            pages_free=pool.free_pages, pages_kept=0 if self.tree is None else self.tree.kept_pages,
            steps=queries.stepper.steps, rows=queries.stepper.rows, tokens=queries.tokens, hit_tokens=self._room.hits,
            preempted=scheduler.preempted, drafted=self._drafter.drafted, accepted=self._drafter.accepted,
        )  # fmt: skip

    def forget_prefixes(self) -> None:
        """Give back the pages that only the prefix tree holds, and guess by nothing that was said before."""
        self._drafter.forget()
        if self.tree is not None:
            self.tree.clear()

    def close(self) -> None:
        """End all queries, keep no page, and take no more queries."""
        self._closed = True
        for query in list(self._queries.open):
            self.cancel(query)
        if self.tree is not None:
            self.tree.close()
        if self._draft_model is not None:
            self._draft_model.close()
        if self._beside is not None:
            self._beside.shutdown()
            self._beside = None

    def wait_for(self, queries: list[Query]) -> None:
        """Run a step, or wait until someone else's has ended, until one of these queries has something to tell."""

        def told() -> bool:
            return any(query.outbox or query.state == "ended" for query in queries)

        while not told():
            calls = self._turns.calls
            if not self._turns.take(told):
                return
            try:
                worked = self._thread.run(self._drive)
            finally:
                self._give_turn()
            if not worked:
                self._turns.wait(told, calls)

    async def sleep_for(self, queries: list[Query]) -> None:
        """`wait_for` in an event loop; it may return early."""
        sleeper, busy = self._turns.sleeper()
        if any(query.outbox or query.state == "ended" for query in queries):
            return
        if not busy and self._idle_at != self._turns.calls:
            from concurrent.futures import ThreadPoolExecutor

            self._beside = self._beside or ThreadPoolExecutor(1, "llmc-engine")
            self._beside.submit(self._try_drive)
        await sleeper

    def _try_drive(self) -> None:
        """Run a step unless someone else does."""
        if self._turns.try_take():
            try:
                self._thread.run(self._drive)
            finally:
                self._give_turn()

    def _add(self, query: Query) -> int:
        if self._closed:
            raise RequestError("the engine is closed")
        self._queries.open[query.id] = query
        self._inbox.append(lambda: self._queries.schedule(query))
        self._turns.wake()
        return query.id

    def _followed(self, id_: int) -> Query:
        query = self._queries.open.get(id_) or self._queries.fresh.get(id_)
        if query is None:
            raise RequestError(f"query {id_}: there is none, or it has ended and was told about")
        query.followed = True
        self._queries.fresh.pop(id_, None)
        return query

    def _wish(self, wish: Callable[[], None]) -> None:
        """Have something done by who has the turn; at once if nobody has it.

        It may be called by a stream that is garbage collected anywhere, so it waits for nothing.
        """
        self._inbox.append(wish)
        if self._turns.try_take():
            self._give_turn()
        self._turns.wake()

    def _give_turn(self) -> None:
        """Do what was wished for meanwhile, and end the turn: what comes after that sees that it is nobody's."""
        while True:
            try:
                self._read_inbox()
            finally:
                self._turns.give()
            if not self._inbox or not self._turns.try_take():
                return

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _drive(self) -> bool:
        """Run a step; whether there was one. Only who has the turn calls it."""
        calls = self._turns.calls
        self._read_inbox()
        worked = self._queries.step()
        if not worked:
            self._idle_at = calls
        return worked
