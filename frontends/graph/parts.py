"""The step cut into parts: its embedding, its layers in so many parts, and its head, as functions of their own.

A prompt can then pass through one part a step, while the answers beside it pass through all of them (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tvm import relax

from llmc.compiler.spec import ModelSpec
from llmc.compiler.spec.parts import EMBED, HEAD, part_name, part_sizes
from llmc.frontends.graph.blocks import layer_of
from llmc.frontends.graph.ends import embedding_of, head_of
from llmc.frontends.graph.inputs import Inputs, inputs_of
from llmc.frontends.graph.places import sights

if TYPE_CHECKING:
    from llmc.frontends.graph.blocks import Blocks
    from llmc.frontends.graph.build import Body


@dataclass(frozen=True)
class Passing:
    """Symbolic inputs of a part: those of a step that it wants, and what its rows have come to so far."""

    x: Any  # (M, C)
    step: Inputs
    wanted: tuple[Any, ...]

    def all(self) -> list[Any]:
        """In the order of the compiled function."""
        return list(self.wanted)


def parts_of(spec: ModelSpec, kv_dtype: str, count: int) -> Iterator[tuple[str, Passing, Body]]:
    """Name, inputs and body of `embed`, `part_0`, ..., and `head`."""
    yield EMBED, *_part(spec, kv_dtype, ("tokens", "positions"), _embed)
    first = 0
    for number, size in enumerate(part_sizes(spec, count)):
        body = partial(_layers, range(first, first + size))
        yield part_name(number), *_part(spec, kv_dtype, None, body)
        first += size
    yield HEAD, *_part(spec, kv_dtype, ("x", "logit_rows"), _head)


def _part(spec: ModelSpec, kv_dtype: str, names: tuple[str, ...] | None, body: Body) -> tuple[Passing, Body]:
    """Fresh inputs of these names, or of all that layers want."""
    step = inputs_of(spec, kv_dtype, sources=False)
    x = relax.Var("x", relax.TensorType((step.tokens.ty.shape[0], spec.sizes.hidden), "float32"))
    if names is None:
        wanted = (x, step.positions, *step.places(), step.kv)
    else:
        wanted = tuple(x if name == "x" else getattr(step, name) for name in names)
    return Passing(x, step, wanted), body


def _embed(outer: Blocks, inputs: Passing, kv_dtype: str) -> Any:
    return embedding_of(outer, outer.weights["embedding"], inputs.step)


def _layers(layers: range, outer: Blocks, inputs: Passing, kv_dtype: str) -> Any:
    x = inputs.x
    for sight in sights(outer, layers, inputs.step, kv_dtype, causal=True):
        x = layer_of(outer.inside(f"layers.{sight.layer}."), x, sight)
    return x


def _head(outer: Blocks, inputs: Passing, kv_dtype: str) -> Any:
    return head_of(outer, inputs.x, inputs.step)
