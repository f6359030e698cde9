"""Tiny models of four structures answer on workers, whatever the placement, as they do on one device.

What takes the time is compiling a library for each device, so a run has some of the placements of each structure;
LLMC_WHOLE_MATRIX=1 has all of them, and SmolLM2 on all of them with 64 tokens. Artifacts for as many workers run one
after another in the same processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.driver import compile_model
from llmc.compiler.placement import parse_placement

sys.path.insert(0, str(Path(__file__).parent))
from tiny_translator import save_translator
from translator_cases import TRANSLATORS

MPIRUN = Path(sys.executable).with_name("mpirun")
pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIRUN.exists(), reason="needs mpi4py, and mpirun beside python"
)

Answers = dict[str, NDArray[Any]]

WHOLE = "LLMC_WHOLE_MATRIX" in os.environ
PLACEMENTS = ("0;1", "0&1", "0;1;2;3", "0&1&2&3", "0&1;2&3")
NEW_TOKENS, TOLERANCE = 64, 1e-3
PROMPTS = [np.random.default_rng(n).integers(5, 300, n).tolist() for n in (37, 5, 18)]

# Structure -> model_type of transformers and what differs from the tiny model of tests/conftest.py; None: a translator.
_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8}
STRUCTURES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "grouped queries": ("llama", {**_LAYERS, "num_key_value_heads": 4}),
    "one kv head for all": ("llama", {**_LAYERS, "num_key_value_heads": 1}),
    "experts": ("mixtral", {**_LAYERS, "num_key_value_heads": 4, "num_local_experts": 4}),
    "an encoder": None,
}
_SOME = {
    "grouped queries": ("0;1", "0&1"),
    "one kv head for all": ("0&1&2&3",),
    "experts": ("0&1;2&3",),
    "an encoder": ("0;1;2;3",),
}
CASES = [(name, devices) for name in STRUCTURES for devices in (PLACEMENTS if WHOLE else _SOME[name])]


@dataclass(frozen=True)
class Asked:
    """A model compiled for a placement, None for one device."""

    artifact: Path
    devices: str | None
    prompts: list[list[int]]
    new_tokens: int

    @property
    def workers(self) -> int:
        """How many it takes."""
        return 1 if self.devices is None else sum(map(len, parse_placement(self.devices, None).stages))


def answered(asked: dict[Any, Asked], folder: Path, timeout: float = 240) -> dict[Any, Answers]:
    """What workers answer: as many processes for all artifacts of so many devices, device_answers.py says how."""
    found = {}
    for workers in sorted({each.workers for each in asked.values()}):
        own = {key: each for key, each in asked.items() if each.workers == workers}
        entries = [{**asdict(each), "artifact": str(each.artifact)} for each in own.values()]
        output = folder / f"answers-{workers}"
        output.mkdir()
        (output / "asked.json").write_text(json.dumps(entries))
        script = Path(__file__).with_name("device_answers.py")
        command = [sys.executable, str(script), str(output / "asked.json"), str(output)]
        launcher = [str(MPIRUN), "-n", str(workers)] if workers > 1 else []
        done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        for number, key in enumerate(own):
            with np.load(output / f"{number}.npz") as arrays:
                found[key] = dict(arrays)
    return found


def assert_same(found: Answers, expected: Answers) -> None:
    """The same tokens, and logits within the tolerance before each of them."""
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a random model of each structure."""
    found = {name: tiny_model(kind[0], **kind[1]) for name, kind in STRUCTURES.items() if kind is not None}
    model_type, config = TRANSLATORS["BART"]
    found["an encoder"] = tmp_path_factory.mktemp("translator")
    layers = {"encoder_layers": 4, "decoder_layers": 4}
    save_translator(found["an encoder"], model_type, {**config, **layers}, seed=0)
    return found


@pytest.fixture(scope="module")
def matrix(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None], Answers]:
    """Structure and placement -> its answers."""
    folder, asked = tmp_path_factory.mktemp("matrix"), {}
    whole: list[tuple[str, str | None]] = [(name, None) for name in STRUCTURES]
    for number, (name, devices) in enumerate([*whole, *CASES]):
        artifact = folder / f"{number}.llmc"
        compile_model(models[name], artifact, quant="f32", devices=devices)
        asked[name, devices] = Asked(artifact, devices, PROMPTS, NEW_TOKENS)
    return answered(asked, folder)


@pytest.mark.parametrize(("structure", "devices"), CASES)
def test_structure(structure: str, devices: str, matrix: dict[tuple[str, str | None], Answers]) -> None:
    expected = matrix[structure, None]
    assert expected["ids"].shape == (len(PROMPTS), NEW_TOKENS)
    assert_same(matrix[structure, devices], expected)


def test_quantized_by_tensor(
    models: dict[str, Path], matrix: dict[tuple[str, str | None], Answers], tmp_path: Path
) -> None:
    """Devices round activations to int8 on their own: what that changes is no more than the format's own error."""
    found = answered(_quantized(models, "auto", tmp_path), tmp_path)
    exact = matrix["grouped queries", None]
    for name in (name for name in exact if name.startswith("logits")):
        one, two = found[None][name], found["0&1"][name]
        assert _rms(two - one) <= 2 * _rms(one - exact[name][:1]) < 0.2


@pytest.mark.skipif(not WHOLE, reason="compiles kernels for a minute: LLMC_WHOLE_MATRIX=1")
def test_quantized_by_tensor_without_rounding(models: dict[str, Path], tmp_path: Path) -> None:
    found = answered(_quantized(models, "f32", tmp_path), tmp_path)
    assert_same(found["0&1"], found[None])


def _quantized(models: dict[str, Path], activations: str, folder: Path) -> dict[str | None, Asked]:
    """One token of a model with weights of 8 bits, of one device and of two."""
    asked: dict[str | None, Asked] = {}
    for devices in (None, "0&1"):
        path = folder / f"{devices}.llmc"
        compile_model(models["grouped queries"], path, quant="q8", devices=devices, activations=activations)
        asked[devices] = Asked(path, devices, PROMPTS, 1)
    return asked


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.model
def test_smollm2(smollm2_gguf: Path, smollm2_artifact: Callable[..., Path], tmp_path: Path) -> None:
    placements, tokens = (PLACEMENTS, 64) if WHOLE else (("0&1",), 16)
    prompt = np.random.default_rng(0).integers(5, 49000, 24).tolist()
    asked: dict[str | None, Asked] = {None: Asked(smollm2_artifact("f32"), None, [prompt], tokens)}
    for number, devices in enumerate(placements):
        path = tmp_path / f"{number}.llmc"
        compile_model(smollm2_gguf, path, quant="f32", devices=devices)
        asked[devices] = Asked(path, devices, [prompt], tokens)
    found = answered(asked, tmp_path, timeout=280 if not WHOLE else 3000)
    for devices in placements:
        assert_same(found[devices], found[None])
