"""Quantized weights times activations in bfloat16, on CPUs: near float32 ones, and the same however tokens are fed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.runtime.runner import Feed
from llmc.targets import target as targets

sys.path.insert(0, str(Path(__file__).parent))
from feeding import all_logits
from prompts import PROMPTS
from test_graphs import CASES, ids, session_of

# Two norms a layer; four, and gates of another kind; no gates, and biases; widths that are no whole chunks of 64.
STRUCTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 128, "intermediate_size": 192}),
    "gemma3": ("gemma3_text", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
    "gpt2": ("gpt2", {"n_embd": 128}),
    "odd": ("llama", {"hidden_size": 96, "intermediate_size": 100}),
}


def far(got: np.ndarray, wanted: np.ndarray) -> float:
    """The size of the difference, relative."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("quant", ["q4", "q8", "r4"])
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.thorough_if(case=lambda name, quant: quant != "q4" or name != "llama")
def test_it_is_near_float32_and_chunks_change_nothing(
    name: str, quant: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    kind, config = STRUCTURES[name]
    folder, tokens = tiny_model(kind, **config), [*range(5, 90), *range(40, 5, -1)]
    found: dict[str, np.ndarray] = {}
    for activations in ("f32", "bf16"):
        path = compile_model(folder, tmp_path / f"{activations}.llmc", quant=quant, activations=activations).path
        with llmc.load(path) as model:
            found[activations] = all_logits(model, tokens, len(tokens))
            for chunk in (1, 17, 70):
                np.testing.assert_array_equal(all_logits(model, tokens, chunk), found[activations])
    assert 0 < far(found["bf16"], found["f32"]) < 0.02


@pytest.mark.model
@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
@pytest.mark.thorough_if(case=lambda target: target != "cpu")
def test_a_real_model_answers_as_with_float32(
    target: str, smollm2_gguf: Path, smollm2_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    with llmc.load(smollm2_artifact("f32")) as exact:
        whole = [*exact.encode(PROMPTS[0]), *exact.generate(PROMPTS[0], max_tokens=24, ignore_eos=True).ids]
        expected = all_logits(exact, whole, len(whole))
    compile_model(smollm2_gguf, tmp_path / "a.llmc", quant="q8", activations="bf16", target=target)
    with llmc.load(tmp_path / "a.llmc") as model:
        found = all_logits(model, whole, len(whole))
        np.testing.assert_array_equal(all_logits(model, whole, 1), found)
        sequences = [model.runner.new_sequence() for _ in range(5)]
        together = model.runner.step([Feed(sequence, whole, "all") for sequence in sequences]).logits
    np.testing.assert_array_equal(together, np.tile(found, (5, 1)))
    assert far(found, expected) < 0.04  # the weights alone 0.027, activations in int8 0.05
    assert np.mean(found.argmax(1) == expected.argmax(1)) > 0.9


def test_a_graph_takes_them_too(tmp_path: Path) -> None:
    write, _ = CASES["layers"]
    file, arrays = write(tmp_path / "layers.onnx"), ids(2, 5)
    graph = llmc.load_graph(compile_model(file, tmp_path / "a.llmc", quant="q8", activations="bf16").path)
    (expected,) = session_of(file).run(["y"], arrays)
    assert 0 < far(graph.run(arrays)["y"], expected) < 0.02


def test_experts_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("mixtral")
    with pytest.raises(LlmcError, match="--activations bf16: experts are multiplied with int8 or float32 on CPUs"):
        compile_model(folder, tmp_path / "a.llmc", quant="q4", activations="bf16")
    assert not (tmp_path / "a.llmc").exists()


def test_targets_say_what_they_join() -> None:
    tiled = next(target for target in targets.variants("x86_64") if target.has("amx_bf16"))
    assert tiled.joins_rounded("q4", 64)
    assert not tiled.joins_rounded("q4", 96)  # no whole groups
    assert not tiled.joins_rounded("bf16", 64)
    assert not any(target.joins_rounded("q4", 64) for target in targets.variants("x86_64") if target != tiled)
    assert targets.CUDA_TARGETS["cuda:sm_90"].joins_rounded("bf16", 96)
