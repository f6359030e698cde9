"""What a compile takes from databases of knobs: the one it was given, and what is shipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.driver.tuning.database import Database, read_database
from llmc.targets.tuned import Tuned, shipped, target_key

if TYPE_CHECKING:
    from llmc.targets.target import Target


class Found:
    """Knobs for every target of a compile. Raises LlmcError, when it is made, for a file that is no database."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._database = Database() if path is None else read_database(path)
        self._asked: set[str] = set()  # targets
        self._used = self._kernels = 0

    def of(self, target: Target, step: Any, plain: bool = True) -> Tuned:
        """What `lower` (not `plain`: `lower_ops`) wants for this module."""
        from llmc.targets.lower import kernel_calls

        section = self._database.targets.get(target_key(target))
        known = {} if section is None else section.kernels
        exact = {key: entry.best for key, entry in known.items() if entry.best is not None}
        if self._path is not None:
            calls = kernel_calls(step, plain)
            self._asked.add(target_key(target))
            self._kernels, self._used = self._kernels + len(calls), self._used + len(set(calls) & set(exact))
        return replace(shipped(target), exact=exact)

    def note(self) -> str | None:
        """What came of the file, in words; None without one."""
        if self._path is None:
            return None
        sections = self._database.targets.items()
        others = sum(len(section.kernels) for target, section in sections if target not in self._asked)
        said = f"{self._used} of {self._kernels} kernels have knobs from {self._path}"
        return said + (f"; its {others} of other targets are ignored" if others else "")
