"""Symbolic sizes: whole numbers that may hold the named dynamic dimensions of a graph's inputs.

Arrays of them are NumPy arrays of dtype object. Every named size is at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import sym, tirx

from llmc.compiler.errors import SourceError

Size = Any  # int, or a tirx expression over named sizes
Shape = tuple[Size, ...]


def simplify(value: Any) -> Any:
    """A plain int where the expression is one."""
    if not isinstance(value, tirx.Expr):
        return int(value)
    value = sym.Analyzer().simplify(value)
    return int(value) if isinstance(value, tirx.IntImm) else value


def is_known(value: Any) -> bool:
    """Whether it is a plain number."""
    return not isinstance(value, tirx.Expr)


def symbols(value: Any) -> set[Any]:
    """The named sizes in an expression."""
    return set(tirx.analysis.undefined_vars(value)) if isinstance(value, tirx.Expr) else set()


def analyzer(*values: Any) -> sym.Analyzer:
    """One that knows that the sizes named in the values are 1 or more."""
    known = sym.Analyzer()
    for name in set().union(*map(symbols, values)):
        known.bind(name, tvm_range(name))
    return known


def tvm_range(name: Any) -> Any:
    """1 to what fits into memory."""
    import tvm

    return tvm.ir.Range(tirx.IntImm("int64", 1), tirx.IntImm("int64", 1 << 40))


def proved(condition: Any) -> bool:
    """Whether a comparison holds for all sizes."""
    if isinstance(condition, (bool, np.bool_)):
        return bool(condition)
    return bool(analyzer(condition).can_prove(condition))


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the named ones are."""
    return a == b if is_known(a) and is_known(b) else proved(tirx.EQ(_expr(a), _expr(b)))


def differ(a: Size, b: Size) -> bool:
    """Whether two sizes can never be equal."""
    return a != b if is_known(a) and is_known(b) else proved(tirx.NE(_expr(a), _expr(b)))


def _expr(value: Size) -> Any:
    return tirx.IntImm("int64", int(value)) if is_known(value) else value


def equal(a: Size, b: Size) -> Any:
    """a == b: True, False, or the expression where it depends."""
    if same(a, b):
        return True
    return False if differ(a, b) else tirx.EQ(_expr(a), _expr(b))


def less(a: Size, b: Size) -> Any:
    """a < b: True, False, or the expression where it depends."""
    if is_known(a) and is_known(b):
        return a < b
    if proved(tirx.LT(_expr(a), _expr(b))):
        return True
    return False if proved(tirx.GE(_expr(a), _expr(b))) else tirx.LT(_expr(a), _expr(b))


def minimum(a: Size, b: Size) -> Size:
    """The smaller one."""
    decided = less(a, b)
    return (a if decided else b) if is_known(decided) else simplify(tirx.Min(_expr(a), _expr(b)))


def maximum(a: Size, b: Size) -> Size:
    """The larger one."""
    decided = less(a, b)
    return (b if decided else a) if is_known(decided) else simplify(tirx.Max(_expr(a), _expr(b)))


def choose(condition: Any, a: Size, b: Size) -> Size:
    """a where the condition holds, else b."""
    if is_known(condition):
        return a if condition else b
    return a if same(a, b) else tirx.Select(condition, _expr(a), _expr(b))


def divide(a: Size, b: Size) -> Size:
    """a / b towards zero, as sizes are not negative where they are not known."""
    if is_known(a) and is_known(b):
        return math.trunc(a / b) if abs(a) < 1 << 52 else a // b
    return simplify(tirx.floordiv(_expr(a), _expr(b)))


def product(sizes: Iterable[Size]) -> Size:
    """Of all."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return simplify(result)


def missing(whole: Sequence[Size], known: Sequence[Size]) -> Size:
    """What the sizes `known` are multiplied with to make as many values as the sizes `whole`: common ones cancel."""
    rest = list(whole)
    left = []
    for size in known:
        place = next((i for i, other in enumerate(rest) if same(size, other)), None)
        if place is None:
            left.append(size)
        else:
            del rest[place]
    return divide(product(rest), product(left))


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that arrays of these shapes take together. Sizes that may differ are taken to be equal."""
    rank = max(map(len, shapes))
    result = []
    for at in range(rank):
        sizes = [shape[at - rank] for shape in shapes if at - rank >= -len(shape)]
        large = [size for size in sizes if not (is_known(size) and size == 1)]
        plain = [size for size in large if is_known(size)]
        result.append((plain or large or [1])[0])
    return tuple(result)


def as_array(values: Iterable[Any]) -> NDArray[Any]:
    """A vector of sizes: int64 where all are plain."""
    values = [simplify(value) for value in values]
    if all(map(is_known, values)):
        return np.array(values, np.int64).reshape(-1)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def as_sizes(array: NDArray[Any], what: str) -> list[Size]:
    """The sizes in an array. Raises SourceError where it holds anything else."""
    if array.dtype != object and array.dtype.kind not in "iu":
        raise SourceError(f"{what}: {array.dtype} values, wanted whole numbers")
    return [simplify(value) for value in array.reshape(-1)]


_OPERATIONS = {
    tirx.Add: "add", tirx.Sub: "sub", tirx.Mul: "mul", tirx.FloorDiv: "div", tirx.FloorMod: "mod", tirx.Min: "min",
    tirx.Max: "max",
}  # fmt: skip


def term(value: Size, names: Mapping[Any, str]) -> Any:
    """A size as the manifest writes it: a number, a name, or [operation, left, right]."""
    if is_known(value):
        return int(value)
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tirx.Var):
        return names[value]
    if type(value) in _OPERATIONS:
        return [_OPERATIONS[type(value)], term(value.a, names), term(value.b, names)]
    raise SourceError(f"a size of {str(value)[:80]}, which llmc cannot check when the graph runs")
