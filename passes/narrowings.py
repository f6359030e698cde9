"""Where a function stores in fewer bits what a norm, an activation or attention gives, and nobody else reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax

from llmc.compiler import ops
from llmc.compiler.ops.narrowed import NARROWED
from llmc.passes.bindings import bound_in, reads_of


@dataclass(frozen=True)
class Narrowing:
    """Variables: of what is stored, of the rows of floats that it is made of, and of the op that gives these last."""

    stored: Any
    rows: Any
    source: Any
    others: int  # results of the op before them


def narrowings(
    function: Any, store: str, multiple: int, sources: tuple[str, ...] = NARROWED
) -> Iterator[Narrowing]:  # fmt: skip
    """Those by the op `store` of what `sources` give, of widths that are a multiple of that, in order."""
    bound, reads = bound_in(function), None
    for variable, value in bound.items():
        found = ops.match(value)
        if found is None or found[0].name != store:
            continue
        (x,) = found[1]
        source, place = x, 0
        if isinstance(bound.get(x), relax.TupleGetItem):
            source, place = bound[x].tuple_value, int(bound[x].index)
        made = None if source not in bound else ops.match(bound[source])
        if made is None or made[0].name not in sources or int(x.ty.shape[1]) % multiple:
            continue
        reads = reads or reads_of(function)
        if reads[x] != 1:
            continue
        others = len(source.ty.fields) - 1 if isinstance(source.ty, ir.TupleType) else 0
        if place == others:
            yield Narrowing(variable, x, source, others)
