"""Text without end in a cache of fixed size: what a sequence forgets when it is full, and what that does to its pages.

Three ways (docs/endless.md). "sinks": the first tokens and the recent ones stay, and the first are shown as if they
stood right before the recent ones (https://arxiv.org/abs/2309.17453). "shift": the same, but all recent keys are turned
back instead. "reevaluate": what stays is read again as a text of its own.

All of it is in the sequence: its hole, its position and its tables. While "sinks" slides, the tables of a model with
rope are [sinks, turned forward][sinks as they were read][partly forgotten][recent pages]..., and the hole reaches from
the end of the sinks to the first recent token. Pages of text are never written again, so they may be shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llmc.runtime.cache.pages import Sequence, pages_for
from llmc.runtime.decoding.options import Options
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import PAGE_TOKENS
from llmc.runtime.runner import Ids, Runner

SINKS, SHIFT, REEVALUATE = "sinks", "shift", "reevaluate"
MODES = (SINKS, SHIFT, REEVALUATE)

_DISCARD = PAGE_TOKENS  # tokens forgotten at once by "sinks" and "shift"


class Window(NamedTuple):
    """How a query's text slides: at most `size` tokens are seen; of a full window the oldest `discard` are forgotten.

    The first `keep` tokens always stay. What a row sees depends on its place in the text alone, not on the steps that
    it was read in, so batching, chunks and preemption change nothing. Sequences may share a window.
    """

    mode: str
    keep: int
    discard: int
    size: int
    turned: bool  # whether keys are turned; else positions need no care, or the text is read again

    @property
    def pages(self) -> int:
        """Pages that a sequence holds at most."""
        return pages_for(self.size + spare_slots(self.mode, self.keep, self.turned))

    def rows(self, sequence: Sequence) -> int:
        """Tokens that may be fed in one step; none when the window is full, see `make_room`."""
        return self.size - visible(sequence)

    def make_room(self, runner: Runner, sequence: Sequence, read: Callable[[], Ids]) -> list[int]:
        """Forget tokens if the window is full. Gives the ids to feed before anything else, empty unless reevaluating.

        read: gives all ids that were fed to the sequence, forgotten ones too; asked only when reevaluating. Raises
        RequestError when pages are short; nothing has moved then.
        """
        if self.rows(sequence) > 0:
            return []
        with runner.lock:
            if self.mode == REEVALUATE:
                ids = read()
                recent = len(ids) - (self.size - self.keep - self.discard)
                left = runner.pool.truncate(sequence, self.keep)
                return [int(token) for token in (*ids[left : self.keep], *ids[recent:])]
            if self.mode == SHIFT:
                self._shift(runner, sequence)
            else:
                self._slide(runner, sequence)
        return []

    def _slide(self, runner: Runner, sequence: Sequence) -> None:
        sinks = pages_for(self.keep)
        head = sinks * PAGE_TOKENS if self.turned else 0  # slots of the turned copy
        if self.turned and sinks:
            if not sequence.hole[1]:
                runner.pool.insert(sequence, 0, sinks)
                sequence.hole = (self.keep, head + self.keep)
            runner.pool.own(sequence, 0, sinks)
        start = max(sequence.hole[1], head + self.keep)
        # Distances are told by whole pages, so the sinks' page has nothing else to show from here on.
        end = max(start + self.discard, head + sinks * PAGE_TOKENS)
        seen = visible(sequence) - (end - start)
        if self.turned and sinks:
            table = sequence.tables[0]
            by = np.full(sinks * PAGE_TOKENS, sequence.position - seen, np.int32)
            runner.turn(by, table[sinks : 2 * sinks], table[:sinks])
        self._forget(runner, sequence, end, pages_for(head + self.keep))

    def _shift(self, runner: Runner, sequence: Sequence) -> None:
        end = max(sequence.hole[1], self.keep) + self.discard
        used = pages_for(sequence.length)
        runner.pool.own(sequence, 0, used)
        by = np.full(used * PAGE_TOKENS, -self.discard, np.int32)
        by[: self.keep] = 0
        runner.turn(by, sequence.tables[0][:used], sequence.tables[0][:used])
        sequence.position -= self.discard
        self._forget(runner, sequence, end, pages_for(self.keep))

    def _forget(self, runner: Runner, sequence: Sequence, end: int, first: int) -> None:
        """Move the end of the hole to slot `end`, and give back the pages from `first` on that lie before it."""
        dead = max(0, end // PAGE_TOKENS - first)
        if dead:
            runner.pool.cut(sequence, first, first + dead)
        sequence.hole = (self.keep, end - dead * PAGE_TOKENS)


def visible(sequence: Sequence) -> int:
    """Tokens of a sequence that its next row sees, where no layer has a window of its own."""
    return sequence.length - (sequence.hole[1] - sequence.hole[0])


def window_of(options: Options, runner: Runner) -> Window | None:
    """The window that `options` ask for, None if the text shall end; RequestError if the model has no such thing."""
    mode = options.endless
    if not mode:
        return None
    if mode not in runner.endless:
        can = ", ".join(runner.endless) or "none"
        raise RequestError(f"endless: got {mode}, and the positions of this model's tokens allow: {can}")
    turned = runner.turn_function is not None and mode != REEVALUATE
    keep = options.n_keep or 0
    spare = spare_slots(mode, keep, turned)
    size = options.window or min(runner.context, runner.pool.num_pages * PAGE_TOKENS - spare)
    discard = options.n_discard or (max(1, (size - keep) // 2) if mode == REEVALUATE else _DISCARD)
    window = Window(mode, keep, discard, size, turned)
    problems = _problems(window, runner)
    if problems:
        raise RequestError("; ".join(problems))
    return window


def _problems(window: Window, runner: Runner) -> list[str]:
    """What is wrong with the sizes of a window."""
    problems = []
    if window.size > runner.context:
        problems.append(f"window: got {window.size}, and the model's context is {runner.context}")
    if window.pages > runner.pool.num_pages:
        room = runner.pool.num_pages * PAGE_TOKENS - spare_slots(window.mode, window.keep, window.turned)
        problems.append(f"window: got {window.size}, and the cache has room for one of {max(0, room)}")
    least, beside = window.keep + window.discard + 1, ""
    if window.mode == SINKS:
        near = max(group.window for group in runner.pool.groups)  # which these layers go on seeing in full
        least = max(window.keep + window.discard, pages_for(window.keep) * PAGE_TOKENS) + max(1, near)
        beside = f", beside the {near} that some layers see" if near else ""
    if window.size < least:
        wish = f"to keep {window.keep} and discard {window.discard}{beside}"
        problems.append(f"window: got {window.size}, wanted at least {least} {wish}")
    return problems


def spare_slots(mode: str, keep: int, turned: bool) -> int:
    """Slots that a sequence takes beside those that are seen: the sinks' second copy, and what is partly forgotten."""
    sinks = pages_for(keep) * PAGE_TOKENS
    return {
        SINKS: sinks - keep + (sinks if turned else 0) + PAGE_TOKENS - 1,
        SHIFT: sinks - keep + PAGE_TOKENS - 1,
        REEVALUATE: 0,
    }[mode]
