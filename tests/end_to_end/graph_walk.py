"""Runs a function of a step's module in NumPy, binding by binding: ops by their meanings, kernels as a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, sym, tirx

from llmc.compiler import ops

Kernel = Callable[[tirx.PrimFunc, list[np.ndarray]], None]  # operands, then outputs, which it fills


class Walk:
    """`module[name]`, called with arrays and lists of arrays."""

    def __init__(self, module: tvm.IRModule, name: str, kernel: Kernel) -> None:
        self.module, self.function, self.kernel = module, module[name], kernel

    def __call__(self, *arguments: Any) -> Any:
        self.sizes: dict[Any, int] = {}
        self.values: dict[Any, Any] = {}
        for param, value in zip(self.function.params, arguments, strict=True):
            self.values[param] = value
            pairs = zip(param.ty.fields, value, strict=True) if isinstance(value, list) else [(param.ty, value)]
            for kind, array in pairs:
                for size, got in zip(kind.shape, array.shape, strict=True):
                    if not isinstance(size, tirx.IntImm):
                        assert self.sizes.setdefault(size, got) == got
        for block in self.function.body.blocks:
            for binding in block.bindings:
                self.values[binding.var] = self._value(binding.value)
        return self._value(self.function.body.body)

    def _value(self, expr: Any) -> Any:
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return [self._value(field) for field in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[int(expr.index)]
        if isinstance(expr, ir.GenericConst):
            return expr.value.numpy()
        found = ops.match(expr)
        if found is not None:
            op, tensors, attrs = found
            result = op.meaning(*map(self._value, tensors), **attrs)
            return list(result) if isinstance(result, tuple) else result
        name = str(expr.op.name)
        if name == "relax.add":
            return self._value(expr.args[0]) + self._value(expr.args[1])
        if name == "relax.concat":
            return np.concatenate(self._value(expr.args[0]), axis=int(expr.attrs.axis))
        assert name == "relax.call_tir", name
        out = expr.ty_args[0]
        kinds = list(out.fields) if isinstance(out, ir.TupleType) else [out]
        outputs = [self._poisoned(kind) for kind in kinds]
        operands = [np.ascontiguousarray(array) for array in self._value(expr.args[1])]
        self.kernel(self.module[expr.args[0]], [*operands, *outputs])
        return outputs if len(outputs) > 1 else outputs[0]

    def _poisoned(self, kind: Any) -> np.ndarray:
        return np.full([self._size(size) for size in kind.shape], 77, str(kind.dtype))

    def _size(self, size: Any) -> int:
        known = sym.Analyzer()
        for own, value in self.sizes.items():
            known.bind(own, tirx.const(value, "int64"))
        return int(known.simplify(size))
