"""Computes the stored weights: walks `..._transform_params` one output at a time, reading source tensors lazily.

At any time only one output and the sources it needs are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError


class Sources(Protocol):
    """Where weights come from, by our tensor names."""

    def read(self, name: str) -> NDArray[np.float32]:
        """The values, (N, K) or (N,)."""

    def pack(self, format: str, names: tuple[str, ...]) -> NDArray[Any]:
        """Matrices of one width, one under another, in a format."""


@dataclass(frozen=True)
class StoredWeight:
    """One weight of the compiled step, not yet computed."""

    name: str  # made of its sources' names
    shape: tuple[int, ...]
    dtype: str
    format: str  # of its packing, or "f32" when it is plain
    sources: tuple[str, ...]
    compute: Callable[[Sources], NDArray[Any]]
    recipe: str  # how it is computed from which parameters; equal ones are the same weight

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def stored_weights(transform: Any, names: list[str]) -> Iterator[StoredWeight]:
    """The outputs of the transform function in order; `names` are the source tensors' names in parameter order."""
    body = transform.body
    bindings = {binding.var: binding.value for block in body.blocks for binding in block.bindings}
    outputs = body.body
    while outputs in bindings:
        outputs = bindings[outputs]
    walk = _Walk(bindings, transform.params[0], names)
    for value in outputs.fields:
        sources = tuple(walk.sources(value))
        final = ops.match(walk.value(value))
        format = str(final[2].get("format", "f32")) if final else "f32"
        shape = tuple(int(size) for size in value.ty.shape)
        yield StoredWeight(
            "+".join(sources), shape, str(value.ty.dtype.dtype), format, sources,
            lambda origin, value=value: np.ascontiguousarray(walk.compute(value, origin)),  # type: ignore[misc]
            walk.recipe(value),
        )  # fmt: skip


@dataclass(frozen=True)
class _Walk:
    bindings: dict[Any, Any]
    params: Any  # the tuple of source weights
    names: list[str]

    def value(self, expr: Any) -> Any:
        """What a variable is bound to, through plain aliases."""
        while expr in self.bindings:
            expr = self.bindings[expr]
        return expr

    def _leaf(self, expr: Any) -> str | None:
        if isinstance(expr, relax.TupleGetItem) and self.value(expr.tuple_value).same_as(self.params):
            return self.names[int(expr.index)]
        return None

    def _operands(self, expr: Any) -> list[Any]:
        found = ops.match(expr)
        if found:
            return found[1]
        if isinstance(expr, relax.Call) and expr.op.name == "relax.concat":
            return list(self.value(expr.args[0]).fields)
        raise LlmcError(f"cannot compute weights with {expr}; add it in compiler/evaluate.py")

    def sources(self, expr: Any) -> list[str]:
        """Names of the source tensors an expression reads, left to right."""
        expr = self.value(expr)
        leaf = self._leaf(expr)
        if leaf is not None:
            return [leaf]
        return [name for operand in self._operands(expr) for name in self.sources(operand)]

    def recipe(self, expr: Any) -> str:
        """The expression as text."""
        expr = self.value(expr)
        if self._leaf(expr) is not None:
            return str(expr.index)
        found = ops.match(expr)
        name = f"{found[0].name}{sorted(found[2].items())}" if found else f"concat{expr.attrs.axis}"
        return f"{name}({', '.join(map(self.recipe, self._operands(expr)))})"

    def compute(self, expr: Any, origin: Sources) -> NDArray[Any]:
        """The array of an expression."""
        expr = self.value(expr)
        leaf = self._leaf(expr)
        if leaf is not None:
            return origin.read(leaf)
        found = ops.match(expr)
        if found and found[0].name == "pack" and self._stacks(found[1][0]):
            return origin.pack(str(found[2]["format"]), tuple(self.sources(found[1][0])))
        arrays = [self.compute(operand, origin) for operand in self._operands(expr)]
        if found is None:
            return np.concatenate(arrays, axis=int(expr.attrs.axis))
        result: NDArray[Any] = found[0].meaning(*arrays, **found[2])
        return result

    def _stacks(self, expr: Any) -> bool:
        """Whether it is source matrices one under another, and nothing else."""
        expr = self.value(expr)
        if isinstance(expr, relax.Call) and expr.op.name == "relax.concat":
            return int(expr.attrs.axis) == 0 and all(map(self._stacks, self.value(expr.args[0]).fields))
        return self._leaf(expr) is not None
