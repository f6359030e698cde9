"""Kernels that give int8 or bfloat16 at once: the bits of the two that they stand for, and near what they mean."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler import meaning
from llmc.compiler.formats import BLOCK, MIDDLE, ROTATED, block_format, from_bf16
from llmc.compiler.ops import OPS
from llmc.compiler.ops.narrowed import MULTIPLIED, NARROWED, after_linear
from llmc.compiler.ops.quantized import BIAS, ENDINGS, EXPERTS, GATED, LINEAR, after_experts
from llmc.compiler.ops.rounded import ENDING
from llmc.targets.matrices.experts import ROW_BLOCK

sys.path.insert(0, str(Path(__file__).parent))
from kernel_cases import ROWS, Case, floats, packed, result
from test_kernels import VARIANTS, WIDTHS

Arrays = list[np.ndarray]
STORES = ENDINGS | {"round_rows": ENDING}


def _case(rng: np.random.Generator, op: str) -> Case:
    """A case of the op that is not fused, of a width that needs no padding; some blocks are zeros."""
    rows, width = ROWS[-1], 64 * int(rng.integers(1, 6))
    inputs = {"add_": 2}.get(op[:4], 1)
    x = [floats(rng, rows, width * (2 if "gated" in op else 1)) + np.float32(0.25) for _ in range(inputs)]
    for each in x:
        each[::5, :32] = 0
    attrs: dict[str, Any]
    if "norm" in op:
        attrs = {"eps": 1e-5}
        x += [floats(rng, width) for _ in range(2 if "layer" in op else 1)]
    else:
        attrs = {"activation": str(rng.choice(["silu", "gelu_tanh", "relu_squared"]))}
        attrs |= {"limit": 0.5, "plus": 1.0} if op == "bounded_gated" else {}
    return Case(op, x, attrs, tuple(range(inputs)))


def _like(rows: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array[:rows] for array in arrays)


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("op", NARROWED)
@pytest.mark.thorough_if(case=lambda store, variant: store == "round_rows" and variant != "native")
def test_a_fused_kernel_has_the_bits_of_the_two_it_stands_for(op: str, store: str, variant: str) -> None:
    rng, target = np.random.default_rng([*map(ord, op + variant)]), VARIANTS[variant]
    case, ending = _case(rng, op), STORES[store]
    expected = OPS[op + ending].meaning(*case.arrays, **case.attrs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    floats_ = OPS[op].meaning(*case.arrays, **case.attrs)
    *others, plain = result(case, target, floats_ if isinstance(floats_, tuple) else (floats_,))
    apart = [*others, *result(Case(store, [plain], {}, (0,)), target, expected[len(others) :])]
    for rows in (1, 3, ROWS[-1]):
        inputs = [a[:rows].copy() if i in case.symbolic else a for i, a in enumerate(case.arrays)]
        fused = Case(op + ending, inputs, case.attrs, case.symbolic)
        found = result(fused, target, _like(rows, *expected))
        for got, wanted in zip(found, apart, strict=True):
            np.testing.assert_array_equal(got, wanted[:rows])
    _near(store, found[len(others) :], np.asarray(floats_[-1] if isinstance(floats_, tuple) else floats_), expected)


# What is not only thorough: formats know nothing of the activation.
_ALWAYS = {
    ("gated", "q4", "native"), ("gated", "c4", "portable"), ("bounded_gated", "q8", "native"),
    ("activate", "q3h", "native"), ("activate", "c4", "portable"),
    ("gated", "r4", "native"), ("activate", "r4", "avx2"),
}  # fmt: skip


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("format", ["q8", "q4", "q3h", "c4", "r4"])
@pytest.mark.parametrize("op", MULTIPLIED)
@pytest.mark.thorough_if(case=lambda op, format, variant: (op, format, variant) not in _ALWAYS)
def test_a_linear_layer_with_its_activation_has_the_bits_of_the_two(op: str, format: str, variant: str) -> None:
    rng, target = np.random.default_rng([*map(ord, op + format + variant)]), VARIANTS[variant]
    attrs = _case(rng, op).attrs
    width, columns, store = 64 * int(rng.integers(1, 4)) * (2 if "gated" in op else 1), 256, _store(format)
    name = after_linear(LINEAR, op + ENDINGS[store])
    left = meaning.left_of(block_format(format), floats(rng, ROWS[-1], columns))
    symbolic, both = tuple(range(len(left))), {"format": format, "width": width}
    operands = [*left, packed(rng, format, width, columns)]
    expected = OPS[name].meaning(*operands, **both, **attrs)
    (plain,) = result(Case(LINEAR, operands, both, symbolic), target, (np.zeros((ROWS[-1], width), np.float32),))
    apart = result(Case(op + ENDINGS[store], [plain], attrs, (0,)), target, expected)
    for rows in (1, 3, ROWS[-1]):
        inputs = [a[:rows].copy() if i in symbolic else a for i, a in enumerate(operands)]
        fused = Case(name, inputs, both | attrs, symbolic)
        for got, wanted in zip(result(fused, target, _like(rows, *expected)), apart, strict=True):
            np.testing.assert_array_equal(got, wanted[:rows])
    _near(store, apart, OPS[op].meaning(OPS[LINEAR].meaning(*operands, **both), **attrs), expected)


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("format", ["q8", "q4", "c4", "q6_k", "r4"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("op", GATED)
@pytest.mark.thorough_if(
    case=lambda op, biased, format, variant: (
        biased != (op == GATED[0]) or format == "q4" or (op, format, variant) not in _ALWAYS
    )
)
def test_experts_with_their_gate_have_the_bits_of_the_ops_apart(
    op: str, biased: bool, format: str, variant: str
) -> None:
    rng, target = np.random.default_rng([*map(ord, op + format + variant)]), VARIANTS[variant]
    rows = ROW_BLOCK + 30 if format == "q8" else 150  # more than are sorted at once
    attrs, used, count = _case(rng, op).attrs, int(rng.integers(1, 4)), 5
    width = 64 * int(rng.integers(1, 12))
    left = meaning.left_of(block_format(format), floats(rng, rows, 256))
    ids = np.sort(rng.integers(-1, count, (rows, used)).astype(np.int32), axis=1)
    gate, up = (packed(rng, format, count * width, 256) for _ in range(2))
    symbolic, both = tuple(range(len(left) + 1)), {"format": format, "experts": count, "width": width}
    biases = [floats(rng, count * width) for _ in range(2)] if biased else []
    ending = ENDINGS[_store(format)]
    name, operands = after_experts(op + ending, biased), [*left, ids, gate, up, *biases]
    expected = OPS[name].meaning(*operands, **both, **attrs)
    like = (np.zeros((rows, used * width), np.float32),)
    halves = [result(Case(EXPERTS, [*left, ids, w], both, symbolic), target, like)[0] for w in (gate, up)]
    for place, bias in enumerate(biases):
        added = Case(BIAS, [halves[place], ids, bias], {"experts": count}, (0, 1))
        halves[place] = result(added, target, like)[0]
    plain = np.concatenate(halves, axis=1)
    apart = result(Case(op + ending, [plain], attrs, (0,)), target, expected)
    for some in (1, 3, 20, rows):
        inputs = [a[:some].copy() if i in symbolic else a for i, a in enumerate(operands)]
        fused = Case(name, inputs, both | attrs, symbolic)
        for got, wanted in zip(result(fused, target, _like(some, *expected)), apart, strict=True):
            np.testing.assert_array_equal(got, wanted[:some])
    _near(_store(format), apart, OPS[op].meaning(plain, **attrs), expected)


def _store(format: str) -> str:
    """What rows become int8 by: here results go to a matrix of the same format."""
    return "quantize_rotated" if block_format(format).rotated else "quantize_rows"


def _near(store: str, found: Arrays, plain: np.ndarray, expected: tuple[np.ndarray, ...]) -> None:
    """Codes times scales are the numbers within half a step, and a little, for they were computed in another order."""
    if store == "round_rows":
        near, wanted = (from_bf16(np.ascontiguousarray(pairs).view(np.uint16)) for pairs in (found[0], expected[-1]))
        np.testing.assert_allclose(near, plain, rtol=1 / 255, atol=1e-6)
        assert np.mean(near == wanted) > 0.99
        return
    codes, scales, *totals = found
    rotated = store == "quantize_rotated"
    block = ROTATED if rotated else BLOCK
    plain = meaning.rotate_rows(plain, plain.shape[1]) if rotated else plain
    signed = np.ascontiguousarray(codes).view(np.int8).reshape(len(codes), -1, block)
    steps = np.repeat(scales, block, axis=1)
    error = np.abs(signed * scales[..., None] - plain.reshape(signed.shape)).reshape(plain.shape)
    assert np.all(error <= 0.501 * steps + 1e-6)
    np.testing.assert_allclose(scales, expected[1 - len(found)], rtol=2e-5, atol=1e-9)
    if rotated:
        np.testing.assert_array_equal(totals[0], signed.sum(-1, dtype=np.int32) * -MIDDLE)
        return
    sums, starts = totals
    own = [signed.reshape(len(codes), -1, size).sum(-1) for size in (BLOCK, BLOCK // 2)]
    np.testing.assert_allclose(
        sums, np.concatenate([own[0] * scales, own[1] * np.repeat(scales, 2, axis=1)], axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(starts, np.concatenate(own, axis=1, dtype=np.int32) * -MIDDLE)
    assert meaning.quantize_rows(plain)[0].shape == codes.shape
