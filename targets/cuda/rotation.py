"""The rotation of K and V in pages of 4 bits (compiler/kv_pages.py, `rotate`), by the threads of a block."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import rotated_block
from llmc.targets.cuda.launch import barrier, f32, local, strided


def rotate(x: Any, count: int, size: int, thread: Any, threads: int) -> None:
    """Vectors of `size` numbers, `count` numbers in all, in place in shared memory; it begins and ends with a barrier.

    Sums are made as in the NumPy meaning: nothing in them can be fused, so the bits are the same.
    """
    block, distance = rotated_block(size), 1
    barrier()
    while distance < block:
        last = 2 * distance == block
        _sums_and_differences(x, count, distance, f32(block**-0.5) if last else None, thread, threads)
        barrier()
        distance *= 2


def _sums_and_differences(x: Any, count: int, apart: int, factor: Any, thread: Any, threads: int) -> None:
    """a and b that stand `apart` from each other become a + b and a - b, the last time by a factor."""

    def one(pair: Any) -> None:
        both = local((2,))
        first = T.floordiv(pair, apart) * (2 * apart) + T.floormod(pair, apart)
        T.buffer_store(both, x[first], [0])
        T.buffer_store(both, x[first + apart], [1])
        for place, value in ((first, both[0] + both[1]), (first + apart, both[0] - both[1])):
            T.buffer_store(x, value if factor is None else value * factor, [place])

    strided(count // 2, thread, threads, one)
