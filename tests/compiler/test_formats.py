"""Weight formats: what is packed comes back, within what the format promises, at the size it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import (
    BLOCK,
    FORMATS,
    MIDDLE,
    OFFERED,
    ROTATED,
    SUM_BLOCK,
    BlockFormat,
    Quantized,
    ceil_to,
    decode,
    encode,
    from_bf16,
    plain,
    quantize_rows,
    rotate_rows,
    to_bf16,
)

SIZES = st.integers(1, 70)
BLOCKS = {name: format for name, format in FORMATS.items() if isinstance(format, BlockFormat)}
EVEN = [name for name in OFFERED if name in BLOCKS and BLOCKS[name].offset == "minimum"]


def _matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def _spans(weight: np.ndarray, block: int, span: str) -> np.ndarray:
    """Per element: the range (max - min) or the greatest magnitude of its block of columns, zeros padded in."""
    rows, columns = weight.shape
    padded = np.zeros((rows, ceil_to(columns, 64)), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, -1, block)
    value = np.abs(blocks).max(-1) if span == "magnitude" else blocks.max(-1) - blocks.min(-1)
    return np.repeat(value, block, axis=1)[:, :columns]


def _bound(name: str, weight: np.ndarray) -> np.ndarray:
    """Greatest error of one weight: half a step, and fp16's rounding of scale and minimum (2^-11, at least 2^-25).

    Of a rotated format that bounds the rotated matrix, and the errors of 64 columns there may add up in one of these.
    """
    if name in BLOCKS and BLOCKS[name].rotated:
        squares = (_bound_of_stored(name, rotate_rows(weight)) ** 2).reshape(len(weight), -1, ROTATED).sum(-1)
        return np.asarray(np.repeat(np.sqrt(squares), ROTATED, axis=1)[:, : weight.shape[1]])
    return _bound_of_stored(name, weight)


def _bound_of_stored(name: str, weight: np.ndarray) -> np.ndarray:
    if name in EVEN:
        format = BLOCKS[name]
        steps = 10 if format.pair else format.top
        span, magnitude = (_spans(weight, format.block, kind) for kind in ("range", "magnitude"))
        return np.asarray(span * (0.5 / steps + 2.0**-11) + magnitude * 2.0**-11 + (steps + 1) * 2.0**-25)
    if name == "q8":
        return np.asarray(_spans(weight, 32, "magnitude") * (0.5 / 127 + 2.0**-11) + 127 * 2.0**-25)
    if name == "r8":  # a step is at most that of the greatest number, and one of a sub-scale more
        root = np.sqrt(_spans(weight, 64, "magnitude") / 127) + np.sqrt(np.abs(weight).max(1)[:, None] / 127) / 127
        return np.asarray(root**2 * 0.501)
    if name in BLOCKS:  # codebooks: a searched scale may clip; no weight is off by more than a few steps
        levels = len(BLOCKS[name].values) ** (0.5 if BLOCKS[name].pair else 1)  # type: ignore[arg-type]
        roots = np.sqrt(_spans(weight, BLOCKS[name].block, "magnitude"))
        # A sub-scale more: blocks far below their row have no finer scales.
        return np.asarray((roots + roots.max(1, keepdims=True) / 127) ** 2 * 4.0 / levels)
    return np.abs(weight) * (2.0**-8 if name == "bf16" else 0)


@pytest.mark.parametrize("name", OFFERED)
@settings(max_examples=20, deadline=None)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 1000))
@example(rows=62, columns=1, seed=282)  # a block so small that its scale is a subnormal number
@example(rows=1, columns=65, seed=222)  # and one far below its row
@example(rows=70, columns=65, seed=245)  # and one of equal numbers between two scales
def test_unpack_gives_back_what_was_packed(name: str, rows: int, columns: int, seed: int) -> None:
    weight = _matrix(rows, columns, seed)
    packed = FORMATS[name].pack(weight)
    assert packed.shape == FORMATS[name].packed_shape(rows, columns)
    assert str(packed.dtype) == FORMATS[name].dtype
    error = np.abs(FORMATS[name].unpack(packed, rows, columns) - weight)
    assert (error <= _bound(name, weight) + 1e-7).all()


# Bits of a weight of a 64 x 2048 matrix, from its bytes. A row's own scale is 32 bits: 1/64 of a bit here.
BITS = {
    "f32": 32, "bf16": 16, "q8": 8.5, "q8_b32": 9, "q6": 6.5, "q5": 5.5, "q4": 5, "q4_b64": 4.5, "q3h": 4, "q3": 4,
    "q2": 3, "c6": 6.25 + 1 / 64, "c5": 5.25 + 1 / 64, "c4": 4.25 + 1 / 64, "c3h": 3.75 + 1 / 64, "c3": 3.25 + 1 / 64,
    "c2h": 2.75 + 1 / 64, "c2": 2.25 + 1 / 64, "r8": 8.125 + 1 / 64, "r6": 6.125 + 1 / 64, "r5": 5.125 + 1 / 64,
    "r4": 4.125 + 1 / 64, "r3h": 3.625 + 1 / 64, "q4_0": 4.5, "q5_0": 5.5, "q5_1": 6, "iq4_nl": 4.5, "q2_k": 2.625,
    "q3_k": 3.625, "q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.625, "int4_b32": 5, "int4_b64": 4.5, "mxfp4": 4.5,
    "iq4_xs": 4.375, "iq3_s": 4.375, "iq3_xxs": 4.375, "iq2_s": 3.625, "iq2_xxs": 3.375, "iq1_m": 3.625,
    "tq2_0": 2.375, "nvfp4": 5, "nf4": 4.25, "q4_0_b64": 4.25,
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERED)
def test_pieces_of_a_matrix_give_the_bytes_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((83, 300)).astype(np.float32)
    whole = FORMATS[name].pack(weight)
    monkeypatch.setattr(plain, "_PIECE", 1)
    assert len(list(plain.pieces(*weight.shape))) == 6
    np.testing.assert_array_equal(FORMATS[name].pack(weight), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_per_weight_come_from_the_bytes(name: str) -> None:
    shape = FORMATS[name].packed_shape(64, 2048)
    assert 8 * int(np.prod(shape)) * 4 / (64 * 2048) == BITS[name]
    if name in OFFERED:
        assert FORMATS[name].pack(_matrix(64, 2048, 0)).nbytes == int(np.prod(shape)) * 4


def test_our_formats_cost_what_they_promise() -> None:
    assert BITS["c3h"] < 3.8
    assert BITS["c4"] < 4.4


@pytest.mark.parametrize("name", BLOCKS)
@given(rows=st.integers(1, 40), seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_layout_keeps_every_code_and_table(name: str, rows: int, seed: int) -> None:
    rng, format = np.random.default_rng(seed), BLOCKS[name]
    columns = format.columns * int(rng.integers(1, 4))
    codes = rng.integers(0, format.top + 1, (rows, columns // (2 if format.pair else 1))).astype(np.uint8)
    blocks, records = columns // format.block, columns // format.columns
    most = 16 if format.sub_bits == 4 else 128
    wide = records if format.scale == "super" else blocks
    tables = {
        "scale": rng.standard_normal((rows, wide)).astype(np.float16),
        "sub_scale": rng.integers(0 if most == 16 else -128, most, (rows, blocks)).astype(np.int8),
        "sub_minimum": rng.integers(0, most, (rows, blocks)).astype(np.uint8),
        "row_scale": rng.standard_normal(rows).astype(np.float32),
    }
    kinds = {"f16": ["scale"], "super": ["scale", "sub_scale"], "row": ["row_scale", "sub_scale"]}[format.scale]
    if isinstance(format.offset, str):
        tables[format.offset] = rng.standard_normal((rows, wide)).astype(np.float16)
        kinds += [format.offset, *(["sub_minimum"] if format.scale == "super" else [])]
    packed = encode(format, Quantized(codes, {kind: tables[kind] for kind in kinds}), rows, columns)
    back = decode(format, packed, rows, columns)
    np.testing.assert_array_equal(back.codes, codes)
    assert set(back.tables) == set(kinds)
    for kind in kinds:
        np.testing.assert_array_equal(back.tables[kind], tables[kind])


# --- the lead seed's numbers -------------------------------------------------------------------

TABLE_2 = np.array([[-1, -0.9, -0.6, -0.4, -0.2, 0, 0.1, 0.5, 0.7, 1, 1.3, 1.5]], np.float32)


@pytest.mark.parametrize(("name", "error"), [("q4", 0.031), ("q3", 0.075), ("q3h", 0.046)])
def test_mean_errors_of_the_seeds_table_2(name: str, error: float) -> None:
    back = FORMATS[name].unpack(FORMATS[name].pack(TABLE_2), 1, TABLE_2.shape[1])
    assert round(float(np.abs(back - TABLE_2).mean()), 3) == error


def test_3_5_bit_codes_are_the_seeds() -> None:
    """Its own packer's bytes for w_i = i: base, scale, then bit 6, bits 5..4 and bits 3..0 of 32 pair codes."""
    golden = bytes.fromhex("00004d460000feff0054aaff0355aafa00cc8c8844f400cb7c88434400c0cc88")
    bits = [np.unpackbits(np.frombuffer(golden[a:b], np.uint8), bitorder="little") for a, b in ((4, 8), (8, 16))]
    low = np.frombuffer(golden[16:32], np.uint8)
    codes = [
        int(bits[0][p]) << 6 | int(bits[1][2 * p] + 2 * bits[1][2 * p + 1]) << 4 | int(low[p // 2] >> 4 * (p % 2)) & 15
        for p in range(32)
    ]
    digits = np.array([[code % 11, code // 11] for code in codes]).reshape(-1)
    weight = np.arange(64, dtype=np.float32)[None]
    ours = FORMATS["q3h"].unpack(FORMATS["q3h"].pack(weight), 1, 64)[0]
    scale = np.frombuffer(golden[2:4], np.float16).astype(np.float32)
    np.testing.assert_allclose(ours, digits * scale, rtol=1e-6)


# --- weights that are hard ---------------------------------------------------------------------

HARD = {
    "zeros": np.zeros((16, 64)),
    "ones": np.ones((16, 64)),
    "equal blocks": np.full((16, 64), -3.5),
    "one column": np.linspace(-1, 1, 16)[:, None],
    "one weight": np.array([[0.25]]),
    "odd width": np.random.default_rng(0).standard_normal((3, 33)),
    "a zero row": np.vstack([np.zeros((1, 40)), np.random.default_rng(1).standard_normal((1, 40))]),
    "tiny": np.random.default_rng(2).standard_normal((4, 64)) * 1e-30,
    "an outlier": np.where(np.arange(64) == 7, 10.0, 0.01) * np.ones((4, 1)),
}


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("kind", HARD)
def test_hard_weights_come_back_finite_and_near(name: str, kind: str) -> None:
    weight = HARD[kind].astype(np.float32)
    back = FORMATS[name].unpack(FORMATS[name].pack(weight), *weight.shape)
    assert np.isfinite(back).all()
    assert (np.abs(back - weight) <= _bound(name, weight) + 1e-6).all()
    if kind == "zeros":
        assert not back.any()


@pytest.mark.parametrize("name", ["q8", *EVEN])
def test_weights_beyond_fp16_scales_are_refused(name: str) -> None:
    with pytest.raises(LlmcError, match="too large"):
        FORMATS[name].pack(np.full((16, 64), 1e9, np.float32) * np.linspace(-1, 1, 64, dtype=np.float32))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in OFFERED])
def test_a_format_that_only_keeps_refuses_floats(name: str) -> None:
    with pytest.raises(LlmcError, match="only keeps"):
        FORMATS[name].pack(np.zeros((16, 256), np.float32))


# --- bfloat16 and activations ------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bf16_rounds_to_nearest_even_as_torch_does(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    x = np.array(values, np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(from_bf16(to_bf16(x)), expected)


@given(rows=st.integers(1, 5), columns=st.integers(1, 130), seed=st.integers(0, 100))
def test_quantized_activations_stay_within_half_a_step(rows: int, columns: int, seed: int) -> None:
    x = _matrix(rows, columns, seed)
    codes, scales, sums, starts = quantize_rows(x)
    back = (codes.reshape(rows, -1, BLOCK) * scales[..., None]).reshape(rows, -1)
    assert (np.abs(back[:, :columns] - x) <= _spans(x, 32, "magnitude") * 0.501 / 127).all()
    expected = [back.reshape(rows, -1, size).sum(-1) for size in (BLOCK, SUM_BLOCK)]
    np.testing.assert_allclose(sums, np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-5)
    whole = [codes.reshape(rows, -1, size).sum(-1, dtype=np.int32) for size in (BLOCK, SUM_BLOCK)]
    np.testing.assert_array_equal(starts, -MIDDLE * np.concatenate(whole, axis=1))
