"""A model with some entries of its vocabulary: what its embedding and its head are made of, a piece at a time.

Rows of both are independent, and there may be more of them than of everything else in a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmc.compiler.spec import ModelSpec, tensor_shapes
from llmc.compiler.spec.blocks import Tokens
from llmc.frontends.tensor_view import RowsView

_NUMBERS = 1 << 22  # of a piece of a matrix, about: 16 MB as float32
_ALIKE = 16  # entries of a piece are a multiple of so many, as matrices are packed


@dataclass(frozen=True)
class Pieces:
    """A vocabulary of `entries` in pieces of `size`, the last of which begins where it ends with the vocabulary."""

    entries: int
    size: int

    @classmethod
    def of(cls, spec: ModelSpec, numbers: int = _NUMBERS) -> Pieces:
        """Pieces of about so many numbers of a matrix."""
        entries = spec.sizes.vocab
        size = -(-numbers // (spec.embedding.width or spec.sizes.hidden) // _ALIKE) * _ALIKE
        return cls(entries, min(entries, size))

    @property
    def starts(self) -> list[int]:
        """The first entry of each.

        >>> Pieces(100, 48).starts
        [0, 48, 52]
        """
        return [min(start, self.entries - self.size) for start in range(0, self.entries, self.size)]

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The spec of a model with one piece."""
        return replace(spec, sizes=replace(spec.sizes, vocab=self.size), tokens=Tokens(None, (), False))

    def model(self, model: Any, start: int) -> Any:
        """The model with the piece that begins there."""
        if self.size == self.entries:
            return model
        few, tensors = tensor_shapes(self.spec(model.spec)), dict(model.tensors)
        for name, shape in tensor_shapes(model.spec).items():
            if few[name] != shape:
                tensors[name] = RowsView.of(tensors[name], few[name], start=start, run=self.size, stride=self.size)
        return replace(model, tensors=tensors)
