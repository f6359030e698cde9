"""Answers a request for text: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.engine.results import StepResult
from llmc.runtime.errors import LlmcError
from llmc.runtime.generate import Generation
from llmc.runtime.model import Model
from llmc.runtime.serving.answers import Answer, usage_of
from llmc.runtime.serving.failures import body_of, log, refusal
from llmc.runtime.serving.metrics import Metrics
from llmc.runtime.serving.requests import Asked


class Generating:
    """The queries of one request. Closing it, or leaving an iteration early, cancels them."""

    def __init__(self, model: Model, asked: Asked, queries: Sequence[int], metrics: Metrics) -> None:
        self._prompt_of = {query: number for number, query in enumerate(queries)}
        self._results = model.engine.follow(queries)
        self._done: dict[int, Generation] = {}
        self._asked, self._metrics = asked, metrics
        self._clock = metrics.clock()

    @classmethod
    def start(
        cls, model: Model, asked: Asked, prompts: Sequence[list[int]], metrics: Metrics, salt: str = ""
    ) -> Generating:  # fmt: skip
        """Have the engine work on prompts, token ids. Raises RequestError if one cannot be served: then on none.

        salt: of whose requests share what was read and said.
        """
        queries: list[int] = []
        try:
            for ids in prompts:
                queries.append(model.add(ids, asked.options, asked.user, salt))
        except BaseException:
            for query in queries:
                model.engine.cancel(query)
            raise
        return cls(model, asked, queries, metrics)

    async def whole(self) -> list[Generation]:
        """The generations, one for each prompt. Raises what ended one of them."""
        try:
            async for _ in self._told():
                pass
        finally:
            self.close()
        return self._finished()

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """The chunks of `answer` as server-sent events; a failure is the last of them."""
        try:
            for chunk in answer.opening():
                yield _event(chunk)
            waiting: dict[tuple[int, int], list[Choice]] = {}  # tokens whose text is not certain yet
            async for prompt, result in self._told():
                tokens = waiting.setdefault((prompt, result.answer), [])
                if result.choice is not None:
                    tokens.append(result.choice)
                if result.text:
                    yield _event(answer.piece(prompt, result.answer, result.text, tokens))
                    tokens.clear()
                if result.done is not None:
                    for chunk in answer.closing(prompt, result.done):
                        yield _event(chunk)
            if self._asked.usage:
                yield _event(answer.counts(self._finished()))
        except Exception as error:  # the status is sent: what is left is to say so
            log("a stream", error)
            yield _event(body_of(refusal(error)))
        finally:
            self.close()
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        """Cancel what has not ended."""
        self._results.close()

    async def _told(self) -> AsyncIterator[tuple[int, StepResult]]:
        """(number of the prompt, result), all results. Raises what ended a query that failed."""
        async for result in self._results:
            if result.choice is not None:
                self._clock.token()
            if result.done is not None:
                if result.error is not None:
                    raise result.error
                self._done[self._prompt_of[result.id]] = result.done
            yield self._prompt_of[result.id], result
        self._metrics.count(usage_of(self._done.values()))

    def _finished(self) -> list[Generation]:
        if len(self._done) < len(self._prompt_of):
            raise LlmcError("the answer was cut off: the server is closing")
        return [self._done[number] for number in range(len(self._done))]


def ids_of(model: Model, asked: Asked) -> list[list[int]]:
    """Token ids of all prompts; long ones take their time. Raises RequestError for one that the model cannot take."""
    if asked.chat:
        return [model.chat_prompt(messages) for messages in asked.prompts]
    return [model.prompt_ids(prompt) for prompt in asked.prompts]


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
