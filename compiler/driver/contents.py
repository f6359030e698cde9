"""Writes what is large in an artifact, weights and libraries, at the same time where that is possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler import artifact
from llmc.compiler.driver.libraries import Lower, write_libraries
from llmc.compiler.driver.write import write_weights

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight
    from llmc.targets.target import AnyTarget

Progress = Callable[[str, int, int], None]


def write_contents(
    folder: Path, stored: list[StoredWeight], source: Any, lower: Lower, targets: Sequence[AnyTarget],
    tvm_runtime: Path | None, report: Progress, name: str = artifact.WEIGHTS, of: str = "",
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """What `write_weights` and `write_libraries` give; these have `of` at the ends of their names.

    Weights are packed by NumPy and machine code is made by LLVM, both without the interpreter lock for most of the
    time. Code for several targets is made by forks, though, which must not come about beside threads: it comes second.
    """

    def write_code() -> list[dict[str, Any]]:
        return write_libraries(folder, lower, targets, tvm_runtime, report, of)

    if len(targets) > 1:
        return write_weights(folder, stored, source, report, name), write_code()
    stopped = threading.Event()

    def report_weights(stage: str, done: int, total: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        report(stage, done, total)

    with ThreadPoolExecutor(1, "weights") as pool:
        weights = pool.submit(write_weights, folder, stored, source, report_weights, name)
        try:
            variants = write_code()
        except BaseException:
            stopped.set()  # nobody wants the rest
            raise
        return weights.result(), variants
