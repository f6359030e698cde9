"""The interpreter of CUDA threads finds what is wrong with products of four warps, and with what they read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import barrier, dynamic, f32, fill, i32, local, row_kernel, shared, u32
from llmc.targets.cuda.prelude import (
    arrive,
    begin_arrivals,
    begin_group_products,
    bf16_pair,
    commit_group_products,
    copy_whole,
    group_mma,
    wait_arrivals,
    wait_group_products,
)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
import cuda_threads

THREADS = 128
WORDS = 8 * THREADS  # of 128 rows by 16
ONES = np.uint32(0x3F803F80)  # two of them, in bfloat16


class Kernel:
    """Four warps multiply ones by ones: 64 by 16 by 128, twice, of memory that is copied to again in between."""

    copies = begins = waits = keeps = arrives = meets = waits_for_copies = True
    first_turn = 0

    def __call__(self, x: Any, out: Any, row: Any, thread: Any) -> None:
        self.row, self.thread = row, thread
        self.memory, self.a, self.sums = dynamic(WORDS), local((4,), "uint32"), local((64,))
        self.there, self.done = shared((1,), "uint64"), shared((1,), "uint64")
        with T.If(thread == 0), T.Then():
            begin_arrivals(self.there[0], 1)
            begin_arrivals(self.done[0], THREADS // 32)
        if self.meets:
            barrier()
        for turn in range(2):
            self.come(x, turn)
            self.multiply(turn)
        T.buffer_store(out, self.sums[63] if self.waits or not self.keeps else f32(0), [row, thread])

    def come(self, x: Any, turn: int) -> None:
        """What is multiplied comes into memory."""
        with T.If(self.thread == 0), T.Then():
            if turn and self.arrives:
                wait_arrivals(self.done[0], i32(0))
            if self.copies:
                copy_whole(self.memory[0], x[self.row, 0], 4 * WORDS, self.there[0])
        if not self.copies:
            for i in range(8):
                T.buffer_store(self.memory, bf16_pair(f32(1), f32(1)), [self.thread + THREADS * i])
            barrier()
        elif self.waits_for_copies is True:
            wait_arrivals(self.there[0], i32(turn + self.first_turn))
        elif self.waits_for_copies is None:
            with T.If(self.thread < 32), T.Then():
                wait_arrivals(self.there[0], i32(turn))

    def multiply(self, turn: int) -> None:
        """The product."""
        fill(self.a, bf16_pair(f32(1), f32(1)))
        if self.begins:
            begin_group_products(self.a, 4)
        group_mma(128, self.sums, self.a[0], self.memory[0], 0, 256, turn)
        commit_group_products()
        if not self.keeps:
            fill(self.a, u32(0))
        if self.waits:
            wait_group_products(0, self.sums, 128)
        if self.arrives:
            with T.If(self.thread % 32 == 0), T.Then():
                arrive(self.done[0])


def run(**options: Any) -> np.ndarray:
    """What comes out of it."""
    kernel = Kernel()
    for name, value in options.items():
        setattr(kernel, name, value)
    rows = tirx.Var("rows", "int64")
    shapes = [[rows, WORDS], [rows, THREADS]]
    made = row_kernel(["float32"] * 2, shapes, THREADS, lambda buffers, row, t: kernel(*buffers, row, t), count=1)
    x, out = np.full((2, WORDS), ONES).view(np.float32), np.zeros((2, THREADS), np.float32)
    cuda_threads.run(made, [x, out])
    return out


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "memory that tensor cores do not see": ({"copies": False}, "before registers, or shared memory, were said"),
    "registers that are not ready": ({"begins": False}, "before registers, or shared memory, were said"),
    "products that nobody waits for": ({"waits": False}, "copied over what tensor cores may still read"),
    "weights that change too early": ({"keeps": False}, "overwritten before anybody waited"),
    "counts that others do not know of": ({"meets": False}, "in a race with"),
    "copied over too early": ({"arrives": False}, "copied over what tensor cores may still read"),
    "copies that are on their way": ({"waits_for_copies": False}, "read before it is written"),
    "copies that one warp waits for": ({"waits_for_copies": None}, "only some threads of a block wait"),
    "a turn that nobody ends": ({"first_turn": 1}, "a wait that never ends"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    options, what = FAULTS[name]
    with pytest.raises(AssertionError, match=what):
        run(**options)


def test_four_warps_multiply() -> None:
    np.testing.assert_array_equal(run(), 32)
