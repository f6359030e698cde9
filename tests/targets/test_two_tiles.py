"""A few rows with two tiles at once have the bits of rows with one tile after another, alone and in experts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, BlockFormat, block_format
from llmc.compiler.ops import OPS
from llmc.targets import target as targets
from llmc.targets.knobs import Knobs
from llmc.targets.matrices import two_tiles
from llmc.targets.target import Target
from llmc.targets.vector import dots_any_bytes

sys.path.insert(0, str(Path(__file__).parent))
from expert_cases import experts
from kernel_cases import Case, floats, packed, result, run

FLAGS = frozenset(flag for flag in targets.cpu_flags() if not flag.startswith(("amx", "avx_vnni")))
WIDE = targets.native(FLAGS)
COLUMNS = 64 * 12  # three records of the K formats
HERE = pytest.mark.skipif(not dots_any_bytes(WIDE), reason="not on this CPU")

VBMI = next(target for target in targets.variants("x86_64") if target.name == "cpu-avx512_vbmi")  # whatever CPU is here
KNOWN = [
    name
    for name, format in FORMATS.items()
    if isinstance(format, BlockFormat) and two_tiles.few(VBMI, format, COLUMNS) is not None
]


def with_knobs(**knobs: int) -> Target:
    """The machine's target with some knobs set."""
    return replace(WIDE, knobs=replace(WIDE.knobs, **knobs))


def one_tile() -> Target:
    """The same that multiplies with a tile at a time."""
    return with_knobs(pair_rows=0, panel_rows=0)


def few_rows(format: str, rows: int, width: int = 50) -> Case:
    """A linear layer over four tiles, of which the last has two outputs."""
    rng = np.random.default_rng([*map(ord, format)])
    x = meaning.left_of(block_format(format), floats(rng, rows, COLUMNS))
    weight = packed(rng, format, width, COLUMNS)
    return Case("i8_linear", [*x, weight], {"format": format, "width": width}, tuple(range(len(x))))


def test_formats_with_four_bits_in_a_plane_are_known() -> None:
    assert {"q4", "q4_0", "q4_b64", "q4_k", "c4", "r4", "mxfp4", "q5", "q5_k", "r5"} <= set(KNOWN)
    assert not {"q8", "q6", "q3h", "q2", "q6_k", "nvfp4", "c2"} & set(KNOWN)


@HERE
@pytest.mark.thorough_if(case=lambda format: format not in ("q4", "q4_0", "q4_b64", "q4_k", "r4", "q5_k"))
@pytest.mark.parametrize("format", KNOWN)
def test_two_tiles_give_the_bits_of_one(format: str) -> None:
    two = with_knobs(pair_rows=2)
    if two_tiles.few(two, block_format(format), COLUMNS) is None:
        assert not two.permutes_bytes
        pytest.skip("looked up: not on this CPU")
    whole = few_rows(format, rows=two_tiles.MOST)
    (wanted,) = run(whole, one_tile())
    *left, weight = whole.arrays
    for rows in range(2, two_tiles.MOST + 1):
        case = Case(whole.op, [*(x[:rows] for x in left), weight], whole.attrs, whole.symbolic)
        np.testing.assert_array_equal(run(case, two)[0], wanted[:rows])


@HERE
@pytest.mark.parametrize(
    "knobs",
    [
        {"pair_rows": 1},
        {"panel_rows": 0},
        {"panel_rows": 0, "row_group": 4},
        {"prefetch_far_bytes": 0},
        {"row_block": 32},
    ],
    ids=str,
)
def test_more_rows_than_a_group_has_go_in_several(knobs: dict[str, int]) -> None:
    case = few_rows("q4_0", rows=39, width=33)
    np.testing.assert_array_equal(run(case, with_knobs(**knobs))[0], run(case, one_tile())[0])


@HERE
@pytest.mark.parametrize("rows", [4, 9])
def test_a_gated_layer_gives_the_same_bits(rows: int) -> None:
    rng = np.random.default_rng(1)
    x = meaning.left_of(block_format("q4_0"), floats(rng, rows, 256))
    attrs = {"format": "q4_0", "width": 256, "activation": "silu"}
    case = Case("i8_linear_gated_i8", [*x, packed(rng, "q4_0", 256, 256)], attrs, tuple(range(len(x))))
    like = OPS[case.op].meaning(*case.arrays, **case.attrs)
    for got, wanted in zip(result(case, WIDE, like), result(case, one_tile(), like), strict=True):
        np.testing.assert_array_equal(got, wanted)


@HERE
@pytest.mark.parametrize("op", ["i8_experts_in", "i8_experts_out"])
def test_pairs_of_experts_give_the_same_bits(op: str) -> None:
    case = experts(np.random.default_rng([*map(ord, op)]), op, "q4", rows=20, inner=64)
    np.testing.assert_array_equal(run(case, with_knobs(pair_rows=2))[0], run(case, one_tile())[0])


def test_where_bytes_are_not_multiplied_by_one_instruction_there_is_one_tile() -> None:
    narrow = targets.native(frozenset(flag for flag in FLAGS if not flag.startswith("avx512")))
    assert two_tiles.few(narrow, block_format("q4"), COLUMNS) is None
    assert two_tiles.few(replace(VBMI, knobs=Knobs(pair_rows=0)), block_format("q4"), COLUMNS) is None
