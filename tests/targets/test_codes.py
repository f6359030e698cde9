"""Words of packed weights as kernels multiply them: each comes once, and those of a step together."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import FORMATS, BlockFormat, block_format
from llmc.targets import target as targets
from llmc.targets.matrices.block_sums import step_of
from llmc.targets.matrices.codes import CHUNK, Tile

BLOCK_FORMATS = [name for name, format in FORMATS.items() if isinstance(format, BlockFormat)]
COLUMNS = 512


def groups_of(format: BlockFormat, target: Any) -> list[int]:
    """Numbers of a chunk's groups of four columns in the order that `multiplied` gives."""
    with IRBuilder(), T.prim_func():
        weight = T.arg("weight", T.buffer(format.packed_shape(32, COLUMNS), "int32"))
        tile = Tile(target, format, weight, COLUMNS, 0, quick=False)
        return [group for group, _ in tile.multiplied(1)]


@pytest.mark.parametrize("variant", ["cpu:avx2", "cpu:avx_vnni", "cpu:avx512_vbmi", "cpu:x86_64", "cpu:i8mm"])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_words_of_a_step_come_together(name: str, variant: str) -> None:
    format, target = block_format(name), targets.get(variant)[-1]
    groups, each = groups_of(format, target), step_of(format) // 4
    assert sorted(groups) == list(range(CHUNK // 4))
    for first in range(0, len(groups), each):
        assert {group // each for group in groups[first : first + each]} == {first // each}


def test_registers_of_codes_come_one_after_another_where_few_are_held() -> None:
    """One of a plane of four bits has two groups, four apart."""
    few, many = (groups_of(block_format("q4"), targets.get(name)[0]) for name in ("cpu:avx2", "cpu:avx512_vbmi"))
    assert few[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert many == sorted(many)
