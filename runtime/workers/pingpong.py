"""How long messages between two workers take here: `mpirun -n 2 python -m llmc.runtime.workers.pingpong`.

Each process keeps to a core of its own, as a device would, and calls the collectives that compiled modules
call, as they do. Rank 0 prints JSON: `latency_s` and `bytes_per_s` of an all_reduce, and `wake_s`, by how much later
a message is answered by who has waited for long; `unsteady`, how much the time of some reading varies from one sum to
the next (a standard deviation, as a part of that time), which costs where one waits for the other.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmc.runtime.loading.library import import_ffi
from llmc.runtime.workers.collectives import HostMemory
from llmc.runtime.workers.team import Team
from llmc.runtime.workers.world import launched, place

_SMALL, _LARGE = 64, 1 << 18  # numbers
_LONG_S = 0.006  # a stage's step
_WARM = 10
_READ, _TOGETHER, _ROUNDS = 1 << 22, 40, 20  # numbers that are read between two sums, 16 MB; sums of a round; rounds
_GREATEST_OF_TWO = 0.589  # the mean of the greater of two normal numbers, in standard deviations (Blom)


def main() -> None:
    """Measure, and print in rank 0."""
    if not launched():
        sys.exit("start it with mpirun -n 2")
    rank, size = place()
    if size != 2:
        sys.exit(f"{size} processes, wanted 2")
    _keep_to_a_core(rank)
    ranks = [SimpleNamespace(stage=0, device=str(each)) for each in range(size)]
    manifest: Any = SimpleNamespace(rank=rank, ranks=ranks)
    team = Team(manifest)
    team.collectives.register(HostMemory())
    small, large = _summed(_SMALL, 400), _summed(_LARGE, 40)
    near, far = _answered(rank, 0.0, 200), _answered(rank, _LONG_S, 60)
    unsteady = _unsteady(small)
    if rank == 0:
        rate = 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
        found = {"latency_s": small, "bytes_per_s": rate, "wake_s": max(0.0, far - near), "unsteady": unsteady}
        print(json.dumps(found), flush=True)
    team.close()


def _keep_to_a_core(rank: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _called(name: str, numbers: int) -> tuple[Any, Any, Any]:
    """A collective as compiled code finds it, with an operand and where its result goes."""
    ffi = import_ffi()
    tensors = [ffi.from_dlpack(np.zeros((1, numbers), np.float32)) for _ in range(2)]
    return ffi.get_global_func(f"llmc.{name}"), *tensors


def _summed(numbers: int, times: int) -> float:
    """Median seconds of a sum over both, one call behind the other."""
    function, x, out = _called("all_reduce", numbers)
    found = []
    for _ in range(times + _WARM):
        start = time.perf_counter()
        function(x, 0, out)
        found.append(time.perf_counter() - start)
    return statistics.median(found[_WARM:])


def _unsteady(latency_s: float) -> float:
    """From how much longer both take when they meet behind each piece of work than when they do not."""
    function, x, out = _called("all_reduce", _SMALL)
    read = np.ones(_READ, np.float32)

    def seconds(meet: bool) -> float:
        function(x, 0, out)
        start = time.perf_counter()
        for _ in range(_TOGETHER):
            read.sum()
            if meet:
                function(x, 0, out)
        return (time.perf_counter() - start) / _TOGETHER - latency_s * meet

    rounds = [(seconds(False), seconds(True)) for _ in range(_ROUNDS)][1:]
    apart, met = (statistics.fmean(each) for each in zip(*rounds, strict=True))
    return max(0.0, met / apart - 1) / _GREATEST_OF_TWO


def _answered(rank: int, pause: float, times: int) -> float:
    """Median seconds in which a message is answered by one who has waited for so long."""
    send, x, zero = _called("send", _SMALL)
    recv, like, out = _called("recv", _SMALL)
    found = []
    for turn in range(times + _WARM):
        if rank == 1:
            recv(like, 0, _SMALL, out)
            send(x, 0, zero)
            continue
        until = time.perf_counter() + pause * (1 + turn / times / 4)  # not in step with the other's rests
        while time.perf_counter() < until:
            pass
        start = time.perf_counter()
        send(x, 1, zero)
        recv(like, 1, _SMALL, out)
        found.append(time.perf_counter() - start)
    return statistics.median(found[_WARM:]) if found else 0.0


if __name__ == "__main__":
    main()
