"""The recorded step returns what each matrix was multiplied with."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.compiler import ops
from llmc.passes.matrices import matrices
from llmc.passes.quantize.record_inputs import record_inputs


@I.ir_module
class Model:
    @R.function
    def step(
        ids: R.Tensor(("n",), "int32"), table: R.Tensor((48, 64), "float32"), a: R.Tensor((8, 64), "float32"),
        b: R.Tensor((4, 64), "float32"),
    ):  # fmt: skip
        R.func_attr({"num_input": 1})
        n = T.int64()
        with R.dataflow():
            x = R.call_dps_packed("llmc.embedding", (ids, table), R.Tensor((n, 64), "float32"))
            joined = R.concat((a, b), axis=0)
            y = R.call_dps_packed("llmc.linear", (x, joined), R.Tensor((n, 12), "float32"))
            z = R.call_dps_packed("llmc.linear", (x, table), R.Tensor((n, 48), "float32"))
            out = (z, y)
            R.output(out)
        return out


def test_matrices_are_listed_once_with_their_parts() -> None:
    found = {matrix.sources: matrix for matrix in matrices(Model)}
    assert list(found) == [("table",), ("a", "b")]
    assert (found["a", "b"].rows, found["a", "b"].columns) == (12, 64)
    assert found["table",].input is not None  # a tied table is multiplied with, too


def test_a_table_that_is_only_looked_up_has_no_input() -> None:
    @I.ir_module
    class Lookup:
        @R.function
        def step(ids: R.Tensor(("n",), "int32"), table: R.Tensor((48, 64), "float32")):
            n = T.int64()
            with R.dataflow():
                x = R.call_dps_packed("llmc.embedding", (ids, table), R.Tensor((n, 64), "float32"))
                R.output(x)
            return x

    (matrix,) = matrices(Lookup)
    assert matrix.input is None


def test_the_step_also_returns_the_inputs() -> None:
    ops.register_meanings()
    rng = np.random.default_rng(0)
    ids = np.array([3, 1, 40], np.int32)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((48, 64), (8, 64), (4, 64))]
    executable = relax.build(record_inputs(Model), tvm.target.Target("llvm"))
    arguments = [tvm.runtime.tensor(array) for array in (ids, *weights)]
    z, y, *inputs = relax.VirtualMachine(executable, tvm.cpu())["step"](*arguments)
    assert len(inputs) == 2
    for x in inputs:
        np.testing.assert_array_equal(x.numpy(), weights[0][ids])
    np.testing.assert_allclose(z.numpy(), weights[0][ids] @ weights[0].T, rtol=1e-4, atol=1e-4)
    assert y.numpy().shape == (3, 12)
