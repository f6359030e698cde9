"""Makes the libraries of an artifact: machine code of one module for each variant, and TVM's runtime beside them.

Each library is written by a process of its own, as many at a time as there are CPUs, while this one goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from llmc.compiler.driver.tvm_runtime import CUDA_RUNTIME, copy_runtime, find_runtime
from llmc.compiler.errors import LlmcError
from llmc.compiler.progress import Progress
from llmc.targets.cuda.target import CudaTarget

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llmc.compiler.driver.tuning.found import Found
    from llmc.targets.target import AnyTarget

Lower = Callable[[Any], Any]  # target -> the module of kernels for a target
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
        self._making: list[Library] = []
        self._turns = Turns(_processes())

    def __enter__(self) -> Libraries:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for library in self._making:
            library.stop()
        self._turns.close()

    def begin(self) -> None:
        """Lower for every target, and begin to make the code of those that get a library: see `_distinct`."""
        for target, module in _distinct(self._lower, self._targets):
            self._making.append(Library(module, target, self._folder / _file(target, self._of), self._turns))
            self._report(self._stage(target), 1, 2)

    def look(self, seconds: float | None = 0) -> None:
        """Report what has ended, or ends within so many seconds (None: ever). Raises LlmcError for what failed."""
        working = {library.said: library for library in self._making if not library.reported}
        for said in wait(list(working), seconds):
            library = working[cast("Connection[Any, Any]", said)]
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


def _processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Turns:
    """So many processes at a time, by a pipe with a byte for each: a semaphore wants shared memory, which may lack."""

    def __init__(self, count: int) -> None:
        self._ends = os.pipe()
        os.write(self._ends[1], bytes(count))

    def __enter__(self) -> None:
        os.read(self._ends[0], 1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.write(self._ends[1], bytes(1))

    def close(self) -> None:
        """Nobody waits for a turn any more."""
        for end in self._ends:
            os.close(end)


class Library:
    """A copy of this process that writes one library, once it is its turn."""

    def __init__(self, module: Any, target: AnyTarget, path: Path, turns: Turns) -> None:
        self.target, self.reported = target, False
        self.said, said = Pipe(duplex=False)
        # A fork: a module cannot be handed to a new process (this TVM's save_json crashes). Nothing that another
        # thread may hold is used in it: it compiles, links, and ends.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self._process = os.fork()
        if not self._process:
            _write_and_leave(module, target, path, turns, said)
        said.close()

    def finish(self) -> None:
        """Wait for it. Raises LlmcError when it failed."""
        known, reason = False, ""
        with contextlib.suppress(EOFError):
            known, reason = self.said.recv()
        failed = self._end()
        if known:
            raise LlmcError(reason)
        if failed:
            raise LlmcError(f"{self.target.name}: its code could not be made: {reason or _ending(failed)}")

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            self._end()

    def _end(self) -> int:
        """What it left with, as os.waitstatus_to_exitcode has it."""
        _, status = os.waitpid(self._process, 0)
        self._process = 0
        self.said.close()
        return os.waitstatus_to_exitcode(status)


def _ending(code: int) -> str:
    return f"its process ended with {code}" if code > 0 else f"its process was ended by signal {-code}"


def _write_and_leave(module: Any, target: AnyTarget, path: Path, turns: Turns, said: Connection[Any, Any]) -> NoReturn:
    """What the copy does."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        with turns:
            write_library(module, target, path)
        code = 0
    except LlmcError as error:
        said.send((True, str(error)))
    except Exception as error:
        said.send((False, (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]))
    finally:
        os._exit(code)


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
