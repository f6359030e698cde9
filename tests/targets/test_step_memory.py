"""Where tensors of a step lie: of random programs every tensor is still there when it is needed, in fewer bytes."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import ir, relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.targets.step_instructions import calls
from llmc.targets.step_memory import place_tensors


def test_smaller_tensors_lie_where_greater_ones_are_not_needed() -> None:
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def step(x: R.Tensor(("n", 8), "float32")):
            n = T.int64()
            storage = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([n, 8]), "float32")
            _ = R.call_packed("first", x, a, ty_args=(R.Tuple,))
            wider = R.memory.alloc_storage(R.shape([n * 64]), 0, "global", "float32")
            b = R.memory.alloc_tensor(wider, 0, R.shape([n, 16]), "float32")
            _1 = R.call_packed("second", a, b, ty_args=(R.Tuple,))
            codes = R.memory.alloc_storage(R.shape([n * 4]), 0, "global", "int8")
            c = R.memory.alloc_tensor(codes, 0, R.shape([n, 4]), "int8")
            _2 = R.call_packed("third", b, c, ty_args=(R.Tuple,))
            return x

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def step(x: R.Tensor(("n", 8), "float32")):
            n = T.int64()
            storage0 = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage0, 0, R.shape([n, 8]), "float32")
            _ = R.call_packed("first", x, a, ty_args=(R.Tuple,))
            storage1 = R.memory.alloc_storage(R.shape([n * 64]), 0, "global", "float32")
            b = R.memory.alloc_tensor(storage1, 0, R.shape([n, 16]), "float32")
            _1 = R.call_packed("second", a, b, ty_args=(R.Tuple,))
            c = R.memory.alloc_tensor(storage0, 0, R.shape([n, 4]), "int8")
            _2 = R.call_packed("third", b, c, ty_args=(R.Tuple,))
            return x

    tvm.ir.assert_structural_equal(place_tensors(Before), Expected)


def test_sizes_that_cannot_be_compared_lie_apart() -> None:
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def step(x: R.Tensor(("n", "m"), "float32")):
            n, m = T.int64(), T.int64()
            storage = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([n, 8]), "float32")
            _ = R.call_packed("first", x, a, ty_args=(R.Tuple,))
            storage1 = R.memory.alloc_storage(R.shape([m * 32]), 0, "global", "float32")
            b = R.memory.alloc_tensor(storage1, 0, R.shape([m, 8]), "float32")
            _1 = R.call_packed("first", x, b, ty_args=(R.Tuple,))
            return x

    assert len(_storages(place_tensors(Before))) == 2


@dataclass(frozen=True)
class Made:
    """A tensor of a program. names: of its sizes that a run knows; reads: tensors that it is made of, by number."""

    names: str
    length: int
    reads: list[int]
    known_as: str
    device: int


MADE = st.builds(
    Made, st.sampled_from(("n", "m", "nn", "")), st.sampled_from((4, 8, 12, 64)),
    st.lists(st.integers(0, 100), min_size=1, max_size=3), st.sampled_from(("itself", "name", "in tuple")),
    st.sampled_from((0, 0, 0, 1)),
)  # fmt: skip
NUMBERS = ((1, 1), (1, 1000), (1000, 1), (1000, 1000))  # of n and m


@given(st.lists(MADE, min_size=1, max_size=24))
def test_random_programs(made: list[Made]) -> None:
    module = _program(made)
    planned, places = _storages(module), _lies(module)
    module = place_tensors(module)
    _run(module)
    found, storages = _lies(module), _storages(module)
    for tensor, storage in places.items():
        assert _device(found[tensor]) == _device(storage)
    for numbers in NUMBERS:
        assert all(_bytes(found[tensor], numbers) >= _bytes(storage, numbers) for tensor, storage in places.items())
        assert sum(_bytes(each, numbers) for each in storages) <= sum(_bytes(each, numbers) for each in planned)


def test_the_check_of_random_programs_finds_a_tensor_that_is_overwritten() -> None:
    @I.ir_module
    class Wrong:
        @R.function(pure=False)
        def step(x: R.Tensor((8,), "float32")):
            storage = R.memory.alloc_storage(R.shape([32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32")
            _ = R.call_packed("first", x, a, ty_args=(R.Tuple,))
            b = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32")
            _1 = R.call_packed("first", a, b, ty_args=(R.Tuple,))
            return x

    with pytest.raises(AssertionError, match="overwritten"):
        _run(Wrong)


def _program(made: list[Made]) -> tvm.IRModule:
    """Each tensor in a storage of its own."""
    numbers = {name: tirx.Var(name, "int64") for name in "nm"}
    x = relax.Var("x", R.Tensor((numbers["n"], numbers["m"]), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("step", [x], pure=False):
        known: list[Any] = [x]
        for each in made:
            shape = [*(numbers[name] for name in each.names), each.length]
            size = relax.ShapeExpr([functools.reduce(operator.mul, shape, 4)])
            storage = builder.emit(relax.op.memory.alloc_storage(size, each.device, "global", "float32"))
            tensor = builder.emit(relax.op.memory.alloc_tensor(storage, 0, relax.ShapeExpr(shape), "float32"))
            read = [known[place % len(known)] for place in each.reads]
            builder.emit(relax.Call(relax.ExternFunc("kernel"), [*read, tensor], ty_args=[ir.TupleType([])]))
            if each.known_as == "name":
                tensor = builder.emit(tensor)
            elif each.known_as == "in tuple":
                tensor = builder.emit(relax.TupleGetItem(builder.emit(relax.Tuple([x, tensor])), 1))
            known.append(tensor)
        builder.emit_func_output(known[made[-1].reads[0] % len(known)])
    return builder.get()


def _bindings(module: tvm.IRModule) -> list[Any]:
    return [each for block in module["step"].body.blocks for each in block.bindings]


def _run(module: tvm.IRModule) -> None:
    """Go through the bindings: a storage holds the tensor that was last made over it."""
    holds: dict[Any, Any] = {}  # storage -> the tensor there
    over: dict[Any, Any] = {}  # tensor -> its storage
    means: dict[Any, Any] = {}  # another name -> the tensor, or a tuple of them

    def use(var: Any) -> None:
        tensor = means.get(var, var)
        assert tensor not in over or holds[over[tensor]].same_as(tensor), f"{tensor} was overwritten"

    for binding in _bindings(module):
        value = binding.value
        if isinstance(value, relax.Var):
            means[binding.var] = means.get(value, value)
        elif isinstance(value, relax.Tuple):
            means[binding.var] = tuple(means.get(part, part) for part in value.fields)
        elif isinstance(value, relax.TupleGetItem):
            means[binding.var] = means[value.tuple_value][value.index]
        elif calls(binding, "relax.memory.alloc_tensor"):
            over[binding.var] = value.args[0]
            holds[value.args[0]] = binding.var
        elif not calls(binding, "relax.memory.alloc_storage"):
            for argument in value.args:
                use(argument)
    use(module["step"].body.body)


def _lies(module: tvm.IRModule) -> dict[Any, Any]:
    """Tensor -> the call that made its storage."""
    values = {binding.var: binding.value for binding in _bindings(module)}
    made = (each for each in _bindings(module) if calls(each, "relax.memory.alloc_tensor"))
    return {each.var: values[each.value.args[0]] for each in made}


def _storages(module: tvm.IRModule) -> list[Any]:
    """The calls that make them."""
    return [each.value for each in _bindings(module) if calls(each, "relax.memory.alloc_storage")]


def _bytes(storage: Any, numbers: tuple[int, int]) -> int:
    """Its size, where n and m are these."""
    size, known = storage.args[0].values[0], tvm.sym.Analyzer()
    for var in tirx.analysis.undefined_vars(size):
        known.bind(var, tirx.IntImm("int64", numbers["nm".index(var.name)]))
    return int(known.simplify(size))


def _device(storage: Any) -> int:
    return int(storage.args[1].value)
