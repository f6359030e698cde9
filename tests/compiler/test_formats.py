"""Weight formats: what is packed comes back, within what the format promises, at the size it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import BLOCK, FORMATS, from_bf16, quantize_rows, to_bf16

SIZES = st.integers(1, 70)


def _matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def _block_spans(weight: np.ndarray, span: str) -> np.ndarray:
    """Per element: the range (max - min) or the greatest magnitude of its block of 32 columns, zeros padded in."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // 64) * 64), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, -1, BLOCK)
    value = np.abs(blocks).max(-1) if span == "magnitude" else blocks.max(-1) - blocks.min(-1)
    return np.repeat(value, BLOCK, axis=1)[:, :columns]


# Greatest error of one weight: half a step, and fp16's rounding of scale and minimum (2^-11 each, over the codes).
BOUNDS = {
    "f32": lambda w: np.zeros_like(w),
    "bf16": lambda w: np.abs(w) * 2.0**-8,
    "q8": lambda w: _block_spans(w, "magnitude") * (0.5 / 127 + 2.0**-11),
    "q4": lambda w: _block_spans(w, "range") * (0.5 / 15 + 2.0**-11) + _block_spans(w, "magnitude") * 2.0**-11,
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 1000))
def test_unpack_gives_back_what_was_packed(name: str, rows: int, columns: int, seed: int) -> None:
    weight = _matrix(rows, columns, seed)
    packed = FORMATS[name].pack(weight)
    assert packed.shape == FORMATS[name].packed_shape(rows, columns)
    assert str(packed.dtype) == FORMATS[name].dtype
    error = np.abs(FORMATS[name].unpack(packed, rows, columns) - weight)
    assert (error <= BOUNDS[name](weight) + 1e-7).all()


@pytest.mark.parametrize(("name", "bits"), [("f32", 32), ("bf16", 16), ("q8", 8.5), ("q4", 5)])
def test_bits_per_weight_come_from_the_bytes(name: str, bits: float) -> None:
    packed = FORMATS[name].pack(_matrix(64, 128, 0))
    assert 8 * packed.nbytes / (64 * 128) == bits


@pytest.mark.parametrize("name", FORMATS)
def test_constant_and_zero_blocks_are_exact_enough(name: str) -> None:
    for value in (0.0, 1.0, -3.5):
        weight = np.full((16, 64), value, np.float32)
        back = FORMATS[name].unpack(FORMATS[name].pack(weight), 16, 64)
        np.testing.assert_allclose(back, weight, rtol=2e-3)


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_weights_beyond_fp16_scales_are_refused(name: str) -> None:
    with pytest.raises(LlmcError, match="too large"):
        FORMATS[name].pack(np.full((16, 64), 1e9, np.float32) * np.linspace(-1, 1, 64, dtype=np.float32))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bf16_rounds_to_nearest_even_as_torch_does(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    x = np.array(values, np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(from_bf16(to_bf16(x)), expected)


@given(rows=st.integers(1, 5), columns=st.integers(1, 130), seed=st.integers(0, 100))
def test_quantized_activations_stay_within_half_a_step(rows: int, columns: int, seed: int) -> None:
    x = _matrix(rows, columns, seed)
    codes, scales, sums = quantize_rows(x)
    back = (codes.reshape(rows, -1, BLOCK) * scales[..., None]).reshape(rows, -1)[:, :columns]
    assert (np.abs(back - x) <= _block_spans(x, "magnitude") * 0.501 / 127).all()
    total = codes.reshape(rows, -1, BLOCK).astype(np.float64).sum(-1) * scales
    np.testing.assert_allclose(sums, total, rtol=1e-5, atol=1e-6)
