"""Writes what is large in an artifact: weights here, and libraries by processes that are at work meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler import artifact
from llmc.compiler.driver.libraries import Libraries, Lower
from llmc.compiler.driver.write import write_weights
from llmc.compiler.progress import Progress

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight
    from llmc.targets.target import AnyTarget

Prepare = Callable[[Progress], Any]  # what stored weights are computed from, once what that takes is done


def write_contents(
    folder: Path, stored: list[StoredWeight], prepare: Prepare, lower: Lower, targets: Sequence[AnyTarget],
    tvm_runtime: Path | None, report: Progress, name: str = artifact.WEIGHTS, of: str = "",
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """What `write_weights` gives, and `Libraries`, whose files have `of` at the ends of their names."""
    with Libraries(folder, lower, targets, report, of) as libraries:
        libraries.begin()

        def report_both(stage: str, done: int, total: int) -> None:
            report(stage, done, total)
            libraries.look()

        weights = write_weights(folder, stored, prepare(report_both), report_both, name)
        return weights, libraries.finish(tvm_runtime)
