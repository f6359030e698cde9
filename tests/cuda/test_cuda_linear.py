"""Linear layers on CUDA for every chip: what blocks ask for fits, and rows have the same bits in all launches."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS
from llmc.compiler.ops import OPS
from llmc.targets.cuda.lower import make_kernel
from llmc.targets.cuda.target import CUDA_TARGETS, STATIC_SHARED_BYTES

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
import cuda_threads
from kernel_cases import TOLERANCE, floats, packed

CHIPS = sorted(CUDA_TARGETS)


def launches(stmt: Any) -> list[list[Any]]:
    """Buffers that each launch has besides operands."""
    if isinstance(stmt, tirx.SeqStmt):
        return [found for part in stmt.seq for found in launches(part)]
    if isinstance(stmt, tirx.IfThenElse):
        return [found for branch in (stmt.then_case, stmt.else_case) for found in launches(branch)]
    if not isinstance(stmt, tirx.AttrStmt):
        return []
    while isinstance(stmt, tirx.AttrStmt):
        stmt = stmt.body
    return [[part.buffer for part in stmt.seq if isinstance(part, tirx.AllocBuffer)]]


def shared_bytes(buffers: list[Any], scope: str) -> int:
    return sum(4 * math.prod(map(int, buffer.shape)) for buffer in buffers if buffer.scope() == scope)


@pytest.mark.thorough_if(case=lambda chip: chip != "cuda:sm_86")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["f32", "bf16", "q8_b32", "q6", "q4", "c3h", "q4_k"])
def test_shared_memory_of_every_launch_fits(name: str, chip: str) -> None:
    """Of wide layers and of narrow ones, that of its code and what it asks for besides."""
    target, rows = CUDA_TARGETS[chip], tirx.Var("m", "int64")
    for op, halves, given in (("packed_linear", 1, 1), ("bf16_linear", 2, 1), ("bf16_linear_gated_bf16", 2, 4)):
        for width, columns in ((4096, 4096), (28672, 4096), (40, 96)):
            matrix = list(FORMATS[name].packed_shape(width, columns))
            shapes = [[rows, columns // halves], matrix, [rows, width // given]]
            made = make_kernel(op, target, shapes, {"format": name, "width": width, "activation": "silu"})
            for buffers in launches(made.body):
                static, asked = (shared_bytes(buffers, scope) for scope in ("shared", "shared.dyn"))
                assert static <= STATIC_SHARED_BYTES, (op, width)
                assert static + asked <= target.shared_bytes, (op, width)
                # TVM tells the driver of what is asked for from so much on, and of nothing else.
                assert asked >= STATIC_SHARED_BYTES or static + asked <= STATIC_SHARED_BYTES, (op, width)


@pytest.mark.parametrize("chip", ["cuda:sm_86", "cuda:sm_90"])
@pytest.mark.parametrize(
    ("op", "name"),
    [("packed_linear", "q4"), ("packed_linear", "q8"), ("packed_linear", "r4"), ("bf16_linear", "bf16")],
)
def test_rows_in_every_launch_of_a_chip(op: str, name: str, chip: str) -> None:
    """Blocks are of other sizes where there is more memory, or less, products of one warp or of four; bits stay."""
    agree(op, name, chip, 40, 192)


@pytest.mark.parametrize("width", [40, 37])
@pytest.mark.parametrize("name", ["bf16", "q4", "q8", "q6", "q3h", "q4_k", "c4"])
def test_rows_of_whole_slabs(name: str, width: int) -> None:
    """Words of neighbouring weights come together, and neighbouring outputs go, where rows have pairs of them."""
    agree("bf16_linear", name, "cuda:sm_90", width, 256)


def agree(op: str, name: str, chip: str, width: int, columns: int) -> None:
    """A layer gives what its op means, and rows the same bits in all launches."""
    rng = np.random.default_rng(5)
    x, weight = floats(rng, 70, columns), packed(rng, name, width, columns)
    if op == "bf16_linear":
        x = meaning.round_rows(x)
    attrs = {"format": name, "width": width}
    rows = tirx.Var("m", "int64")
    made = make_kernel(op, CUDA_TARGETS[chip], [[rows, x.shape[1]], list(weight.shape), [rows, width]], attrs)
    wanted = OPS[op].meaning(x, weight, **attrs)
    found = np.full_like(wanted, 77)
    cuda_threads.run(made, [x, weight, found])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=10 * TOLERANCE * np.abs(wanted).max())
    for some in (slice(3, 4), slice(20, 50)):
        again = np.full_like(wanted[some], 77)
        cuda_threads.run(made, [x[some].copy(), weight, again])
        np.testing.assert_array_equal(again, found[some])


@pytest.mark.parametrize(
    ("name", "shared_kib"), [("q4", 227), ("q4", 120), pytest.param("c3h", 120, marks=pytest.mark.thorough)]
)
def test_a_batch_in_blocks_that_stay(name: str, shared_kib: int) -> None:
    """Several groups of outputs, of which the last is not whole; a strand of x as a whole, or where memory is short in
    parts; strands of 3 and of 1 slab, and a half one."""
    target = replace(CUDA_TARGETS["cuda:sm_90"], multiprocessors=8, shared_bytes=shared_kib << 10)
    rng = np.random.default_rng(8)
    x, weight = floats(rng, 40, 2368), packed(rng, name, 300, 2368)
    attrs, rows = {"format": name, "width": 300}, tirx.Var("m", "int64")
    made = make_kernel("packed_linear", target, [[rows, 2368], list(weight.shape), [rows, 300]], attrs)
    wanted = OPS["packed_linear"].meaning(x, weight, **attrs)
    found = np.full_like(wanted, 77)
    cuda_threads.run(made, [x, weight, found])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=10 * TOLERANCE * np.abs(wanted).max())
    for some in (slice(1), slice(33, 38)):
        again = np.full_like(wanted[some], 77)
        cuda_threads.run(made, [x[some].copy(), weight, again])
        np.testing.assert_array_equal(again, found[some])


@pytest.mark.thorough_if(case=lambda columns: columns == 4480)
@pytest.mark.parametrize("columns", [200, 2048, 4096, 4480])
@pytest.mark.parametrize("name", ["bf16", "q8", "q4", "q3h", "c3h", "q4_k"])
def test_one_row_in_blocks_that_stay(name: str, columns: int) -> None:
    """Of a chip with one multiprocessor two blocks take tile after tile, strands of one to five slabs; the bits of two
    rows beside each other."""
    rng = np.random.default_rng(columns)
    x, weight = floats(rng, 2, columns), packed(rng, name, 72, columns)
    attrs, rows = {"format": name, "width": 72}, tirx.Var("m", "int64")
    target = replace(CUDA_TARGETS["cuda:sm_90"], multiprocessors=1)
    made = make_kernel("packed_linear", target, [[rows, columns], list(weight.shape), [rows, 72]], attrs)
    both, alone = np.full((2, 72), 77, np.float32), np.full((1, 72), 77, np.float32)
    cuda_threads.run(made, [x, weight, both])
    wanted = OPS["packed_linear"].meaning(x, weight, **attrs)
    np.testing.assert_allclose(both, wanted, rtol=0, atol=10 * TOLERANCE * np.abs(wanted).max())
    cuda_threads.run(made, [x[1:].copy(), weight, alone])
    np.testing.assert_array_equal(alone, both[1:])


@pytest.mark.thorough
@pytest.mark.parametrize("chip", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("name", ["bf16", "q8", "q4", "q6", "q3h", "c4"])
def test_long_rows(name: str, chip: str) -> None:
    """Slabs come in place of others again and again; the last one is half of one."""
    rng = np.random.default_rng(6)
    x, weight = floats(rng, 66, 5440), packed(rng, name, 16, 5440)
    attrs, rows = {"format": name, "width": 16}, tirx.Var("m", "int64")
    made = make_kernel("packed_linear", CUDA_TARGETS[chip], [[rows, 5440], list(weight.shape), [rows, 16]], attrs)
    most = np.zeros((66, 16), np.float32)
    cuda_threads.run(made, [x, weight, most])
    wanted = OPS["packed_linear"].meaning(x, weight, **attrs)
    np.testing.assert_allclose(most, wanted, rtol=0, atol=10 * TOLERANCE * np.abs(wanted).max())
    for some in (slice(3), slice(9)):
        found = np.zeros((some.stop, 16), np.float32)
        cuda_threads.run(made, [x[some].copy(), weight, found])
        np.testing.assert_array_equal(found, most[some])
