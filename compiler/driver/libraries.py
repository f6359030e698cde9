"""Writes the libraries of an artifact: machine code of one module for each variant, and TVM's runtime beside them.

One variant is compiled here; several are, each in a process of its own, as many at a time as there are CPUs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmc.compiler.driver.tvm_runtime import CUDA_RUNTIME, copy_runtime, find_runtime
from llmc.compiler.errors import LlmcError
from llmc.targets.cuda.target import CudaTarget

if TYPE_CHECKING:
    from llmc.compiler.driver.tuning.found import Found
    from llmc.targets.target import AnyTarget, Target

Progress = Callable[[str, int, int], None]
Lower = Callable[[Any], Any]  # target -> the module of kernels for a target
LIBRARY = "library"  # the stage that progress names; of several variants it is followed by the variant's name


def write_libraries(
    folder: Path, lower: Lower, targets: Sequence[AnyTarget], tvm_runtime: Path | None, report: Progress, of: str = ""
) -> list[dict[str, Any]]:
    """Machine code of what `lower` gives for each target, in lib/; the manifest's entries of the variants, in order.

    `tvm_runtime` is where TVM's runtime for their architecture is; None for this machine's own. `of` ends the files'
    names where a variant has several: one for each device.
    """
    made: Sequence[AnyTarget] = targets
    if len(targets) == 1:
        _write_here(folder / _file(targets[0], of), lower, targets[0], report)
    else:
        made = _write_apart(folder, lower, targets, report, of)
    copy_runtime(find_runtime(targets[0].arch, tvm_runtime), folder / "lib")
    return [_entry(target, _file(target, of), folder, tvm_runtime) for target in made]


def _entry(target: AnyTarget, file: str, folder: Path, tvm_runtime: Path | None) -> dict[str, Any]:
    """What the manifest says of a variant; what TVM needs to run it beside its runtime is put into lib/."""
    entry: dict[str, Any] = {"file": file, "name": target.name, "arch": target.arch, "requires": list(target.requires)}
    if isinstance(target, CudaTarget):
        copy_runtime(find_runtime(target.arch, tvm_runtime, CUDA_RUNTIME), folder / "lib", CUDA_RUNTIME)
        entry["device"] = {"kind": "cuda", "arch": target.chip, "runtime": f"lib/{CUDA_RUNTIME}"}
    return entry


def _file(target: AnyTarget, of: str) -> str:
    return f"lib/{target.name}{of}.so"


def _write_here(path: Path, lower: Lower, target: AnyTarget, report: Progress) -> None:
    report(LIBRARY, 0, 2)
    module = lower(target)
    report(LIBRARY, 1, 2)
    write_library(module, target, path)
    report(LIBRARY, 2, 2)


def lowered(step: Any, target: AnyTarget, knobs: Found) -> Any:
    """The module of kernels for a target."""
    if isinstance(target, CudaTarget):
        from llmc.targets.cuda.lower import lower as lower_to_cuda

        return lower_to_cuda(step, target)
    from llmc.targets.lower import lower

    return lower(step, target, knobs.of(target, step))


def write_library(module: Any, target: AnyTarget, path: Path) -> None:
    """Machine code of a module of kernels."""
    if isinstance(target, CudaTarget):
        from llmc.targets.cuda.build import compile_module as compile_for_cuda

        executable, _ = compile_for_cuda(module, target)
    else:
        from llmc.targets.build import compile_module

        executable = compile_module(module, target)
    executable.export_library(str(path), cc=target.linker)


def _write_apart(folder: Path, lower: Lower, targets: Sequence[Any], report: Progress, of: str) -> list[Target]:
    """The same for each target; kernels are made here, while processes compile those of the targets before.

    The targets that got a library: see `_distinct`.
    """
    made: list[Target] = []
    running: dict[int, _Child] = {}
    try:
        for target, module in _distinct(lower, targets):
            report(f"{LIBRARY} {target.name}", 0, 1)
            while len(running) >= _processes():
                _finish_one(running, report)
            child = _Child(module, target, folder / _file(target, of))
            running[child.process.sentinel] = child
            made.append(target)
        while running:
            _finish_one(running, report)
    finally:
        for child in running.values():
            child.process.kill()
            child.process.join()
    return made


def _distinct(lower: Lower, targets: Sequence[Target]) -> Iterator[tuple[Target, Any]]:
    """Targets and their modules, less those that the next target's code serves as well."""
    from tvm_ffi import structural_equal

    ahead = lower(targets[0])
    for target, following in zip(targets, targets[1:], strict=False):
        module, ahead = ahead, lower(following)
        if not (following.serves(target) and structural_equal(module, ahead)):
            yield target, module
    yield targets[-1], ahead


def _processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Child:
    """A copy of this process that writes one library."""

    def __init__(self, module: Any, target: Target, path: Path) -> None:
        # A fork: a module cannot be handed to a new process (this TVM's save_json crashes). Nothing that another
        # thread may hold is used in it: it compiles, links, and ends.
        context = multiprocessing.get_context("fork")
        self.target = target
        self.said, said = context.Pipe(duplex=False)
        self.process = context.Process(target=_in_child, args=(module, target, path, said), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self.process.start()
        said.close()


def _in_child(module: Any, target: Target, path: Path, said: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        write_library(module, target, path)
    except Exception as error:
        said.send((str(error).strip().splitlines() or [type(error).__name__])[-1][:500])
        sys.exit(1)


def _finish_one(running: dict[int, _Child], report: Progress) -> None:
    """Wait for a process to end. Raises LlmcError when it failed."""
    child = running.pop(cast("int", wait(list(running))[0]))
    child.process.join()
    if child.process.exitcode:
        try:
            reason = child.said.recv()
        except EOFError:
            reason = f"its process ended with {child.process.exitcode}"
        raise LlmcError(f"{child.target.name}: its code could not be made: {reason}")
    report(f"{LIBRARY} {child.target.name}", 1, 1)
