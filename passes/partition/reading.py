"""What a function of a model reads: its bindings by variable, who uses them, and which layers' pages they touch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import ir, relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.passes.bindings import bound_in
from llmc.passes.matrices import MULTIPLYING

ATTENDING = ("attention", "attention_with_sinks", "attention_by_distance")
CONVOLVING = "short_convolution"


@dataclass(frozen=True)
class Reading:
    """A function, taken apart. `made` are the variables that inputs and weights alone give, without a matrix."""

    function: Any
    inputs: tuple[Any, ...]
    weights: tuple[Any, ...]
    pages: Any  # the input that has the pages of all layers, None where there is none
    bound: dict[Any, Any]  # variable -> value, in order
    uses: Counter[Any]
    outputs: tuple[Any, ...]  # variables
    made: frozenset[Any]
    single: bool  # the function gives one tensor, no tuple

    def layer(self, variable: Any) -> int | None:
        """The layer whose pages a variable is, None for any other."""
        value = self.bound.get(variable)
        if isinstance(value, relax.TupleGetItem) and self.pages is not None and value.tuple_value.same_as(self.pages):
            return int(value.index)
        return None

    def touched(self, value: Any) -> int | None:
        """The layer whose pages an op reads or writes."""
        layers = [layer for part in operands(value) if (layer := self.layer(part)) is not None]
        return layers[0] if layers and not isinstance(value, relax.Tuple) else None

    @cached_property
    def convolved(self) -> dict[int, int]:
        """Pages of convolutions -> the layer that they are of: that of the first channels of the same values."""
        found: dict[int, int] = {}
        first: dict[Any, int] = {}
        for value in self.bound.values():
            match, layer = ops.match(value), self.touched(value)
            if match is not None and layer is not None and match[0].name == CONVOLVING:
                found[layer] = first.setdefault(match[1][0], layer)
        return found

    def owner(self, layer: int) -> int:
        """The layer of the model that keeps something in the pages of `layer`."""
        return self.convolved.get(layer, layer)

    def name(self, variable: Any) -> str:
        """Of the op that gives a variable, else nothing."""
        found = ops.match(self.bound.get(variable))
        return found[0].name if found else ""


def read(name: str, function: Any) -> Reading:
    """Takes a function apart. Raises LlmcError where it is no function of a model, naming what is in the way."""
    if not function.attrs or "num_input" not in function.attrs:
        raise LlmcError(f"{name}: a function without `num_input` does not say which parameters are weights")
    count = int(function.attrs["num_input"])
    inputs, weights = tuple(function.params[:count]), tuple(function.params[count:])
    bound = bound_in(function)
    uses = Counter[Any]()
    for value in bound.values():
        _check(name, value)
        uses.update(operands(value))
    output = function.body.body
    while isinstance(bound.get(output), relax.Var):
        output = bound[output]
    value = bound.get(output, output)
    outputs = tuple(value.fields) if isinstance(value, relax.Tuple) else (output,)
    if isinstance(value, relax.Tuple):
        bound.pop(output, None)
    pages = next((each for each in inputs if not isinstance(each.ty, relax.TensorType)), None)
    single = not isinstance(value, relax.Tuple)
    return Reading(function, inputs, weights, pages, bound, uses, outputs, _made(bound, inputs, weights, pages), single)


def operands(value: Any) -> list[Any]:
    """The variables and constants that a binding reads."""
    found = ops.match(value)
    if found is not None:
        return list(found[1])
    if isinstance(value, relax.Call):
        return [part for arg in value.args for part in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return list(value.fields) if isinstance(value, relax.Tuple) else []


def _check(name: str, value: Any) -> None:
    known = isinstance(value, (relax.TupleGetItem, relax.Tuple, relax.Var)) or ops.match(value) is not None
    if not known and not (isinstance(value, relax.Call) and value.op.name in ("relax.add", "relax.concat")):
        what = getattr(getattr(value, "op", None), "name", type(value).__name__)
        raise LlmcError(f"{name}: {what} in a graph that is to be partitioned; partition the graph the frontend made")


def _made(bound: dict[Any, Any], inputs: Any, weights: Any, pages: Any) -> frozenset[Any]:
    made: set[Any] = set(inputs) | set(weights)
    pools: set[Any] = set()
    for variable, value in bound.items():
        found = ops.match(value)
        reads = operands(value)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(pages):
            pools.add(variable)
        touches = any(part in pools for part in reads)
        plain = not touches and (found is None or found[0].name not in MULTIPLYING)
        if plain and all(isinstance(part, ir.Constant) or part in made for part in reads):
            made.add(variable)
    return frozenset(made | pools)
