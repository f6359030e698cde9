"""Move everything that depends on weights alone out of the functions, to be computed once at compile time.

TVM's LiftTransformParams makes a second function for each, `step_transform_params`: source weights -> stored weights.
All then take the stored weights as one tuple, the same for all of them, so that a call hands over one object however
many layers there are.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from llmc.compiler.evaluate import StoredWeight, stored_weights

_ENDING = "_transform_params"
TRANSFORM = f"step{_ENDING}"


def lift_weights(module: tvm.IRModule) -> tvm.IRModule:
    """step(inputs, weights...) -> step(inputs, stored weights...) and step_transform_params(weights) -> stored."""
    return relax.transform.LiftTransformParams()(module)


def stored_by_all(module: tvm.IRModule, names: list[str]) -> list[StoredWeight]:
    """The stored weights that any function takes, each once; `names` are the source weights' in parameter order."""
    return list(_by_recipe(module, names).values())


def bundle_weights(module: tvm.IRModule) -> tvm.IRModule:
    """The functions alone, the weights of `stored_by_all` as one tuple parameter of each."""
    functions = {v: f for v, f in module.functions.items() if not v.name_hint.endswith(_ENDING)}
    stored = _by_recipe(module, None)
    for variable, function in functions.items():
        if len(functions) > 1:
            functions[variable] = _taking(function, _recipes(module[variable.name_hint + _ENDING]), stored)
    return relax.transform.BundleModelParams()(tvm.IRModule(functions))


def _by_recipe(module: tvm.IRModule, names: list[str] | None) -> dict[str, StoredWeight]:
    transforms = {v.name_hint: f for v, f in module.functions.items() if v.name_hint.endswith(_ENDING)}
    found: dict[str, StoredWeight] = {}
    for _, transform in sorted(transforms.items()):
        for weight in stored_weights(transform, names or _numbers(transform)):
            found.setdefault(weight.recipe, weight)
    return found


def _recipes(transform: Any) -> list[str]:
    """How each of a transform's outputs is computed."""
    return [weight.recipe for weight in stored_weights(transform, _numbers(transform))]


def _numbers(transform: Any) -> list[str]:
    return [str(number) for number in range(len(transform.params[0].ty.fields))]


def _taking(function: Any, recipes: list[str], stored: dict[str, StoredWeight]) -> Any:
    """The function with parameters for all stored weights in place of its own."""
    count = int(function.attrs["num_input"])
    own = dict(zip(recipes, function.params[count:], strict=True))
    weights = [
        own[recipe] if recipe in own else relax.Var(f"other{number}", relax.TensorType(weight.shape, weight.dtype))
        for number, (recipe, weight) in enumerate(stored.items())
    ]
    return relax.Function(
        [*function.params[:count], *weights], function.body, function.ret_ty, function.is_pure, function.attrs
    )
