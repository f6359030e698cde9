"""Make functions also return what each of their matrices is multiplied with: the activations that calibration reads."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from llmc.passes.matrices import matrices


def record_inputs(module: tvm.IRModule, names: Sequence[str] = ("step",)) -> tvm.IRModule:
    """Each named function -> (what it gives, inputs (M, K) of every matrix with one, in the order of `matrices`).

    What gives one tensor gives a tuple then; where no matrix has an input, a function stays as it is.
    """
    module = relax.transform.ToNonDataflow()(module)
    functions = dict(module.functions.items())
    for name in names:
        functions[module.get_global_var(name)] = _recording(module, name)
    return relax.transform.ConvertToDataflow(1)(relax.transform.Normalize()(tvm.IRModule(functions)))


def _recording(module: tvm.IRModule, name: str) -> relax.Function:
    function = module[name]
    inputs = [matrix.input for matrix in matrices(module, name) if matrix.input is not None]
    if not inputs:
        return function
    (block, *rest), output = function.body.blocks, function.body.body
    assert not rest
    result = {binding.var: binding.value for binding in block.bindings}.get(output, output)
    outputs = [*(result.fields if isinstance(result, relax.Tuple) else [output]), *inputs]
    body = relax.SeqExpr([block], relax.Tuple(outputs))
    result_type = relax.TupleType([variable.ty for variable in outputs])
    return relax.Function(function.params, body, result_type, function.is_pure, function.attrs)
