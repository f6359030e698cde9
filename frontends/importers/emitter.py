"""Builds the Relax function of an imported graph: constants become weights, and shapes are checked when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax, te, tirx
from tvm_ffi import structural_map

from llmc.compiler import ops
from llmc.compiler.errors import SourceError
from llmc.frontends.importers import sizes
from llmc.frontends.importers.imported import LEAST_WEIGHT, STEP

Put = Callable[[Any], Any]


class Emitter:
    """What has been built so far. `builder` is open in a dataflow block."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.weights: dict[str, tuple[Any, NDArray[Any]]] = {}  # name -> variable, values
        self.matrices: dict[str, tuple[Any, NDArray[Any]]] = {}
        self.conditions: dict[tuple[str, str], tuple[Any, str, Any]] = {}  # what sizes must be when it runs
        self.exact: set[str] = set()  # names of matrices of whole numbers
        self.names: dict[int, str] = {}  # id of an array -> what the file calls it
        self._parts: dict[tuple[int, str], tuple[NDArray[Any], NDArray[Any]]] = {}
        self._made: dict[int, tuple[NDArray[Any], Any]] = {}  # id of an array -> the array, its variable

    def emit(self, expr: Any) -> Any:
        """The variable of an expression."""
        return self.builder.emit(expr)

    def tensor(self, value: Any) -> Any:
        """An array as an expression: a weight of its own where it is large, computed where it holds symbolic sizes."""
        if isinstance(value, relax.Expr):
            return value
        if value.dtype == object:
            return self._computed(value)
        if value.size < LEAST_WEIGHT:
            return relax.const(value, str(value.dtype))
        if id(value) not in self._made:
            self._made[id(value)] = value, self._weight(self.weights, value, self.name_of(value))
        return self._made[id(value)][1]

    def _weight(self, table: dict[str, tuple[Any, NDArray[Any]]], value: NDArray[Any], name: str) -> Any:
        base = name or "constant"
        name, number = base, 1
        while name in self.weights or name in self.matrices:
            number += 1
            name = f"{base}.{number}"
        variable = relax.Var(name, relax.TensorType(value.shape, str(value.dtype)))
        table[name] = variable, value
        return variable

    def _computed(self, value: NDArray[Any]) -> Any:
        flat = list(value.reshape(-1))

        def sizes_in_order(put: Put) -> Any:
            def pick(*index: Any) -> Any:
                at: Any = 0
                for place, size in zip(index, value.shape, strict=True):
                    at = at * size + place
                result = put(flat[-1])
                for number in range(len(flat) - 2, -1, -1):
                    result = tirx.if_then_else(at == number, put(flat[number]), result)
                return result

            return te.compute(value.shape, pick, name="sizes")

        return self.compute("sizes", [], flat, sizes_in_order)

    def compute(self, name: str, tensors: list[Any], used: list[Any], make: Callable[..., Any]) -> Any:
        """A loop nest of its own: `make(put, *tensors)` gives it in TE; `put` turns a size into what may stand in it.

        `used` are the sizes that `make` uses.
        """
        names = sorted(set().union(*map(sizes.symbols, used)), key=str)

        def build(*given: Any) -> Any:
            known = dict(zip(names, given[len(tensors) :], strict=True))

            def put(size: Any) -> Any:
                if sizes.is_known(size):
                    return tirx.IntImm("int64", int(size))
                return structural_map(size, (tirx.Var, lambda variable: known.get(variable, variable)))

            return make(put, *given[: len(tensors)])

        return self.builder.emit_te(build, *tensors, *names, primfunc_name_hint=name)

    def shape(self, expr: Any) -> tuple[Any, ...]:
        """The sizes of an expression. Every tensor of a graph has a known rank."""
        return tuple(sizes.simplify(size) for size in expr.ty.shape)

    def matched(self, expr: Any, shape: tuple[Any, ...]) -> Any:
        """The same tensor, taken to have this shape. Where that is not proved it becomes a condition of the graph.

        Not by match_cast: TVM's passes would put the sizes in place of one another without end.
        """
        own = self.shape(expr)
        unproved = [(a, b) for a, b in zip(own, shape, strict=True) if not sizes.same(a, b)]
        if not unproved:
            return expr
        for a, b in unproved:
            if sizes.is_known(a) and sizes.is_known(b):
                raise SourceError(f"sizes {a} and {b} meet, which should be equal")
            self.conditions.setdefault((str(a), str(b)), (a, "equal", b))

        def copy(put: Put, x: Any) -> Any:
            def at(*index: Any) -> Any:  # inside the tensor whatever the sizes are
                return x(*(tirx.min(i, put(size) - 1) for i, size in zip(index, own, strict=True)))

            return te.compute([put(size) for size in shape], at, name="taken_as")

        return self.compute("taken_as", [expr], [*own, *shape], copy)

    def need(self, size: Any) -> Any:
        """A size that is computed, and must not be negative."""
        if not sizes.is_known(size) and not sizes.proved(size >= 0):
            self.conditions.setdefault((str(size), "least"), (size, "at least", 0))
        return size

    def linear(self, x: Any, matrix: NDArray[np.float32], name: str, exact: bool = False) -> Any:
        """x (..., K) times matrix (K, N): the op `linear` over a matrix that passes give a format.

        `exact`: the numbers are whole, and small enough that bfloat16 holds them; no other format is to be chosen.
        """
        *rows, columns = self.shape(x)
        if id(matrix) not in self._made:
            variable = self._weight(self.matrices, np.ascontiguousarray(matrix.T), name)
            self._made[id(matrix)] = matrix, variable
            if exact:
                self.exact.add(str(variable.name))
        flat = x if len(rows) == 1 else self.emit(relax.op.reshape(x, (sizes.product(rows), columns)))
        y = ops.emit(self.builder, "linear", flat, self._made[id(matrix)][1])
        return y if len(rows) == 1 else self.emit(relax.op.reshape(y, (*rows, matrix.shape[1])))

    def name_of(self, value: NDArray[Any]) -> str:
        """What the file calls an array."""
        return self.names.get(id(value), "matrix")

    def turned(self, value: NDArray[Any]) -> NDArray[Any]:
        """A matrix (N, K) as (K, N): one array, however often it is asked for."""
        return self._derived(value, "turned", lambda: value.T)

    def part(self, origin: NDArray[Any], whole: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Rows of `whole`, which is made of `origin`: one array, however often it is asked for."""
        return self._derived(origin, f"{start}:{stop}", lambda: whole[start:stop])

    def _derived(self, origin: NDArray[Any], how: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        if (id(origin), how) not in self._parts:
            made = make()
            self._parts[id(origin), how] = origin, made
            self.names[id(made)] = self.name_of(origin)
        return self._parts[id(origin), how][1]


def with_weights(module: Any, to: Emitter) -> Any:
    """The module whose step has the weights and the matrices as parameters behind its inputs."""
    step = module[STEP]
    params = [*step.params, *(v for v, _ in to.weights.values()), *(v for v, _ in to.matrices.values())]
    step = relax.Function(params, step.body, step.ret_ty, step.is_pure, step.attrs)
    module.update_func(module.get_global_var(STEP), step)
    return module
