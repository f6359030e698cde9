"""Imported graphs -> machine code: operators as TVM lowers them, fused, and scheduled for a CPU's cores.

Kernels of the op table stay as they are. A graph may call nothing at run time that the thin runtime lacks.
"""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from llmc.compiler.errors import LlmcError
from llmc.targets.lower import lower_ops
from llmc.targets.target import Target
from llmc.targets.tuned import Tuned

_SPATIAL, _REDUCE = 0, 2  # kinds of a block's axes

_AT_HAND = "vm.builtin."  # functions of libtvm_runtime.so alone; sorting, for one, is in the compiler's library
_CALLED = re.compile(r'T\.call_(?:c?packed|extern)\((?:"[a-z0-9]+", )?"([^"]+)"')  # by loops, as TVMScript shows them


def lower_graph(module: tvm.IRModule, target: Target, tuned: Tuned | None = None) -> tvm.IRModule:
    """A module over kernels, each with its own knobs, and scheduled loops."""
    transform = relax.transform
    module = lower_ops(module, target, tuned)
    with target.llvm():
        module = tvm.ir.transform.Sequential([
            transform.DecomposeOpsForInference(), transform.LegalizeOps(),
            transform.AnnotateTIROpPattern(), transform.FoldConstant(), transform.FuseOps(), transform.FuseTIR(),
            transform.DeadCodeElimination(),
        ])(module)  # fmt: skip
    left = sorted(_unlowered(module))
    if left:
        raise LlmcError(f"no code for {', '.join(left)}: the graph cannot run without TVM itself")
    for variable, function in module.functions.items():
        if isinstance(function, tirx.PrimFunc) and _has_blocks(function):
            module.update_func(variable, _scheduled(function))
    return _without_blocks(module)


def _unlowered(module: tvm.IRModule) -> set[str]:
    """Operators that became no loops, and functions that only the compiler's library has."""
    found: set[str] = set()

    def visit(expr: Any) -> None:
        if not isinstance(expr, relax.Call):
            return
        if isinstance(expr.op, relax.ExternFunc):
            name = str(expr.op.global_symbol)
            if not name.startswith(_AT_HAND):
                found.add(name)
        elif isinstance(expr.op, tvm.ir.Op) and str(expr.op.name) not in _PLACED:
            found.add(str(expr.op.name))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
        elif _has_blocks(function):
            found |= set(_CALLED.findall(function.script()))
    return found


_PLACED = {"relax.call_tir", "relax.shape_of", "relax.call_pure_packed", "relax.call_dps_packed"}


def _has_blocks(function: tirx.PrimFunc) -> bool:
    """Whether it is loops that TVM made; kernels of the op table are plain code already."""
    return "T.sblock(" in function.script()


def _scheduled(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rows in parallel; sums of products with the innermost loop over neighbours, for vector registers."""
    schedule = s_tir.Schedule(function)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        name = schedule.get(block).name_hint
        for place in (_sum_inwards, _rows_in_parallel):
            trial = schedule.copy()
            try:
                place(trial, trial.get_sblock(name))
            except s_tir.ScheduleError:  # not that kind of loop nest: it stays as it is
                continue
            schedule = trial
            break
    return schedule.mod["main"]


def _loops(schedule: Any, block: Any) -> tuple[list[Any], list[Any]]:
    """The loops over the output and those of the sum; none where the block is anything else."""
    loops = schedule.get_loops(block)
    kinds = [int(axis.iter_type) for axis in schedule.get(block).iter_vars]
    if len(loops) != len(kinds) or kinds != sorted(kinds) or set(kinds) - {_SPATIAL, _REDUCE}:
        return [], []
    rows = kinds.count(_SPATIAL)
    return loops[:rows], loops[rows:]


def _sum_inwards(schedule: Any, block: Any) -> None:
    """Rows in parallel, then the sum, then neighbours in a row."""
    rows, sums = _loops(schedule, block)
    if len(rows) < 2 or not sums:
        raise s_tir.ScheduleError("not a sum over rows of neighbours")
    *outer, inner = rows
    schedule.reorder(*outer, *sums, inner)
    rows_loop = schedule.fuse(*outer) if len(outer) > 1 else outer[0]
    schedule.decompose_reduction(block, sums[0])
    schedule.parallel(rows_loop)


def _rows_in_parallel(schedule: Any, block: Any) -> None:
    rows, _ = _loops(schedule, block)
    outer = rows[:-1] or rows
    if outer:
        schedule.parallel(schedule.fuse(*outer) if len(outer) > 1 else outer[0])


def _without_blocks(module: tvm.IRModule) -> tvm.IRModule:
    """Blocks -> plain loops, as targets/build.py takes them."""
    t = s_tir.transform
    return tvm.ir.transform.Sequential([
        t.LowerInitBlock(), t.PlanAndUpdateBufferAllocationLocation(), t.ConvertBlocksToOpaque(),
        t.CompactBufferAllocation(), t.LowerMatchBuffer(), t.LowerOpaqueBlock(),
    ])(module)  # fmt: skip
