"""Move everything that depends on weights alone out of the step, to be computed once at compile time.

TVM's LiftTransformParams makes a second function, `step_transform_params`: source weights -> stored weights. The step
then takes the stored weights as one tuple, so that a call hands over one object however many layers there are.
"""

from __future__ import annotations

import tvm
from tvm import relax

TRANSFORM = "step_transform_params"


def lift_weights(module: tvm.IRModule) -> tvm.IRModule:
    """step(inputs, weights...) -> step(inputs, stored weights...) and step_transform_params(weights) -> stored."""
    return relax.transform.LiftTransformParams()(module)


def bundle_weights(module: tvm.IRModule) -> tvm.IRModule:
    """The step alone, its stored weights as one tuple parameter."""
    step = tvm.IRModule({v: f for v, f in module.functions.items() if v.name_hint != TRANSFORM})
    return relax.transform.BundleModelParams()(step)
