"""Scales of blocks, tried: the inner loop of search.py as code compiled for this machine when it is first needed.

In NumPy it takes a dozen passes over each number for each of some twenty scales; here a number stays in a register.
Sixteen blocks go together, one a lane, and each sums its columns in their order. Nothing is contracted to a fused
multiply-add, so every machine chooses the same scales; `tests/compiler/test_trials.py` says in NumPy which.

Letters as in search.py: x weights, h importance, c the nearest entries at 1 / scale, all with one block a column.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from llmc.compiler.formats.plain import F32

LANES = 16
LEAST = 1e-30  # of a sum of squares that is divided by
BETTER = 1 + 1e-6  # by less than this, what a scale takes off is a matter of rounding
_COMPILING = threading.Lock()


class Trials:
    """Blocks x (columns, n) and the table of a codebook's nearest entries, (columns a code stands for, cells) float32.

    A cell is one of `steps` a unit, from -64 on; of pairs the first column's cells count before the second's.
    """

    def __init__(self, table: F32, steps: int, x: F32, importance: F32 | None) -> None:
        self._count = x.shape[1]
        self._fixed = [table, _whole_lanes(x)]
        if importance is not None:
            self._fixed.append(_whole_lanes(np.broadcast_to(importance, x.shape)))
        with _COMPILING:
            self._functions = _compiled(len(table), steps, importance is not None, len(x))

    def best(self, inverses: F32, reaches: F32) -> F32:
        """(n,) the scales that take most off the errors: those that fit the entries nearest at 1 / scale.

        The trials are `inverses` (n,) times each of `reaches` (R,), and last what has come out best. The first one of
        those that do as well counts, and 0 where none does better than zeros.
        """
        (scale,) = self._call("best", [inverses], [reaches], 1)
        return scale

    def sums(self, inverses: F32) -> tuple[F32, F32]:
        """sum(h x c) and sum(h c c) of every block, c the nearest entries at 1 / scale (n,)."""
        inner, square = self._call("sums", [inverses], [], 2)
        return inner, square

    def _call(self, name: str, by_block: list[F32], others: list[F32], results: int) -> list[F32]:
        import tvm_ffi

        inputs = [*self._fixed, *(_whole_lanes(each) for each in by_block), *others]
        outputs = [np.empty(self._fixed[1].shape[1], np.float32) for _ in range(results)]
        self._functions[name](*(tvm_ffi.from_dlpack(each) for each in (*inputs, *outputs)))
        return [each[: self._count] for each in outputs]


def _whole_lanes(x: F32) -> F32:
    """Zeros added to the last axis, up to a multiple of 16."""
    missing = -x.shape[-1] % LANES
    if missing:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], missing), np.float32)], axis=-1)
    return np.require(x, requirements=["C", "W"])


@lru_cache(maxsize=16)
def _compiled(width: int, steps: int, weighted: bool, block: int) -> dict[str, Callable[..., None]]:
    """`best` and `sums` for codebooks of so many columns a code, and blocks of so many columns."""
    import tvm

    kernels = _Kernels(width, steps, weighted, block)
    functions = {"best": kernels.best(), "sums": kernels.sums()}
    module = tvm.IRModule({name: each.with_attr("global_symbol", name) for name, each in functions.items()})
    # Few CPU flags: what is gathered from the table takes the time.
    config = {"kind": "llvm", "mtriple": f"{platform.machine()}-linux-gnu"}
    if platform.machine() == "x86_64":
        config["mcpu"] = "x86-64-v2"
    library = tvm.compile(module, target=tvm.target.Target(config))
    return {name: library[name] for name in functions}


class _Kernels:
    """The two functions in TVM's terms; see `Trials` for what they compute."""

    def __init__(self, width: int, steps: int, weighted: bool, block: int) -> None:
        from tvm.script.ir_builder import tirx as T

        self.t: Any = T
        self.width, self.steps, self.weighted, self.block = width, steps, weighted, block

    def best(self) -> Any:
        """(table, x[, h], inverses, reaches, out scale)"""
        from tvm.script.ir_builder import IRBuilder

        t = self.t
        with IRBuilder() as builder, t.prim_func():
            n, reach = self._arguments(), self._size()
            inverses, reaches, out = self._array([n]), self._array([reach]), self._array([n])
            with t.serial(0, t.floordiv(n, LANES)) as group:
                own = t.ramp(group * LANES, 1, LANES)
                best, scale, inverse = (self._register() for _ in range(3))
                for each in (best, scale):
                    self._set(each, self._all(0.0))

                def keep_better() -> None:
                    inner, square = self._sums(own, self._get(inverse))
                    fitted, gain = self._register(), self._register()
                    self._set(fitted, self._get(inner) / t.max(self._get(square), self._all(LEAST)))
                    self._set(gain, self._get(inner) * self._get(fitted))
                    better = self._get(gain) > self._get(best) * self._all(BETTER)
                    self._set(scale, t.Select(better, self._get(fitted), self._get(scale)))
                    self._set(best, t.Select(better, self._get(gain), self._get(best)))

                with t.serial(0, reach) as trial:
                    self._set(inverse, inverses[own] * t.broadcast(reaches[trial], LANES))
                    keep_better()
                zero = self._get(scale) == self._all(0.0)
                divisor = t.Select(zero, self._all(1.0), self._get(scale))
                self._set(inverse, t.Select(zero, self._all(0.0), self._all(1.0) / divisor))
                keep_better()
                t.buffer_store(out, self._get(scale), [own])
        return builder.get()

    def sums(self) -> Any:
        """(table, x[, h], inverses, out inner, out square)"""
        from tvm.script.ir_builder import IRBuilder

        t = self.t
        with IRBuilder() as builder, t.prim_func():
            n = self._arguments()
            inverses, *outputs = (self._array([n]) for _ in range(3))
            with t.serial(0, t.floordiv(n, LANES)) as group:
                own = t.ramp(group * LANES, 1, LANES)
                for out, each in zip(outputs, self._sums(own, inverses[own]), strict=True):
                    t.buffer_store(out, self._get(each), [own])
        return builder.get()

    def _arguments(self) -> Any:
        """The arguments that both have; the number of blocks."""
        n, cells = self._size(), 128 * self.steps
        self.table = self._array([self.width, cells**self.width])
        self.x = self._array([self.block, n])
        self.h = self._array([self.block, n]) if self.weighted else None
        return n

    def _sums(self, own: Any, inverse: Any) -> tuple[Any, Any]:
        """Registers with sum(h x c) and sum(h c c) of sixteen blocks."""
        t, get = self.t, self._get
        inner, square, factor, entry = (self._register() for _ in range(4))
        rows = self.block // self.width
        cells = t.alloc_local((rows, LANES), "int32", annotations={"disable_lower_builtin": True})
        for each in (inner, square):
            self._set(each, self._all(0.0))
        self._set(factor, inverse * self._all(float(self.steps)))
        with t.serial(0, rows) as row:
            t.buffer_store(cells, self._cell(row, own, get(factor)), [row, t.ramp(0, 1, LANES)])
        for column in range(self.width):  # a pair's first columns are in the rows before those of its second ones
            with t.serial(0, rows) as row:
                at = row + column * rows
                self._set(entry, self.table[column, cells[row, t.ramp(0, 1, LANES)]])
                x = self.x[at, own]
                h = None if self.h is None else self.h[at, own]
                self._add(inner, (x if h is None else x * h) * get(entry))
                self._add(square, get(entry) * get(entry) * (self._all(1.0) if h is None else h))
        return inner, square

    def _cell(self, row: Any, own: Any, factor: Any) -> Any:
        """The table's cells of a row of codes."""
        t, cells = self.t, 128 * self.steps

        def of(row: Any) -> Any:
            y = self._rounded(self.x[row, own] * factor) + self._all(64.0 * self.steps)
            return t.cast(t.max(t.min(y, self._all(cells - 0.5)), self._all(0.0)), f"int32x{LANES}")

        if self.width == 1:
            return of(row)
        return of(row) * t.broadcast(t.int32(cells), LANES) + of(row + self.block // 2)

    def _size(self) -> Any:
        """A size that a call says."""
        from tvm import tirx

        return tirx.Var("n", "int32")

    def _array(self, shape: list[Any]) -> Any:
        """An argument, at any address that float32 may have."""
        return self.t.match_buffer(self.t.arg("array", self.t.handle()), shape, "float32", align=4)

    def _register(self, dtype: str = "float32") -> Any:
        """Sixteen lanes, which LLVM keeps in registers."""
        return self.t.alloc_local((LANES,), dtype, annotations={"disable_lower_builtin": True})

    def _get(self, register: Any) -> Any:
        return register[self.t.ramp(0, 1, LANES)]

    def _set(self, register: Any, value: Any) -> None:
        self.t.buffer_store(register, value, [self.t.ramp(0, 1, LANES)])

    def _add(self, register: Any, product: Any) -> None:
        self._set(register, self._get(register) + self._rounded(product))

    def _rounded(self, product: Any) -> Any:
        """A product that LLVM does not contract with what it is added to."""
        return self.t.call_llvm_pure_intrin("llvm.arithmetic.fence", product, dtype=f"float32x{LANES}")

    def _all(self, value: float) -> Any:
        return self.t.broadcast(self.t.float32(value), LANES)
