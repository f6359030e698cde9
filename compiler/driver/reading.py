"""A text on its way through the parts of a model: original.py has it wait behind each part for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from llmc.compiler.driver.probe import array_of
from llmc.compiler.driver.vocabulary import Pieces
from llmc.compiler.spec.parts import HEAD

F32 = NDArray[np.float32]


@dataclass
class Reading:
    """Index arrays and pages of a text, what its rows have come to, and what matrices were given."""

    ids: NDArray[Any]
    index: list[Any]
    pages: int  # that the text takes
    kv: list[Any]  # without pages while no part wants them
    judged: bool  # whether its logits are wanted
    pieces: Pieces
    x: Any = None
    embedded: list[F32] = field(default_factory=list)
    logits: F32 = field(default_factory=lambda: np.empty((0, 0), np.float32))
    squares: dict[str, F32] = field(default_factory=dict)

    def embed(self, start: int, call: Callable[[Any, Any], Any]) -> list[F32]:
        """Rows of the tokens that are in a piece of the vocabulary, and the same of what matrices there were given."""
        here = (self.ids >= start) & (self.ids < start + self.pieces.size)
        tokens = tvm.runtime.tensor(np.where(here, self.ids - start, 0).astype(np.int32))
        found = call(tokens, self.index[1])
        arrays = [array_of(found)] if isinstance(found, tvm.runtime.Tensor) else list(map(array_of, found))
        before = self.embedded or arrays
        self.embedded = [np.where(here[:, None], new, old) for new, old in zip(arrays, before, strict=True)]
        self.x = tvm.runtime.tensor(self.embedded[0])
        return self.embedded[1:]

    def begin(self, layers: set[int]) -> None:
        """A part reads and writes K and V of these layers, as ones before it may have."""
        for layer in layers:
            none, *page = self.kv[layer].shape
            if none == 0:
                self.kv[layer] = zeros(self.pages, *page)

    def end(self, layers: set[int]) -> None:
        """No part after this one wants K and V of these layers."""
        for layer in layers:
            self.kv[layer] = zeros(0, *self.kv[layer].shape[1:])

    def inputs(self, part: str) -> list[Any]:
        """What a part behind the embedding takes beside weights."""
        _, positions, *places, wanted = self.index
        return [self.x, wanted] if part == HEAD else [self.x, positions, *places, self.kv]

    def take_logits(self, start: int, found: F32) -> None:
        """Those of a piece of the vocabulary."""
        if self.judged:
            if not self.logits.size:
                self.logits = np.empty((len(found), self.pieces.entries), np.float32)
            self.logits[:, start : start + self.pieces.size] = found


def zeros(*shape: int) -> Any:
    """A tensor of them."""
    return tvm.runtime.tensor(np.zeros(shape, np.float32))
