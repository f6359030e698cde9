"""A query and the answers that it is given, as far as they have come."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import Sequence, pages_for
from llmc.runtime.decoding.candidates import Row
from llmc.runtime.decoding.chooser import Choice, Chooser
from llmc.runtime.decoding.lookup import Lookup
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.stops import StopMatcher
from llmc.runtime.engine.drafts import Draft
from llmc.runtime.engine.results import StepResult
from llmc.runtime.engine.window import Window
from llmc.runtime.errors import LlmcError
from llmc.runtime.generate import Generation
from llmc.runtime.parts import Passage
from llmc.runtime.text.tokenizer import TextStream

if TYPE_CHECKING:
    from llmc.runtime.cache.swap import Copy
    from llmc.runtime.decoding.beams import BeamSearch


@dataclass(eq=False, slots=True)
class Fed:
    """Tokens of an answer in a step that is under way; `wants`: whether they will have logits."""

    rows: int
    wants: bool


@dataclass(eq=False)
class Answer:
    """One answer: its sequence in the cache, what is to be fed to that, and how tokens are chosen and become text.

    ids: tokens chosen so far. sequence: None while it holds no pages, or another answer reads the prompt for it. todo:
    tokens that are not in the cache yet, in order. under_way: what it was fed in steps that have not ended, in order.
    row: logits that nobody has chosen from yet; draft: what was fed behind the token that they are of, as a guess, with
    logits of its own; drafted, accepted: tokens guessed so far, and those that were right. finish_reason: "" while it
    goes on.
    """

    number: int
    chooser: Chooser | None
    text: TextStream | None
    stops: StopMatcher | None
    window: Window | None = None
    ids: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    todo: list[int] = field(default_factory=list)
    under_way: list[Fed] = field(default_factory=list)
    slid: bool = False  # whether its sequence has forgotten something
    passage: Passage | None = None  # of the first tokens to be fed, where they have come through a part of the layers
    row: Row | None = None
    draft: Draft | None = None
    lookup: Lookup | None = None  # its text, once a guess was wanted
    drafted: int = 0
    accepted: int = 0
    finish_reason: str = ""
    pieces: list[str] = field(default_factory=list)
    choices: list[Choice] | None = None  # kept where log-probabilities were asked for
    end_time: float = 0.0

    @property
    def awaits(self) -> bool:
        """Whether a step that is under way will give it logits: until then there is nothing else to do for it."""
        return any(fed.wants for fed in self.under_way)

    def say(self, choice: Choice, silent: bool) -> str:
        """Go on with a token; the text that is certain now. `silent`: the token is no text."""
        assert self.chooser is not None
        assert self.text is not None
        assert self.stops is not None
        self.chooser.accept(choice)
        self.ids.append(choice.token)
        if self.choices is not None:
            self.choices.append(choice)
        self.row = None
        return "" if silent else self.stops.push(self.text.push(choice.token))

    def finish(self, reason: str, piece: str = "") -> str:
        """End here; `piece` with the text that was still held back."""
        if self.text is not None and self.stops is not None:
            piece += self.stops.push(self.text.finish()) + self.stops.finish()
        self.finish_reason = reason
        self.end_time = time.perf_counter()
        return piece


@dataclass(eq=False)
class Query:
    """What a user asked, and how far it has come. Only who runs the engine's step may change it.

    opening: what each answer begins with, for the model. prompt: what the user gave: that, or in a model with an
    encoder `source_ids`, the text that is answered to. prediction: what the answer may be like. whole: an encoder's
    text, whose rows are the answer. limit: tokens that opening and answer can have together. unborn: answers that begin
    as forks of the first one that goes on, once it has read the opening. state: "waiting" (holds no pages), "running",
    or "ended". torn: a step's effects on it are only half done.
    """

    id: int
    options: Options
    prompt: list[int]
    opening: list[int]
    source_ids: list[int] | None
    limit: int
    answers: list[Answer]
    ends: frozenset[int]
    whole: bool = False
    by_caller: bool = False
    priority: int = 0
    user: str = ""
    salt: str = ""
    search: BeamSearch | None = None
    prediction: list[int] = field(default_factory=list)
    unborn: list[Answer] = field(default_factory=list)
    source: Sequence | None = None
    source_read: bool = False
    copies: list[tuple[Sequence, Copy]] = field(default_factory=list)
    waited: bool = False
    state: str = "waiting"
    torn: bool = False
    rows: NDArray[np.float32] | None = None  # of an encoder's text, once it was read
    hits: int = 0  # tokens of its opening that the cache still had
    start: float = field(default_factory=time.perf_counter)  # when it came, or was let in if it had to wait for room
    read_time: float = 0.0
    first_time: float = 0.0
    outbox: deque[StepResult] = field(default_factory=deque)
    followed: bool = False
    awaits_commit: bool = False
    error: LlmcError | None = None

    @property
    def going(self) -> list[Answer]:
        """Answers that have not ended."""
        return [answer for answer in self.answers if not answer.finish_reason]

    @property
    def speaking(self) -> list[Answer]:
        """Answers that have not ended and have a sequence of their own."""
        return [answer for answer in self.answers if not answer.finish_reason and answer.sequence is not None]

    @property
    def sequences(self) -> list[Sequence]:
        """All that hold pages for it."""
        own = [answer.sequence for answer in self.answers if answer.sequence is not None]
        return own if self.source is None else [*own, self.source]

    def first_reads(self) -> list[int]:
        """What the first answer that goes on reads before it speaks (on), alone or for all of them."""
        first, *others = self.going
        return self.opening if others else self.opening + first.ids

    def reads(self, answer: Answer) -> list[int]:
        """All that is fed to an answer's sequence, from its beginning to what it said last."""
        return self.opening if self.unborn else self.opening + answer.ids

    def pages_missing(self) -> int:
        """Pages that its sequences will need beside those they hold, for what they are to be fed next."""
        missing = len(self.unborn)
        for answer in self.speaking:
            assert answer.sequence is not None
            wanted = answer.sequence.length + len(answer.todo) + 1
            pages = pages_for(wanted)
            if answer.window is not None:
                pages = min(pages, answer.window.pages)
            missing += max(0, pages - len(answer.sequence.pages))
        if self.source is not None and self.source_ids is not None and not self.source_read:
            missing += pages_for(len(self.source_ids))
        return missing

    def result(self) -> Generation:
        """The finished query: its best or first answer, with the others behind it."""
        first, *others = [self._generation(answer) for answer in self.answers]
        first.others.extend(others)
        return first

    def _generation(self, answer: Answer) -> Generation:
        first, end = self.first_time or answer.end_time, answer.end_time
        timings = {
            "prefill_s": (self.read_time or end) - self.start,
            "first_token_s": first - self.start,
            "decode_s": end - first,
            "prefill_tokens": len(self.prompt) - self.hits,
            "decode_tokens": max(0, len(answer.ids) - 1),
            "drafted_tokens": answer.drafted,
            "accepted_tokens": answer.accepted,
        }
        error = None if self.error is None else str(self.error)
        text = "".join(answer.pieces)
        return Generation(text, answer.ids, self.prompt, answer.finish_reason, timings, answer.choices, error)
