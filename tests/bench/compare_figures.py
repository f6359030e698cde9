"""What follows from the samples of compare.py: medians, spread, ratios, shares of what the machine can do.

A sample is {"model", "threads", "system", "measure", "value", "round"}. "system" is "llmc q4", "openvino int4", ... or
"machine"; what has nothing to do with a number of threads has 0 of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Sample = dict[str, Any]

OURS = "llmc"
RATES = ("prefill", "decode", "batch 8", "batch 16")  # tokens per second
LESS_IS_BETTER = ("first token s", "peak MB")
ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Figure:
    """Samples of one measure: their median, and how far they lie apart as a share of it."""

    median: float
    spread: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        """The figure of at least one value.

        >>> Figure.of([10, 12, 9])
        Figure(median=10, spread=0.3, count=3)
        """
        middle = statistics.median(values)
        return Figure(middle, (max(values) - min(values)) / middle if middle else 0.0, len(values))


@dataclass
class Row:
    """All that is known of one system with one model and so many threads."""

    model: str
    threads: int
    system: str
    figures: dict[str, Figure] = field(default_factory=dict)
    of_limit: float | None = None  # share of the steps per second that reading its weights allows

    @property
    def ours(self) -> bool:
        """Whether this is llmc."""
        return self.system.split()[0] == OURS

    def value(self, measure: str) -> float | None:
        """The median of a measure, None where there is none."""
        found = self.figures.get(measure)
        return None if found is None else found.median


def rows_of(samples: Iterable[Sample]) -> list[Row]:
    """A row for each model, number of threads and system, in that order; what has 0 of them is on the others too."""
    values: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for sample in samples:
        key = (sample["model"], sample["threads"], sample["system"])
        values.setdefault(key, {}).setdefault(sample["measure"], []).append(sample["value"])
    limits: dict[int, float] = {}
    for (_, threads, system), found in values.items():
        if system == "machine":  # of all rounds and models the best: what disturbed the others is no limit
            limits[threads] = max(limits.get(threads, 0.0), *found["read bytes/s"])
    rows = []
    for (model, threads, system), found in values.items():
        if system == "machine":
            continue
        known = {**values.get((model, 0, system), {}), **found}
        row = Row(model, threads, system, {name: Figure.of(each) for name, each in known.items()})
        step_bytes, decode = row.value("step bytes"), row.value("decode")
        if step_bytes and decode and threads in limits:
            row.of_limit = share_of_limit(decode, step_bytes, limits[threads])
        peak, held = row.value("peak MB"), row.value("held MB")
        if peak and held:
            row.figures["peak/held"] = Figure.of([peak / held])
        rows.append(row)
    return sorted(rows, key=lambda row: (row.model, row.threads, not row.ours, row.system.split()[0], -bits(row)))


def share_of_limit(steps_per_s: float, step_bytes: float, read_bytes_per_s: float) -> float:
    """The bytes of weights that are read a second, as a share of those that a plain loop reads.

    >>> share_of_limit(20, 600e6, 15e9)
    0.8
    """
    return steps_per_s * step_bytes / read_bytes_per_s


def bits(row: Row) -> float:
    """Bits per weight, 0 where it is not known."""
    return row.value("bits/weight") or 0.0


def times_better(ours: Row, other: Row, measure: str) -> float | None:
    """How many times better than `other` we are: of rates ours over its, of seconds and bytes its over ours."""
    mine, theirs = ours.value(measure), other.value(measure)
    if not mine or not theirs:
        return None
    return theirs / mine if measure in LESS_IS_BETTER else mine / theirs


def equal_bits(row: Row, others: Sequence[Row]) -> Row | None:
    """Our row of the fewest bits per weight that are as many as those of `row`; where none has as many, our most."""
    ours = sorted((each for each in others if each.ours and bits(each)), key=bits)
    enough = [each for each in ours if bits(each) >= bits(row) * 0.97]  # files hold a little beside weights
    return (enough or ours[-1:] or [None])[0]


def best_peer(rows: Sequence[Row], measure: str) -> Row | None:
    """The peer's row that is best at it, whatever its bits."""
    peers = [row for row in rows if not row.ours and row.value(measure)]
    if not peers:
        return None
    return (min if measure in LESS_IS_BETTER else max)(peers, key=lambda row: row.value(measure) or 0.0)


def costs(row: Row) -> dict[int, float]:
    """t(M) / t(1): what a step of M rows costs over one of a single row, for each M that was measured.

    >>> figures = {f"step {m}": Figure(m / 100, 0, 1) for m in (1, 4)}
    >>> costs(Row("m", 1, "llmc q4", figures))
    {1: 1.0, 4: 4.0}
    """
    one = row.value("step 1")
    if not one:
        return {}
    return {m: seconds / one for m in ROWS if (seconds := row.value(f"step {m}"))}
