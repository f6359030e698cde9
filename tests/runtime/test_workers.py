"""What workers send each other: messages, and the numbers of collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmc.runtime.errors import RequestError
from llmc.runtime.workers.calls import ANSWER, CALL, COPY, packed, unpacked
from llmc.runtime.workers.front import Front

MPIRUN = Path(sys.executable).with_name("mpirun")


def test_messages_come_out_as_they_went_in() -> None:
    random = np.random.default_rng(0)
    arrays = [
        random.integers(-9, 9, 5, dtype=np.int32), random.integers(0, 9, (7, 2), dtype=np.int32),
        random.standard_normal((3, 41)).astype(np.float32), np.empty((0, 4), np.float32), np.float32([[np.nan]]),
        random.standard_normal((9, 6)).astype(np.float32)[:2],
    ]  # fmt: skip
    for kind, numbers, sent in ((COPY, (0, 3, 2**31 - 1), []), (CALL, (1, 2), arrays), (ANSWER, (), arrays[2:])):
        message = packed(kind, numbers, sent)
        assert message.size % 16 == 0
        found = unpacked(message)
        assert (found.kind, found.numbers) == (kind, numbers)
        for got, wanted in zip(found.arrays, sent, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)
            if got.size:
                assert (got.ctypes.data - message.ctypes.data) % 64 == 0  # as kernels want it


def test_a_cache_is_as_large_as_the_least_room_allows() -> None:
    front = Front.__new__(Front)
    front._team = SimpleNamespace(least=lambda number: min(number, 640))  # type: ignore[assignment]
    assert [front.tokens(1000, asked=False), front.tokens(640, asked=True), front.tokens(16, asked=True)] == [
        640,
        640,
        16,
    ]
    with pytest.raises(RequestError, match="cache_tokens: got 1000, and a device has room for 640"):
        front.tokens(1000, asked=True)


@pytest.mark.mpi
@pytest.mark.parametrize("count", [2, 3])
def test_collectives_give_what_they_mean(count: int) -> None:
    case = Path(__file__).with_name("collectives_case.py")
    command = [str(MPIRUN), "-n", str(count), sys.executable, str(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == count
