"""Lowered module -> machine code: TVM's passes in named phases, then the Relax VM library.

Our kernels arrive as explicit vector code, so the TIR phases are a short list of our own: no scheduling, no common
subexpression elimination (a known regression of this TVM line), and no
rewriting of bfloat16.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

from llmc.compiler.errors import LlmcError
from llmc.targets.target import Target

_LINKERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}


def _sequence(*passes: Any) -> Any:
    return tvm.ir.transform.Sequential(list(passes))


def host_phase() -> Any:
    """TIR functions -> functions with the packed calling convention."""
    t = tirx.transform
    return _sequence(
        t.StmtSimplify(), t.FlattenBuffer(), t.NarrowDataType(32), t.VectorizeLoop(True), t.UnrollLoop(),
        t.StmtSimplify(),
        t.VerifyMemory(), t.AnnotateEntryFunc(), t.SplitHostDevice(), t.MakePackedAPI(),
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


def relax_phases() -> Any:
    """Relax with kernels -> VM instructions. `StaticPlanBlockMemory` reuses buffers between layers."""
    r = relax.transform
    return _sequence(
        r.ToNonDataflow(), r.RemovePurityChecking(), r.CallTIRRewrite(),
        r.StaticPlanBlockMemory(), r.LowerAllocTensor(), r.KillAfterLastUse(), r.LowerRuntimeBuiltin(),
        r.ComputePrimValue(), r.VMShapeLower(), r.AttachGlobalSymbol(),
    )  # fmt: skip


def compile_kernels(functions: dict[str, Any], target: Any) -> Any:
    """PrimFuncs by name -> a callable module; for kernel tests and tuning."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    return tvm.tirx.build(module, target=target.llvm(), pipeline=_PIPELINE)


def compile_module(module: Any, target: Any) -> Any:
    """A lowered Relax module -> a VM executable (`export_library` writes the .so)."""
    llvm = target.llvm()
    with llvm:
        return relax.build(module, llvm, relax_pipeline=relax_phases(), tir_pipeline=_PIPELINE)


def export(executable: Any, path: Path, target: Target) -> None:
    """Link the VM executable into a shared library. Needs gcc (or the target's cross compiler) on PATH."""
    compiler = _LINKERS[target.arch] if target.arch != platform.machine() else "gcc"
    if shutil.which(compiler) is None:
        raise LlmcError(f"{compiler} is needed to link {path.name} and is not on PATH; install it")
    executable.export_library(str(path), cc=compiler)
