"""A short run of every reader's fuzzing; docs/threats.md tells of the long ones."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run
from readers import READERS, Reader

COUNT, SEED = 250, 2


@pytest.mark.parametrize("name", READERS)
def test_changed_inputs_are_read_or_refused(name: str) -> None:
    counts, failures = run.fuzz(name, COUNT, SEED)
    assert not failures, "\n".join(failures)
    assert counts.read + counts.refused == COUNT
    assert counts.refused > 0 or name == "gguf-blocks"  # where any bytes are numbers
    assert counts.read > 0


def _broken(read: Callable[[Any], None]) -> Callable[[Path], Reader]:
    """A reader that takes its one sample, and does with all else what it must not."""
    return lambda _: Reader(["good"], lambda random: "bad", lambda data: None if data == "good" else read(data))


def _raise(error: BaseException) -> Callable[[Any], None]:
    def read(_: Any) -> None:
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (_raise(KeyError("x")), "KeyError"),
        (_raise(MemoryError()), "MemoryError"),
        (_raise(run.LlmcError("two\nlines")), "not one line"),
        (lambda _: os.system("true"), "did os.system"),
        (lambda _: _work(0.05), "took"),
    ],
)
def test_what_counts_as_a_failure(read: Callable[[Any], None], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.READERS, "broken", _broken(read))
    monkeypatch.setattr(run, "SECONDS", 0.01)
    counts, failures = run.fuzz("broken", 30, 1)
    assert counts.read + counts.refused <= 30
    assert len(failures) == 20  # and it stops there
    assert told in failures[0]
    assert "--reader broken --seed 1 --first 0" in failures[0]


def _work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
