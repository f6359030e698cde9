"""How a CUDA kernel begins, and the pieces that threads of a block make together.

A kernel is a PrimFunc of one or more launches in order; a launch is a grid of blocks of threads. What a thread of a
block reads of shared memory after another has written it stands behind a `barrier`, which all threads of the block
reach. Sums are made in an order that depends on nothing but the sizes that are known here, so that a row's bits do not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.cuda.prelude import after_launches
from llmc.targets.cuda.target import STATIC_SHARED_BYTES, WARP
from llmc.targets.vector import f32, i32

Body = Callable[[list[Any], Any, Any], None]
_ALL_LANES = 0xFFFFFFFF


def row_kernel(dtypes: list[str], shapes: list[Any], threads: int, body: Body, count: int = 0) -> tirx.PrimFunc:
    """A PrimFunc that runs `body(buffers, row, thread)` in a block of its own for each row of buffer `count`."""
    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(dtypes, shapes)
        with launch({"blockIdx.x": shapes[count][0], "threadIdx.x": threads}) as (row, thread):
            body(buffers, row, thread)
    return builder.get()


@contextmanager
def launch(extents: dict[str, Any], waits: bool = True) -> Iterator[list[Any]]:
    """A grid by the names of its axes, blocks' and then threads'; gives their indices.

    It may begin before the launches in front of it have ended, and waits for them at once, or where the kernel says
    `after_launches`, which all threads do: before that it reads weights and tables alone, and writes no global memory.
    """
    with _threads(list(extents.items())) as indices:
        if waits:
            after_launches()
        yield indices


@contextmanager
def _threads(extents: list[tuple[str, Any]]) -> Iterator[list[Any]]:
    (tag, extent), *rest = extents
    with T.launch_thread(tag, extent) as index:
        if not rest:
            yield [index]
            return
        with _threads(rest) as others:
            yield [index, *others]


def by_rows(rows: Any, launches: list[tuple[int, Callable[[], None]]], most: Callable[[], None]) -> None:
    """The first of these launches that is for at most as many rows as there are, or that of `most` rows."""
    if not launches:
        most()
        return
    (count, launch), *others = launches
    with T.If(rows <= count):
        with T.Then():
            launch()
        with T.Else():
            by_rows(rows, others, most)


@contextmanager
def together(blocks: int) -> Iterator[None]:
    """In a launch whose memory is made for so many blocks of a multiprocessor: registers are not saved for more."""
    with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", blocks):
        yield


def width_threads(width: int, most: int = 256) -> int:
    """Threads for a row of so many numbers: whole warps, at least one."""
    return min(most, -(-width // WARP) * WARP)


def side_by_side(width: int, most: int = 4) -> int:
    """How many neighbouring numbers of rows of so many a thread reads at once: where rows begin at multiples of it."""
    return next(count for count in (4, 2, 1) if count <= most and width % count == 0)


def lanes(first: Any, count: int) -> Any:
    """The index of so many neighbours, of which the first is at a multiple of their number."""
    return T.ramp(first, 1, count) if count > 1 else first


def stored(first: Any, count: int) -> Any:
    """As `lanes`, for a store: of one at a sum of three numbers, a row's, a block's, a thread's, nvcc makes several."""
    return lanes(held(T.cast(T.floordiv(first, count), "int32"), "int32") * count, count)


def strided(count: int, thread: Any, threads: int, body: Callable[[Any], None]) -> None:
    """`body(i)` for every i below `count`, threads taking turns: neighbours read neighbours."""
    steps = -(-count // threads)
    with T.serial(0, steps) as step:
        index = step * threads + thread
        if count % threads:
            with T.If(index < count), T.Then():
                body(index)
        else:
            body(index)


def barrier() -> None:
    """All threads of the block have come here, and see what the others wrote to shared memory."""
    T.evaluate(T.tvm_storage_sync("shared"))


def shared(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Memory of the block."""
    return T.alloc_buffer(shape, dtype, scope="shared")


def dynamic(words: int, beside: int = 0) -> Any:
    """Words of memory of the block that the launch asks for, one array, beside so many bytes of other shared memory.

    A driver refuses a launch of more than 48 KiB in all that was not announced to it, and TVM announces what is asked
    for from 48 KiB on: where only both together are more, as much is asked for.
    """
    if 4 * words + beside > STATIC_SHARED_BYTES:
        words = max(words, STATIC_SHARED_BYTES // 4)
    return T.alloc_buffer((words,), "uint32", scope="shared.dyn")


def local(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Registers of the thread, where every index is known once loops are unrolled."""
    return T.alloc_buffer(shape, dtype, scope="local")


def fill(buffer: Any, value: Any) -> None:
    """Every number of a short one-dimensional register array."""
    for i in range(int(buffer.shape[0])):
        T.buffer_store(buffer, value, [i])


def held(value: Any, dtype: str = "float32") -> Any:
    """A number computed once, to be read several times; and, before `reinterpret`, one that CUDA C++ can point to."""
    one = local((1,), dtype)
    T.buffer_store(one, value, [0])
    return one[0]


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once, whatever a compiler makes of what stands beside it."""
    return T.call_pure_extern("float32", "__fmaf_rn", a, b, c)


def warp_reduce(buffer: Any, at: int, combine: Callable[[Any, Any], Any], lanes: int = WARP) -> None:
    """A register of so many neighbouring lanes combined, of the warp if nothing is said, in each; neighbours last."""
    distance = lanes // 2
    while distance:
        other = T.tvm_warp_shuffle_xor(tirx.const(_ALL_LANES, "uint32"), buffer[at], distance, WARP, WARP)
        T.buffer_store(buffer, combine(buffer[at], other), [at])
        distance //= 2


def shuffled(value: Any, distance: int, dtype: str = "uint32") -> Any:
    """What the lane has whose number differs in this bit."""
    other = T.tvm_warp_shuffle_xor(tirx.const(_ALL_LANES, "uint32"), value, distance, WARP, WARP)
    return held(other, dtype)


def from_lane(value: Any, lane: int, lanes: int) -> Any:
    """The float32 that lane `lane` has, of so many neighbouring ones."""
    return held(T.tvm_warp_shuffle(tirx.const(_ALL_LANES, "uint32"), value, lane, lanes, WARP))


def block_reduce(buffer: Any, at: int, thread: Any, threads: int, combine: Callable[[Any, Any], Any]) -> None:
    """The same of all threads of the block: by warps, and of warps by two neighbours, by two of these and so on."""
    warp_reduce(buffer, at, combine)
    warps = threads // WARP
    if warps == 1:
        return
    parts = shared((warps,), str(buffer.dtype))
    with T.If(T.floormod(thread, WARP) == 0), T.Then():
        T.buffer_store(parts, buffer[at], [T.floordiv(thread, WARP)])
    barrier()
    found = [parts[warp] for warp in range(warps)]
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=False)
        found = [combine(*pair) for pair in pairs] + found[len(found) & ~1 :]
    T.buffer_store(buffer, found[0], [at])


def added(a: Any, b: Any) -> Any:
    """For reductions: the sum."""
    return a + b


def greater(a: Any, b: Any) -> Any:
    """For reductions: the greater."""
    return T.max(a, b)


def u32(value: int) -> Any:
    """A uint32 constant."""
    return tirx.const(value, "uint32")


def bf16_bits(value: Any) -> Any:
    """Float32 -> the bits of the nearest bfloat16, ties to even, in uint16; as formats.to_bf16 rounds."""
    bits = T.reinterpret("uint32", value)
    rounded = bits + tirx.const(0x7FFF, "uint32") + ((bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32"))
    return T.cast(rounded >> tirx.const(16, "uint32"), "uint16")


def bf16_pair(first: Any, second: Any) -> Any:
    """Two float32 -> the int32 of both as bfloat16, the first one low."""
    low, high = (T.cast(bf16_bits(value), "uint32") for value in (first, second))
    return T.reinterpret("int32", low | (high << u32(16)))


def from_bf16(bits: Any) -> Any:
    """Bits of a bfloat16, in uint16, or in the low half of uint32 -> float32."""
    return T.reinterpret("float32", T.cast(bits, "uint32") << tirx.const(16, "uint32"))


__all__ = [
    "added", "after_launches", "barrier", "bf16_bits", "bf16_pair", "block_reduce", "by_rows", "dynamic", "f32", "fill",
    "fma", "from_bf16",
    "from_lane", "greater", "held", "i32", "lanes", "launch", "local", "row_kernel", "shared", "shuffled",
    "side_by_side", "stored", "strided", "together", "u32", "warp_reduce", "width_threads",
]  # fmt: skip
