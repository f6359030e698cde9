"""Matrices that several of a file's tensors stand for together, as quantizers save them: codes here, scales there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from llmc.compiler.errors import SourceError
from llmc.frontends.binding import group_names
from llmc.frontends.files.mapped_file import MappedFile
from llmc.frontends.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class FoldedTensor(Tensor):
    """What a field of its class is a Tensor of, the file has; whoever made it has checked that they fit."""

    @property
    def readable(self) -> bool:
        """Always: what does not fit is refused before."""
        return True

    @property
    def turned(self) -> bool:
        """Always: quantizers turn what lies (in, out), as GPT-2's does, before they pack it."""
        return True

    @property
    def by_rows(self) -> bool:
        """Always, where its class does not say otherwise."""
        return True

    @property
    def kept(self) -> str | None:
        """None, where its class does not name a format of ours that has these codes."""
        return None

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """Shards may part the tensors."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value.file for value in values if isinstance(value, Tensor))


def misfits(where: str, faults: Mapping[str, list[str]]) -> SourceError:
    """The error for what is wrong -> names of the matrices it is wrong with."""
    listed = "; ".join(f"{group_names(names)}: {problem}" for problem, names in faults.items())
    return SourceError(f"{where}: quantized tensors do not fit: {listed}")
