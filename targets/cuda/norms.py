"""CUDA kernels that norm rows, a block each: RMS and layer norm, of a row, of a sum of two, of heads of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.targets.arguments import arguments
from llmc.targets.cuda.launch import added, block_reduce, f32, launch, local, row_kernel, strided, width_threads
from llmc.targets.cuda.target import CudaTarget

Read = Callable[[Any, Any], Any]  # a thread's turn, and its column then -> the number there
MOST_THREADS = 1024  # of a row: few turns each, for few rows leave a chip waiting for memory


def _turns(width: int, thread: Any, threads: int, body: Callable[[Any, Any], None]) -> None:
    """`body(turn, column)` for every column, threads taking turns; all reads of a thread are on their way together."""
    with T.unroll(0, -(-width // threads)) as turn:
        column = turn * threads + thread
        if width % threads:
            with T.If(column < width), T.Then():
                body(turn, column)
        else:
            body(turn, column)


def _mean(width: int, thread: Any, threads: int, number: Read) -> Any:
    """The mean over columns, in a register of every thread of the block."""
    total = local((1,))
    T.buffer_store(total, f32(0), [0])
    _turns(width, thread, threads, lambda turn, c: T.buffer_store(total, total[0] + number(turn, c), [0]))
    block_reduce(total, 0, thread, threads, added)
    T.buffer_store(total, total[0] / f32(width), [0])
    return total[0]


def _normed(number: Read, width: int, thread: Any, threads: int, eps: float, centred: bool) -> Read:
    """The column's number / sqrt(mean of squares + eps); `centred`: their mean is taken off them first."""
    mean = _mean(width, thread, threads, number) if centred else None

    def centre(turn: Any, c: Any) -> Any:
        return number(turn, c) if mean is None else number(turn, c) - mean

    squares = _mean(width, thread, threads, lambda turn, c: centre(turn, c) * centre(turn, c))
    scale = local((1,))
    T.buffer_store(scale, f32(1) / T.sqrt(squares + f32(eps)), [0])
    return lambda turn, c: centre(turn, c) * scale[0]


def _norm(shapes: list[Any], attrs: dict[str, Any], centred: bool, summed: bool) -> tirx.PrimFunc:
    """x [, residual], weight [, bias] -> [sum,] normed."""
    width = int(shapes[0][1])
    threads = width_threads(width, MOST_THREADS)
    operands = 2 + centred + summed

    def body(buffers: list[Any], row: Any, thread: Any) -> None:
        x, weight = buffers[0], buffers[1 + summed]
        bias, out = buffers[2 + summed] if centred else None, buffers[-1]
        own = local((-(-width // threads),))

        def read(turn: Any, c: Any) -> None:
            T.buffer_store(own, x[row, c] + buffers[1][row, c] if summed else x[row, c], [turn])
            if summed:
                T.buffer_store(buffers[operands], own[turn], [row, c])

        _turns(width, thread, threads, read)
        normed = _normed(lambda turn, c: own[turn], width, thread, threads, attrs["eps"], centred)

        def store(turn: Any, c: Any) -> None:
            value = normed(turn, c) * weight[c]
            T.buffer_store(out, value if bias is None else value + bias[c], [row, c])

        _turns(width, thread, threads, store)

    return row_kernel(["float32"] * (operands + 1 + summed), shapes, threads, body)


def rms_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), weight (C,) -> (M, C)."""
    return _norm(shapes, attrs, centred=False, summed=False)


def add_rms_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, residual (M, C), weight (C,) -> sum, normed (M, C)."""
    return _norm(shapes, attrs, centred=False, summed=True)


def layer_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x (M, C), weight, bias (C,) -> (M, C)."""
    return _norm(shapes, attrs, centred=True, summed=False)


def add_layer_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """x, residual (M, C), weight, bias (C,) -> sum, normed (M, C)."""
    return _norm(shapes, attrs, centred=True, summed=True)


def qk_norm(target: CudaTarget, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """qkv (M, (H + 2G) D), weights of q and of k -> the same, q and k normed; by heads, or as one row each."""
    heads, kv_heads, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    width, whole, shared = int(shapes[0][1]), attrs["span"] == "all", attrs["span"] == "head"
    centred, eps = attrs["kind"] == "layer", attrs["eps"]

    def norm(buffers: list[Any], weight: Any, row: Any, thread: Any, threads: int, span: tuple[Any, int, Any]) -> None:
        """The `count` columns from `first` on, by weights from `at` on."""
        (x, *_, out), (first, count, at) = buffers, span
        normed = _normed(lambda turn, c: x[row, first + c], count, thread, threads, eps, centred)

        def store(turn: Any, c: Any) -> None:
            T.buffer_store(out, normed(turn, c) * weight[at + c], [row, first + c])

        _turns(count, thread, threads, store)

    with IRBuilder() as builder, T.prim_func():
        buffers = arguments(["float32"] * 4, shapes)
        rows, start = shapes[0][0], 0
        for weight, count in ((buffers[1], heads), (buffers[2], kv_heads)):
            spans, each = (1, count * size) if whole else (count, size)
            threads = width_threads(each)
            with launch({"blockIdx.x": rows, "blockIdx.y": spans, "threadIdx.x": threads}) as (row, span, thread):
                at = 0 if shared else span * each
                norm(buffers, weight, row, thread, threads, (start + span * each, each, at))
            start += count * size
        threads = width_threads(width - start)
        with launch({"blockIdx.x": rows, "threadIdx.x": threads}) as (row, thread):
            strided(
                width - start, thread, threads,
                lambda c: T.buffer_store(buffers[3], buffers[0][row, start + c], [row, start + c]),
            )  # fmt: skip
    return builder.get()
