"""Models compiled for CUDA, on machines without a GPU: what the artifact holds, and that its step means the same.

No step of it has run on a GPU here. Its graph runs by the ops' NumPy meanings, and its kernels by an interpreter of
their threads (tests/targets/cuda_threads.py); both must give the tokens of the CPU's artifact.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.compile import planned_step
from llmc.compiler.errors import LlmcError
from llmc.frontends.source import open_model
from llmc.passes.round_activations import round_activations
from llmc.runtime import ArtifactError
from llmc.targets.cuda.lower import lower
from llmc.targets.target import get

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "targets"), str(Path(__file__).parent)]
import cuda_threads
from graph_walk import Walk

TARGET = "cuda:sm_80"
need_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: CUDA code cannot be compiled")
_WINDOWS = {"sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
# model_type -> its config, the format of weights, that of pages. The second norms heads of q and k, the third has
# windows and other norms, the last layer norm, biases and an MLP without a gate.
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": ({}, "q4", "f32"),
    "qwen3": ({}, "c3h", "f32"),
    "gemma3_text": (_WINDOWS, "bf16", "bf16"),
    "starcoder2": ({}, "f32", "f32"),
}
EXACT, ROUNDED = 3e-5, 2e-2  # of the greatest logit; over bf16 pages CPUs round softmax weights too
PROMPT, ANSWER = [5, 77, 130, 9, 250], 3


def step_of(source: Path, artifact: Path) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
    """The module of packed ops that the artifact was made of, its weights in order, and its manifest."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    with open_model(source) as model:
        recipe = manifest["quantization"]["formats"]
        _, step = planned_step(model.spec, recipe, manifest["kv"]["dtype"], None, True, lambda *_: None)
    stored = load_file(artifact / manifest["weights"]["file"])
    return step, [stored[name] for name in manifest["weights"]["order"]], manifest


@pytest.mark.parametrize("model_type", MODELS)
def test_kernels_and_meanings_give_the_tokens_of_a_cpu(
    model_type: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config, quant, kv_dtype = MODELS[model_type]
    source = tiny_model(model_type, **config)
    compile_model(source, tmp_path / "cpu.llmc", quant=quant, kv=kv_dtype, activations="f32")
    step, weights, manifest = step_of(source, tmp_path / "cpu.llmc")
    (target,) = get(TARGET)
    ways = {"meanings": step, "kernels": lower(step, target)}
    if quant == "q4":
        ways["rounded"] = lower(round_activations(step), target)
    with llmc.load(tmp_path / "cpu.llmc", threads=1, cache_tokens=64) as model:
        wanted = model.generate(PROMPT, max_tokens=ANSWER, ignore_eos=True).ids
        compiled = model.runner.step_function
        for way, module in ways.items():
            walk, kv = Walk(module, "step", cuda_threads.run), pages(manifest)

            def both(*index: np.ndarray, walk: Walk = walk, kv: list[np.ndarray] = kv, way: str = way) -> Any:
                rows, *others = compiled(*index)
                mine, *best = walk(*index, kv, weights)[:4]
                exact = kv_dtype == "f32" and way != "rounded"
                most = float(np.abs(rows).max()) * (EXACT if exact else ROUNDED)
                np.testing.assert_allclose(mine, rows, rtol=0, atol=most)
                return [mine, *best]

            model.runner.step_function = both
            assert model.generate(PROMPT, max_tokens=ANSWER, ignore_eos=True).ids == wanted, way


def pages(manifest: dict[str, Any]) -> list[np.ndarray]:
    """A cache of four pages for every layer, full of what is no number."""
    kv = manifest["kv"]
    dtype, value = (np.float32, np.nan) if kv["dtype"] == "f32" else (np.uint16, 0x7FC0)
    return [np.full((5, *kv["page_shape"]), value, dtype) for _ in range(kv["layers"])]


@need_nvcc
def test_an_artifact_for_cuda(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    """It holds a cubin and TVM's runtime for it, the bytes of the CPU's weights, and is the same every time."""
    source = tiny_llama()
    first, again = (compile_model(source, tmp_path / f"{i}.llmc", quant="q4", target=TARGET).path for i in "ab")
    cpu = compile_model(source, tmp_path / "cpu.llmc", quant="q4", activations="f32").path
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (first, again)]
    assert manifests[0] == manifests[1]
    (variant,) = manifests[0]["variants"]
    assert variant["device"] == {"kind": "cuda", "arch": "sm_80", "runtime": "lib/libtvm_runtime_cuda.so"}
    assert set(manifests[0]["files"]) >= {"lib/cuda-sm_80.so", "lib/libtvm_runtime_cuda.so", "lib/libtvm_runtime.so"}
    library = (first / variant["file"]).read_bytes()
    assert b"llmc cubin base64 f0VMRg" in library  # of "\x7fELF"
    assert b"__global__" not in library  # no source, which would want a compiler at every load
    assert (first / "weights.safetensors").read_bytes() == (cpu / "weights.safetensors").read_bytes()
    llmc.runtime.verify(str(first))
    assert llmc.runtime.inspect(str(first))["machine"]["variant"] is None
    with pytest.raises(ArtifactError, match=r"only compiled for GPUs: cuda-sm_80 needs .+; for CPUs, compile it with"):
        llmc.load(first)


def test_what_cuda_cannot_do_yet_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, target: str = TARGET, **options: Any) -> None:
        with pytest.raises(LlmcError, match=match):
            compile_model(tmp_path / options.pop("source", "none"), tmp_path / "a.llmc", target=target, **options)

    refused("unknown target 'cuda:sm_70'; llmc knows: .*cuda:sm_80, cuda:sm_86, cuda:sm_89, cuda:sm_90", "cuda:sm_70")
    refused("--kv q8: cuda-sm_80 has kernels for f32, bf16", kv="q8")
    refused("--activations i8: kernels of cuda-sm_80", activations="i8")
    refused("--activations bf16: only kernels for CUDA", target="cpu", activations="bf16")
    refused("--devices: not for cuda-sm_80 so far", devices="0&1")
    refused("--tuned: not for cuda-sm_80 so far", tuned=tmp_path / "db.json")
    refused("a graph: not for cuda-sm_80 so far", source="model.onnx")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("is needed to (link|compile)")
