"""Matrices as Model Optimizer exports them: the values, the codes that are kept, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.compiler.errors import SourceError

sys.path.insert(0, str(Path(__file__).parent))
from quantized_layers import Packed, compressed_bytes, modelopt_floats, modelopt_fp4, modelopt_powers
from quantized_reading import check, faults_of, fold, refusal

BYTES = compressed_bytes(9, 160, "int", (1, 160))
ROWS = Packed(BYTES.tensors | {"weight_scale": BYTES.tensors["weight_scale"].float()[:, 0]}, BYTES.values)


def config(algorithm: Any, **more: Any) -> dict[str, Any]:
    """What `convert_hf_config.py` of version 0.47 writes, and what is not read of it."""
    groups = {"group_0": {"weights": {"num_bits": 8}, "targets": ["Linear"]}}
    table = {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": groups, "ignore": ["lm_head"]}
    return {"quantization_config": table | {"producer": {"name": "modelopt", "version": "0.47.0"}} | more}


CASES: dict[str, tuple[str, Packed, str | None]] = {
    "one scale": ("FP8", modelopt_floats(9, 160, (9, 160), ()), None),
    "one scale in a list": ("FP8", modelopt_floats(9, 160, (9, 160), (1,)), None),
    "rows": ("FP8_PER_CHANNEL_PER_TOKEN", modelopt_floats(9, 160, (1, 160), (9,)), None),
    "squares": ("fp8_pb_wo", modelopt_floats(130, 160, (128, 128), (2, 1, 2, 1)), None),
    "flat squares": ("FP8_PB_WO", modelopt_floats(130, 160, (128, 128), (2, 2)), None),
    "powers": ("MXFP8", modelopt_powers(9, 160), None),
    "bytes": ("W8A16", ROWS, "q8"),
    "nvfp4": ("NVFP4", modelopt_fp4(9, 160, "nvfp4", 0.25), "nvfp4"),
    "weights alone": ("W4A16_NVFP4", modelopt_fp4(9, 160, "nvfp4", 2.0), "nvfp4"),
    "mxfp4": ("W4A8_MXFP4_FP8", modelopt_fp4(9, 160, "mxfp4"), "mxfp4"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm(case: str, tmp_path: Path) -> None:
    """With scales of activations and of the cache beside it, and a layer that is as it was."""
    algorithm, packed, kept = CASES[case]
    others = {"a.input_scale": torch.ones(()), "a.k_scale": torch.ones(1), "b.weight": torch.ones(2, 2)}
    found = fold(tmp_path / "t", config(algorithm), packed.named("a") | others)
    assert set(found) == {"a.weight", "b.weight"}
    check(found["a.weight"], packed.values, kept)


def test_layers_of_several_algorithms(tmp_path: Path) -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    eights, fours = CASES["rows"][1], CASES["nvfp4"][1]
    table = config("MIXED_PRECISION", quantized_layers=layers)
    found = fold(tmp_path / "t", table, eights.named("a") | fours.named("b"))
    check(found["a.weight"], eights.values, None)
    check(found["b.weight"], fours.values, "nvfp4")


FLOATS, FOURS = CASES["rows"][1].tensors, CASES["nvfp4"][1].tensors
BAD_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "scaled before": (FLOATS | {"pre_quant_scale": torch.ones(160)}, "pre_quant_scale is there: columns are scaled"),
    "no codes": ({"weight_scale": torch.ones(9)}, "missing weight"),
    "no scale": ({"weight": FOURS["weight"], "weight_scale_2": torch.ones(())}, "missing weight_scale"),
    "codes": (FLOATS | {"weight": torch.ones(9, 160)}, "stored as F32 with scales in F32, llmc reads F8_E4M3 with F32"),
    "stack": (FLOATS | {"weight": FLOATS["weight"][None]}, "shape [1, 9, 160], wanted a matrix"),
    "none": (FLOATS | {"weight": FLOATS["weight"][:0]}, "shape [0, 160], wanted a matrix"),
    "scales": (FLOATS | {"weight_scale": torch.ones(8)}, "weight_scale has shape [8], wanted [], [9] or [1, 2] for"),
    "bytes' scales": (BYTES.tensors | {"weight_scale": torch.ones(8)}, "weight_scale has shape [8], wanted [9]"),
    "powers": (
        CASES["powers"][1].tensors | {"weight_scale": torch.ones(9, 4).byte()},
        "weight_scale has shape [9, 4], wanted [9, 5]",
    ),
    "no second": (FOURS | {"weight_scale_2": ...}, "weight_scale_2 is missing, wanted one F32"),
    "seconds": (FOURS | {"weight_scale_2": torch.ones(2)}, "weight_scale_2 is F32 [2], wanted one F32"),
    "another second": (FLOATS | {"weight_scale_2": torch.ones(())}, "weight_scale_2 not expected"),
    "blocks": (FOURS | {"weight_scale": FOURS["weight_scale"][:, :5]}, "weight_scale has shape [9, 5], wanted [9, 10]"),
    "width": (FOURS | {"weight": FOURS["weight"][:, :76]}, "rows of 152, wanted a multiple of 16"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(case: str, tmp_path: Path) -> None:
    """Each is told with what is wrong elsewhere."""
    tensors, message = BAD_PARTS[case]
    named = Packed(tensors, BYTES.values).named("a") | {"b.weight_scale_2": torch.ones(2)}
    found = refusal(tmp_path / "t", config("FP8"), named)
    assert found.startswith("x: quantized tensors do not fit: ")
    assert message in found
    assert "b.weight: missing weight, weight_scale" in found


def test_no_part_at_all(tmp_path: Path) -> None:
    assert "quantized by modelopt, but no tensor is" in refusal(
        tmp_path / "t", config("FP8"), {"a.weight": torch.ones(2, 2)}
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number(bad: float, tmp_path: Path) -> None:
    parts_of = {"rows": "weight_scale", "bytes": "weight_scale", "nvfp4": "weight_scale_2"}
    for number, (case, part) in enumerate(parts_of.items()):
        algorithm, packed, _ = CASES[case]
        parts = packed.named("a")
        parts[f"a.{part}"] = parts[f"a.{part}"].clone()
        parts[f"a.{part}"].view(-1)[-1] = bad
        with pytest.raises(SourceError, match=r"a.weight(_scale|_scale_2)? has NaN or infinite values"):
            fold(tmp_path / str(number), config(algorithm), parts)["a.weight"].read()


BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "key": (config("FP8", rotation=1), "unknown keys 'rotation'"),
    "none": (config(None), "quant_algo has None, llmc reads FP8, "),
    "scaled before": (config("W4A16_AWQ"), "quantization_config.quant_algo has 'W4A16_AWQ', llmc reads FP8"),
    "list": (config(["FP8"]), "quant_algo has ['FP8'], llmc reads"),
    "no layers": (config("MIXED_PRECISION"), "quantized_layers = None, wanted a table of tables"),
    "flat": (config("MIXED_PRECISION", quantized_layers={"a": "FP8"}), "wanted a table of tables"),
    "a layer": (
        config("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": ["x"]}}),
        "quantized_layers has ['x'], llmc reads FP8",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config(case: str) -> None:
    table, message = BAD_CONFIG[case]
    assert message in faults_of(table)
