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
class _Tensor:
    """A tensor, and when it is needed."""

    first: int  # place of its binding
    last: int  # that of the last binding that needs it
    size: Any  # bytes
    storage: Any  # the binding of the storage that was planned

    @property
    def kind(self) -> tuple[str, ...]:
        """What is the same of all that share a storage: device, scope, and the numbers that sizes depend on."""
        numbers = sorted(map(str, tirx.analysis.undefined_vars(self.size)))
        return (str(self.storage.value.args[1]), str(self.storage.value.args[2]), *numbers)


@dataclass
class _Place:
    """A storage as great as its first tensor, and when it is needed, in order."""

    kind: tuple[str, ...]
    size: Any
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
    known = _Sizes()
    for tensor in sorted(_tensors(bindings, body), key=lambda one: (known.most(one.size), one.last - one.first))[::-1]:
        idle = (one for one in reversed(places) if one.kind == tensor.kind and one.is_idle(tensor))
        place = next((one for one in idle if known.holds(one.size, tensor.size)), None)
        if place is None:
            place = _Place(tensor.kind, tensor.size)
            places.append(place)
        place.take(tensor)
    return list(_over(places, bindings))


def _over(places: list[_Place], bindings: list[Any]) -> Iterator[Any]:
    """The bindings with tensors over these places, each of which is made where its first tensor is."""
    owner = {tensor.first: place for place in places for tensor in place.tensors}
    planned = {tensor.storage.var for place in places for tensor in place.tensors}
    storages: dict[int, Any] = {}
    for number, binding in enumerate(bindings):
        if binding.var in planned:
            continue
        place = owner.get(number)
        if place is None:
            yield binding
            continue
        if id(place) not in storages:
            model = place.tensors[0].storage
            storages[id(place)] = relax.Var(f"storage{len(storages)}", model.var.ty)
            size = relax.ShapeExpr([place.size])
            yield relax.VarBinding(storages[id(place)], _call(model.value, size, *model.value.args[1:]))
        yield relax.VarBinding(binding.var, _call(binding.value, storages[id(place)], *binding.value.args[1:]))


def _call(model: Any, *args: Any) -> Any:
    """The same call with other arguments."""
    return relax.Call(model.op, list(args), model.attrs, model.ty_args)


def _tensors(bindings: list[Any], body: Any) -> list[_Tensor]:
    """All tensors over storages that nothing else is made of."""
    storages, last = {}, _last_uses(bindings, body)
    made: dict[int, Any] = {}  # place of a tensor's binding -> its storage
    for number, binding in enumerate(bindings):
        if calls(binding, _STORAGE):
            storages[binding.var] = binding
        elif calls(binding, _TENSOR):
            made[number] = binding.value.args[0]
        else:
            for var in _variables(binding.value):
                storages.pop(var, None)
    return [
        _Tensor(number, last.get(number, number), _bytes(bindings[number].value), storages[var])
        for number, var in made.items()
        if var in storages
    ]


def _bytes(tensor: Any) -> Any:
    size = tirx.IntImm("int64", (tvm.DataType(str(tensor.args[3].value)).bits + 7) // 8)
    for length in tensor.args[2].values:
        size = size * length
    return sym.Analyzer().simplify(size)


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
    found: list[Any] = []
    relax.analysis.post_order_visit(expr, lambda part: found.append(part) if isinstance(part, relax.Var) else None)
    return found


class _Sizes:
    """Sizes of tensors, whatever the numbers in them are; each question is answered once."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}
        self._holds: dict[tuple[str, str], bool] = {}

    def most(self, size: Any) -> int:
        """The most it may be."""
        if str(size) not in self._most:
            self._most[str(size)] = int(_known(size).const_int_bound(size).max_value)
        return self._most[str(size)]

    def holds(self, size: Any, other: Any) -> bool:
        """Whether it is never less than the other."""
        pair = str(size), str(other)
        if pair not in self._holds:
            self._holds[pair] = bool(_known(size).can_prove(size >= other))
        return self._holds[pair]


def _known(size: Any) -> Any:
    analyzer = sym.Analyzer()
    for var in tirx.analysis.undefined_vars(size):
        analyzer.bind(var, ir.Range(tirx.IntImm("int64", 0), tirx.IntImm("int64", _MOST)))
    return analyzer
