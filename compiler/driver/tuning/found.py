"""What a compile takes from databases of knobs: the one it was given, and what is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.driver.tuning.database import read_database
from llmc.targets.tuned import Tuned, shipped, target_key

if TYPE_CHECKING:
    from llmc.targets.target import Target


class Found:
    """Knobs for one target. Raises LlmcError, when it is made, for a file that is no database."""

    def __init__(self, path: Path | None, target: Target) -> None:
        self._path, self._used, self._kernels = path, 0, 0
        self._tuned, self._others = shipped(target), 0
        if path is not None:
            database = read_database(path)
            section = database.targets.pop(target_key(target), None)
            entries = {} if section is None else section.kernels
            exact = {key: entry.best for key, entry in entries.items() if entry.best is not None}
            self._tuned = Tuned(exact, self._tuned.families)
            self._others = sum(len(other.kernels) for other in database.targets.values())

    def of(self, step: Any, plain: bool = True) -> Tuned:
        """What `lower` (not `plain`: `lower_ops`) wants for this module."""
        from llmc.targets.lower import kernel_calls

        if self._path is not None:
            calls = kernel_calls(step, plain)
            self._kernels, self._used = len(calls), len(set(calls) & set(self._tuned.exact))
        return self._tuned

    def note(self) -> str | None:
        """What came of the file, in words; None without one."""
        if self._path is None:
            return None
        said = f"{self._used} of {self._kernels} kernels have knobs from {self._path}"
        return said + (f"; its {self._others} of other targets are ignored" if self._others else "")
