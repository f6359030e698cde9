"""Asking for packed weights before they are needed: the hardware's own prefetcher stops at page borders."""

from __future__ import annotations

from typing import Any

from llmc.targets.target import Target
from llmc.targets.vector import prefetch


def ask_ahead(target: Target, weight: Any, place: Any, quick: bool) -> None:
    """Ask for what stands ahead of word `place` of the weights; `quick`: they are done with as fast as they come.

    Where each line of the cache is worked on for longer, lines asked for far ahead into the first-level cache, which
    can wait for two dozen at once on many CPUs, would keep those back that are needed now: they are asked for into the
    second level.
    """
    ahead = target.knobs.prefetch_bytes if quick else target.knobs.prefetch_far_bytes
    if ahead:
        prefetch(weight.access_ptr("r", offset=place + ahead // 4), far=not quick)
