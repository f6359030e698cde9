"""Runs a CUDA kernel's TIR on the CPU, its threads side by side in NumPy, and finds what a GPU would not say.

The PrimFunc is the very one that nvcc gets. Every expression is an array over the threads of the grid; branches and
loops are masks. What is checked on the way, each a `Fault`:

- a read or write outside a buffer, of a thread that is not masked off
- a read of shared memory, of a register array or of a workspace that nobody has written
- a barrier that only some threads of a block reach
- a race: between two barriers a thread touches an element of shared memory that another one of the block writes; or,
  in one launch, one of a global buffer that any other thread writes. Threads of a warp are threads like others
- a shuffle from a lane that is masked off
- a read of what is still being copied, and a copy that nobody waits for
- a write, or a read of what another launch of the kernel wrote, before a launch has waited for those in front of it
- products of four warps whose operands are not ready or change, or that nobody waits for (group_products.py)

A barrier of a warp parts what its own threads did before from what they do after. Time stands still between threads,
so whatever order they ran in would show as a race and nothing else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tvm import tirx

from llmc.targets.cuda.prelude import COPIED
from llmc.targets.cuda.target import WARP

sys.path.insert(0, str(Path(__file__).parent))
import arrivals
import tensor_cores
from arrivals import Arrivals
from group_products import NAMES, GroupProducts
from thread_memory import Copies, Fault, Memory
from thread_numbers import BINARY, CALLS, aligned, scalar

Array = np.ndarray[Any, Any]


def run(function: tirx.PrimFunc, arrays: list[Array]) -> None:
    """Run a kernel on arrays, operands and then outputs, all C-contiguous; outputs are written in place."""
    sizes: dict[Any, int] = {}
    buffers: dict[Any, tuple[tuple[int, ...], Array, Array | None, Array]] = {}
    for param, array in zip(function.params, arrays, strict=True):
        assert array.flags.c_contiguous
        assert array.dtype == np.dtype(str(param.dtype)), (param.dtype, array.dtype)
        for size, got in zip(param.shape, array.shape, strict=True):
            if isinstance(size, tirx.IntImm):
                assert int(size) == got, (param.shape, array.shape)
            else:
                assert sizes.setdefault(size, got) == got
        buffers[param] = (array.shape, array.reshape(1, -1), None, np.zeros((1, array.size), bool))
    with np.errstate(all="ignore"):
        _host(function.body, buffers, sizes)


def _host(stmt: Any, buffers: dict[Any, Any], sizes: dict[Any, int]) -> None:
    """What stands outside of launches: statements in order, and choices between launches by sizes."""
    kind = type(stmt).__name__
    if kind == "SeqStmt":
        for part in stmt.seq:
            _host(part, buffers, sizes)
    elif kind == "IfThenElse":
        chosen = stmt.then_case if _size(stmt.condition, sizes) else stmt.else_case
        if chosen is not None:
            _host(chosen, buffers, sizes)
    elif kind == "AllocBuffer":
        shape = tuple(_size(size, sizes) for size in stmt.buffer.shape)
        data = np.full((1, math.prod(shape)), np.nan, str(stmt.buffer.dtype))
        buffers[stmt.buffer] = (shape, data, np.zeros(data.shape, bool), np.zeros(data.shape, bool))
    elif kind == "AttrStmt" and stmt.attr_key == "thread_extent":
        _Launch(stmt, buffers, sizes)
    else:
        raise Fault(f"outside of a launch: {kind}")


def _size(expr: Any, sizes: dict[Any, int]) -> int:
    launch = _Launch.__new__(_Launch)
    launch.values, launch.count = {var: np.array([value], np.int64) for var, value in sizes.items()}, 1
    return int(launch.value(expr, np.ones(1, bool))[0])


class _Launch:
    """One launch: its threads, their values and memory."""

    def __init__(self, stmt: Any, buffers: dict[Any, Any], sizes: dict[Any, int]) -> None:
        extents: dict[str, tuple[Any, int]] = {}
        while type(stmt).__name__ == "AttrStmt" and stmt.attr_key == "thread_extent":
            extents[str(stmt.node.thread_tag)] = (stmt.node.var, _size(stmt.value, sizes))
            stmt = stmt.body
        # blockIdx before threadIdx, x fastest: threads of a block, and of a warp, stand together.
        order = sorted(extents, key=lambda tag: (tag.startswith("thread"), -ord(tag[-1])))
        counts = [extents[tag][1] for tag in order]
        self.count = math.prod(counts)
        self.block_threads = math.prod(n for tag, n in zip(order, counts, strict=True) if tag.startswith("thread"))
        assert 0 < self.block_threads <= 1024
        assert self.block_threads % WARP == 0
        places = np.unravel_index(np.arange(self.count), counts)
        self.thread = np.arange(self.count)
        self.block = self.thread // self.block_threads
        self.values: dict[Any, Array] = {var: np.array([value], np.int64) for var, value in sizes.items()}
        for tag, place in zip(order, places, strict=True):
            self.values[extents[tag][0]] = place.astype(str(extents[tag][0].ty.dtype))
        self.memory = {
            buffer: Memory(str(buffer.name), shape, data, "global", written, changed)
            for buffer, (shape, data, written, changed) in buffers.items()
        }
        self.copies: list[Copies] = []
        self.groups = np.zeros(self.count, np.int64)  # of copies, that each thread has made
        self.waited = False  # for the launches before
        everyone = np.ones(self.count, bool)
        self.arrivals = Arrivals(self.block_threads // WARP)
        self.products = GroupProducts(self.count, self._pointed, self.value, self.arrivals)
        self.run(stmt, everyone)
        if not self.waited:
            raise Fault("a launch that never waits for those before it")
        if self.products.waiting:
            raise Fault("products of four warps that nobody waited for")
        if self.copies:
            raise Fault(f"{self.copies[0].memory.name}: copied into, and nobody waited for it")

    def run(self, stmt: Any, mask: Array) -> None:
        """Statements, for the threads of the mask."""
        getattr(self, f"_run_{type(stmt).__name__}")(stmt, mask)

    def _run_SeqStmt(self, stmt: Any, mask: Array) -> None:
        for part in stmt.seq:
            self.run(part, mask)

    def _run_AttrStmt(self, stmt: Any, mask: Array) -> None:
        self.run(stmt.body, mask)

    def _run_AllocBuffer(self, stmt: Any, mask: Array) -> None:
        buffer, scope = stmt.buffer, str(stmt.buffer.scope()).removesuffix(".dyn")
        if buffer in self.memory and scope == "shared":
            self.memory[buffer].begin_again(np.unique(self.block[mask]))
            return
        shape = tuple(int(size) for size in buffer.shape)
        spaces = {"shared": self.count // self.block_threads, "local": self.count}[scope]
        data = np.zeros((spaces, math.prod(shape)), str(buffer.dtype))
        if data.dtype.kind == "f":
            data[...] = np.nan
        self.memory[buffer] = Memory(str(buffer.name), shape, data, scope, np.zeros(data.shape, bool))

    def _run_Bind(self, stmt: Any, mask: Array) -> None:
        self.values[stmt.var] = self.value(stmt.value, mask)

    def _run_BufferStore(self, stmt: Any, mask: Array) -> None:
        memory, value = self.memory[stmt.buffer], self.value(stmt.value, mask)
        self._touch(memory, written=True)
        space, at, thread, places = self._places(memory, stmt.indices, mask)
        width = at.shape[1]
        if value.ndim == 1:
            value = value[:, None]
        spread = np.broadcast_to(value, (self.count, width))[places].astype(memory.data.dtype, casting="same_kind")
        for lane in range(width):
            memory.write(space, at[:, lane], thread, spread[:, lane])

    def _run_For(self, stmt: Any, mask: Array) -> None:
        assert int(stmt.kind) in (0, 3), "a serial or an unrolled loop"
        first, extent = self.value(stmt.min, mask), self.value(stmt.extent, mask)
        step = 0
        while True:
            inside = mask & (step < extent)
            if not inside.any():
                break
            self.values[stmt.loop_var] = (first + step).astype(str(stmt.loop_var.ty.dtype))
            self.run(stmt.body, inside)
            step += 1

    def _run_IfThenElse(self, stmt: Any, mask: Array) -> None:
        chosen = self.value(stmt.condition, mask).astype(bool)
        for part, inside in ((stmt.then_case, mask & chosen), (stmt.else_case, mask & ~chosen)):
            if part is not None and inside.any():
                self.run(part, inside)

    def _run_Evaluate(self, stmt: Any, mask: Array) -> None:
        if isinstance(stmt.value, tirx.IntImm):
            return
        name = str(stmt.value.op.name)
        if name.endswith(".call_extern"):
            self._device_function(stmt.value, mask)
            return
        if not name.endswith(".tvm_storage_sync") or stmt.value.args[0].value != "shared":
            raise Fault(f"a statement that this knows nothing of: {name}")
        reached = mask.reshape(-1, self.block_threads)
        if (reached.any(1) != reached.all(1)).any():
            raise Fault("a barrier that only some threads of a block reach")
        for memory in self.memory.values():
            if memory.scope == "shared":
                memory.forget(reached.all(1))

    def _device_function(self, call: Any, mask: Array) -> None:
        """What targets/cuda/prelude.py has beside expressions."""
        name = str(call.args[0].value)
        if name == "llmc_mma_m16n8k16_bf16":
            self._product(call, mask)
        elif name == "__syncwarp":
            self._whole_warps(mask, "a barrier of a warp")
            for memory in self.memory.values():
                if memory.scope == "shared":
                    memory.forget_warps(np.unique(self.thread[mask] // WARP))
        elif name.startswith(NAMES):
            self.products.call(name, call.args[1:], mask)
        elif name in arrivals.NAMES:
            self._arrivals(name, call.args[1:], mask)
        elif name == "llmc_copy_async":
            self._copy(call, mask)
        elif name in ("llmc_load_pair", "llmc_load_pair_now"):
            self._load_pair(call, mask, of_operand=name.endswith("_now"))
        elif name == "llmc_after_launches":
            self._begin_after(mask)
        elif name == "llmc_commit_copies":
            self.groups[mask] += 1
        elif name.startswith("llmc_wait_copies<"):
            self._wait(int(name.partition("<")[2][:-1]), mask)
        else:
            raise Fault(f"a device function that this knows nothing of: {name}")

    def _begin_after(self, mask: Array) -> None:
        if not mask.all():
            raise Fault("some threads do not wait for the launches before")
        self.waited = True
        for memory in self.memory.values():
            memory.at_work = None

    def _touch(self, memory: Memory, written: bool) -> None:
        """What launches before may still be at work on: all that is written, and what they wrote for this one."""
        if memory.scope == "global" and not self.waited and (written or memory.written is not None):
            raise Fault(f"{memory.name}: touched before the launches before have ended")

    def _product(self, call: Any, mask: Array) -> None:
        """sums (16, 8) += a (16, 16) @ b (16, 8), of bfloat16 pairs that lanes of a warp hold, column by column."""
        self._whole_warps(mask, "a product of tensor cores")
        sums, a, b = (self._pointed(call.args[i + 1], words, mask) for i, words in enumerate((4, 4, 2)))
        held = tensor_cores.product(
            *(np.stack([memory.read(*one) for one in places]) for memory, places in (sums, a, b))
        )
        for one, values in zip(sums[1], held, strict=True):
            sums[0].write(*one, values)

    def _copy(self, call: Any, mask: Array) -> None:
        """16 bytes from global to shared memory, which are there when the thread has waited for them."""
        to, places = self._pointed(call.args[1], COPIED, mask)
        of_word = 4 // self.memory[call.args[2].args[0].source].data.itemsize
        given, sources = self._pointed(call.args[2], COPIED * of_word, mask)
        count = np.broadcast_to(self.value(call.args[3], mask), (self.count,))[mask]
        assert to.scope == "shared"
        assert given.scope == "global"
        self._touch(given, written=False)
        for word, place in enumerate(places):
            own = sources[word * of_word : (word + 1) * of_word]
            if word == 0 and ((place[1] % COPIED).any() or (own[0][1] % (COPIED * of_word)).any()):
                raise Fault(f"{to.name}: copied from or to a place that is no multiple of 16 bytes")
            inside = count > 4 * word
            values = np.zeros(len(inside), np.uint32)
            read = np.stack([given.read(*(part[inside] for part in source)) for source in own], axis=1)
            values[inside] = np.ascontiguousarray(read).view(np.uint32)[:, 0]
            to.write(*place, values, written=False)
            self.copies.append(Copies(to, place, self.groups[place[2]].copy()))

    def _load_pair(self, call: Any, mask: Array, of_operand: bool) -> None:
        """Two words from global memory, or of an operand, to registers."""
        (to, places), (given, sources) = (self._pointed(call.args[i], 2, mask) for i in (1, 2))
        self._touch(given, written=False)
        if of_operand:
            self._not_written(given)
        if (sources[0][1] % 2).any():
            raise Fault(f"{given.name}: two words from a place that is no multiple of 8 bytes")
        for place, source in zip(places, sources, strict=True):
            to.write(*place, np.ascontiguousarray(given.read(*source)).view(to.data.dtype))

    def _arrivals(self, name: str, args: Any, mask: Array) -> None:
        """Counts of arrivals, and copies that count."""
        at = 3 if name == "llmc_copy_whole" else 0
        memory, places = self._pointed(args[at], 1, mask)
        if name == "llmc_begin_arrivals":
            self.arrivals.begin(memory, places[0], int(args[1]))
        elif name == "llmc_arrive":
            self.arrivals.arrive(memory, places[0])
        elif name == "llmc_wait_arrivals":
            turns = np.broadcast_to(self.value(args[1], mask), (self.count,))[mask]
            self.arrivals.wait(memory, places[0], turns)
        else:
            self._copy_whole(args, mask, memory, places[0])

    def _copy_whole(self, args: Any, mask: Array, counts: Any, at: tuple[Array, Array, Array]) -> None:
        words = int(args[2]) // 4
        (to, places), (given, sources) = (self._pointed(args[i], 1, mask) for i in (0, 1))
        self._touch(given, written=False)
        for memory, first in ((to, places[0][1]), (given, sources[0][1])):
            if (first % COPIED).any() or words % COPIED:
                raise Fault(f"{memory.name}: copied from or to a place that is no multiple of 16 bytes")
            if (first + words > memory.data.shape[1]).any():
                raise Fault(f"{memory.name}: outside of {memory.shape}: a copy")
        space, first, thread = (np.repeat(part, words) for part in sources[0])
        values = given.read(space, first + np.tile(np.arange(words), len(at[0])), thread).reshape(-1, words)
        self.arrivals.copy(to, places[0], values, counts, at)
        self.products.shared[:] = True  # tensor cores see what is so copied

    def _wait(self, groups: int, mask: Array) -> None:
        """All but the last `groups` groups of these threads are there."""
        left = []
        for each in self.copies:
            thread = each.place[2]
            left.append(each.arrive(mask[thread] & (each.group < self.groups[thread] - groups)))
        self.copies = [each for each in left if len(each.group)]

    def _pointed(self, pointer: Any, words: int, mask: Array) -> tuple[Memory, list[tuple[Array, Array, Array]]]:
        """The buffer behind an address, and (copy, element, thread) of each word from there on."""
        target = pointer.args[0]
        memory = self.memory[target.source]
        space, at, thread, _ = self._places(memory, target.indices, mask)
        if (at + words > memory.data.shape[1]).any():
            raise Fault(f"{memory.name}: outside of {memory.shape}: {words} words from {pointer}")
        return memory, [(space, at[:, 0] + i, thread) for i in range(words)]

    def _whole_warps(self, mask: Array, what: str) -> None:
        warps = mask.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any():
            raise Fault(f"{what} that only some threads of a warp reach")

    def _places(self, memory: Memory, indices: Any, mask: Array) -> tuple[Array, Array, Array, Array]:
        """(copy, elements (n, lanes), thread) of the threads of the mask, and which these are."""
        at = np.zeros((self.count, 1), np.int64)
        for index, size in zip(indices, memory.shape, strict=True):
            value = self.value(index, mask).astype(np.int64)
            value = value[:, None] if value.ndim == 1 else value
            if (((value < 0) | (value >= size)) & mask[:, None]).any():
                raise Fault(f"{memory.name}: outside of {memory.shape}: {index}")
            at = at * size + value
        places = np.flatnonzero(mask)
        space = {"global": np.zeros_like, "shared": lambda t: self.block[t], "local": lambda t: t}[memory.scope](places)
        return space, at[places], places, places

    def value(self, expr: Any, mask: Array) -> Array:
        """An expression of all threads: (T,), (T, lanes), or (1,) where it is the same in all; of masked ones, any."""
        kind = type(expr).__name__
        if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
            return np.array([expr.value], str(expr.ty.dtype))
        if expr in self.values:
            return self.values[expr]
        if kind in BINARY:
            a, b = aligned(self.value(expr.a, mask), self.value(expr.b, mask))
            return np.asarray(BINARY[kind](a, b))
        getter: Callable[[Any, Array], Array] = getattr(self, f"_value_{kind}")
        return getter(expr, mask)

    def _value_TensorLoad(self, expr: Any, mask: Array) -> Array:
        memory = self.memory[expr.source]
        self._touch(memory, written=False)
        space, at, thread, places = self._places(memory, expr.indices, mask)
        out = np.zeros((self.count, at.shape[1]), memory.data.dtype)
        for lane in range(at.shape[1]):
            out[places, lane] = memory.read(space, at[:, lane], thread)
        return out[:, 0] if at.shape[1] == 1 else out

    def _value_And(self, expr: Any, mask: Array) -> Array:
        left = self.value(expr.a, mask).astype(bool)
        return np.asarray(left & self.value(expr.b, mask & left).astype(bool))

    def _value_Or(self, expr: Any, mask: Array) -> Array:
        left = self.value(expr.a, mask).astype(bool)
        return np.asarray(left | self.value(expr.b, mask & ~left).astype(bool))

    def _value_Not(self, expr: Any, mask: Array) -> Array:
        return ~self.value(expr.a, mask).astype(bool)

    def _value_Select(self, expr: Any, mask: Array) -> Array:
        condition, yes = aligned(self.value(expr.condition, mask), self.value(expr.true_value, mask))
        yes, no = aligned(yes, self.value(expr.false_value, mask))
        return np.where(aligned(condition, yes)[0], yes, no)

    def _value_Cast(self, expr: Any, mask: Array) -> Array:
        return self.value(expr.value, mask).astype(scalar(expr.ty.dtype))

    def _value_Ramp(self, expr: Any, mask: Array) -> Array:
        base, stride = self.value(expr.base, mask), self.value(expr.stride, mask)
        return base[:, None] + stride[:, None] * np.arange(int(expr.lanes))

    def _value_Broadcast(self, expr: Any, mask: Array) -> Array:
        return np.repeat(self.value(expr.value, mask)[:, None], int(expr.lanes), axis=1)

    def _value_Call(self, expr: Any, mask: Array) -> Array:
        name = str(expr.op.name).rpartition(".")[2]
        if name == "if_then_else":
            condition, yes, no = expr.args
            chosen = np.broadcast_to(self.value(condition, mask).astype(bool), (self.count,))
            a, b = aligned(self.value(yes, mask & chosen), self.value(no, mask & ~chosen))
            return np.where(aligned(chosen, a)[0], a, b)
        if name == "tvm_warp_shuffle_xor":
            return self._shuffle_xor(expr, mask)
        if name == "tvm_warp_shuffle":
            return self._shuffle_from(expr, mask)
        if name == "call_pure_extern" and expr.args[0].value == "llmc_load_now":
            return self._loaded(expr, mask)
        if name == "call_pure_extern" and expr.args[0].value == "llmc_word_at":
            return self._word_at(expr, mask)
        if name == "call_pure_extern" and str(expr.args[0].value).startswith("llmc_value_"):
            return self._looked_up(expr, mask)
        if name == "call_pure_extern" and expr.args[0].value == "llmc_votes":
            return self._votes(expr, mask)
        if name == "call_pure_extern":
            name, values = expr.args[0].value, [self.value(arg, mask) for arg in expr.args[1:]]
        else:
            values = [self.value(arg, mask) for arg in expr.args]
        if name == "reinterpret":
            return np.ascontiguousarray(values[0]).view(scalar(expr.ty.dtype))
        if len(values) == 2:
            values = list(aligned(*values))
        if name not in CALLS:
            raise Fault(f"an expression that this knows nothing of: {name}")
        return np.asarray(CALLS[name](*values)).astype(scalar(expr.ty.dtype))

    def _votes(self, expr: Any, mask: Array) -> Array:
        """A bit for each lane of a warp."""
        self._whole_warps(mask, "a vote")
        holds = np.broadcast_to(self.value(expr.args[1], mask), (self.count,)) != 0
        words = (holds.reshape(-1, WARP).astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(1, dtype=np.uint32)
        return np.repeat(words, WARP)

    def _looked_up(self, expr: Any, mask: Array) -> Array:
        """What codes of a format stand for; of threads that are masked off, anything."""
        codes = np.broadcast_to(self.value(expr.args[1], mask), (self.count,))
        return tensor_cores.value(str(expr.args[0].value), np.where(mask, codes, 0))

    def _not_written(self, memory: Memory) -> None:
        if memory.written is not None:
            raise Fault(f"{memory.name}: read as if no launch wrote it")

    def _loaded(self, expr: Any, mask: Array) -> Array:
        """A word of an operand."""
        memory, places = self._pointed(expr.args[1], 1, mask)
        self._not_written(memory)
        out = np.zeros(self.count, np.uint32)
        out[mask] = np.ascontiguousarray(memory.read(*places[0])).view(np.uint32)
        return out

    def _word_at(self, expr: Any, mask: Array) -> Array:
        """A word of an array by its place in bytes."""
        memory, places = self._pointed(expr.args[1], 1, mask)
        space, at, thread = places[0]
        place = np.broadcast_to(self.value(expr.args[2], mask), (self.count,))[mask].astype(np.int64)
        at = at + place // 4
        if (place % 4).any() or (at >= memory.data.shape[1]).any():
            raise Fault(f"{memory.name}: outside of {memory.shape}: a place in bytes")
        out = np.zeros(self.count, memory.data.dtype)
        out[mask] = memory.read(space, at, thread)
        return out

    def _shuffle_from(self, expr: Any, mask: Array) -> Array:
        """A value of one lane of `width` neighbouring ones."""
        lanes, lane, width = (int(expr.args[i].value) for i in (0, 2, 3))
        value = np.broadcast_to(self.value(expr.args[1], mask), (self.count,))
        assert lanes == 0xFFFFFFFF
        assert 0 <= lane < width
        self._whole_warps(mask, "a shuffle")
        return value[self.thread // width * width + lane]

    def _shuffle_xor(self, expr: Any, mask: Array) -> Array:
        lanes = int(expr.args[0].value)
        value = np.broadcast_to(self.value(expr.args[1], mask), (self.count,))
        assert lanes == 0xFFFFFFFF
        assert int(expr.args[3]) == WARP
        self._whole_warps(mask, "a shuffle")
        return value[self.thread ^ int(expr.args[2])]
