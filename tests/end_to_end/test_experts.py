"""Mixtures of experts through the whole compiler: what test_families.py, which compiles to float32, does not reach."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler import ops
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.recipe import uniform
from llmc.compiler.formats import FORMATS
from llmc.compiler.spec.tensors import is_router
from llmc.frontends.source import open_model
from llmc.runtime.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from family_cases import CASES
from feeding import all_logits

pytestmark = pytest.mark.usefixtures("plain_code")

TEXT = "the quick brown fox jumps over the lazy dog and says hello to the world, again and again. " * 40
IDS = np.random.default_rng(5).integers(3, 320, 37).tolist()
WAYS: list[dict[str, Any]] = [
    {"quant": "q4"},
    {"quant": "c3"},
    {"bpw": 7.0, "calib": True},
    {"quant": "c4", "calib": True},
]
# Experts whose width is a multiple of 64 take codes on the left of both products, others of the first only.
MODELS = {
    "mixtral": {"num_local_experts": 5, "intermediate_size": 128},
    "qwen2_moe": CASES["Qwen 2 MoE, layers without experts"][1],
}


# Each model once, each way to store it once: tests/targets/test_experts.py has every format with either width.
EXACT = [("mixtral", "c4"), ("qwen2_moe", "q8"), ("mixtral", "r4")]
ROUNDED = [("mixtral", "bf16"), ("mixtral", "q8"), ("qwen2_moe", "q8"), ("mixtral", "r8")]


@pytest.fixture
def folder(name: str, tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(name, **MODELS[name])


def _steps(model: Model, chunk: int) -> np.ndarray:
    return all_logits(model, IDS, chunk)


def _by_meaning(folder: Path, quant: str) -> np.ndarray:
    """Logits of IDS by no pass and no kernel, of the weights as the formats round them."""
    import tvm
    from tvm import relax

    from llmc.frontends.graph.build import build

    with open_model(folder) as source:
        spec = source.spec
        recipe = uniform(spec, quant)
        weights = {name: tensor.read() for name, tensor in source.tensors.items()}
    for name, format in recipe.items():
        rows, columns = weights[name].shape
        weights[name] = FORMATS[format].unpack(FORMATS[format].pack(weights[name]), rows, columns)
    ops.register_meanings()
    machine = relax.VirtualMachine(relax.build(build(spec), tvm.target.Target("llvm")), tvm.cpu())
    count = len(IDS)
    pages = -(-count // 16)
    places = np.arange(count, dtype=np.int32)
    page = (pages, 2, spec.attention.kv_heads, 16 * spec.attention.head_dim)
    kv = [tvm.runtime.tensor(np.zeros(page, np.float32)) for _ in range(spec.sizes.layers)]
    listed = np.zeros((1, 2), np.int32), np.array([0, pages], np.int32), np.arange(pages, dtype=np.int32)
    index = [np.array(IDS, np.int32), places, np.zeros(count, np.int32), places, *listed, places]
    got, *_ = machine["step"](*map(tvm.runtime.tensor, index), kv, *map(tvm.runtime.tensor, weights.values()))
    return np.array(got.numpy())


@pytest.mark.thorough_if(case=lambda name, quant: name != "mixtral" or quant != "r4")
@pytest.mark.parametrize(("name", "quant"), EXACT)
def test_an_exact_artifact_computes_what_its_rounded_weights_mean(quant: str, folder: Path, tmp_path: Path) -> None:
    compile_model(folder, tmp_path / "a.llmc", quant=quant, activations="f32", kv="f32")
    with llmc.load(tmp_path / "a.llmc") as model:
        np.testing.assert_allclose(_steps(model, len(IDS)), _by_meaning(folder, quant), atol=1e-3)


@pytest.mark.thorough_if(case=lambda name, quant: name != "mixtral" or quant == "r8")
@pytest.mark.parametrize(("name", "quant"), ROUNDED)
def test_rounded_activations_lose_little_and_chunks_nothing(quant: str, folder: Path, tmp_path: Path) -> None:
    compile_model(folder, tmp_path / "a.llmc", quant=quant, kv="f32")
    expected = _by_meaning(folder, quant)
    with llmc.load(tmp_path / "a.llmc") as model:
        whole = _steps(model, len(IDS))
        for chunk in (1, 9):
            np.testing.assert_array_equal(_steps(model, chunk), whole)
    error = np.abs(whole - expected).max(1) / np.abs(expected).max()
    assert np.median(error) < 0.02  # a row may go another way where two experts score almost the same


@pytest.mark.thorough_if(case=lambda way: way is not WAYS[0])
@pytest.mark.parametrize("way", WAYS)
def test_routers_stay_as_they_are(way: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("qwen2_moe", **CASES["Qwen 1.5 MoE"][1])
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    result = compile_model(folder, tmp_path / "a.llmc", **{k: text if k == "calib" else v for k, v in way.items()})
    routers = {name: format for name, format in result.formats.items() if is_router(name)}
    assert routers
    assert set(routers.values()) == {"f32"}
    assert {result.formats[name] for name in result.formats if ".experts." in name} != {"f32"}
    with llmc.load(result.path) as model:
        assert len(model.generate(IDS, max_tokens=4, ignore_eos=True).ids) == 4
