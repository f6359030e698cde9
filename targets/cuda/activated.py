"""An activation of what a linear layer gives, on CUDA: of sums as soon as they are there, as bfloat16 pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import TILE
from llmc.compiler.formats.plain import tiles
from llmc.targets.cuda.elementwise import Activation
from llmc.targets.cuda.launch import bf16_pair, held


@dataclass(frozen=True)
class Activated:
    """An activation, its attributes, and where it goes: `out` (M, F/2), of a matrix of `halves` times F outputs."""

    activation: Activation
    attrs: dict[str, Any]
    out: Any

    @property
    def halves(self) -> int:
        """How many sums one result is made of: of tiles that are `tiles_of_half` apart."""
        return self.activation.halves

    def fits(self, width: int) -> bool:
        """Whether halves of so many outputs begin with a tile."""
        return self.halves == 1 or width // self.halves % TILE == 0

    def tiles_of_half(self, width: int) -> int:
        """Of a matrix of so many outputs."""
        return tiles(width // self.halves)

    def put(self, row: Any, pair: Any, sums: list[list[Any]]) -> None:
        """Result `pair` of a row, made of two neighbouring sums of each half."""
        function = self.activation.of(self.attrs)
        first, second = (held(function(*(half[i] for half in sums))) for i in range(2))
        T.buffer_store(self.out, bf16_pair(first, second), [row, pair])

    def launch(self, results: Any) -> None:
        """All rows of what other launches have written."""
        self.activation.launch(results, self.out, self.attrs)
