"""Lowered module -> a library with the host's code and a cubin: TVM's passes in named phases, then nvcc."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from llmc.targets.build import host_phase, relax_phases
from llmc.targets.cuda.nvcc import Resources, find_nvcc, machine_code
from llmc.targets.cuda.prelude import PRELUDE
from llmc.targets.cuda.target import CUDA_TARGETS, CudaTarget

# TVM asks this function for the text to keep in place of the CUDA source that it wrote. Where the driver is missing, as
# on most machines that compile, TVM would keep source, to be compiled at every load; what is kept here is a cubin.
_CALLBACK = "tvm_callback_cuda_postproc"
CUBIN = "llmc cubin base64 "  # before the cubin; runtime/loading/cuda.py takes it off again
_PIPELINE = "llmc-cuda"


def _tir_pipeline() -> Any:
    """What `register_tir_pipeline` takes: the lowering pass and factories of the host and device finish."""
    t = tirx.transform
    return (
        host_phase(),
        lambda: tvm.ir.transform.Sequential([t.LowerTVMBuiltin(), t.LowerIntrin()]),
        lambda: tvm.ir.transform.Sequential([t.StmtSimplify(), t.LowerIntrin(), _launched_early]),
    )


@tirx.transform.prim_func_pass(opt_level=0)  # type: ignore[untyped-decorator]
def _launched_early(function: tirx.PrimFunc, module: tvm.IRModule, context: Any) -> tirx.PrimFunc:
    """A kernel's launch does not wait for the ones before, on chips where the kernel itself does (launch.py)."""
    made, tags = function.attrs.get("target"), function.attrs.get("tirx.kernel_launch_params")
    if tags is None or made is None or str(made.attrs["arch"]) not in _EARLY:
        return function
    # The tag of dynamic shared memory has to stand last.
    return function.with_attr("tirx.kernel_launch_params", [*tags[:-1], _EARLY_TAG, *tags[-1:]])


_EARLY = {chip.chip for chip in CUDA_TARGETS.values() if chip.early_launch}
_EARLY_TAG = "tirx.use_programtic_dependent_launch"  # as TVM spells it
tirx.compilation_pipeline.register_tir_pipeline(_PIPELINE, _tir_pipeline)


@contextmanager
def _compiling_for(target: CudaTarget) -> Iterator[dict[str, Resources]]:
    """While open, TVM's CUDA source becomes a cubin, as text; gives what kernels take, as they are compiled."""
    found: dict[str, Resources] = {}

    def compiled(source: str, *_: Any) -> str:
        code, taken = machine_code(PRELUDE + source, target)
        found.update(taken)
        return CUBIN + base64.b64encode(code).decode()

    tvm_ffi.register_global_func(_CALLBACK, compiled, override=True)
    try:
        yield found
    finally:
        tvm_ffi.registry.remove_global_func(_CALLBACK)


def compile_kernels(functions: dict[str, Any], target: CudaTarget) -> tuple[Any, dict[str, Resources]]:
    """PrimFuncs by name -> a module, and what kernels take: `NAME_kernel`, and of a second launch `NAME_kernel_1`."""
    find_nvcc()
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with _compiling_for(target) as found:
        return tvm.tirx.build(module, target=target.tvm(), pipeline=_PIPELINE), found


def compile_module(module: Any, target: CudaTarget) -> tuple[Any, dict[str, Resources]]:
    """A lowered Relax module -> a VM executable (`export_library` writes the .so), and what each kernel takes."""
    find_nvcc()
    made = target.tvm()
    with _compiling_for(target) as found, made:
        return relax.build(module, made, relax_pipeline=relax_phases(), tir_pipeline=_PIPELINE), found
