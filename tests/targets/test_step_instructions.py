"""What a planned module loses before it becomes instructions: Before and Expected."""

from __future__ import annotations

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.targets.step_instructions import drop_idle, share_tensors


def test_one_tensor_serves_all_that_take_a_storage_in_turn() -> None:
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def step(x: R.Tensor(("n", 8), "float32")):
            n = T.int64()
            storage = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([n, 8]), "float32")
            _ = R.call_packed("first", x, a, ty_args=(R.Tuple,))
            other = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            b = R.memory.alloc_tensor(other, 0, R.shape([n, 8]), "float32")
            _1 = R.call_packed("second", a, b, ty_args=(R.Tuple,))
            c = R.memory.alloc_tensor(storage, 0, R.shape([n, 8]), "float32")
            _2 = R.call_packed("first", b, c, ty_args=(R.Tuple,))
            d = R.memory.alloc_tensor(storage, 0, R.shape([n, 4]), "float32")
            _3 = R.call_packed("second", c, d, ty_args=(R.Tuple,))
            return d

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def step(x: R.Tensor(("n", 8), "float32")):
            n = T.int64()
            storage = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([n, 8]), "float32")
            _ = R.call_packed("first", x, a, ty_args=(R.Tuple,))
            other = R.memory.alloc_storage(R.shape([n * 32]), 0, "global", "float32")
            b = R.memory.alloc_tensor(other, 0, R.shape([n, 8]), "float32")
            _1 = R.call_packed("second", a, b, ty_args=(R.Tuple,))
            c = a
            _2 = R.call_packed("first", b, c, ty_args=(R.Tuple,))
            d = R.memory.alloc_tensor(storage, 0, R.shape([n, 4]), "float32")
            _3 = R.call_packed("second", c, d, ty_args=(R.Tuple,))
            return d

    tvm.ir.assert_structural_equal(share_tensors(Before), Expected)


def test_tuples_nobody_reads_and_kills_of_their_parts_go() -> None:
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def step(weights: R.Tuple(R.Tensor((8,), "float32"), R.Tensor((8,), "float32"))):
            storage = R.memory.alloc_storage(R.shape([32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32")
            weight = weights[0]
            _ = R.call_packed("kernel", weight, a, ty_args=(R.Tuple,))
            _1 = R.memory.kill_tensor(weight)
            unread = (a, weight)  # noqa: F841
            read = (a, a)
            _2 = R.memory.kill_tensor(a)
            _3 = R.memory.kill_storage(storage)
            return read

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def step(weights: R.Tuple(R.Tensor((8,), "float32"), R.Tensor((8,), "float32"))):
            storage = R.memory.alloc_storage(R.shape([32]), 0, "global", "float32")
            a = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32")
            weight = weights[0]
            _ = R.call_packed("kernel", weight, a, ty_args=(R.Tuple,))
            read = (a, a)
            _2 = R.memory.kill_tensor(a)
            _3 = R.memory.kill_storage(storage)
            return read

    tvm.ir.assert_structural_equal(drop_idle(Before), Expected)
