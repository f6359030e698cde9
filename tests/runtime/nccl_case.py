"""Collectives of emulated devices by NCCL, between the processes that mpirun started; each says "equal" at its end.

    mpirun -n 3 python tests/runtime/nccl_case.py FOLDER

FOLDER has kernels.so, with the kernel that adds, and TVM's runtimes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from check_kernels import load_kernels, to_device

from llmc.runtime.cuda.device import the_device
from llmc.runtime.cuda.exchange import ADD_PARTS, DeviceCollectives, joined
from llmc.runtime.workers.collectives import Collectives
from llmc.runtime.workers.world import Leave, mpi


def wait(done: Callable[[], bool]) -> None:
    while not done():
        pass


def main() -> None:
    world = mpi().COMM_WORLD
    size, rank = world.size, world.rank
    host = Collectives(world, world.Dup(), wait, lambda *sent: None)
    communicator = joined(host.stage)
    assert communicator is not None
    direct = DeviceCollectives(communicator, host, host.everyone, range(size))
    kernels, device = load_kernels(Path(sys.argv[1])), the_device()
    direct.begin(device, kernels[ADD_PARTS])

    def run(name: str, *arguments: Any, shape: tuple[int, ...]) -> np.ndarray:
        out = to_device(device, np.full(shape, np.nan, np.float32))
        with device.ffi.use_raw_stream(device.handle, device.stream):
            direct.within("step", getattr(direct, name), *arguments, out)
        return device.read(out)

    random = np.random.default_rng(0)  # of the same numbers everywhere
    for rows, columns in ((1, 131), (50, 48), (257, 768), (256, 259)):  # the last but one is added by slices
        parts = random.standard_normal((size, rows, columns)).astype(np.float32)
        parts *= np.float32(10.0) ** random.integers(-3, 4, (size, 1, 1)).astype(np.float32)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        found = run("all_reduce", to_device(device, parts[rank]), 0, shape=(rows, columns))
        np.testing.assert_array_equal(found, total)
        widths = [16 * (1 + number) for number in range(size)]
        each = [random.standard_normal((rows, width)).astype(np.float32) for width in widths]
        found = run("all_gather", to_device(device, each[rank]), 0, sum(widths), shape=(rows, sum(widths)))
        np.testing.assert_array_equal(found, np.hstack(each))
    given = [random.standard_normal((3, 40)).astype(np.float32) for _ in range(size)]
    sent = [to_device(device, each) for each in given]

    def send_to_all(out: Any) -> None:
        for other in reversed(range(1, size)):
            direct.send(sent[other], other, out)
            device.cudart.copy(sent[other].data_ptr(), sent[0].data_ptr(), given[0].nbytes, 3, device.stream)

    if rank == 0:  # to those who take it in another order than it is given, and what was sent is overwritten meanwhile
        out = to_device(device, np.ones(1, np.int32))
        direct.within("step", send_to_all, out)
        assert device.read(out)[0] == 0
    else:
        np.testing.assert_array_equal(run("recv", sent[0], 0, 40, shape=(3, 40)), given[rank])

    def around(out: Any) -> None:
        direct.send(sent[rank], (rank + 1) % size, to_device(device, np.ones(1, np.int32)))
        direct.recv(sent[0], (rank - 1) % size, 40, out)

    out = to_device(device, np.full((3, 40), np.nan, np.float32))
    sent = [to_device(device, each) for each in given]
    direct.within("step", around, out)
    np.testing.assert_array_equal(device.read(out), given[rank - 1])
    print("equal", flush=True)
    wait(world.Ibarrier().Test)
    Leave.allowed = True


main()
