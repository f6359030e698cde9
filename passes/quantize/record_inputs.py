"""Make the step also return what each of its matrices is multiplied with: the activations that calibration reads."""

from __future__ import annotations

import tvm
from tvm import relax

from llmc.passes.matrices import matrices


def record_inputs(module: tvm.IRModule) -> tvm.IRModule:
    """step -> (what it gives, inputs (M, K) of every matrix with one, in the order of `matrices`)."""
    module = relax.transform.ToNonDataflow()(module)
    step = module["step"]
    (block, *rest), output = step.body.blocks, step.body.body
    assert not rest
    bound = {binding.var: binding.value for binding in block.bindings}
    result = bound.get(output, output)
    inputs = [matrix.input for matrix in matrices(module) if matrix.input is not None]
    outputs = [*result.fields, *inputs]
    body = relax.SeqExpr([block], relax.Tuple(outputs))
    result_type = relax.TupleType([variable.ty for variable in outputs])
    recorded = relax.Function(step.params, body, result_type, step.is_pure, step.attrs)
    module = tvm.IRModule({**dict(module.functions.items()), module.get_global_var("step"): recorded})
    return relax.transform.ConvertToDataflow(1)(relax.transform.Normalize()(module))
