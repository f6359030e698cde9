"""Runs an ordered list of passes over a module, and shows what each did.

With `LLMC_DUMP=folder` the module is written as TVMScript before the first pass and after each one
(`00_frontend.py`, `01_<pass>.py`, ...); a pass that changed nothing leaves a file that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler import knobs

Module = Any  # tvm.IRModule


@dataclass(frozen=True)
class Stage:
    """A named pass and why it stands where it does."""

    name: str
    apply: Callable[[Module], Module]
    reason: str


def run(stages: Iterable[Stage], module: Module, progress: Callable[[str, int, int], None] | None = None) -> Module:
    """The module after every stage, in order."""
    stages = list(stages)
    folder = knobs.dump_folder()
    _dump(folder, 0, "frontend", module, None)
    for number, stage in enumerate(stages, 1):
        if progress:
            progress("passes", number - 1, len(stages))
        started = time.perf_counter()
        after = stage.apply(module)
        _dump(folder, number, stage.name, after, module, time.perf_counter() - started)
        module = after
    return module


def _dump(
    folder: Path | None, number: int, name: str, module: Module, before: Module | None, seconds: float = 0.0
) -> None:
    if folder is None:
        return
    from tvm_ffi import structural_equal

    same = before is not None and structural_equal(before, module)
    text = f"# {name}: unchanged\n" if same else f"# {name}: {seconds:.3f} s\n{module.script()}\n"
    (folder / f"{number:02d}_{name}.py").write_text(text)
