"""Where the tensors of a step lie: in few storages, each of which serves one tensor after another.

`StaticPlanBlockMemory` finds the tensors that a function keeps to itself, and gives the storage of one on to others of
the same size alone. Of a step's rows, queries and keys take some bytes, activated ones others, and neither is needed
while the other is: here the greatest tensors take their places first, of those the ones that stay the longest, and
smaller ones lie there while those are not.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import tvm
from tvm import ir, relax, sym, tirx

from llmc.targets.step_instructions import calls, rewritten

_STORAGE, _TENSOR = "relax.memory.alloc_storage", "relax.memory.alloc_tensor"
_MOST = 2**31  # of every size that is known at run time alone


def place_tensors(module: tvm.IRModule) -> tvm.IRModule:
    """Other storages for the tensors of a module whose memory is planned, of fewer bytes in all.

    Sizes are compared for all numbers of rows; what cannot be compared lies apart. Functions of several blocks are left
    as they are.
    """
    return rewritten(module, _placed)


@dataclass(frozen=True)
class _Storage:
    """A storage that was planned."""

    binding: Any

    @cached_property
    def size(self) -> Any:
        """Bytes."""
        return self.binding.value.args[0].values[0]

    @cached_property
    def most(self) -> int:
        """Bytes at most."""
        return int(_known(self.size).const_int_bound(self.size).max_value)

    @cached_property
    def kind(self) -> str:
        """What is the same of all that may be one: device, scope, and the numbers that sizes depend on."""
        numbers = sorted(map(str, tirx.analysis.undefined_vars(self.size)))
        return " ".join(map(str, (*self.binding.value.args[1:3], *numbers)))


@dataclass(frozen=True)
class _Tensor:
    """A tensor, and when it is needed."""

    first: int  # place of its binding
    last: int  # that of the last binding that needs it
    planned: _Storage  # which is as great as it is


@dataclass(frozen=True)
class _Place:
    """A storage, and the tensors that lie there, in order of time."""

    storage: _Storage
    tensors: list[_Tensor] = field(default_factory=list)

    def is_idle(self, tensor: _Tensor) -> bool:
        """Whether nothing lies there while the tensor is needed."""
        number = bisect(self.tensors, tensor.first, key=_first)
        before, after = self.tensors[max(0, number - 1) : number], self.tensors[number : number + 1]
        return all(one.last < tensor.first for one in before) and all(one.first > tensor.last for one in after)

    def take(self, tensor: _Tensor) -> None:
        """Let a tensor lie there."""
        insort(self.tensors, tensor, key=_first)


def _first(tensor: _Tensor) -> int:
    return tensor.first


def _placed(bindings: list[Any], body: Any) -> list[Any]:
    if len(body.blocks) > 1:
        return bindings
    places: list[_Place] = []
    holds = cache(_holds)
    for tensor in sorted(_tensors(bindings, body), key=lambda one: (one.planned.most, one.last - one.first))[::-1]:
        fitting = (one for one in reversed(places) if holds(one.storage, tensor.planned))
        place = next((one for one in fitting if one.is_idle(tensor)), None)
        if place is None:
            place = _Place(tensor.planned)
            places.append(place)
        place.take(tensor)
    return list(_over(places, bindings))


def _over(places: list[_Place], bindings: list[Any]) -> Iterator[Any]:
    """The bindings with tensors over these places, each of which is made where its first tensor is."""
    owner = {tensor.first: place for place in places for tensor in place.tensors}
    planned = {tensor.planned.binding.var for place in places for tensor in place.tensors}
    storages: dict[int, Any] = {}
    for number, binding in enumerate(bindings):
        if binding.var in planned:
            continue
        place = owner.get(number)
        if place is None:
            yield binding
            continue
        if id(place) not in storages:
            made = place.storage.binding
            storages[id(place)] = relax.Var(f"storage{len(storages)}", made.var.ty)
            yield relax.VarBinding(storages[id(place)], made.value)
        call = binding.value
        over = relax.Call(call.op, [storages[id(place)], *call.args[1:]], call.attrs, call.ty_args)
        yield relax.VarBinding(binding.var, over)


def _tensors(bindings: list[Any], body: Any) -> list[_Tensor]:
    """All tensors over storages that nothing else is made of."""
    storages, last = {}, _last_uses(bindings, body)
    made: dict[int, Any] = {}  # place of a tensor's binding -> its storage
    for number, binding in enumerate(bindings):
        if calls(binding, _STORAGE):
            storages[binding.var] = _Storage(binding)
        elif calls(binding, _TENSOR):
            made[number] = binding.value.args[0]
        else:
            for var in _variables(binding.value):
                storages.pop(var, None)
    return [_Tensor(number, last.get(number, number), storages[var]) for number, var in made.items() if var in storages]


def _last_uses(bindings: list[Any], body: Any) -> dict[int, int]:
    """Place of a tensor's binding -> that of the last one that needs it: directly, by another name, in a tuple."""
    means: dict[Any, frozenset[int]] = {}  # variable -> places of tensors that it may stand for
    fields: dict[Any, list[frozenset[int]]] = {}
    last: dict[int, int] = {}

    def meant(expr: Any) -> frozenset[int]:
        return frozenset().union(*(means.get(var, frozenset()) for var in _variables(expr)))

    for number, binding in enumerate(bindings):
        var, value = binding.var, binding.value
        if calls(binding, _TENSOR):
            means[var] = frozenset([number])
            continue
        means[var] = meant(value)
        if isinstance(value, relax.Tuple):
            fields[var] = [meant(part) for part in value.fields]
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in fields:
            means[var] = fields[value.tuple_value][value.index]
        elif not isinstance(value, relax.Var):
            last |= dict.fromkeys(means[var], number)
    return last | dict.fromkeys(meant(body.body), len(bindings))


def _variables(expr: Any) -> list[Any]:
    """The variables in an expression."""
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.If):
        found: list[Any] = []
        relax.analysis.post_order_visit(expr, lambda part: found.append(part) if isinstance(part, relax.Var) else None)
        return found
    parts: Any = ()
    if isinstance(expr, relax.Call):
        parts = expr.args
    elif isinstance(expr, relax.Tuple):
        parts = expr.fields
    elif isinstance(expr, relax.TupleGetItem):
        parts = (expr.tuple_value,)
    return [var for part in parts for var in _variables(part)]


def _holds(one: _Storage, other: _Storage) -> bool:
    """Whether all that lies in the other may lie in the one, whatever the numbers in their sizes are."""
    return one.kind == other.kind and bool(_known(one.size).can_prove(one.size >= other.size))


def _known(size: Any) -> Any:
    analyzer = sym.Analyzer()
    for var in tirx.analysis.undefined_vars(size):
        analyzer.bind(var, ir.Range(tirx.IntImm("int64", 0), tirx.IntImm("int64", _MOST)))
    return analyzer
