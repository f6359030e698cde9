"""Makes the libraries of an artifact: machine code of one module for each variant, and TVM's runtime beside them.

It is made by other processes (machine_code.py), while this one goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from llmc.compiler.driver.machine_code import Kernels, Process, Turns, kernels_of, write_library
from llmc.compiler.driver.tvm_runtime import CUDA_RUNTIME, copy_runtime, find_runtime
from llmc.compiler.progress import Progress
from llmc.runtime.loading.cpu import default_threads
from llmc.targets.cuda.target import CudaTarget

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llmc.compiler.driver.tuning.found import Found
    from llmc.targets.target import AnyTarget

Lower = Callable[[Any], Any]  # target -> the module of kernels for a target
_NICE = 10  # a tenth of the time of a CPU that another process wants as well
LIBRARY = "library"  # the stage that progress names; of several variants it is followed by the variant's name


class Libraries:
    """Machine code of what `lower` gives for each target, written into lib/ of a folder from `begin` to `finish`.

    `of` ends the files' names where a variant has several: one for each device. At the end of a `with` nothing is at
    work any more.
    """

    def __init__(
        self, folder: Path, lower: Lower, targets: Sequence[AnyTarget], report: Progress, of: str = ""
    ) -> None:  # fmt: skip
        self._folder, self._lower, self._targets, self._report, self._of = folder, lower, targets, report, of
        self._objects = folder / "lib" / f"objects{of}"
        self._making: list[Library] = []
        self._helpers: list[Process] = []
        self._turns = Turns(default_threads())

    def __enter__(self) -> Libraries:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for helper in self._helpers:
            helper.stop()
        for library in self._making:
            library.stop()
        self._turns.close()
        shutil.rmtree(self._objects, ignore_errors=True)

    def begin(self) -> None:
        """Lower for every target, and begin to make the code of those that get a library: see `_distinct`."""
        self._objects.mkdir(parents=True, exist_ok=True)
        for target, module in _distinct(self._lower, self._targets):
            path = self._folder / _file(target, self._of)
            self._making.append(Library(module, target, path, self._objects, self._turns))
            self._report(self._stage(target), 1, 2)
        each = [library.kernels for library in self._making]
        for _ in range(min(default_threads() - 1, sum(len(kernels.names) for kernels in each))):
            self._helpers.append(Process(partial(_help, each, self._turns)))
        for kernels in each:
            kernels.helped()

    def look(self, seconds: float | None = 0) -> None:
        """Report what has ended, or ends within so many seconds (None: ever). Raises LlmcError for what failed."""
        working = {library.said: library for library in self._making if not library.reported}
        helping = {helper.said: helper for helper in self._helpers if not helper.ended}
        for said in cast("list[Connection[Any, Any]]", wait([*working, *helping], seconds)):
            if said in helping:
                helping[said].finish(self._targets[0].name)
                continue
            library = working[said]
            library.finish()
            library.reported = True
            self._report(self._stage(library.target), 2, 2)

    def finish(self, tvm_runtime: Path | None) -> list[dict[str, Any]]:
        """Wait for the rest; the manifest's entries of the variants, in order. Raises LlmcError for what failed.

        `tvm_runtime` is where TVM's runtime for their architecture is; None for this machine's own.
        """
        while not all(library.reported for library in self._making):
            self.look(None)
        copy_runtime(find_runtime(self._targets[0].arch, tvm_runtime), self._folder / "lib")
        return [self._entry(library.target, tvm_runtime) for library in self._making]

    def _stage(self, target: AnyTarget) -> str:
        return LIBRARY if len(self._targets) == 1 else f"{LIBRARY} {target.name}"

    def _entry(self, target: AnyTarget, tvm_runtime: Path | None) -> dict[str, Any]:
        """What the manifest says of a variant; what TVM needs to run it beside its runtime is put into lib/."""
        file = _file(target, self._of)
        entry: dict[str, Any] = {
            "file": file, "name": target.name, "arch": target.arch, "requires": list(target.requires)
        }  # fmt: skip
        if isinstance(target, CudaTarget):
            copy_runtime(find_runtime(target.arch, tvm_runtime, CUDA_RUNTIME), self._folder / "lib", CUDA_RUNTIME)
            entry["device"] = {"kind": "cuda", "arch": target.chip, "runtime": f"lib/{CUDA_RUNTIME}"}
        return entry


class Library:
    """One that is being made by a process of its own, and whoever helps."""

    def __init__(self, module: Any, target: AnyTarget, path: Path, objects: Path, turns: Turns) -> None:
        """`objects`: a folder for what it is linked from."""
        self.target, self.reported = target, False
        self.kernels = kernels_of(module, target, str(objects / target.name))
        self._process = Process(partial(write_library, module, target, path, self.kernels, turns))
        self.said = self._process.said

    def finish(self) -> None:
        """Wait for it. Raises LlmcError when it failed."""
        self._process.finish(self.target.name)

    def stop(self) -> None:
        """End what has not ended."""
        self._process.stop()
        self.kernels.close()


def _help(each: list[Kernels], turns: Turns) -> None:
    """What a helper does, with what the others leave it of the CPUs: it would hold up who packs weights meanwhile."""
    os.nice(_NICE)
    for kernels in each:
        kernels.help(turns)


def _file(target: AnyTarget, of: str) -> str:
    return f"lib/{target.name}{of}.so"


def _distinct(lower: Lower, targets: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Targets and their modules, less those that the next target's code serves as well."""
    from tvm_ffi import structural_equal

    ahead = lower(targets[0])
    for target, following in zip(targets, targets[1:], strict=False):
        module, ahead = ahead, lower(following)
        if not (following.serves(target) and structural_equal(module, ahead)):
            yield target, module
    yield targets[-1], ahead


def lowered(step: Any, target: AnyTarget, knobs: Found) -> Any:
    """The module of kernels for a target."""
    if isinstance(target, CudaTarget):
        from llmc.targets.cuda.lower import lower as lower_to_cuda

        return lower_to_cuda(step, target)
    from llmc.targets.lower import lower

    return lower(step, target, knobs.of(target, step))
