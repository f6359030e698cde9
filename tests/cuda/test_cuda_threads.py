"""The interpreter of CUDA threads finds what is wrong with a kernel: each kernel here has one fault, or none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import from_bf16, to_bf16
from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import (
    after_launches,
    barrier,
    dynamic,
    f32,
    fill,
    held,
    launch,
    local,
    row_kernel,
    shared,
    u32,
    warp_reduce,
)  # fmt: skip
from llmc.targets.cuda.prelude import (
    bf16_pair,
    bits_set,
    commit_copies,
    copy_async,
    exp2,
    load_now,
    load_pair,
    load_pair_now,
    mma,
    sync_warp,
    votes,
    wait_copies,
)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
import cuda_threads
import tensor_cores

THREADS = 64


def neighbour(thread: Any) -> Any:
    return T.floormod(thread + 1, THREADS)


def exchanged(x: Any, out: Any, row: Any, thread: Any, wait: bool) -> None:
    """Every thread gives the number of its neighbour."""
    numbers = shared((THREADS,))
    T.buffer_store(numbers, x[row, thread], [thread])
    if wait:
        barrier()
    T.buffer_store(out, numbers[neighbour(thread)], [row, thread])


def written_again(x: Any, out: Any, row: Any, thread: Any) -> None:
    """Shared memory is written while others may still read it."""
    exchanged(x, out, row, thread, wait=True)
    numbers = shared((THREADS,))
    T.buffer_store(numbers, f32(0), [thread])
    barrier()
    T.buffer_store(out, numbers[neighbour(thread)], [row, thread])
    T.buffer_store(numbers, f32(1), [thread])


def half_wait(x: Any, out: Any, row: Any, thread: Any) -> None:
    with T.If(thread < 32), T.Then():
        barrier()
    T.buffer_store(out, x[row, thread], [row, thread])


def half_shuffle(x: Any, out: Any, row: Any, thread: Any) -> None:
    number = local((1,))
    T.buffer_store(number, x[row, thread], [0])
    with T.If(thread < 16), T.Then():
        warp_reduce(number, 0, lambda a, b: a + b)
    T.buffer_store(out, number[0], [row, thread])


def half_product(x: Any, out: Any, row: Any, thread: Any) -> None:
    sums, words = operands()
    with T.If(thread < 16), T.Then():
        mma(sums[0], words[0], words[4])
    T.buffer_store(out, sums[0], [row, thread])


def product_of_too_few(x: Any, out: Any, row: Any, thread: Any) -> None:
    sums, words = operands()
    mma(sums[0], words[0], words[5])
    T.buffer_store(out, sums[0], [row, thread])


def operands() -> tuple[Any, Any]:
    """Sums, and words of both sides of a product: ones."""
    sums, words = local((4,)), local((6,), "uint32")
    fill(sums, f32(0))
    for i in range(6):
        T.buffer_store(words, bf16_pair(f32(1), f32(1)), [i])
    return sums, words


def exchanged_twice(x: Any, out: Any, row: Any, thread: Any) -> None:
    """Memory that a loop's body asks for is the same one each time."""
    with T.serial(0, 2):
        exchanged(x, out, row, thread, wait=True)


def unwritten(x: Any, out: Any, row: Any, thread: Any) -> None:
    number = local((2,))
    T.buffer_store(number, x[row, thread], [0])
    T.buffer_store(out, number[1], [row, thread])


def copied(x: Any, out: Any, row: Any, thread: Any, first: int = 0, waits: bool = True, synced: bool = True) -> None:
    """16 threads copy the row to shared memory, and each reads what its neighbour has copied, within a warp."""
    memory, start = dynamic(THREADS + 4), thread * 4 + first
    with T.If(thread < THREADS // 4), T.Then():
        copy_async(memory[start], x[row, thread * 4], u32(16))
        commit_copies()
        if waits:
            wait_copies(0)
    if synced:
        sync_warp()
    with T.If(thread < 32), T.Then():
        number = T.reinterpret("float32", held(memory[first + T.floormod(thread + 5, 32)], "uint32"))
        T.buffer_store(out, number, [row, thread])


def never_waited_for(x: Any, out: Any, row: Any, thread: Any) -> None:
    memory = dynamic(THREADS * 4)
    copy_async(memory[thread * 4], x[row, T.floormod(thread, 16) * 4], u32(16))
    commit_copies()
    T.buffer_store(out, x[row, thread], [row, thread])


def test_launches_wait_for_those_before() -> None:
    """Before that they write nothing, and read nothing that another launch has written."""

    def made(read: bool, waits: bool) -> None:
        with IRBuilder() as builder, T.prim_func():
            x, out = arguments(["float32"] * 2, [[THREADS], [THREADS]])
            kept = T.alloc_buffer((THREADS,), "float32")
            with launch({"threadIdx.x": THREADS}) as (thread,):
                T.buffer_store(kept, x[thread], [thread])
            with launch({"threadIdx.x": THREADS}, waits=False) as (thread,):
                early = held(kept[thread] if read else x[thread])
                if waits:
                    after_launches()
                T.buffer_store(out, early, [thread])
        cuda_threads.run(builder.get(), [np.zeros(THREADS, np.float32) for _ in range(2)])

    made(read=False, waits=True)
    for read, waits in ((True, True), (False, False)):
        with pytest.raises(cuda_threads.Fault, match="touched before the launches before have ended"):
            made(read, waits)


@pytest.mark.parametrize("width", [1, 2])
def test_what_launches_write_is_read_as_no_matrix(width: int) -> None:
    """Of matrices caches may keep what was there before."""

    def made(of: int) -> np.ndarray:
        with IRBuilder() as builder, T.prim_func():
            x, out = arguments(["uint32"] * 2, [[2 * THREADS], [THREADS]])
            kept = T.alloc_buffer((2 * THREADS,), "uint32")
            with launch({"threadIdx.x": THREADS}) as (thread,):
                for i in range(2):
                    T.buffer_store(kept, x[2 * thread + i], [2 * thread + i])
            with launch({"threadIdx.x": THREADS}) as (thread,):
                found = local((2,), "uint32")
                if width == 2:
                    load_pair_now(found[0], (x, kept)[of][2 * thread])
                else:
                    T.buffer_store(found, load_now((x, kept)[of][2 * thread + 1]), [1])
                T.buffer_store(out, found[1], [thread])
        given, out = np.arange(2 * THREADS, dtype=np.uint32), np.zeros(THREADS, np.uint32)
        cuda_threads.run(builder.get(), [given, out])
        return out

    np.testing.assert_array_equal(made(0), np.arange(1, 2 * THREADS, 2))
    with pytest.raises(cuda_threads.Fault, match="read as if no launch wrote it"):
        made(1)


def test_what_a_launch_in_front_writes_is_read_when_it_has_ended() -> None:
    """Of an operand, other elements may be read before."""

    def made(first: int) -> None:
        with IRBuilder() as builder, T.prim_func():
            x, out = arguments(["float32"] * 2, [[2 * THREADS], [THREADS]])
            with launch({"threadIdx.x": THREADS}) as (thread,):
                T.buffer_store(x, f32(1), [thread])
            with launch({"threadIdx.x": THREADS}, waits=False) as (thread,):
                early = held(x[first + thread])
                after_launches()
                T.buffer_store(out, early + x[thread], [thread])
        cuda_threads.run(builder.get(), [np.zeros(2 * THREADS, np.float32), np.zeros(THREADS, np.float32)])

    made(THREADS)
    with pytest.raises(cuda_threads.Fault, match="read before the launch that writes it has ended"):
        made(THREADS - 1)


def half_vote(x: Any, out: Any, row: Any, thread: Any) -> None:
    with T.If(thread < 16), T.Then():
        T.buffer_store(out, T.cast(held(votes(thread < 3), "uint32"), "float32"), [row, thread])


def pair_between(x: Any, out: Any, row: Any, thread: Any, load: Callable[[Any, Any], None] = load_pair) -> None:
    both = local((2,))
    load(both[0], x[row, thread // 2 + 1])
    T.buffer_store(out, both[0], [row, thread])


def warps_of_others(x: Any, out: Any, row: Any, thread: Any) -> None:
    """A barrier of a warp is none for other warps."""
    numbers = shared((THREADS,))
    T.buffer_store(numbers, x[row, thread], [thread])
    sync_warp()
    T.buffer_store(out, numbers[neighbour(thread)], [row, thread])


FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    "no barrier": (lambda *a: exchanged(*a, wait=False), "read before it is written|in a race with"),
    "written while others read": (written_again, "written in a race with another thread"),
    "written the next time around": (exchanged_twice, "written in a race with another thread"),
    "one place for all": (lambda x, out, r, t: T.buffer_store(out, x[r, t], [r, 0]), "written in a race"),
    "read beside a write": (lambda x, out, r, t: T.buffer_store(x, x[r, neighbour(t)], [r, t]), "written in a race"),
    "too far": (lambda x, out, r, t: T.buffer_store(out, x[r, t + 1], [r, t]), "outside of"),
    "half of a block waits": (half_wait, "a barrier that only some threads"),
    "half of a warp shuffles": (half_shuffle, "a shuffle that only some threads"),
    "half of a warp votes": (half_vote, "a vote that only some threads"),
    "two words from anywhere": (pair_between, "no multiple of 8 bytes"),
    "two words of a matrix from anywhere": (lambda *a: pair_between(*a, load_pair_now), "no multiple of 8 bytes"),
    "half of a warp multiplies": (half_product, "a product of tensor cores that only some threads"),
    "operands beyond a buffer": (product_of_too_few, "outside of .*: 2 words from"),
    "copies that are on their way": (lambda *a: copied(*a, waits=False), "read before it is written"),
    "copies by others of the warp": (lambda *a: copied(*a, synced=False), "read in a race with"),
    "copies that nobody waits for": (never_waited_for, "copied into, and nobody waited for it"),
    "a copy between two places": (lambda *a: copied(*a, first=2), "no multiple of 16 bytes"),
    "warps that do not wait for each other": (warps_of_others, "read in a race with"),
    "nobody wrote it": (unwritten, "read before it is written"),
}


def run(body: Callable[..., None]) -> tuple[np.ndarray, np.ndarray]:
    """What goes in and what comes out."""
    shape = [tirx.Var("rows", "int64"), THREADS]
    made = row_kernel(["float32"] * 2, [shape, shape], THREADS, lambda buffers, row, t: body(*buffers, row, t))
    x, out = np.arange(3 * THREADS, dtype=np.float32).reshape(3, THREADS), np.zeros((3, THREADS), np.float32)
    cuda_threads.run(made, [x, out])
    return x, out


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    body, what = FAULTS[name]
    with pytest.raises(cuda_threads.Fault, match=what):
        run(body)


def test_what_one_launch_leaves_to_the_next() -> None:
    """Of a workspace, too, only what was written is read."""

    def doubled(read: int) -> np.ndarray:
        with IRBuilder() as builder, T.prim_func():
            x, out = arguments(["float32"] * 2, [[THREADS], [THREADS]])
            kept = T.alloc_buffer((2, THREADS), "float32")
            with launch({"threadIdx.x": THREADS}) as (thread,):
                T.buffer_store(kept, x[thread] * f32(2), [0, thread])
            with launch({"threadIdx.x": THREADS}) as (thread,):
                T.buffer_store(out, kept[read, neighbour(thread)], [thread])
        numbers = np.arange(THREADS, dtype=np.float32)
        result = np.full_like(numbers, 77)
        cuda_threads.run(builder.get(), [numbers, result])
        return result

    np.testing.assert_array_equal(doubled(0), 2 * np.roll(np.arange(THREADS, dtype=np.float32), -1))
    with pytest.raises(cuda_threads.Fault, match="read before it is written"):
        doubled(1)


def test_threads_exchange_numbers() -> None:
    x, out = run(lambda *a: exchanged(*a, wait=True))
    np.testing.assert_array_equal(out, np.roll(x, -1, axis=1))


def test_copies_arrive() -> None:
    x, out = run(copied)
    np.testing.assert_array_equal(out[:, :32], np.roll(x[:, :32], -5, axis=1))


def test_a_warp_adds_up() -> None:
    def body(x: Any, out: Any, row: Any, thread: Any) -> None:
        number = local((1,))
        T.buffer_store(number, x[row, thread], [0])
        warp_reduce(number, 0, lambda a, b: a + b)
        T.buffer_store(out, number[0], [row, thread])

    x, out = run(body)
    np.testing.assert_array_equal(out, np.repeat(x.reshape(3, 2, 32).sum(-1), 32, axis=1))


def test_a_warp_votes() -> None:
    """A bit for each lane; and what else the prelude has for numbers of a lane."""

    def body(x: Any, out: Any, row: Any, thread: Any) -> None:
        found, both = held(votes(x[row, thread] < f32(3)), "uint32"), local((2,))
        load_pair(both[0], x[row, thread // 2 * 2])
        count = T.cast(bits_set(found), "float32")
        T.buffer_store(out, count + exp2(both[1] - both[0]) * f32(100), [row, thread])

    _, out = run(body)
    np.testing.assert_array_equal(out[0], np.repeat([203, 200], 32))


def test_a_warp_multiplies() -> None:
    """Fragments as PTX lays them out ("mma.m16n8k16"): two numbers a word, of A four words a lane, of B two."""
    rng = np.random.default_rng(1)
    a, b = (from_bf16(to_bf16(rng.standard_normal(shape).astype(np.float32))) for shape in ((16, 16), (16, 8)))
    sums = rng.standard_normal((16, 8)).astype(np.float32)
    lanes = [(lane // 4, lane % 4) for lane in range(32)]
    places = [(g + 8 * (i // 2), 2 * q + i % 2) for i in range(4) for g, q in lanes]
    words_a = [a[g + 8 * (i % 2), 2 * q + 8 * (i // 2) :][:2] for i in range(4) for g, q in lanes]
    words_b = [b[2 * q + 8 * i :, g][:2] for i in range(2) for g, q in lanes]
    pairs = [to_bf16(np.array(words)).view(np.uint32).reshape(-1, 32) for words in (words_a, words_b)]
    found = tensor_cores.product(np.array([sums[at] for at in places]).reshape(4, 32), *pairs)
    np.testing.assert_allclose(found.reshape(-1), [(sums + a @ b)[at] for at in places], rtol=0, atol=1e-5)
