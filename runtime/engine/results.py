"""What one step of the engine made of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import LlmcError

if TYPE_CHECKING:
    from llmc.runtime.decoding.candidates import Row
    from llmc.runtime.decoding.chooser import Choice
    from llmc.runtime.generate import Generation


class StepResult(NamedTuple):
    """What a step made of query `id`: a token, and in the end the whole answer.

    answer: which of the query's answers, from 0, where it asked for several. text: what has become certain with this
    step; "" while a character, or what may be a stop string, is incomplete. choice: the token, and its log-probability
    and those of the likeliest if they were asked for; None where the caller chooses, and of an encoder's text. row:
    for a caller who chooses, the logits; they are the caller's until it commits. rows: of an encoder's text, outputs
    of all its tokens (n, W). done: with a query's last result, the whole of it. error: why it ended, where it failed.
    """

    id: int
    text: str = ""
    answer: int = 0
    choice: Choice | None = None
    row: Row | None = None
    rows: NDArray[np.float32] | None = None
    done: Generation | None = None
    error: LlmcError | None = None

    @property
    def token(self) -> int | None:
        """The token that was chosen."""
        return None if self.choice is None else self.choice.token


class Stats(NamedTuple):
    """How an engine stands, and what it has done since it was made.

    running: queries that hold pages. waiting: those that do not yet, or not at present. pages_free, pages: of the
    cache; pages_kept: those that only the prefix tree holds. steps: calls of the compiled functions. rows: tokens that
    passed through them. hit_tokens: tokens of prompts that did not have to, as the cache still had them. preempted:
    how often a query had to give its pages up. tokens: tokens made. drafted: tokens guessed ahead; accepted: those of
    them that were said.
    """

    running: int
    waiting: int
    pages: int
    pages_free: int
    pages_kept: int
    steps: int
    rows: int
    tokens: int
    hit_tokens: int
    preempted: int
    drafted: int
    accepted: int
