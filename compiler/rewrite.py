"""Applies an expression mutator to every Relax function of a module: what most passes are made of."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax


def rewrite_functions(mutator: Any, module: tvm.IRModule) -> tvm.IRModule:
    """The module of the mutator, which was made with `module`, after it has visited each Relax function."""
    for variable, function in module.functions.items():
        if isinstance(function, relax.Function):
            mutator.builder_.update_func(variable, mutator.visit_expr(function))
    return mutator.builder_.get()
