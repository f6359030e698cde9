"""Many rows through panels of unpacked weights have the bits of rows in groups, where registers are few or many."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler import meaning
from llmc.compiler.formats import block_format
from llmc.compiler.ops import OPS
from llmc.targets import target as targets
from llmc.targets.matrices import panel_linear
from llmc.targets.matrices.panels import PANEL
from llmc.targets.target import Target
from llmc.targets.vector import dots_any_bytes

sys.path.insert(0, str(Path(__file__).parent))
from expert_cases import experts
from kernel_cases import Case, floats, packed, result, run

FLAGS = frozenset(flag for flag in targets.cpu_flags() if not flag.startswith(("amx", "avx_vnni")))
NARROW = targets.native(frozenset(flag for flag in FLAGS if not flag.startswith("avx512")))
PLAIN = targets.native(FLAGS - {"avx512_vnni", "avx512vbmi", "avx512_bf16"})
WIDE = targets.native(FLAGS)  # two tiles of outputs at once, where there is VNNI
COLUMNS = 64 * (PANEL + 1)  # a panel, and one that is smaller


def has_panels(target: Target) -> bool:
    """Whether many rows of a target go through panels."""
    return panel_linear.many(target, block_format("q4"), COLUMNS) is not None


@pytest.fixture(params=[NARROW, PLAIN, WIDE], ids=["narrow", "plain", "wide"])
def target(request: pytest.FixtureRequest) -> Target:
    """One of three, where this CPU has it."""
    target: Target = request.param
    there = {NARROW: has_panels(NARROW), PLAIN: PLAIN.has("avx512f"), WIDE: dots_any_bytes(WIDE)}[target]
    if not there:
        pytest.skip("not on this CPU")
    assert has_panels(target)
    return target


def in_groups(target: Target) -> Target:
    """The same without panels, and with a tile at a time."""
    found = replace(target, knobs=replace(target.knobs, pair_rows=0, panel_rows=0))
    assert not has_panels(found)
    return found


def many_rows(format: str, rows: int, width: int) -> Case:
    """A linear layer over several panels."""
    rng = np.random.default_rng([*map(ord, format)])
    x = meaning.left_of(block_format(format), floats(rng, rows, COLUMNS))
    weight = packed(rng, format, width, COLUMNS)
    return Case("i8_linear", [*x, weight], {"format": format, "width": width}, tuple(range(len(x))))


# Bytes as they are, sums of 8, 5, 4 and 2 of them in 16 bits; bytes in halves; starts as stored and not; blocks of all
# lengths; looked up and computed.
@pytest.mark.parametrize(
    "format", ["q4", "q4_0", "mxfp4", "q5", "q6", "q8", "c4", "r4", "r8", "q3h", "q4_b64", "q4_k", "q6_k"]
)
def test_panels_give_the_bits_of_groups(format: str, target: Target) -> None:
    case = many_rows(format, rows=147, width=33)  # a block of rows, and 19, which have shorter panels
    (got,) = run(case, target)
    np.testing.assert_array_equal(got, run(case, in_groups(target))[0])


def test_a_row_has_the_same_bits_alone(target: Target) -> None:
    case = many_rows("q4_0", rows=target.knobs.panel_rows + 4, width=20)
    (together,) = run(case, target)
    *left, weight = case.arrays
    for row in range(0, len(together), 4):
        alone = Case(case.op, [*(x[row : row + 1] for x in left), weight], case.attrs, case.symbolic)
        np.testing.assert_array_equal(run(alone, target)[0][0], together[row])


# Few rows go through a gated layer in the order of memory.
@pytest.mark.parametrize(("rows", "format"), [(41, "q4_0"), (7, "q3h")])
def test_a_gated_layer_gives_the_same_bits(rows: int, format: str, target: Target) -> None:
    target = replace(target, knobs=replace(target.knobs, panel_rows=6))
    rng = np.random.default_rng(1)
    x = meaning.left_of(block_format(format), floats(rng, rows, 256))
    attrs = {"format": format, "width": 256, "activation": "silu"}
    case = Case("i8_linear_gated_i8", [*x, packed(rng, format, 256, 256)], attrs, tuple(range(len(x))))
    like = OPS[case.op].meaning(*case.arrays, **case.attrs)
    for got, wanted in zip(result(case, target, like), result(case, in_groups(target), like), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("op", ["i8_experts_in", "i8_experts_out"])
def test_pairs_of_experts_go_through_panels(op: str, target: Target) -> None:
    case = experts(np.random.default_rng([*map(ord, op)]), op, "q8", rows=90, inner=64)
    np.testing.assert_array_equal(run(case, target)[0], run(case, in_groups(target))[0])
