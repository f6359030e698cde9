"""Encoders: whole texts in, one vector a text or predictions for its masked tokens out.

A text passes in one step, for every token sees all of it; short texts share a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.decoding.temperature import weights
from llmc.runtime.decoding.top_k import top_k
from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.loading.manifest import Pooling

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


def encode_rows(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, F32]]:
    """(number of the text, outputs of all its tokens (n, W)), shortest texts first; each text is read whole.

    Raises RequestError for a text longer than the model's context, before any is read.
    """
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    number_of = dict[int, int]()
    try:
        for number in order:
            try:
                number_of[engine.add_text(texts[number])] = number
            except RequestError as error:
                raise RequestError(f"text {number + 1}: {error}") from None
        for result in engine.follow(number_of):
            if result.rows is None:
                raise result.error or LlmcError("the text was not read")
            yield number_of[result.id], result.rows
    finally:
        for query in number_of:
            engine.cancel(query)


def best(logits: F32, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest ids of one row (V,), with their probabilities."""
    weight = weights(logits, 1.0)
    weight /= weight.sum()
    return [(int(i), float(weight[i])) for i in top_k(weight, count)]
