"""Matrices in 8-bit floats: the values are torch's, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.compiler.errors import SourceError
from llmc.frontends.files.safetensors_file import read_safetensors
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.quantized.scaled_floats import E4M3, SquarePacking
from llmc.frontends.source import open_model
from llmc.frontends.tensor import Tensor

SQUARE = 128
PUBLISHED = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
}  # fmt: skip


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix (N, K), and what they stand for."""
    rows, columns = weight.shape
    squares = torch.zeros(-(-rows // SQUARE) * SQUARE, -(-columns // SQUARE) * SQUARE)
    squares[:rows, :columns] = weight
    scales = squares.unflatten(1, (-1, SQUARE)).unflatten(0, (-1, SQUARE)).abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(SQUARE, 0).repeat_interleave(SQUARE, 1)[:rows, :columns]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def tensors(path: Path, weights: dict[str, torch.Tensor]) -> dict[str, Tensor]:
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)
    return read_safetensors(path)


def test_every_code_is_what_torch_says() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, expected)


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (3, 5)])
def test_rows_are_codes_times_scales(shape: tuple[int, int], tmp_path: Path) -> None:
    codes, scales, expected = quantized(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    found = tensors(tmp_path / "w", {"a": codes, "a_scale_inv": scales, "norm": torch.ones(3)})
    folded = SquarePacking(SQUARE).fold(found, "x")
    assert set(folded) == {"a", "norm"}
    assert (folded["a"].shape, folded["a"].readable, folded["a"].kept) == (shape, True, None)
    np.testing.assert_array_equal(folded["a"].read(), expected.numpy())
    for start, stop in ((0, 1), (shape[0] - 1, shape[0]), (shape[0] // 2, shape[0]), (1, 1)):
        np.testing.assert_array_equal(folded["a"].read_rows(start, stop), expected.numpy()[start:stop])


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    codes = torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn)
    folded = SquarePacking(SQUARE).fold(tensors(tmp_path / "w", {"a": codes, "a_scale_inv": torch.ones(1, 1)}), "x")
    with pytest.raises(SourceError, match="NaN or infinite"):
        folded["a"].read()


CODES, ONE = torch.zeros(130, 4).to(torch.float8_e4m3fn), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"a": torch.ones(3)}, "no tensor is stored as F8_E4M3"),
        ({"a": CODES}, "a: missing _scale_inv"),
        ({"a_scale_inv": ONE}, "a: missing the matrix itself"),
        (
            {"a": CODES, "a_scale_inv": torch.ones(1, 1)},
            r"_scale_inv has shape \[1, 1\], wanted \[2, 1\] for \[130, 4\]",
        ),
        ({"a": CODES.float(), "a_scale_inv": ONE}, "stored as F32 and F32, wanted F8_E4M3"),
        ({"a": CODES, "a_scale_inv": ONE.int()}, "stored as F8_E4M3 and I32, wanted"),
        ({"a": CODES[0], "a_scale_inv": ONE}, r"shape \[4\], wanted a matrix"),
    ],
)
def test_what_does_not_fit_is_refused(weights: dict[str, torch.Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=reason):
        SquarePacking(SQUARE).fold(tensors(tmp_path / "w", weights), "x")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"], "dequantize": False}, None),
        ({"weight_block_size": [64, 128]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"bits": 8}, "unknown keys"),
    ],
)
def test_what_config_json_may_say(changes: dict[str, Any], fault: str | None) -> None:
    faults: list[str] = []
    packing = packing_of({"quantization_config": PUBLISHED | changes}, faults)
    assert packing == (None if fault else SquarePacking(SQUARE))
    assert all(fault in one for one in faults) if fault else not faults


def test_a_folder(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Matrices of a layer in 8-bit floats, all else as it is."""
    source = tiny_model("qwen3", head_dim=16)
    weights, expected = load_file(source / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name], weights[f"{name}_scale_inv"], expected[name] = quantized(weights[name])
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": PUBLISHED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = open_model(tmp_path, None)
    read = model.tensors["layers.1.gate"].read()
    np.testing.assert_array_equal(read, expected["model.layers.1.mlp.gate_proj.weight"].numpy())
    model.close()
