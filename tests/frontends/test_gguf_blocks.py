"""GGUF's block types are kept as they are: the same codes, the same scales, in llmc's layout."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import BlockFormat, Quantized, block_format, ceil_to, decode, dequantize, encode
from llmc.frontends.files.mapped_file import MappedFile, open_mapped
from llmc.frontends.gguf import blocks as gguf_blocks
from llmc.frontends.source import open_model
from llmc.frontends.tensor import READABLE, Tensor

# GGUF type -> its format, where its float16 numbers stand in a block.
TYPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "Q8_0": ("q8", (0,)),
    "Q4_0": ("q4_0", (0,)),
    "Q4_1": ("q4", (0, 2)),
    "Q5_0": ("q5_0", (0,)),
    "Q5_1": ("q5_1", (0, 2)),
    "IQ4_NL": ("iq4_nl", (0,)),
    "Q2_K": ("q2_k", (80, 82)),
    "Q3_K": ("q3_k", (108,)),
    "Q4_K": ("q4_k", (0, 2)),
    "Q5_K": ("q5_k", (0, 2)),
    "Q6_K": ("q6_k", (208,)),
    "IQ4_XS": ("iq4_xs", (0,)),
    "IQ3_S": ("iq3_s", (0,)),
    "IQ3_XXS": ("iq3_xxs", (0,)),
    "IQ2_S": ("iq2_s", (0,)),
    "IQ2_XS": ("iq2_s", (0,)),
    "IQ2_XXS": ("iq2_xxs", (0,)),
    "IQ1_S": ("iq1_m", (0,)),
    "IQ1_M": ("iq1_m", ()),  # its float16 is in the highest bits of four numbers
    "TQ1_0": ("tq2_0", (52,)),
    "TQ2_0": ("tq2_0", (64,)),
    "MXFP4": ("mxfp4", ()),  # its scale is a byte, a power of two
    "NVFP4": ("nvfp4", ()),  # its scales are bytes, E4M3
}
QUANTIZABLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # by the gguf package


def format_of(stored: str) -> BlockFormat:
    return block_format(TYPES[stored][0])


def random_blocks(stored: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes for codes and sub-scales, float16 numbers of every size and sign, zero and denormal ones too."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks, READABLE[stored][1]), np.uint8)
    for at in TYPES[stored][1]:
        sizes = np.exp2(random.uniform(-26, 4, (rows, blocks))) * random.choice([-1, 0, 1, 1], (rows, blocks))
        raw[:, :, at : at + 2] = sizes.astype(np.float16)[..., None].view(np.uint8)
    if stored == "MXFP4":
        raw[:, :, 0] = random.integers(104, 144, (rows, blocks))  # 2 ** -24 to 2 ** 15, which float16 has
    if stored == "IQ1_M":
        spread_scale(raw, random.uniform(-4, 4, (rows, blocks)).astype(np.float16))
    return raw.reshape(rows, -1)


def spread_scale(raw: np.ndarray, scale: np.ndarray) -> None:
    """Put IQ1_M's float16 where it is: four bits at the top of each of four numbers, the lowest ones first."""
    bits = scale.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) << np.uint16(12)
    words = np.ascontiguousarray(raw[..., 48:]).view(np.uint16) & np.uint16(0x0FFF) | bits
    raw[..., 48:] = np.ascontiguousarray(words).view(np.uint8)


def tensor_of(raw: np.ndarray, stored: str, path: Path) -> Tensor:
    """`raw` (N, bytes of a row) as a tensor in a file, after bytes of something else."""
    path.write_bytes(b"other" + raw.tobytes())
    values, size = READABLE[stored]
    shape = (raw.shape[0], raw.shape[1] // size * values)
    return Tensor("t", shape, stored, 5, raw.size, open_mapped(path, 1))


def expected(raw: np.ndarray, stored: str) -> np.ndarray:
    return quants.dequantize(raw, GGMLQuantizationType[stored])


def assert_same(a: Quantized, b: Quantized) -> None:
    np.testing.assert_array_equal(a.codes, b.codes)
    assert set(a.tables) == set(b.tables)
    for name, table in a.tables.items():
        assert table.dtype == b.tables[name].dtype
        np.testing.assert_array_equal(table, b.tables[name])


def check(raw: np.ndarray, stored: str, path: Path) -> None:
    """Everything that keeping promises, for one tensor."""
    tensor, format = tensor_of(raw, stored, path), format_of(stored)
    rows, columns = tensor.shape
    assert tensor.kept == format.name
    quantized = tensor.read_quantized()
    values = dequantize(format, quantized)
    assert values.shape == (rows, ceil_to(columns, format.columns))
    np.testing.assert_array_equal(values[:, :columns], expected(raw, stored))
    np.testing.assert_array_equal(values[:, :columns], tensor.read())
    assert not values[:, columns:].any()
    packed = encode(format, quantized, rows, columns)
    assert packed.shape == format.packed_shape(rows, columns)
    assert_same(decode(format, packed, rows, columns), quantized)
    np.testing.assert_array_equal(format.unpack(packed, rows, columns), tensor.read())


def test_every_block_type_that_is_read_is_kept() -> None:
    assert set(TYPES) == {name for name, (values, _) in READABLE.items() if values > 1}


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("stored", TYPES)
def test_kept_bit_for_bit(stored: str, blocks: int, rows: int, tmp_path: Path) -> None:
    check(random_blocks(stored, rows, blocks, rows + blocks), stored, tmp_path / "t")


@pytest.mark.parametrize("stored", QUANTIZABLE)
def test_what_gguf_quantizes_is_kept(stored: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((40, 96)).astype(np.float32)
    weight[3] = 0
    check(quants.quantize(weight, GGMLQuantizationType[stored]), stored, tmp_path / "t")


@pytest.mark.parametrize("byte", [0, 127, 128, 255])
@pytest.mark.parametrize("stored", TYPES)
def test_extreme_codes(stored: str, byte: int, tmp_path: Path) -> None:
    """All bits set, none, only the highest: int8 -128 in Q8_0 and in Q6_K's scales, 63 and -32 in Q3_K's."""
    raw = np.full((2, 2, READABLE[stored][1]), byte, np.uint8)
    for at in TYPES[stored][1]:
        raw[:, :, at : at + 2] = np.float16([[[60000.0], [-6e-8]]]).repeat(2, 0).view(np.uint8)
    if stored == "MXFP4":
        raw[:, :, 0] = 104, 143
    if stored == "IQ1_M":
        spread_scale(raw, np.float16([[60000.0, -6e-8]] * 2))
    check(raw.reshape(2, -1), stored, tmp_path / "t")


@settings(deadline=None, max_examples=30)
@given(
    stored=st.sampled_from(list(TYPES)),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 4),
    chunk=st.integers(1, 2000),
    seed=st.integers(0, 2**32 - 1),
)
def test_pieces_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, stored: str, rows: int, blocks: int, chunk: int, seed: int
) -> None:
    raw = random_blocks(stored, rows, blocks, seed).reshape(rows, blocks, -1)
    whole = gguf_blocks.read_blocks(raw, stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_blocks, "CHUNK", chunk)
        assert_same(gguf_blocks.read_blocks(raw, stored), whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("stored", "place"), [(t, p) for t, (_, places) in TYPES.items() for p in range(len(places))])
def test_scales_that_are_no_numbers(stored: str, place: int, bad: float, tmp_path: Path) -> None:
    raw = random_blocks(stored, 3, 2)
    at = READABLE[stored][1] + TYPES[stored][1][place]
    raw[1, at : at + 2] = np.float16([bad]).view(np.uint8)
    tensor = tensor_of(raw, stored, tmp_path / "t")
    for read in (tensor.read, tensor.read_quantized):
        with pytest.raises(SourceError, match="t: t has NaN or infinite values; the weights are damaged"):
            read()


def test_a_scale_of_iq1_m_that_is_no_number(tmp_path: Path) -> None:
    raw = random_blocks("IQ1_M", 3, 2).reshape(3, 2, -1)
    spread_scale(raw[1:2, 1:2], np.float16([[np.inf]]))
    with pytest.raises(SourceError, match="the weights are damaged"):
        tensor_of(raw.reshape(3, -1), "IQ1_M", tmp_path / "t").read_quantized()


def test_what_is_not_kept(tmp_path: Path) -> None:
    def tensor(shape: tuple[int, ...], stored: str, plus: float = 0.0) -> Tensor:
        path = tmp_path / "t"
        path.write_bytes(bytes(4096))
        return Tensor("t", shape, stored, 0, 1024, MappedFile("t", open_mapped(path, 1).data), plus)

    for stored in ("F32", "F16", "BF16", "I32", "Q8_1"):
        assert tensor((4, 32), stored).kept is None
        with pytest.raises(SourceError, match=f"t: t is stored as {stored}, which no block format keeps"):
            tensor((4, 32), stored).read_quantized()
    assert tensor((64,), "Q8_0").kept is None
    assert tensor((2, 2, 32), "Q8_0").kept is None
    assert tensor((4, 32), "Q8_0", plus=1.0).kept is None


def test_a_file_says_what_it_keeps(tiny_gguf: Callable[..., Path]) -> None:
    with open_model(tiny_gguf(quant="Q5_1")) as source:
        assert source.tensors["layers.0.q"].kept == "q5_1"
        assert source.tensors["final_norm"].kept is None
        down = source.tensors["layers.1.down"]  # 96 columns: a record and a half
        values = dequantize(format_of("Q5_1"), down.read_quantized())
        assert values.shape == (64, 128)
        np.testing.assert_array_equal(values[:, :96], down.read())
    with pytest.raises(SourceError, match="is closed"):
        down.read_quantized()


@pytest.mark.parametrize("stored", TYPES)
def test_what_llama_cpp_quantizes_is_kept(stored: str, tmp_path: Path) -> None:
    """LLMC_PEER_LIB: llama.cpp's libggml-base."""
    if "LLMC_PEER_LIB" not in os.environ:
        pytest.skip("LLMC_PEER_LIB: path of llama.cpp's libggml-base")
    library = ctypes.CDLL(os.environ["LLMC_PEER_LIB"])
    chunk = library.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    weight = np.random.default_rng(2).standard_normal((33, 512)).astype(np.float32)
    values, size = READABLE[stored]
    raw = np.zeros((33, 512 // values * size), np.uint8)
    columns = np.ones(512, np.float32)  # how much they count, without which the smallest types refuse
    made = chunk(GGMLQuantizationType[stored], weight.ctypes.data, raw.ctypes.data, 0, 33, 512, columns.ctypes.data)
    assert made == raw.size
    check(raw, stored, tmp_path / "t")
    assert np.corrcoef(expected(raw, stored).ravel(), weight.ravel())[0, 1] > 0.6


def test_scales_of_mxfp4_that_float16_cannot_hold() -> None:
    raw = np.zeros((1, 2, 17), np.uint8)
    raw[0, 1] = 7
    for scale in (103, 144, 255):
        raw[0, 0] = scale, *[0x80] * 16  # zeros, whose scale does not matter
        raw[0, 1, 0] = 120
        assert np.isfinite(gguf_blocks.read_blocks(raw, "MXFP4").tables["scale"]).all()
        raw[0, 1, 0] = scale
        with pytest.raises(SourceError, match="a scale that float16 cannot hold; compile with --quant"):
            gguf_blocks.read_blocks(raw, "MXFP4")
