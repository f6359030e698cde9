"""Loops whose turns go to threads, for kernels that hold more than there are registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.target import Target
from llmc.targets.vector import LANES, i32, imported, registers

# An array at a multiple of 64 bytes that nothing reads. LLVM learns of spilled registers too late to align a stack for
# them; they would lie across lines of the cache, or not, as the caller's stack has it.
_ALIGNED = """
define i32 @llmc_align_stack() alwaysinline {
  %place = alloca <16 x i32>, align 64
  call void asm sideeffect "", "r"(ptr %place)
  ret i32 0
}
"""


def _forgotten(registers: list[str]) -> str:
    """Says that these registers are written."""
    return f"""
define i32 @llmc_forget_registers() alwaysinline {{
  call void asm sideeffect "", "{",".join(f"~{{{register}}}" for register in registers)}"()
  ret i32 0
}}
"""


# Threads take turns from a number that they share; which of them takes which does not matter.
_TAKE = """
define i32 @llmc_take(ptr %taken, i32 %some) alwaysinline {
  %first = atomicrmw add ptr %taken, i32 %some monotonic
  ret i32 %first
}
"""
_SHARED_BYTES = 1 << 20  # that a loop reads, for its turns to be shared out as it goes: measured
_PIECES = 128  # of the turns, for a thread to take one at a time,
_TAKEN_BYTES = 32 << 10  # or more of them, if they are to be worth it


def forget_registers(target: Target) -> None:
    """What follows finds its constants in memory, not in vector registers, where those are many: measured.

    LLVM loads the constants of a loop ahead of it. So those of what is done at the end of each turn are held, or
    spilled and fetched, all through the loops before it, which need the registers.
    """
    kinds = {"avx512f": [f"zmm{number}" for number in range(32)], "avx2": [f"ymm{number}" for number in range(16)]}
    known = next((registers for flag, registers in kinds.items() if target.has(flag)), None)
    if known is not None:
        with imported(_forgotten(known)):
            T.evaluate(T.call_extern("int32", "llmc_forget_registers"))


@contextmanager
def _aligned(target: Target) -> Iterator[None]:
    """A function of its own, whose spilled registers are aligned."""
    wide = target.has("avx")
    with imported(*[_ALIGNED] * wide):
        if wide:
            T.evaluate(T.call_extern("int32", "llmc_align_stack"))
        yield


@contextmanager
def parallel(target: Target, count: Any, turn_bytes: int = _TAKEN_BYTES) -> Iterator[Any]:
    """The number of the turn, below `count`. The body is a function of its own, whose spilled registers are aligned.

    Threads are never equally fast: one waits for memory that others read too, or for its CPU. Each has a part of the
    first three quarters to itself, in a row, as memory likes it; of the rest they take a few turns at a time.
    `turn_bytes`: what a turn reads from memory. Loops that read little are over before that is worth it.
    """
    if isinstance(count, int) and count * turn_bytes < _SHARED_BYTES:
        with T.parallel(0, count) as turn, _aligned(target):
            yield turn
        return
    count = T.cast(count, "int32")
    alone = T.max(T.floordiv(count * 3, i32(4)), i32(1))
    some = T.max(T.floordiv(count, i32(_PIECES)), i32(-(-_TAKEN_BYTES // turn_bytes)))
    taken = registers((2 * LANES,), "int32")  # one number, alone in its line of the cache
    T.buffer_store(taken, alone, [LANES])
    with T.attr(i32(0), "pragma_parallel_launch_point", i32(1)), _aligned(target), imported(_TAKE):
        own = _own_range(alone)
        with T.While(own[0] < count):
            with T.serial(own[0], own[1]) as turn:
                yield turn
            T.buffer_store(own, T.call_extern("int32", "llmc_take", T.address_of(taken[LANES]), some), [0])
            T.buffer_store(own, T.min(own[0] + some, count), [1])


def _own_range(count: Any) -> Any:
    """The first of `count` that is this thread's, and the one after the last: both 0 if none is.

    TVM shares out the turns of a loop and tells nobody how; so the loop notes it.
    """
    own = registers((2,), "int32")
    T.buffer_store(own, count, [0])
    T.buffer_store(own, i32(0), [1])
    with T.parallel(0, count) as turn:
        T.buffer_store(own, T.min(own[0], T.cast(turn, "int32")), [0])
        T.buffer_store(own, T.cast(turn, "int32") + 1, [1])
    T.buffer_store(own, T.min(own[0], own[1]), [0])
    return own


@contextmanager
def parallel_ranges(target: Target, count: int) -> Iterator[tuple[Any, Any]]:
    """The first of `count` that is this thread's, and the one after the last: what it does stands together.

    There may be none: the body, which is as `parallel`'s, is for all threads.
    """
    with T.attr(i32(0), "pragma_parallel_launch_point", i32(1)), _aligned(target):
        own = _own_range(i32(count))
        yield own[0], own[1]
