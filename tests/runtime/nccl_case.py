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
from llmc.runtime.cuda.exchange import ADD_PARTS, by_nccl
from llmc.runtime.workers.collectives import Collectives
from llmc.runtime.workers.world import Leave, mpi


def wait(done: Callable[[], bool]) -> None:
    while not done():
        pass


def main() -> None:
    world = mpi().COMM_WORLD
    size, rank = world.size, world.rank
    direct = by_nccl(Collectives(world, world.Dup(), wait, lambda *sent: None))
    assert direct is not None
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
    print("equal", flush=True)
    wait(world.Ibarrier().Test)
    Leave.allowed = True


main()
