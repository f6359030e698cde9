"""What was generated, whole or a part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.decoding.options import Options

__all__ = ["Generation", "Options", "Part"]


@dataclass(frozen=True)
class Generation:
    """What was generated.

    ids: every token made, the end token included; text: what they say without special tokens. finish_reason: "stop" at
    an end token or a stop string, "length" at max_tokens, "context" where the model's context (or the cache) ends,
    "error" where the model failed, and `error` says how. timings, in seconds since the query came, or was let in if it
    had to wait for room: prefill_s until its prompt was read, first_token_s until the first token, decode_s from there
    to the last; and prefill_tokens, decode_tokens: tokens that passed in each, without those that the cache still had;
    drafted_tokens, accepted_tokens: those guessed ahead, and those of them that were right.
    logprobs: of each token, if they were asked for. others: the other answers, where several were asked for.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    timings: dict[str, float]
    logprobs: list[Choice] | None = None
    error: str | None = None
    others: list[Generation] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What one step added to the answer of prompt number `index`; with its last part comes the whole of it."""

    index: int
    text: str
    done: Generation | None
