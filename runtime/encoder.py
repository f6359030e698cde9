"""Encoders: whole texts in, one vector a text or predictions for its masked tokens out.

A text passes in one step, for every token sees all of it; short texts share a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.loading.manifest import Pooling
from llmc.runtime.runner import Feed, Runner

F32 = NDArray[np.float32]


def pool(pooling: Pooling, rows: F32) -> F32:
    """The vector (C,) of a text's rows (n, C)."""
    vector = rows.mean(0) if pooling.kind == "mean" else rows[0 if pooling.kind == "first" else -1]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype(np.float32)


@dataclass(frozen=True)
class Guess:
    """A token that may stand at a masked place, and its probability."""

    id: int
    token: str
    probability: float


def encode_rows(runner: Runner, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, F32]]:
    """(number of the text, outputs of all its tokens (n, W)), shortest texts first; each text is read whole.

    Raises RequestError for a text longer than the model's context, before any is read.
    """
    for number, ids in enumerate(texts):
        check_source(number, len(ids), runner.context)
    for batch in batches(texts, runner.prefill_chunk):
        sequences = [runner.new_sequence() for _ in batch]
        try:
            feeds = [Feed(s, texts[n], "all") for s, n in zip(sequences, batch, strict=True)]
            rows = runner.step(feeds).logits
        finally:
            for sequence in sequences:
                runner.release(sequence)
        if not np.isfinite(rows).all():
            raise LlmcError("the model computed outputs that are not finite; its weights may be damaged")
        at = 0
        for number in batch:
            yield number, rows[at : at + len(texts[number])]
            at += len(texts[number])


def check_source(number: int, tokens: int, context: int) -> None:
    """Raise RequestError where text `number`, from 0, is longer than an encoder reads."""
    if tokens > context:
        raise RequestError(
            f"text {number + 1} has {tokens} tokens, and the model reads {context}; shorten it, or ask for it to be cut"
        )


def batches(texts: Sequence[Sequence[int]], rows: int) -> Iterator[list[int]]:
    """Numbers of texts whose tokens fill a step of at most `rows` rows; a longer text has a step of its own."""
    batch: list[int] = []
    used = 0
    for number in sorted(range(len(texts)), key=lambda n: len(texts[n])):
        if batch and used + len(texts[number]) > rows:
            yield batch
            batch, used = [], 0
        batch.append(number)
        used += len(texts[number])
    if batch:
        yield batch


def best(logits: F32, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest ids of one row (V,), with their probabilities."""
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    shifted /= shifted.sum()
    order = np.argsort(-shifted, kind="stable")[:count]
    return [(int(i), float(shifted[i])) for i in order]
