"""What the logits of a step do to a query: the one place where answers go on, branch and end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.decoding.candidates import Row
from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.engine.query import Answer, Query
from llmc.runtime.engine.results import StepResult
from llmc.runtime.engine.room import Room
from llmc.runtime.errors import LlmcError
from llmc.runtime.text.tokenizer import TextStream

if TYPE_CHECKING:
    from llmc.runtime.decoding.beams import BeamSearch

_BROKEN = "the model computed {} that are not finite; its weights may be damaged or not fit its spec"


def advance(query: Query, room: Room, text: Callable[[], TextStream]) -> list[StepResult]:
    """Go on with all of a running query's answers that got logits; what to tell about it.

    Raises what the choice of a token raises; then nothing was said, and the query is to end.
    """
    if query.whole:
        return _whole(query)
    _branch(query, room)
    if not any(answer.row is not None and not answer.todo for answer in query.speaking):
        return []
    query.read_time = query.read_time or time.perf_counter()
    if query.search is not None:
        return _search(query, query.search, room, text)
    if query.by_caller:
        return _ask(query)
    ready = [answer for answer in query.speaking if answer.row is not None and not answer.todo]
    chosen = [answer.chooser.choose(answer.row) for answer in ready if answer.chooser and answer.row]
    query.torn = True
    results = [
        result for answer, choice in zip(ready, chosen, strict=True) for result in _go_on(query, answer, choice, room)
    ]
    query.torn = False
    return results


def say(query: Query, answer: Answer, choice: Choice, ends: bool, room: Room) -> StepResult:
    """Go on with a token that was chosen; `ends` if the caller says that it is the last."""
    query.first_time = query.first_time or time.perf_counter()
    stops = choice.token in query.ends
    piece = answer.say(choice, stops)
    assert answer.stops is not None
    reason = ""
    if stops or ends or answer.stops.stopped:
        reason = "stop"
    elif len(answer.ids) >= query.options.max_tokens:
        reason = "length"
    elif len(query.opening) + len(answer.ids) >= query.limit:
        reason = "context"
    if reason:
        room.keep(query)  # while the answer still counts as one that speaks
        piece = answer.finish(reason, piece)
        room.end(answer)
    else:
        answer.todo = [] if answer.awaits else [choice.token]  # a step that followed has it already
    answer.pieces.append(piece)
    return StepResult(query.id, piece, answer.number, choice)


def _go_on(query: Query, answer: Answer, choice: Choice, room: Room) -> list[StepResult]:
    """Go on with a token, and with those behind it as far as the answer's draft guessed what is chosen."""
    draft, answer.draft = answer.draft, None
    results: list[StepResult] = []
    if draft is not None:
        assert answer.chooser is not None
        answer.drafted += len(draft.tokens)
        for token, row in zip(draft.tokens, draft.rows, strict=True):
            draft.refuted = choice.token != token
            if draft.refuted:
                break
            results.append(say(query, answer, choice, False, room))
            draft.right += 1
            answer.accepted += 1
            if answer.finish_reason:
                return results
            try:
                choice = answer.chooser.choose(row)
            except Exception:  # what is wrong is told by the next step, which has this row first
                _take_back(answer, len(draft.tokens) - draft.right + 1, room)
                return results
        if draft.right < len(draft.tokens):
            _take_back(answer, len(draft.tokens) - draft.right, room)
    return [*results, say(query, answer, choice, False, room)]


def _take_back(answer: Answer, tokens: int, room: Room) -> None:
    """Have the answer's sequence forget its last tokens."""
    assert answer.sequence is not None
    room.runner.truncate(answer.sequence, answer.sequence.length - tokens)


def _branch(query: Query, room: Room) -> None:
    """Fork the other answers from the one that has read the opening for all of them."""
    if not query.unborn or not query.speaking or query.speaking[0].todo or query.speaking[0].awaits:
        return
    first = query.speaking[0]
    assert first.sequence is not None
    for twin in query.unborn:
        twin.sequence = room.pool.fork(first.sequence)
        twin.todo, twin.slid = list(twin.ids), first.slid
        if not twin.ids:  # else what it has, if it has any, are its own: they waited for other beams
            twin.row = first.row
    first.todo = list(first.ids)
    query.unborn = []


def _ask(query: Query) -> list[StepResult]:
    """Have the caller choose: the logits become its own."""
    (answer,) = query.speaking
    if query.awaits_commit or answer.row is None:
        return []
    if not np.isfinite(answer.row.normalizer):
        raise LlmcError(_BROKEN.format("logits"))
    answer.row = _own(answer.row)
    query.awaits_commit = True
    return [StepResult(query.id, row=answer.row)]


def _whole(query: Query) -> list[StepResult]:
    """The outputs of an encoder's text, if it was read."""
    if query.rows is None:
        return []
    if not np.isfinite(query.rows).all():
        raise LlmcError(_BROKEN.format("outputs"))
    query.answers[0].finish("stop")
    return [StepResult(query.id, rows=query.rows)]


def _search(query: Query, search: BeamSearch, room: Room, text: Callable[[], TextStream]) -> list[StepResult]:
    """Go on with a beam search once every beam has its logits."""
    beams = query.speaking
    if any(beam.row is None or beam.todo for beam in beams):
        for beam in beams:  # those that wait for the others must not keep a whole step's logits alive
            beam.row = beam.row and _own(beam.row)
        return []
    search = search.after([beam.row for beam in beams if beam.row is not None])
    query.first_time = query.first_time or time.perf_counter()
    query.torn = True
    query.search = search
    if search.done:
        _found(query, search, room, text)
    else:
        _next_beams(query, search, room)
    query.torn = False
    return [StepResult(query.id, query.answers[0].pieces[0])] if search.done else []


def _next_beams(query: Query, search: BeamSearch, room: Room) -> None:
    """Fork beams for their children; the last child takes its parent's own sequence."""
    parents, children = query.speaking, Counter(live.parent for live in search.live)
    beams = []
    for number, live in enumerate(search.live):
        parent = parents[live.parent]
        assert parent.sequence is not None
        children[live.parent] -= 1
        sequence = room.pool.fork(parent.sequence) if children[live.parent] else parent.sequence
        beams.append(Answer(number, None, None, None, ids=list(live.ids), sequence=sequence, todo=[live.token]))
    for number, parent in enumerate(parents):
        if not any(live.parent == number for live in search.live):
            room.end(parent)
    query.answers = beams


def _found(query: Query, search: BeamSearch, room: Room, text: Callable[[], TextStream]) -> None:
    """End a search: its best answers are the query's."""
    for beam in query.speaking:
        room.end(beam)
    query.answers = []
    for number, found in enumerate(search.best(query.options.n)):
        stream = text()
        said = found.ids[:-1] if found.ended else found.ids
        answer = Answer(number, None, None, None, ids=list(found.ids))
        answer.pieces = ["".join([stream.push(token) for token in said]) + stream.finish()]
        full = len(found.ids) >= query.options.max_tokens
        answer.finish("stop" if found.ended else "length" if full else "context")
        query.answers.append(answer)


def _own(row: Row) -> Row:
    """The row, of a step that gave others too, as an array of its own."""
    if row.logits.base is None:
        return row
    own = row.logits.copy()
    return replace(row, read=lambda: own)
