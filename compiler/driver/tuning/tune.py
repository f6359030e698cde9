"""tune_model: a model's kernels -> the knobs that are fastest here -> the database file, read top to bottom."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.driver.request import Request, check_choices
from llmc.compiler.driver.tuning.database import Database, Entry, Section, check_place, read_database, write_database
from llmc.compiler.driver.tuning.machine import Machine, ThisMachine
from llmc.compiler.driver.tuning.model_kernels import Kernel, model_calls, tunable
from llmc.compiler.driver.tuning.search import Budget, Report, search
from llmc.compiler.errors import LlmcError
from llmc.compiler.progress import Progress
from llmc.targets.target import AnyTarget, Target, cpu_flags
from llmc.targets.tuned import target_key


@dataclass(frozen=True)
class Tuning:
    """What a run did. `section` is the database's, of this target, with kernels of other models too."""

    model: str
    target: Target
    kernels: list[Kernel]
    section: Section
    skipped: dict[str, str]  # kernel -> why it was not timed
    trials: int  # of this run
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether another run would find nothing left to do."""
        return all(row["state"] != "unfinished" for row in self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """What is known of each kernel of the model, the heaviest first; times are of calls, in microseconds."""
        return [
            _row(kernel, self.section.kernels.get(kernel.key), self.skipped.get(kernel.key)) for kernel in self.kernels
        ]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "model": self.model, "target": self.target.name, "trials": self.trials, "seconds": self.seconds,
            "complete": self.complete, "kernels": self.rows(),
        }  # fmt: skip


def _row(kernel: Kernel, entry: Entry | None, reason: str | None) -> dict[str, Any]:
    best = None if entry is None else entry.best
    if reason is not None:
        state = "left out"
    elif entry is None or best is None:
        state = "unfinished"
    else:
        state = "default" if best == entry.default else "tuned"
    times = {} if entry is None or state != "tuned" else entry.microseconds
    return {
        "op": kernel.call.name, "format": str(kernel.call.attrs.get("format", "")), "shape": kernel.shape,
        "key": kernel.key, "calls": kernel.call.count, "state": state, "reason": reason,
        "knobs": best, "default": None if entry is None else entry.default,
        "microseconds": {
            rows: {"default": before, "best": after}
            for rows, (before, after) in sorted(times.items(), key=lambda each: int(each[0]))
        },
    }  # fmt: skip


def tune_model(
    request: Request, database: Path, *, threads: int, cold_bytes: int, budget: Budget, report: Report,
    progress: Progress | None = None, machine: Machine | None = None,
) -> Tuning:  # fmt: skip
    """Search the knobs of the kernels of `request.source`, an artifact or what `llmc compile` takes.

    The database file is read where there is one, and written after every trial. `cold_bytes` of weights are more than
    the caches hold. Raises LlmcError, before any work, for what is not understood.
    """
    started = time.perf_counter()
    choices = check_choices(request)
    check_place(database)
    known = read_database(database) if database.exists() else Database()
    target = _that_runs_here(choices)
    model, calls = model_calls(request, progress or (lambda stage, done, total: None))
    kernels = tunable(calls, target)
    section = known.targets.setdefault(target_key(target), Section())
    timed = machine or ThisMachine(target, threads, cold_bytes)
    skipped = search(kernels, timed, section, budget, report, lambda: write_database(database, known))
    return Tuning(model, target, kernels, section, skipped, budget.used, time.perf_counter() - started)


def note_threads(database: Path, target: Target, model: str, best: dict[str, int]) -> None:
    """Keep how many threads a model does best with, in decoding and in reading prompts."""
    known = read_database(database)
    known.targets.setdefault(target_key(target), Section()).threads[model] = best
    write_database(database, known)


def _that_runs_here(choices: Sequence[AnyTarget]) -> Target:
    """The first that this machine can time."""
    lacking = {}
    for target in choices:
        missing = sorted(set(target.requires) - cpu_flags())
        if target.arch != platform.machine():
            missing = [f"arch {target.arch}"]
        if not missing and isinstance(target, Target):
            return target
        lacking[target.name] = " ".join(missing)
    said = "; ".join(f"{name} lacks {missing}" for name, missing in lacking.items())
    raise LlmcError(f"kernels are timed on this machine, and it cannot run them: {said}; tune where they run")
