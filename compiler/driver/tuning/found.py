"""What a compile takes from databases of knobs: the one it was given, and what is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.driver.tuning.database import Section, read_database
from llmc.targets.tuned import Tuned, shipped, target_key

if TYPE_CHECKING:
    from llmc.targets.target import Target


class Found:
    """Knobs for some targets. Raises LlmcError, when it is made, for a file that is no database."""

    def __init__(self, path: Path | None, targets: Sequence[Target]) -> None:
        self._path = path
        sections = {} if path is None else dict(read_database(path).targets)
        self._tuned = {target.name: _tuned(target, sections.pop(target_key(target), None)) for target in targets}
        self._others = sum(len(other.kernels) for other in sections.values())
        self._used: dict[str, tuple[int, int]] = {}  # by target: kernels with knobs from the file, all of them

    def of(self, step: Any, target: Target, plain: bool = True) -> Tuned:
        """What `lower` (not `plain`: `lower_ops`) wants for this module."""
        from llmc.targets.lower import kernel_calls

        tuned = self._tuned[target.name]
        if self._path is not None:
            calls = kernel_calls(step, plain)
            self._used[target.name] = len(set(calls) & set(tuned.exact)), len(calls)
        return tuned

    def note(self) -> str | None:
        """What came of the file, in words; None without one."""
        if self._path is None:
            return None
        used, kernels = max(self._used.values(), default=(0, 0))
        said = f"{used} of {kernels} kernels have knobs from {self._path}"
        return said + (f"; its {self._others} of other targets are ignored" if self._others else "")


def _tuned(target: Target, section: Section | None) -> Tuned:
    entries = {} if section is None else section.kernels
    exact = {key: entry.best for key, entry in entries.items() if entry.best is not None}
    return Tuned(exact, shipped(target).families)
