"""Asking for packed weights before they are needed: the hardware's own prefetcher stops at page borders."""

from __future__ import annotations

from typing import Any

from llmc.targets.target import Target
from llmc.targets.vector import prefetch


def ask_ahead(target: Target, weight: Any, place: Any, quick: bool) -> None:
    """Ask for what stands ahead of word `place` of the weights; `quick`: they are done with as fast as they come.

    Where each line of the cache is worked on for longer, lines asked for far ahead into the first-level cache, which
    can wait for two dozen at once on many CPUs, would keep those back that are needed now: they are asked for into the
    second level, and once more, nearer, into the first.
    """
    knobs = target.knobs
    if quick:
        _ask(weight, place, knobs.prefetch_bytes, far=False)
    else:
        _ask(weight, place, knobs.prefetch_far_bytes, far=True)
        _ask(weight, place, knobs.prefetch_near_bytes, far=False)


def _ask(weight: Any, place: Any, ahead: int, far: bool) -> None:
    """Ask for the line so many bytes ahead, if any."""
    if ahead:
        prefetch(weight.access_ptr("r", offset=place + ahead // 4), far=far)
