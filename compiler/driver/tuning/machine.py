"""Where kernels are timed: this machine. Caches are as cold as in a model: weights stand there several times."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tvm
from numpy.typing import NDArray

from llmc.compiler.driver.tuning.model_kernels import Kernel
from llmc.compiler.driver.tuning.operands import operands_for
from llmc.runtime.loading.library import set_most_threads, use_threads
from llmc.targets.build import compile_kernels
from llmc.targets.knobs import Knobs
from llmc.targets.target import Target

_MOST_COPIES = 512


class Bench(Protocol):
    """One kernel on operands of one number of rows."""

    def result(self, code: Any) -> str:
        """A digest of what the code computes."""
        ...

    def seconds(self, code: Any, calls: int) -> float:
        """Of one call, on average over so many, each with operands that the others have not read."""
        ...


class Machine(Protocol):
    """Compiles and runs kernels."""

    threads: int

    def build(self, kernel: Kernel, knobs: Knobs) -> Any:
        """The kernel's code with these knobs."""
        ...

    def bench(self, kernel: Kernel, rows: int) -> Bench:
        """Operands for it; LlmcError when none are known."""
        ...


@dataclass
class ThisMachine:
    """The process's own cores. `cold_bytes` of weights are more than its caches hold."""

    target: Target
    threads: int
    cold_bytes: int
    _copies: dict[Any, list[Any]] = field(default_factory=dict)  # of one kernel's weights, for every number of rows

    def __post_init__(self) -> None:
        set_most_threads(self.threads)
        use_threads(self.threads)

    def build(self, kernel: Kernel, knobs: Knobs) -> Any:
        """Machine code in this process."""
        return compile_kernels({"kernel": kernel.function(self.target, knobs)}, self.target)["kernel"]

    def bench(self, kernel: Kernel, rows: int) -> Bench:
        """Operands in this process's memory."""
        return _Here(self, kernel, rows)

    def copies(self, kernel: Kernel, operand: int, array: NDArray[Any], count: int) -> list[Any]:
        """So many tensors of an operand's shape, whose values need not be the array's; only one kernel's are kept."""
        key = (kernel.key, operand, array.shape)
        if any(known[0] != kernel.key for known in self._copies):
            self._copies.clear()
        if key not in self._copies:
            self._copies[key] = [tvm.runtime.tensor(array) for _ in range(count)]
        return self._copies[key]

    @property
    def clock(self) -> Callable[[], float]:
        """Processor time of one thread, which a busy neighbour does not lengthen; of several, who wait, plain time."""
        return time.process_time if self.threads == 1 else time.perf_counter


class _Here:
    """A bench in this process."""

    def __init__(self, machine: ThisMachine, kernel: Kernel, rows: int) -> None:
        operands = operands_for(kernel.call, rows)
        cold = sum(operands.inputs[i].nbytes for i in operands.cold)
        count = min(_MOST_COPIES, max(2, -(-machine.cold_bytes // cold))) if cold else 1
        shared = [None if i in operands.cold else tvm.runtime.tensor(a) for i, a in enumerate(operands.inputs)]
        copies = {i: machine.copies(kernel, i, operands.inputs[i], count) for i in operands.cold}
        self._clock = machine.clock
        self._zeros = [np.zeros(shape, dtype) for shape, dtype in operands.outputs]
        self._outputs = [tvm.runtime.tensor(array) for array in self._zeros]
        self._calls = [
            [copies[i][number] if i in copies else each for i, each in enumerate(shared)] for number in range(count)
        ]
        self._next = 0

    def result(self, code: Any) -> str:
        """Of the first operands, into memory that held other numbers."""
        for zeros, tensor in zip(self._zeros, self._outputs, strict=True):
            tensor.copyfrom(zeros)
        code(*self._calls[0], *self._outputs)
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self._outputs:
            digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def seconds(self, code: Any, calls: int) -> float:
        """In turn through the copies, from where the last measurement stopped."""
        chosen = [self._calls[(self._next + i) % len(self._calls)] for i in range(calls)]
        self._next = (self._next + calls) % len(self._calls)
        clock, outputs = self._clock, self._outputs
        start = clock()
        for operands in chosen:
            code(*operands, *outputs)
        return (clock() - start) / calls
