"""Bytes looked up in tables beside NumPy's indexing, one word and several, in every variant that this machine runs."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

import llmc.targets.target as targets
from llmc.compiler.formats import FORMATS, BlockFormat, block_format
from llmc.targets.arguments import arguments
from llmc.targets.build import compile_kernels
from llmc.targets.lookups import lookups, words_at_once
from llmc.targets.narrow import functions
from llmc.targets.target import Target
from llmc.targets.vector import held, imported, lanes

TARGETS = [each for each in targets.variants(targets.native().arch) if set(each.requires) <= targets.cpu_flags()]
WORDS = 16  # of codes, sixteen int32 each
TABLES = [(16,), (32,), (64,), (128,), (16, 2), (32, 2), (64, 2), (121, 2), (128, 2)]


def found_by(target: Target, table: np.ndarray, codes: np.ndarray, at_once: int) -> np.ndarray:
    """(WORDS, columns, 64): what the codes (WORDS, 64) stand for, so many words looked up together."""
    import tvm

    columns = table.size // len(table)
    with IRBuilder() as builder, T.prim_func():
        given, out = arguments(["int32", "int32"], [[WORDS * 16], [WORDS * columns * 16]])
        with imported(*functions(target)):
            for first in range(0, WORDS, at_once):
                words = [held(given[lanes((first + i) * 16)], "int32") for i in range(at_once)]
                found = [part for own in lookups(target, table, words) for part in own]
                for place, part in enumerate(found, first * columns):
                    T.buffer_store(out, part, [lanes(place * 16)])
    result = tvm.runtime.tensor(np.zeros(WORDS * columns * 16, np.int32))
    compile_kernels({"kernel": builder.get()}, target)["kernel"](
        tvm.runtime.tensor(codes.view(np.int32).ravel()), result
    )
    bytes_: np.ndarray = result.numpy().view(np.uint8).reshape(WORDS, columns, 64)
    return bytes_


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("shape", TABLES, ids=str)
def test_bytes_are_looked_up(shape: tuple[int, ...], target: Target) -> None:
    rng = np.random.default_rng(len(shape) + shape[0])
    table = rng.integers(0, 256, shape, np.uint8)
    codes = rng.integers(0, len(table), (WORDS, 64), np.uint8)
    wanted = table.reshape(len(table), -1)[codes].swapaxes(1, 2)
    for at_once in (1, 2, 4):
        np.testing.assert_array_equal(found_by(target, table, codes, at_once), wanted)


def test_tables_that_registers_cannot_hold_serve_two_words() -> None:
    few, many = targets.get("cpu:avx2")[0], targets.get("cpu:avx512_vbmi")[0]
    sizes = {shape: np.zeros(shape, np.uint8) for shape in TABLES}
    assert [shape for shape, table in sizes.items() if words_at_once(few, table) == 2] == [
        (64,), (128,), (32, 2), (64, 2), (121, 2), (128, 2)
    ]  # fmt: skip
    assert all(words_at_once(many, table) == 1 for table in sizes.values())


def test_tables_of_many_pairs_are_slow_where_no_instruction_looks_up_so_much() -> None:
    blocks = [name for name, format in FORMATS.items() if isinstance(format, BlockFormat)]
    slow = {
        target.name: {name for name in blocks if target.looks_up_slowly(name)}
        for target in targets.variants("x86_64") + targets.variants("aarch64")
    }
    assert slow["cpu-avx2"] == slow["cpu-avx_vnni"] == slow["cpu-avx512_vnni"] == {"c3", "c3h", "r3h"}
    assert not any(slow[name] for name in ("cpu-amx_int8", "cpu-avx512_vbmi", "cpu-i8mm", "cpu-aarch64"))


def test_codes_of_q3h_are_digits_and_those_of_codebooks_are_not() -> None:
    assert {name: block_format(name).base for name in ("q3h", "c3h", "c4", "q4")} == {
        "q3h": 11, "c3h": 0, "c4": 0, "q4": 0
    }  # fmt: skip
