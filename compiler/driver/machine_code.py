"""Processes that make machine code of lowered modules, as many at a time as there are CPUs.

Each library has a process that writes it. Kernels are compiled one by one, each by whichever process is free: one of a
library, or a helper. All are copies of the process that lowered the modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from llmc.compiler.errors import LlmcError
from llmc.targets.cuda.target import CudaTarget

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llmc.targets.target import AnyTarget

_NUMBER = 4  # bytes of a kernel's number
_MOST = 2**10  # kernels that are compiled one by one: their numbers fit the least that a pipe may hold
_REASON = 500  # characters of what went wrong
_CLOSED = -1


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


class Kernels:
    """Kernels of a library, each of which a process makes that comes for it first, into a file of its own.

    Copies of a process share them. Those that help tell what became of a kernel, in a line of JSON: its number, whether
    what went wrong is known, and what went wrong.
    """

    def __init__(self, functions: dict[str, Any], target: AnyTarget, objects: str) -> None:
        """`objects`: where the files' names begin."""
        self._functions, self._target, self._objects = list(functions.items())[:_MOST], target, objects
        self._waiting, numbers = os.pipe()
        os.write(numbers, b"".join(number.to_bytes(_NUMBER, "little") for number in range(len(self._functions))))
        os.close(numbers)
        self._told, self._tell = os.pipe()

    @property
    def names(self) -> frozenset[str]:
        """What is compiled here, and not with the rest of the module."""
        return frozenset(name for name, _ in self._functions)

    def help(self, turns: Turns) -> None:
        """Make kernels while there are any, and tell of each."""
        while True:
            with turns:
                number = self._take()
                if number is None:
                    return
                known, reason = False, ""
                try:
                    self._make(number)
                except Exception as error:
                    known, reason = isinstance(error, LlmcError), _reason(error)
            os.write(self._tell, json.dumps([number, known, reason]).encode() + b"\n")

    def helped(self) -> None:
        """All who help are there: where they have gone without a word, it is known."""
        os.close(self._tell)
        self._tell = _CLOSED

    def make(self, turns: Turns) -> list[str]:
        """Make kernels while there are any, and wait for the others' -> the files, in order. Raises what went wrong."""
        os.close(self._tell)
        missing = set(range(len(self._functions)))
        while True:
            with turns:
                number = self._take()
                if number is None:
                    break
                self._make(number)
            missing.remove(number)
        with os.fdopen(self._told, encoding="utf-8") as told:
            while missing and (line := told.readline()):
                number, known, reason = json.loads(line)
                if reason:
                    raise LlmcError(reason) if known else RuntimeError(reason)
                missing.remove(number)
        if missing:
            raise RuntimeError(f"the process that made {self._functions[min(missing)][0]} was ended")
        return [self._file(number) for number in range(len(self._functions))]

    def close(self) -> None:
        """Of the process that all others are copies of: nobody is to be told of anything any more."""
        for end in {self._waiting, self._told, self._tell} - {_CLOSED}:
            os.close(end)

    def _take(self) -> int | None:
        """The number of a kernel that this process is to make."""
        number = os.read(self._waiting, _NUMBER)
        return int.from_bytes(number, "little") if number else None

    def _make(self, number: int) -> None:
        name, function = self._functions[number]
        write_kernel(name, function, self._target, self._file(number))

    def _file(self, number: int) -> str:
        return f"{self._objects}.{number}.o"


class Process:
    """A copy of this process that does something and ends. `said`: what it says at last, where something went wrong."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.said, said = Pipe(duplex=False)
        # A fork: a module cannot be handed to a new process (this TVM's save_json crashes). Nothing that another
        # thread may hold is used in it: it compiles, links, and ends.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self._number = os.fork()
        if not self._number:
            _work_and_leave(work, said)
        said.close()

    @property
    def ended(self) -> bool:
        """Whether somebody has waited for it."""
        return not self._number

    def finish(self, what: str) -> None:
        """Wait for it. Raises LlmcError when it failed at `what`."""
        known, reason = False, ""
        with contextlib.suppress(EOFError):
            known, reason = self.said.recv()
        failed = self._end()
        if known:
            raise LlmcError(reason)
        if failed:
            raise LlmcError(f"{what}: its code could not be made: {reason or _ending(failed)}")

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self._number:
            os.kill(self._number, signal.SIGKILL)
            self._end()

    def _end(self) -> int:
        """What it left with, as os.waitstatus_to_exitcode has it."""
        _, status = os.waitpid(self._number, 0)
        self._number = 0
        self.said.close()
        return os.waitstatus_to_exitcode(status)


def _ending(code: int) -> str:
    return f"its process ended with {code}" if code > 0 else f"its process was ended by signal {-code}"


def _work_and_leave(work: Callable[[], None], said: Connection[Any, Any]) -> NoReturn:
    """What the copy does."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        work()
        code = 0
    except LlmcError as error:
        said.send((True, str(error)))
    except Exception as error:
        said.send((False, _reason(error)))
    finally:
        os._exit(code)


def _reason(error: Exception) -> str:
    if isinstance(error, LlmcError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:_REASON]


def kernels_of(module: Any, target: AnyTarget, objects: str) -> Kernels:
    """The kernels of a lowered module that are compiled one by one: a CPU's. A GPU's code is one file."""
    if isinstance(target, CudaTarget):
        return Kernels({}, target, objects)
    from llmc.targets.build import kernels_of

    return Kernels(kernels_of(module), target, objects)


def write_kernel(name: str, function: Any, target: AnyTarget, path: str) -> None:
    """An object file with machine code of one kernel for a CPU."""
    from llmc.targets.build import compile_kernels

    compile_kernels({name: function}, target).write_to_file(path)


def write_library(module: Any, target: AnyTarget, path: Path, kernels: Kernels, turns: Turns) -> None:
    """Machine code of a lowered module: that of its kernels, and the steps that call them."""
    with turns:
        executable = _compiled(module, target, kernels.names)
    objects = kernels.make(turns)
    with turns:
        executable.export_library(str(path), addons=objects, cc=target.linker)


def _compiled(module: Any, target: AnyTarget, apart: frozenset[str]) -> Any:
    if isinstance(target, CudaTarget):
        from llmc.targets.cuda.build import compile_module as compile_for_cuda

        return compile_for_cuda(module, target)[0]
    from llmc.targets.build import compile_module

    return compile_module(module, target, apart)
