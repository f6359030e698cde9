"""MXFP4 folders: the values, the codes that are kept, what the compiled model computes, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import SourceError
from llmc.compiler.formats import FORMATS, dequantize
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from family_cases import CASES
from reference import is_greedy, logits, saved_reference

pytestmark = pytest.mark.usefixtures("plain_code")

PACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
IDS = list(range(3, 30))


def _packed(weights: dict[str, np.ndarray], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of an MXFP4 folder with random codes in place of some matrices, and those of its float twin."""
    packed, plain = {}, {}
    for name, values in weights.items():
        if not name.endswith(PACKED):
            packed[name] = plain[name] = values
            continue
        experts, columns, rows = values.shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(122, 125, blocks.shape[:-1], np.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        turned = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
        plain[name] = turned.contiguous().numpy()
    return packed, plain


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An MXFP4 folder, and one of the same numbers in float32."""
    source = tiny_model("gpt_oss", **CASES["gpt-oss"][1])
    made = [Path(shutil.copytree(source, tmp_path_factory.mktemp("mxfp4") / name)) for name in ("model", "float")]
    weights = load_file(source / "model.safetensors")
    for folder, tensors in zip(made, _packed(weights, np.random.default_rng(0)), strict=True):
        save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (made[0] / "config.json").write_text(json.dumps(config))
    return made[0], made[1]


def test_values_are_those_of_transformers_and_their_codes_are_kept(folders: tuple[Path, Path]) -> None:
    with open_model(folders[0]) as packed, open_model(folders[1]) as plain:
        for name, tensor in plain.tensors.items():
            found, expected = packed.tensors[name], tensor.read()
            np.testing.assert_array_equal(found.read(), expected)
            if ".experts." not in name or name.endswith("_bias"):
                continue
            assert found.kept == "mxfp4"
            kept = dequantize(FORMATS["mxfp4"], found.read_quantized())
            np.testing.assert_array_equal(kept[:, : expected.shape[1]], expected)
            np.testing.assert_array_equal(found.read_rows(3, 20), expected[3:20])


@pytest.mark.thorough
def test_a_compiled_model_keeps_the_codes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    result = compile_model(folders[0], tmp_path / "a.llmc", activations="f32", kv="f32")
    assert {format for name, format in result.formats.items() if ".experts." in name} == {"mxfp4"}
    exact = compile_model(folders[0], tmp_path / "b.llmc", quant="f32")
    with llmc.load(exact.path) as model:
        made = model.generate(IDS, max_tokens=16, ignore_eos=True)
    expected = logits(saved_reference(folders[1]), [*IDS, *made.ids])
    assert is_greedy(expected, IDS, list(made.ids))


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], str], None], str]] = {
    "no scales": (lambda t, n: t.pop(f"{n}_scales"), "missing _scales"),
    "both forms": (lambda t, n: t.update({n: np.zeros(4, np.float32)}), "both as it is and quantized"),
    "other type": (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"].astype(np.int32)}), "stored as I32"),
    "other shape": (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :-1].copy()}), "_scales has shape"),
    "short blocks": (lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"][..., :8].copy()}), "_blocks has shape"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_bad_parts(case: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    damage, message = DAMAGE[case]
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    damage(tensors, f"model.layers.0.{PACKED[1]}")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SourceError, match=message):
        open_model(folder)


def test_scales_that_mean_no_number_or_are_too_small_to_keep(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.{PACKED[1]}_scales"
    for scale, read, message in ((255, "read", "NaN"), (3, "read_quantized", "float16 cannot hold")):
        tensors[name][:] = scale
        save_file(tensors, folder / "model.safetensors")
        with open_model(folder) as source, pytest.raises(SourceError, match=message):
            getattr(source.tensors["layers.0.experts.down"], read)()


def test_a_folder_without_blocks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[1], tmp_path / "model"))
    shutil.copy(folders[0] / "config.json", folder / "config.json")
    with pytest.raises(SourceError, match="no tensor's name ends in _blocks"):
        open_model(folder)
