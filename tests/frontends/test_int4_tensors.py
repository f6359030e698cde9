"""One AWQ or GPTQ layer is kept as it is: the same 4-bit codes, scales and zeros, in llmc's layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import block_format, ceil_to, decode, dequantize, encode
from llmc.frontends.files.safetensors_file import read_safetensors
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.quantized import grouped
from llmc.frontends.quantized.words import WordPacking, WordTensor

sys.path.insert(0, str(Path(__file__).parent))
from int4_layers import PACKINGS, Layer, config_of, kept_as, pack_gptq, random_layer


def tensor_of(kind: str, layer: Layer, group: int, path: Path, **changes: Any) -> WordTensor:
    arrays = {f"a.{part}": array for part, array in {**PACKINGS[kind][1](layer), **changes}.items()}
    save_file({name: array for name, array in arrays.items() if array is not ...}, path)
    faults: list[str] = []
    packing = packing_of({"quantization_config": config_of(kind, group)}, faults)
    assert not faults
    assert packing is not None
    tensor = packing.fold(read_safetensors(path), "x")["a.weight"]
    assert isinstance(tensor, WordTensor)
    return tensor


@pytest.mark.parametrize(
    ("columns", "group", "kept"),
    [
        (128, 32, "int4_b32"),
        (128, 64, "int4_b64"),
        (256, 128, "int4_b64"),
        (192, -1, "int4_b64"),
        (96, -1, "int4_b32"),
        (96, 32, "int4_b32"),
        (192, 96, "int4_b32"),
        (320, 128, "int4_b64"),  # half a group at the end
        (96, 64, "int4_b32"),
        (64, 128, "int4_b64"),  # a group wider than the row
    ],
)
@pytest.mark.parametrize("kind", PACKINGS)
def test_kept_bit_for_bit(kind: str, columns: int, group: int, kept: str, tmp_path: Path) -> None:
    layer = random_layer(24, columns, group, PACKINGS[kind][2])
    tensor = tensor_of(kind, layer, group, tmp_path / "t.safetensors")
    kept = kept_as(kind, kept)
    assert (tensor.shape, tensor.kept) == ((24, columns), kept)
    assert tensor.stored == ("AWQ4" if kind == "awq" else "GPTQ4")
    assert tensor.nbytes >= 24 * columns // 2
    values = layer.values()
    np.testing.assert_array_equal(tensor.read(), values)
    for start, stop in ((0, 1), (3, 11), (8, 24), (5, 5)):
        np.testing.assert_array_equal(tensor.read_rows(start, stop), values[start:stop])
    format = block_format(kept)
    quantized = tensor.read_quantized()
    np.testing.assert_array_equal(quantized.codes[:, :columns], layer.codes)
    assert quantized.codes.shape == (24, ceil_to(columns, format.columns))
    whole = dequantize(format, quantized)
    np.testing.assert_array_equal(whole[:, :columns], values)
    assert not whole[:, columns:].any()
    packed = encode(format, quantized, 24, columns)
    back = decode(format, packed, 24, columns)
    for name, table in quantized.tables.items():
        np.testing.assert_array_equal(back.tables[name], table)
    np.testing.assert_array_equal(format.unpack(packed, 24, columns), values)


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(list(PACKINGS)),
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    group=st.sampled_from([-1, 32, 64, 96, 128]),
    chunk=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_pieces_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, kind: str, rows: int, columns: int, group: int, chunk: int, seed: int
) -> None:
    layer = random_layer(8 * rows, 32 * columns, group, PACKINGS[kind][2], seed)
    tensor = tensor_of(kind, layer, group, tmp_path_factory.mktemp("t") / "t.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "CHUNK", chunk)
        format = block_format(tensor.kept or "")
        np.testing.assert_array_equal(tensor.read(), layer.values())
        values = dequantize(format, tensor.read_quantized())
        np.testing.assert_array_equal(values[:, : 32 * columns], layer.values())


def test_zeros_that_contradict_the_configuration(tmp_path: Path) -> None:
    layer = random_layer(8, 64, 32, (8, 8))
    less = pack_gptq(layer, 0)["qzeros"]  # 8, where the first format has 7
    tensor = tensor_of("gptq sym", layer, 32, tmp_path / "t.safetensors", qzeros=less)
    for read in (tensor.read, tensor.read_quantized):
        with pytest.raises(SourceError, match=r"a\.qzeros has a zero point of 9, wanted 8 since .*sym is true"):
            read()
    tensor = tensor_of("gptq", layer, 32, tmp_path / "u.safetensors", qzeros=np.full_like(less, -1))
    with pytest.raises(SourceError, match="zero points stored as 15, less one, which some readers take for 16"):
        tensor.read()


@pytest.mark.parametrize("kind", ["awq", "gptq"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_no_numbers(kind: str, bad: float, tmp_path: Path) -> None:
    layer = random_layer(8, 64, 32, (8, 8))
    layer.scales[3, 1] = bad
    tensor = tensor_of(kind, layer, 32, tmp_path / "t.safetensors")
    for read in (tensor.read, tensor.read_quantized):
        with pytest.raises(SourceError, match="has NaN or infinite values; the weights are damaged"):
            read()


@pytest.mark.parametrize(
    ("dtype", "factor", "kept"),
    [
        ("float32", 3.0, True),
        ("float32", 1 + 2.0**-12, True),
        ("bfloat16", 3.0, True),
        ("bfloat16", 2.0**30, False),
        ("bfloat16", 2.0**-16, False),
    ],
)
def test_scales_of_other_types(dtype: str, factor: float, kept: bool, tmp_path: Path) -> None:
    """Kept where float16 has the same numbers, or nearly, refused where it has not; always read."""
    layer = random_layer(8, 64, 32, (8, 8))
    layer.scales[:] = 2.0**-9
    parts = {f"a.{name}": torch.from_numpy(array) for name, array in pack_gptq(layer).items()}
    parts["a.scales"] = (parts["a.scales"].float() * factor).to(getattr(torch, dtype))
    save_torch(parts, tmp_path / "t.safetensors")
    tensor = WordPacking("GPTQ", 4, 32, 1).fold(read_safetensors(tmp_path / "t.safetensors"), "x")["a.weight"]
    exact = replace(layer, scales=parts["a.scales"].float().numpy().T).values()
    np.testing.assert_array_equal(tensor.read(), exact)
    if kept:
        assert tensor.read_quantized().tables["scale"].dtype == np.float16
        return
    with pytest.raises(SourceError, match="scales that float16 cannot hold, so the weights cannot be kept"):
        tensor.read_quantized()
