"""Which columns of matrices can be scaled: what makes them can be divided by as much, and nothing changes.

Columns of W (N, K) times s (K,), and x (M, K) over s, give the same x W^T. Where x comes out of weights that nothing
else reads, these take the division, and a step has no more to do than before. Such weights are

- those of a norm: x / s = norm * (weight / s) (+ bias / s),
- rows of a matrix whose product is x, or is gated or mixed by attention on its way to x, which leaves factors as they
  are: up's rows for down's columns, v's for o's, where each serves all query heads of its KV head,
- the same through relu, which takes positive factors out.

Between layers of a network this is https://arxiv.org/abs/1906.04721 section 4.1; behind norms, for the sake of what
is rounded beside the weights, https://arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import ir, relax

from llmc.compiler import ops
from llmc.passes.bindings import bound_in, reads_of

_SCALED = ("linear", "experts_in")  # of matrices.MULTIPLYING, what takes all of x as it is
_NORMS = ("rms_norm", "layer_norm")
_PASSING_V = ("rope", "qk_norm", "grow_queries")  # what changes no values among queries, keys and values
_MIXING = ("attention", "attention_with_sinks", "attention_by_distance")


@dataclass(frozen=True)
class Group:
    """Columns that are scaled together, and the weights that are divided.

    Column k of `matrices` (N, K) times a factor goes with entry `made_by[k]` of `vectors` (F,) over it, and with that
    row of `rows` (F, K').
    """

    matrices: tuple[str, ...]
    vectors: tuple[str, ...]
    rows: tuple[str, ...]
    made_by: NDArray[np.intp]  # (K,)

    @property
    def weights(self) -> tuple[str, ...]:
        """All that would change."""
        return (*self.matrices, *self.vectors, *self.rows)


def groups(module: tvm.IRModule) -> list[Group]:
    """Those of the unpacked step, none of which scales what another one scales in the same direction."""
    return _Finder(module["step"]).groups()


class _Finder:
    def __init__(self, step: Any) -> None:
        self.bound, self.reads = bound_in(step), reads_of(step)
        self.weights = set(step.params)

    def groups(self) -> list[Group]:
        """In the order of the graph."""
        multiplied: dict[Any, list[Any]] = {}  # x -> the matrices it is multiplied with
        for value in self.bound.values():
            found = ops.match(value)
            if found is not None and found[0].name in _SCALED:
                multiplied.setdefault(found[1][0], []).append(found[1][-1])
        made = []
        for x, matrices in multiplied.items():
            alone = self.reads[x] == len(matrices) and all(map(self._own, matrices))
            group = self._made(x) if alone else None
            if group is not None:
                made.append(replace(group, matrices=tuple(str(matrix.name) for matrix in matrices)))
        return made

    def _own(self, weight: Any) -> bool:
        """Whether it is a weight as the model has it, which one op reads."""
        return weight in self.weights and self.reads[weight] == 1

    def _inner(self, variable: Any) -> Group | None:
        """What makes a variable that is only read on the way."""
        return self._made(variable) if self.reads[variable] == 1 else None

    def _made(self, x: Any) -> Group | None:
        """The weights that x is proportional to, column by column; None where there are none."""
        value: Any = self.bound.get(x)
        if _calls(value, "relax.add"):
            return self._biased(*value.args)
        found = ops.match(value)
        if found is None:
            return None
        op, operands, attrs = found
        columns = np.arange(int(x.ty.shape[1]))
        if op.name in _NORMS:
            own = [weight for weight in operands[1:] if not isinstance(weight, ir.Constant)]
            fits = operands[1] in own and all(map(self._own, own))
            return Group((), tuple(str(weight.name) for weight in own), (), columns) if fits else None
        if op.name == "linear":
            return Group((), (), (str(operands[1].name),), columns) if self._own(operands[1]) else None
        if op.name == "gated":
            return self._part(operands[0], 1)
        if op.name == "activate":
            return self._inner(operands[0]) if attrs["activation"] == "relu" else None
        if op.name in _MIXING:
            values = self._values(operands[0])
            return None if values is None else replace(values, made_by=values.made_by[_kv_columns(attrs)])
        return None

    def _biased(self, y: Any, bias: Any) -> Group | None:
        """Of y + bias, where bias (K,) is a weight."""
        made = self._inner(y) if self._own(bias) else None
        return None if made is None else replace(made, vectors=(*made.vectors, str(bias.name)))

    def _part(self, whole: Any, number: int) -> Group | None:
        """Of one of several variables side by side."""
        value: Any = self.bound.get(whole)
        alone = self.reads[whole] == 1 and _calls(value, "relax.concat")
        return self._inner(value.args[0].fields[number]) if alone else None

    def _values(self, qkv: Any) -> Group | None:
        """Of the values among queries, keys and values."""
        value: Any = self.bound.get(qkv)
        found = ops.match(value)
        if self.reads[qkv] != 1:
            return None
        if found is not None and found[0].name in _PASSING_V:
            return self._values(found[1][0])
        if _calls(value, "relax.add"):
            bias = ops.match(self.bound.get(value.args[1]))
            return self._values(value.args[0]) if bias is not None and bias[0].name == "qk_bias" else None
        return self._part(qkv, 2)


def _calls(value: Any, op: str) -> bool:
    return isinstance(value, relax.Call) and bool(value.op.same_as(ir.Op.get(op)))


def _kv_columns(attrs: dict[str, ops.Attr]) -> NDArray[np.intp]:
    """(H D,) the column among those of KV heads (G D,) that a column of what heads give is a mixture of."""
    heads, kv_heads, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    head = np.arange(heads) // (heads // kv_heads)
    return (head[:, None] * size + np.arange(size)).ravel()
