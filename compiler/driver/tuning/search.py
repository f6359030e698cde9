"""Tries knobs, one kernel after another: each candidate against the default, in turns, at every kind of row count.

A kernel is one piece of code for every number of rows, so its knobs count by what they give at all of them: a
candidate that is slower anywhere is out. The best is measured again, for longer, before it is taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmc.compiler.driver.tuning.database import Entry, Section, Tried, Values
from llmc.compiler.driver.tuning.machine import Bench, Machine
from llmc.compiler.driver.tuning.model_kernels import Kernel
from llmc.compiler.errors import LlmcError
from llmc.targets.knobs import CANDIDATES

ROWS = (1, 4, 32, 512)  # of decode, of a few sequences, of many, of a prompt

_ROUNDS, _CONFIRMING = 5, 25  # measurements of each of two, in turns
_BATCHES = 3  # of confirming measurements, while it is open whether a winner is one
_MEASURED_SECONDS = 0.015  # one measurement, at least
_MOST_CALLS = 4096
_LEAST_GAIN = 0.01  # less is not told from noise, and not worth it
_MOST_CONFIRMED = 3  # candidates that are measured for longer

Clock = Callable[[], float]
Pairs = list[tuple[float, float]]  # seconds of a call, the default's and a candidate's


class Ended(Exception):
    """The trials or minutes asked for are used up."""


@dataclass
class Budget:
    """How much may still be measured; None is no limit."""

    trials: int | None = None
    seconds: float | None = None
    clock: Clock = time.monotonic
    used: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def spend(self) -> None:
        """One trial more; raises Ended when there is none."""
        if self.trials is not None and self.used >= self.trials:
            raise Ended
        if self.seconds is not None and self.clock() - self.started >= self.seconds:
            raise Ended
        self.used += 1


@dataclass(frozen=True)
class State:
    """Where a search is. `gain`: the best candidate's, at the numbers of rows on average; 1 is the default's speed."""

    number: int  # of the kernel, from 1
    kernels: int
    kernel: Kernel
    trials: int
    gain: float
    knobs: Values

    @property
    def title(self) -> str:
        """What is being measured, in words.

        The shape does not fit a line of a terminal.
        """
        format = self.kernel.call.attrs.get("format", "")
        return f"kernel {self.number} of {self.kernels}, {self.kernel.call.name} {format}, trial {self.trials}"

    @property
    def changed(self) -> Values:
        """The best knobs, less those that are the default's."""
        return {name: value for name, value in self.knobs.items() if getattr(self.kernel.default, name) != value}


Report = Callable[[State], None]


def search(
    kernels: Sequence[Kernel], machine: Machine, section: Section, budget: Budget, report: Report,
    save: Callable[[], None],
) -> dict[str, str]:  # fmt: skip
    """Fill the section of the database until every kernel is decided or the budget ends; `save` after each step.

    Kernels whose operands are not known are left at their defaults: key -> reason. Raises LlmcError when knobs change
    what a kernel computes.
    """
    skipped: dict[str, str] = {}
    for number, kernel in enumerate(kernels, 1):
        entry = _entry(section, kernel, machine)
        if entry.best is not None:
            continue
        try:
            one = _One(kernel, machine, entry, budget)
        except LlmcError as error:
            skipped[kernel.key] = str(error)
            continue
        try:
            for _ in one.steps():
                report(State(number, len(kernels), kernel, budget.used, *one.leader()))
                save()
        except Ended:
            break
    save()
    return skipped


def _entry(section: Section, kernel: Kernel, machine: Machine) -> Entry:
    """What is known of the kernel; anew when that was measured with other threads, or against another default."""
    known = {name: getattr(kernel.default, name) for name in kernel.knobs}
    entry = section.kernels.get(kernel.key)
    if entry is None or entry.threads != machine.threads or entry.default != known:
        entry = section.kernels[kernel.key] = Entry(known, machine.threads)
    return entry


def mean_gain(gain: dict[str, float]) -> float:
    """The geometric mean over numbers of rows."""
    return math.exp(statistics.fmean(map(math.log, gain.values()))) if gain else 1.0


class _One:
    """The search of one kernel."""

    def __init__(self, kernel: Kernel, machine: Machine, entry: Entry, budget: Budget) -> None:
        self.kernel, self.machine, self.entry, self.budget = kernel, machine, entry, budget
        self.benches: dict[int, Bench] = {rows: machine.bench(kernel, rows) for rows in ROWS}
        self.code = machine.build(kernel, kernel.default)
        self.results = {rows: bench.result(self.code) for rows, bench in self.benches.items()}
        self.calls: dict[int, int] = {}
        self.share: dict[int, float] = {}  # of the measurements asked for: long ones are steadier, and need not be many
        for rows, bench in self.benches.items():
            bench.seconds(self.code, 1)  # the first call finds nothing in any cache, its own code neither
            seconds = max(bench.seconds(self.code, 1), 1e-7)
            self.calls[rows] = max(1, min(_MOST_CALLS, math.ceil(_MEASURED_SECONDS / seconds)))
            self.share[rows] = min(1.0, 5 * _MEASURED_SECONDS / seconds)

    def steps(self) -> Iterator[None]:
        """Measure what is not yet measured, knob after knob, each from the best so far; then decide."""
        for name in self.kernel.knobs:
            start = self._best([tried for tried in self.entry.tried if not _later(tried, name, self)])
            for value in CANDIDATES[name]:
                if self._try({**start, name: value}):
                    yield
        yield from self._decide()

    def leader(self) -> tuple[float, Values]:
        """The gain and the knobs of the best so far."""
        knobs = self._best(self.entry.tried)
        found = next((tried for tried in self.entry.tried if tried.knobs == knobs), None)
        return (1.0, knobs) if found is None else (mean_gain(found.gain), knobs)

    def _best(self, tried: Sequence[Tried]) -> Values:
        """The knobs that gain most, or the default's where none gain; of about equal ones those tried first."""
        best, gain = self.entry.default, 1.0
        for each in filter(_promising, tried):
            if mean_gain(each.gain) > gain * (1 + _LEAST_GAIN):
                best, gain = each.knobs, mean_gain(each.gain)
        return best

    def _try(self, values: Values) -> bool:
        """Measure these knobs; False when they are the default's, or were measured before."""
        if values == self.entry.default or any(tried.knobs == values for tried in self.entry.tried):
            return False
        self.budget.spend()
        code = self._built(values)
        times = {rows: self._times(rows, code, _ROUNDS) for rows in self.benches}
        self.entry.tried.append(Tried(values, {str(rows): _gain(pairs) for rows, pairs in times.items()}))
        return True

    def _built(self, values: Values) -> Any:
        """The code with these knobs, which computes what the default's does."""
        code = self.machine.build(self.kernel, replace(self.kernel.default, **values))
        for rows, bench in self.benches.items():
            if bench.result(code) != self.results[rows]:
                raise LlmcError(
                    f"llmc.{self.kernel.call.name} computes something else for {rows} rows with {values} "
                    f"({self.kernel.key}); knobs must not change results: please report this"
                )
        return code

    def _times(self, rows: int, code: Any, rounds: int) -> Pairs:
        """Of the two in turns, in either order."""
        bench, calls = self.benches[rows], self.calls[rows]
        pairs = []
        for turn in range(max(3, round(rounds * self.share[rows]))):
            first = bench.seconds(self.code if turn % 2 == 0 else code, calls)
            second = bench.seconds(code if turn % 2 == 0 else self.code, calls)
            pairs.append((first, second) if turn % 2 == 0 else (second, first))
        return pairs

    def _confirmed(self, code: Any) -> dict[int, Pairs]:
        """Times of a candidate for winner: so many that it can be told whether it is one, within bounds."""
        times: dict[int, Pairs] = {rows: [] for rows in self.benches}
        for _ in range(_BATCHES):
            for rows, pairs in times.items():
                pairs += self._times(rows, code, _CONFIRMING)
            if _holds(times) or any(_gain(pairs) + _noise(pairs) < 1 - _LEAST_GAIN for pairs in times.values()):
                break
        return times

    def _decide(self) -> Iterator[None]:
        """Measure the best again until one holds, or none is left that should."""
        while sum(bool(tried.verdict) for tried in self.entry.tried) < _MOST_CONFIRMED:
            values = self._best(self.entry.tried)
            if values == self.entry.default:
                break
            tried = next(each for each in self.entry.tried if each.knobs == values)
            self.budget.spend()
            times = self._confirmed(self._built(values))
            tried.gain = {str(rows): _gain(pairs) for rows, pairs in times.items()}
            tried.verdict = "holds" if _holds(times) else "fails"
            if tried.verdict == "holds":
                self.entry.best, self.entry.microseconds = values, _medians(times)
                yield
                return
            yield
        self.entry.best = self.entry.default
        yield


def _later(tried: Tried, name: str, one: _One) -> bool:
    """Whether this was tried in the round of knob `name` or after it: a resumed search starts as the first one did."""
    own = one.kernel.knobs[one.kernel.knobs.index(name) :]
    return any(tried.knobs[each] != one.entry.default[each] for each in own)


def _gain(pairs: Pairs) -> float:
    return round(statistics.median(default / max(other, 1e-12) for default, other in pairs), 4)


def _promising(tried: Tried) -> bool:
    """Whether a candidate may win: it is nowhere clearly slower."""
    if tried.verdict:
        return tried.verdict == "holds"
    slack = 3 * _LEAST_GAIN  # a short measurement may be unlucky
    return min(tried.gain.values()) > 1 - slack


def _holds(times: dict[int, Pairs]) -> bool:
    """Whether a winner is one: at some number of rows faster by more than the noise there, and at none slower."""
    faster = any(_gain(pairs) > 1 + max(_noise(pairs), _LEAST_GAIN) for pairs in times.values())
    slower = any(min(_gain(pairs), before / after) < 1 - _LEAST_GAIN
                 for pairs, (before, after) in zip(times.values(), _medians(times).values(), strict=True))  # fmt: skip
    return faster and not slower


def _noise(pairs: Pairs) -> float:
    """Two standard errors of the median of so many ratios, as their interquartile range tells it."""
    low, _, high = statistics.quantiles((default / max(other, 1e-12) for default, other in pairs), n=4)
    return 2 * (high - low) / math.sqrt(len(pairs))


def _medians(times: dict[int, Pairs]) -> dict[str, list[float]]:
    return {
        str(rows): [round(1e6 * statistics.median(side), 3) for side in zip(*pairs, strict=True)]
        for rows, pairs in times.items()
    }
