"""A machine whose times are known, for tests of the search: no code is made, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmc.compiler.driver.tuning.model_kernels import Kernel
from llmc.compiler.errors import LlmcError
from llmc.targets.knobs import Knobs
from llmc.targets.lower import KernelCall

Times = Callable[[Kernel, Knobs, int], float]


def kernel(name: str, *knobs: str, size: int = 64) -> Kernel:
    """A kernel that reads these knobs."""
    call = KernelCall("i8_linear", [[size, 64], [1, size]], ["int32", "float32"], {"format": name, "width": size}, 1)
    return Kernel(
        f"i8_linear format={name}: {size},64 1,{size}", call, knobs or ("prefetch_bytes", "row_block"), Knobs()
    )


@dataclass
class FakeMachine:
    """`times(kernel, knobs, rows)` are seconds of a call."""

    times: Times
    threads: int = 1
    wrong: Knobs | None = None  # knobs with which kernels compute something else
    unknown: str = ""  # format of kernels that have no operands
    built: list[tuple[str, Knobs]] = field(default_factory=list)
    before: Callable[[], None] = lambda: None  # called before each measurement

    def build(self, kernel: Kernel, knobs: Knobs) -> Knobs:
        """Knobs stand for code."""
        self.built.append((kernel.key, knobs))
        return knobs

    def bench(self, kernel: Kernel, rows: int) -> Any:
        """Knows how long each code takes."""
        if kernel.call.attrs["format"] == self.unknown:
            raise LlmcError("no operands")
        return _Bench(self, kernel, rows)


@dataclass
class _Bench:
    machine: FakeMachine
    kernel: Kernel
    rows: int

    def result(self, code: Knobs) -> str:
        return "other" if code == self.machine.wrong else "same"

    def seconds(self, code: Knobs, calls: int) -> float:
        self.machine.before()
        return self.machine.times(self.kernel, code, self.rows)
