"""What of a kernel may be tuned: the same results to the last bit, at another speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Knobs:
    """The tuning of one kernel. Defaults are what most machines do well with."""

    prefetch_bytes: int = 8192  # how far ahead a weight stream is asked for; 0 asks for nothing
    row_block: int = 128  # rows whose activations stay in the second-level cache while weights stream
    row_group: int = 0  # rows that share each weight register; 0: what the target has registers for
