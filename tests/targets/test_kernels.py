"""Every kernel against its NumPy meaning, on random shapes, for every kind of CPU this machine can run."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler import meaning
from llmc.compiler.formats import MIDDLE, block_format
from llmc.compiler.ops import quantized, rounded
from llmc.compiler.ops.narrowed import MULTIPLIED, NARROWED, after_linear
from llmc.compiler.ops.quantized import ENDINGS, GATED, after_experts
from llmc.targets import target as targets
from llmc.targets.lower import KERNELS

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import ATTENTION_CASES
from expert_cases import EXPERT_CASES
from kernel_cases import (
    BLOCK_FORMATS,
    CASES,
    FEW_FORMATS,
    TURNS,
    Case,
    activation_case,
    embedding_case,
    fixed,
    greatest_case,
    linear_case,
    qk_norm,
    result,
    run,
    run_rows,
)
from latent_kernel_cases import LATENT_CASES

FLAGS = targets.cpu_flags()
NEWER = {"avx512_vnni", "avx512vbmi", "avx512_bf16", "avx_vnni"}


def _without(*flags: str) -> targets.Target:
    """This machine without some of its flags; a name that ends in * stands for all that begin so."""
    gone = {f for f in FLAGS for flag in flags if f == flag or (flag.endswith("*") and f.startswith(flag[:-1]))}
    return targets.native(FLAGS - gone)


VARIANTS = {
    "native": targets.native(),
    "no vbmi": _without("avx512vbmi"),
    "avx512": _without(*NEWER),
    "avx vnni": _without("avx512*"),
    "avx2": _without("avx512*", "avx_vnni"),
    "portable": targets.baseline(targets.native().arch),
}


# On a machine without the newest instructions some are the same.
DISTINCT = [name for i, name in enumerate(VARIANTS) if VARIANTS[name] not in list(VARIANTS.values())[:i]]
WIDTHS = [name for name in ("native", "avx2", "portable") if name in DISTINCT]  # of registers


def test_every_kernel_has_a_case() -> None:
    fused = set()  # test_quantized.py, test_unpacked.py
    for linear, ending in (*((quantized.LINEAR, e) for e in ENDINGS.values()), (rounded.LINEAR, rounded.ENDING)):
        fused |= {op + ending for op in NARROWED} | {after_linear(linear, op + ending) for op in MULTIPLIED}
    for ending in ENDINGS.values():
        fused |= {after_experts(op + ending, biased) for op in GATED for biased in (False, True)}
    assert set(CASES) | set(ATTENTION_CASES) | set(EXPERT_CASES) | set(LATENT_CASES) | fused == set(KERNELS)


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("op", CASES)
def test_kernel_equals_its_meaning(op: str, variant: str) -> None:
    rng = np.random.default_rng([*map(ord, op + variant)])
    for _ in range(3 if variant == "native" else 1):
        run_rows(CASES[op](rng), VARIANTS[variant])


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.thorough_if(
    case=lambda format, variant: variant != "native" and TURNS[format] != DISTINCT.index(variant) % 2
)
def test_every_block_format_equals_its_meaning(format: str, variant: str) -> None:
    """For two rows, so that a kernel has one group of rows: the same code reads weights for all groups."""
    rng = np.random.default_rng([*map(ord, format + variant)])
    run(fixed(linear_case(rng, "i8_linear", format, rows=2)), VARIANTS[variant])
    for least in (False, True) if block_format(format).offset == MIDDLE else (False,):
        run(greatest_case(rng, format, least), VARIANTS[variant])
    if variant in ("native", "avx2"):
        run(embedding_case(rng, format), VARIANTS[variant])
    if variant == "native" and format in FEW_FORMATS:
        run(fixed(linear_case(rng, "packed_linear", format, rows=2)), VARIANTS[variant])


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.thorough_if(case=lambda format: format not in FEW_FORMATS)
def test_every_block_format_goes_through_every_group_of_rows(format: str) -> None:
    rng = np.random.default_rng([*map(ord, format)])
    run_rows(linear_case(rng, "i8_linear", format), VARIANTS["native"])


@pytest.mark.parametrize("seed", range(6))
def test_two_tiles_of_floats_together_give_the_bits_of_each(seed: int) -> None:
    """Widths of one tile, of an even number and of an odd one are among them."""
    case = linear_case(np.random.default_rng(seed), "packed_linear", "f32")
    (whole,) = run(case, VARIANTS["native"])
    for rows in (1, 11, 59, 60, 61, 71, 72, 73, 127, 128, 187, 189):
        first = replace(case, arrays=[case.arrays[0][:rows].copy(), case.arrays[1]])
        (got,) = result(first, VARIANTS["native"], (whole[:rows],))
        np.testing.assert_array_equal(got, whole[:rows], err_msg=str(rows))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_int8_products_have_the_same_bits_on_every_kind_of_cpu(format: str) -> None:
    """Whatever bytes it looks codes up as, and however it sums them: dots are whole numbers, offset and all."""
    case = fixed(linear_case(np.random.default_rng([*map(ord, format)]), "i8_linear", format, rows=3))
    like = (np.empty((3, case.attrs["width"]), np.float32),)
    fused = [name for name in DISTINCT if name != "portable"]  # which rounds a product before it is added
    first, *others = (result(case, VARIANTS[variant], like)[0] for variant in fused)
    for variant, other in zip(fused[1:], others, strict=True):
        np.testing.assert_array_equal(other, first, err_msg=variant)


def test_one_instruction_for_pairs_of_bfloat16_gives_the_bits_of_two_steps() -> None:
    case = linear_case(np.random.default_rng(26), "bf16_linear", "bf16", rows=27)
    like = (np.empty((27, case.attrs["width"]), np.float32),)
    one, two = (result(case, VARIANTS[variant], like)[0] for variant in ("native", "avx512"))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("op", ["activate", "gated"])
@pytest.mark.parametrize("name", meaning.ACTIVATIONS)
def test_every_activation_equals_its_meaning(name: str, op: str) -> None:
    rng = np.random.default_rng([*map(ord, name + op)])
    for variant in WIDTHS:
        run(activation_case(rng, op, name), VARIANTS[variant])


@pytest.mark.parametrize("span", ["head", "heads", "all"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_every_norm_of_q_and_k_equals_its_meaning(kind: str, span: str) -> None:
    rng = np.random.default_rng([*map(ord, kind + span)])
    for variant in ("native", "portable"):
        run(qk_norm(rng, kind, span), VARIANTS[variant])


# Numbers of every size, and those where the pieces of tanh meet.
SIZES = np.concatenate([np.logspace(-38, 38, 1500), np.linspace(0.6, 0.65, 100), np.linspace(0, 15, 1500)])


@pytest.mark.parametrize("variant", WIDTHS)
def test_tanh_is_right_for_the_smallest_and_the_greatest_numbers(variant: str) -> None:
    x = np.concatenate([SIZES, -SIZES, [np.inf, -np.inf]]).astype(np.float32)[None]
    (got,) = result(Case("soft_cap", [x], {"cap": 1.0}, (0,)), VARIANTS[variant])
    np.testing.assert_allclose(got, np.tanh(x.astype(np.float64)), rtol=3e-7, atol=0)


@pytest.mark.parametrize("variant", WIDTHS)
def test_gelu_is_right_number_by_number(variant: str) -> None:
    """Also far below zero, where next to nothing is left of a number."""
    x = np.concatenate([SIZES, -SIZES]).astype(np.float32)[None]
    (got,) = result(Case("activate", [x], {"activation": "gelu"}, (0,)), VARIANTS[variant])
    wanted = np.array([[v / 2 * math.erfc(-v / math.sqrt(2)) for v in x[0].tolist()]])
    for chosen, rtol in ((x >= 0, 4e-7), ((x < 0) & (x > -12), 6e-6)):
        np.testing.assert_allclose(got[chosen], wanted[chosen], rtol=rtol, atol=0)
    assert np.all(np.abs(got[x <= -12]) < 1e-30)


@pytest.mark.parametrize("variant", WIDTHS)
def test_what_is_no_number_stays_so(variant: str) -> None:
    """A model that went wrong must not look well: bounds and caps make no number of NaN."""
    x = np.full((1, 37), np.nan, np.float32)
    cases = [Case("activate", [x], {"activation": name}, (0,)) for name in meaning.ACTIVATIONS]
    cases += [Case("clip", [x], {"bound": 2.0}, (0,)), Case("soft_cap", [x], {"cap": 2.0}, (0,))]
    for case in cases:
        assert np.isnan(result(case, VARIANTS[variant])[0]).all(), case
