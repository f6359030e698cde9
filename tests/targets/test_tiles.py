"""Kernels with tile registers give the bits of those without, on a machine that has tiles or by an emulator."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler import meaning
from llmc.compiler.formats import block_format
from llmc.compiler.ops import OPS
from llmc.runtime.loading.cpu import missing_flags
from llmc.runtime.loading.package import Variant
from llmc.targets import target as targets
from llmc.targets.matrices.tile_linear import PANEL

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import attention
from expert_cases import experts
from kernel_cases import BLOCK_FORMATS, FEW_FORMATS, Case, floats, linear_case, packed, result, run

FLAGS = targets.cpu_flags()
BEST = next(t for t in targets.variants("x86_64") if t.has("amx_int8"))
TILED = replace(BEST, requires=tuple(f for f in BEST.requires if f != "avx512_bf16"))  # which these kernels do not use
PLAIN = targets.native(frozenset(TILED.requires) - {"amx_tile", "amx_int8", "amx_bf16"}, "x86_64")

pytestmark = pytest.mark.skipif(not FLAGS.issuperset(PLAIN.requires), reason="no AVX-512 with VNNI and VBMI")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL | None]:
    """The emulator at work, or None where the machine has tiles and lets us use them."""
    if not missing_flags(Variant("", TILED.name, TILED.arch, TILED.requires), "x86_64", FLAGS):
        yield None
        return
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the emulator of tiles")
    library = tmp_path_factory.mktemp("tiles") / "emulator.so"
    source = Path(__file__).with_name("amx_emulator.c")
    subprocess.run(
        [
            "gcc",
            "-O2",
            "-mfma",
            "-ffp-contract=off",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            str(source),
            "-lm",
            "-o",
            str(library),
        ],
        check=True,
    )
    emulator = ctypes.CDLL(str(library))
    emulator.instructions_executed.restype = ctypes.c_long
    assert emulator.install() == 0
    yield emulator
    assert emulator.uninstall() == 0


def check(case: Case, counted: ctypes.CDLL | None) -> None:
    """Tiles are used, and give the bits of kernels without."""
    before = counted.instructions_executed() if counted else 0
    (got,) = run(case, TILED)
    if counted:
        assert counted.instructions_executed() > before, "no tile was used"
    np.testing.assert_array_equal(got, run(case, PLAIN)[0])


@pytest.mark.thorough_if(case=lambda format: format not in FEW_FORMATS)
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_tiles_give_the_same_bits(format: str, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    for rows in (8, 41):  # a group of few; two groups and a half
        check(linear_case(rng, "i8_linear", format, rows=rows), counted)


@pytest.mark.parametrize("format", ["q4", "q3h", "c4", "r4", "q6_k"])
def test_many_rows_go_through_one_panel_after_another(format: str, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    columns = 64 * PANEL + 3 * block_format(format).columns  # an odd number of chunks behind the first panel
    x = meaning.left_of(block_format(format), floats(rng, 147, columns))  # a block of rows and 19
    weight = packed(rng, format, 33, columns)
    check(Case("i8_linear", [*x, weight], {"format": format, "width": 33}, tuple(range(len(x)))), counted)


def test_a_gated_layer_gives_the_same_bits(counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng(1)
    x = meaning.left_of(block_format("q4"), floats(rng, 41, 256))
    attrs = {"format": "q4", "width": 256, "activation": "silu"}
    same_bits(Case("i8_linear_gated_i8", [*x, packed(rng, "q4", 256, 256)], attrs, tuple(range(len(x)))), counted)


def same_bits(case: Case, counted: ctypes.CDLL | None) -> None:
    """`check` of an op with several results."""
    like = OPS[case.op].meaning(*case.arrays, **case.attrs)
    before = counted.instructions_executed() if counted else 0
    found = result(case, TILED, like)
    assert counted is None or counted.instructions_executed() > before, "no tile was used"
    for got, wanted in zip(found, result(case, PLAIN, like), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_bf16_equals_its_meaning_and_a_row_has_the_same_bits_alone(counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng(2)
    for rows, columns, width in ((1, 64, 16), (2, 96, 33), (5, 32, 48), (16, 64, 20), (33, 160, 16), (151, 64, 40)):
        x, weight = meaning.round_rows(floats(rng, rows, columns)), packed(rng, "bf16", width, columns)
        case = Case("bf16_linear", [x, weight], {"format": "bf16", "width": width}, (0,))
        before = counted.instructions_executed() if counted else 0
        (together,) = run(case, TILED)
        assert counted is None or (counted.instructions_executed() > before) == (rows > 1), "tiles are for several rows"
        for row in range(0, rows, 7):
            alone = Case(case.op, [x[row : row + 1], weight], case.attrs, (0,))
            np.testing.assert_array_equal(run(alone, TILED)[0][0], together[row])


def test_bf16_without_whole_tiles_of_columns_goes_without(counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng(3)
    x, weight = meaning.round_rows(floats(rng, 9, 48)), packed(rng, "bf16", 32, 48)
    case = Case("bf16_linear", [x, weight], {"format": "bf16", "width": 32}, (0,))
    before = counted.instructions_executed() if counted else 0
    (got,) = run(case, TILED)
    assert counted is None or counted.instructions_executed() == before
    np.testing.assert_array_equal(got, run(case, PLAIN)[0])


@pytest.mark.parametrize("op", ["i8_experts_in", "i8_experts_out", "bf16_experts_in", "bf16_experts_out"])
def test_pairs_of_experts_go_through_tiles(op: str, counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng([*map(ord, op)])
    case = experts(rng, op, "bf16" if op.startswith("bf16") else "q4", rows=90, inner=64)
    before = counted.instructions_executed() if counted else 0
    (got,) = run(case, TILED)
    assert counted is None or counted.instructions_executed() > before, "no tile was used"
    if op.startswith("i8"):
        np.testing.assert_array_equal(got, run(case, PLAIN)[0])


def test_gated_experts_give_the_same_bits(counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng(4)
    left = meaning.left_of(block_format("q4"), floats(rng, 60, 128))
    ids = np.sort(rng.integers(0, 3, (60, 2)).astype(np.int32), axis=1)
    weights = [packed(rng, "q4", 3 * 64, 128) for _ in range(2)]
    attrs = {"format": "q4", "experts": 3, "width": 64, "activation": "silu"}
    same_bits(Case("i8_experts_gated_i8", [*left, ids, *weights], attrs, tuple(range(len(left) + 1))), counted)


# Past and new rows: in blocks, alone, beyond a chunk of 256 tokens, with pages that end before they are full.
LENGTHS = [(300, 3), (37, 29), (0, 1), (16, 1), (600, 1), (250, 45)]


@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    # Halves of a tile's pairs of K; odd tiles of V; several groups of heads of one row; pairs of K in tiles of ten.
    [(2, 1, 16), (6, 2, 48), (32, 1, 32), (8, 8, 80), (16, 2, 64)],
)
def test_attention_equals_its_meaning_and_a_row_has_the_same_bits_alone(
    heads: int, groups: int, size: int, counted: ctypes.CDLL | None
) -> None:
    rng = np.random.default_rng([heads, size])
    case = attention(rng, "bf16", lengths=LENGTHS, heads=heads, kv_heads=groups, head_dim=size, window=0)
    before = counted.instructions_executed() if counted else 0
    (together,) = run(case, TILED)
    assert counted is None or counted.instructions_executed() > before, "no tile was used"
    qkv, kv, seqs, slots, *rest = case.arrays
    after = kv.copy()  # a row alone finds the K and V of those before it where they were written
    OPS[case.op].meaning(qkv.copy(), after, seqs, slots, *rest, **case.attrs)
    for row in (0, 2, 3, 17, 32, 33, 34, 35, len(qkv) - 1):
        alone = replace(case, arrays=[qkv[row : row + 1], after, seqs[row : row + 1], slots[row : row + 1], *rest])
        if not case.attrs["causal"] and slots[row] < slots[seqs == seqs[row]].max():
            continue  # which sees those behind it, too
        found = result(alone, TILED, (together[:1],))[0]
        np.testing.assert_array_equal(found[0], together[row], err_msg=f"row {row}")


def test_attention_with_sinks_and_by_distance_go_through_tiles(counted: ctypes.CDLL | None) -> None:
    rng = np.random.default_rng(5)
    for op in ("attention_with_sinks", "attention_by_distance"):
        case = attention(rng, "bf16", op, lengths=LENGTHS, heads=4, kv_heads=2, head_dim=32)
        before = counted.instructions_executed() if counted else 0
        run(case, TILED)
        assert counted is None or counted.instructions_executed() > before, "no tile was used"


def test_attention_of_heads_that_are_no_whole_tiles_goes_without(counted: ctypes.CDLL | None) -> None:
    if counted is None:
        pytest.skip("tiles of the machine are not counted")
    before = counted.instructions_executed()
    run(attention(np.random.default_rng(6), "bf16", heads=4, kv_heads=2, head_dim=20), TILED)
    assert counted.instructions_executed() == before


def test_few_rows_use_no_tile(counted: ctypes.CDLL | None) -> None:
    if counted is None:
        pytest.skip("tiles of the machine are not counted")
    before = counted.instructions_executed()
    run(linear_case(np.random.default_rng(0), "i8_linear", "q4", rows=7), TILED)
    assert counted.instructions_executed() == before
