"""What the front tells the others, and who of them answers."""

from __future__ import annotations

from typing import Any

from llmc.runtime.loading.device_manifest import DeviceManifest

# Messages: BEGIN with the number of pages; CALL with a function's name and index arrays; COPY with a group of layers,
# a page and the page to copy it to; END.
BEGIN, CALL, COPY, END = "begin", "call", "copy", "end"


class Answers:
    """Which rank gives what the front looks at."""

    def __init__(self, manifest: DeviceManifest) -> None:
        self._ranks = manifest.ranks

    def source(self, name: str) -> int | None:
        """The first rank that gives the function's first output; None where all of them only keep things alive."""
        found = (rank for rank, each in enumerate(self._ranks) if 0 in each.outputs[name])
        return next(found, None)

    def of(self, name: str, rank: int, given: list[Any]) -> list[Any]:
        """What a rank's function gave of the model's outputs: zeros of sends follow them."""
        return given[: len(self._ranks[rank].outputs[name])]
