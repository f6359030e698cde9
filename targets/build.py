"""Lowered module -> machine code: TVM's passes in named phases, then the Relax VM library.

Our kernels arrive as explicit vector code, so the TIR phases are a short list of our own: no scheduling, no common
subexpression elimination (a known regression of this TVM line), no rewriting of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, tirx

from llmc.targets import step_instructions, step_memory


def _sequence(*passes: Any) -> Any:
    return tvm.ir.transform.Sequential(list(passes))


def host_phase() -> Any:
    """TIR functions -> functions with the packed calling convention."""
    t = tirx.transform
    return _sequence(
        t.StmtSimplify(), t.FlattenBuffer(), t.NarrowDataType(32), t.VectorizeLoop(True), t.UnrollLoop(),
        t.StmtSimplify(), t.VerifyMemory(), t.AnnotateEntryFunc(), t.SplitHostDevice(), t.MakePackedAPI(),
    )  # fmt: skip


def _tir_pipeline() -> Any:
    """What `register_tir_pipeline` takes: the lowering pass and factories of the host and device finish."""
    t = tirx.transform
    return (
        host_phase(),
        lambda: _sequence(t.LowerTVMBuiltin(), t.LowerIntrin()),
        lambda: _sequence(t.LowerIntrin()),
    )


_PIPELINE = "llmc"
tirx.compilation_pipeline.register_tir_pipeline(_PIPELINE, _tir_pipeline)


def _plain(function: Callable[[tvm.IRModule], tvm.IRModule]) -> Any:
    """A function of a module as a pass of TVM's."""
    return tvm.transform.module_pass(lambda module, _: function(module), 0, name=function.__name__)


def _sort_shape_stores(module: tvm.IRModule) -> tvm.IRModule:
    """VMShapeLower writes the sizes of a step in the order of memory addresses; put them in order of their slots.

    Each reads input slots only, so any order computes the same, and one order gives the same bytes in every compile.
    """

    def slot(store: Any) -> int:
        return int(store.indices[0])

    for variable, function in module.functions.items():
        body = function.body if isinstance(function, tirx.PrimFunc) else None
        if variable.name_hint.startswith("shape_func") and isinstance(body, tirx.SeqStmt):
            module.update_func(variable, function.with_body(tirx.SeqStmt(sorted(body.seq, key=slot))))
    return module


def relax_phases() -> Any:
    """Relax with kernels -> VM instructions. Buffers are reused between layers and within them."""
    r = relax.transform
    return _sequence(
        r.ToNonDataflow(), r.RemovePurityChecking(), r.CallTIRRewrite(),
        r.StaticPlanBlockMemory(), _plain(step_memory.place_tensors), _plain(step_instructions.share_tensors),
        r.LowerAllocTensor(), r.KillAfterLastUse(), _plain(step_instructions.drop_idle), r.LowerRuntimeBuiltin(),
        r.ComputePrimValue(), r.VMShapeLower(),
        _plain(_sort_shape_stores), r.AttachGlobalSymbol(),
    )  # fmt: skip


def compile_kernels(functions: dict[str, Any], target: Any) -> Any:
    """PrimFuncs by name -> a callable module; for kernel tests and tuning."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    return tvm.tirx.build(module, target=target.llvm(), pipeline=_PIPELINE)


def kernels_of(module: Any) -> dict[str, Any]:
    """The PrimFuncs of a lowered module by name."""
    functions = module.functions.items()
    return {str(variable.name_hint): each for variable, each in functions if isinstance(each, tirx.PrimFunc)}


def compile_module(module: Any, target: Any, apart: frozenset[str] = frozenset()) -> Any:
    """A lowered Relax module -> a VM executable (`export_library` writes the .so).

    apart: kernels that are compiled by `compile_kernels`, and whose object files are linked to it.
    """

    def with_others(module: tvm.IRModule) -> tvm.IRModule:
        kept = {variable: f for variable, f in module.functions.items() if variable.name_hint not in apart}
        return tvm.IRModule(kept, attrs=module.attrs)

    llvm = target.llvm()
    with llvm:
        phases = _sequence(relax_phases(), _plain(with_others))
        return relax.build(module, llvm, relax_pipeline=phases, tir_pipeline=_PIPELINE)
