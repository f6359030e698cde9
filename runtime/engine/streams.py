"""Results as they come: iterators that run the engine's steps while they wait for something of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmc.runtime.engine.query import Query
from llmc.runtime.engine.results import StepResult
from llmc.runtime.errors import RequestError
from llmc.runtime.generate import Generation

if TYPE_CHECKING:
    from llmc.runtime.engine.engine import Engine


class Results:
    """Results of some queries until all of them have ended: an iterator, and one for asyncio.

    With `async for` steps run in a thread beside the event loop, which is never held up. Closing or dropping it cancels
    the queries that have not ended.
    """

    def __init__(self, engine: Engine, queries: Iterable[Query]) -> None:
        self._engine = engine
        self._open = list(queries)

    def __iter__(self) -> Results:
        return self

    def __next__(self) -> StepResult:
        while self._open:
            if (result := self._ready()) is not None:
                return result
            self._engine.wait_for(self._open)
        raise StopIteration

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> StepResult:
        try:
            while self._open:
                if (result := self._ready()) is not None:
                    return result
                await self._engine.sleep_for(self._open)
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def _ready(self) -> StepResult | None:
        """A result that is there already."""
        for query in self._open:
            if query.outbox:
                return self._taken(query, query.outbox.popleft())
        self._open = [query for query in self._open if query.state != "ended" or query.outbox]  # cancelled elsewhere
        return None

    def close(self) -> None:
        """Stop here."""
        queries, self._open = self._open, []
        for query in queries:
            self._engine.cancel(query.id)

    def __del__(self) -> None:
        self.close()

    def _taken(self, query: Query, result: StepResult) -> StepResult:
        # The next result is another query's if there is one, so that none waits for the rest.
        self._open.remove(query)
        if result.done is None:
            self._open.append(query)
        return result


class TextStream:
    """Pieces of a query's text as they are generated; `result` is the Generation once the pieces are used up.

    Raises what ended the query if it failed. Closing or dropping it early cancels the query.
    """

    def __init__(self, engine: Engine, query: Query) -> None:
        self._query = query
        self._results = Results(engine, [query])
        self._result: Generation | None = None

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        for result in self._results:
            if (piece := self._piece(result)) is not None:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Stop here."""
        self._results.close()

    @property
    def result(self) -> Generation:
        """The whole generation. Raises RequestError before the last piece was taken."""
        if self._result is None:
            raise RequestError("the stream is not used up, so it has no result yet")
        return self._result

    def _piece(self, result: StepResult) -> str | None:
        """The text of a result of the first answer; None where there is none."""
        if result.done is not None:
            self._result = result.done
            if self._query.error is not None:
                raise self._query.error
        return result.text if result.text and result.answer == 0 else None


class AsyncTextStream(TextStream):
    """A `TextStream` for asyncio: steps run in a thread beside the event loop."""

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> str:
        async for result in self._results:
            if (piece := self._piece(result)) is not None:
                return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop here."""
        self.close()
