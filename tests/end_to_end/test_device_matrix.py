"""Tiny models of four structures answer on workers, whatever the placement, as they do on one device.

What takes the time is compiling a library for each device, so some of the placements are left to `make test-all`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
pytestmark = [
    pytest.mark.usefixtures("plain_code"),
    pytest.mark.mpi,
]

Answers = dict[str, NDArray[Any]]

PLACEMENTS = ("0;1", "0&1", "0;1;2;3", "0&1&2&3", "0&1;2&3")
NEW_TOKENS, TOLERANCE = 64, 1e-3
PROMPTS = [np.random.default_rng(n).integers(5, 300, n).tolist() for n in (37, 5, 18)]

# Structure -> model_type of transformers and what differs from the tiny model of tests/conftest.py; None: a translator.
_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8}
STRUCTURES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "grouped queries": ("llama", {**_LAYERS, "num_key_value_heads": 4}),
    "one kv head for all": ("llama", {**_LAYERS, "num_key_value_heads": 1}),
    "experts": ("mixtral", {**_LAYERS, "num_key_value_heads": 4, "num_local_experts": 4}),
    "convolutions": ("lfm2", {**_LAYERS, "num_key_value_heads": 1, "hidden_size": 128, "full_attn_idxs": [1]}),
    "an encoder": None,
}
_NOT_SHARED = "convolutions"  # which are divided by layer only
# Structure -> placements of every run of the tests.
_SOME = {
    "grouped queries": ("0;1",),
    "experts": ("0&1;2&3",),
    "convolutions": ("0;1",),
    "SmolLM2": ("0&1",),
}


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


def answered(asked: Asked, folder: Path, environment: dict[str, str] | None = None) -> Answers:
    """What workers answer, device_answers.py says how; `environment` is theirs."""
    folder.mkdir()
    (folder / "asked.json").write_text(json.dumps({**asdict(asked), "artifact": str(asked.artifact)}))
    script = Path(__file__).with_name("device_answers.py")
    command = [sys.executable, str(script), str(folder / "asked.json"), str(folder / "answers.npz")]
    launcher = [str(MPIRUN), "-n", str(asked.workers)] if asked.workers > 1 else []
    done = subprocess.run(
        [*launcher, *command], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "answers.npz") as arrays:
        return dict(arrays)


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
def exact(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """A function: structure -> the answers of one device, in float32."""
    folder, found = tmp_path_factory.mktemp("exact"), dict[str, Answers]()

    def get(name: str) -> Answers:
        if name not in found:
            own = folder / name
            own.mkdir()
            compile_model(models[name], own / "whole.llmc", quant="f32")
            found[name] = answered(Asked(own / "whole.llmc", None, PROMPTS, NEW_TOKENS), own / "answers")
        return found[name]

    return get


@pytest.mark.thorough_if(case=lambda name, devices: devices not in _SOME.get(name, ()))
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("devices", PLACEMENTS)
def test_structure(
    name: str, devices: str, models: dict[str, Path], exact: Callable[[str], Answers], tmp_path: Path
) -> None:
    if name == _NOT_SHARED and "&" in devices:
        pytest.skip("refused, as tests/frontends/test_convolutions.py has it")
    compile_model(models[name], tmp_path / "parts.llmc", quant="f32", devices=devices)
    found = answered(Asked(tmp_path / "parts.llmc", devices, PROMPTS, NEW_TOKENS), tmp_path / "answers")
    assert found["ids"].shape == (len(PROMPTS), NEW_TOKENS)
    assert_same(found, exact(name))


@pytest.mark.thorough
def test_quantized_by_tensor(models: dict[str, Path], exact: Callable[[str], Answers], tmp_path: Path) -> None:
    """Devices round activations to int8 on their own: what that changes is no more than the format's own error."""
    one, two = _quantized(models, "auto", tmp_path)
    unrounded = exact("grouped queries")
    for name in (name for name in unrounded if name.startswith("logits")):
        assert _rms(two[name] - one[name]) <= 2 * _rms(one[name] - unrounded[name][:1]) < 0.2


@pytest.mark.thorough
def test_quantized_by_tensor_without_rounding(models: dict[str, Path], tmp_path: Path) -> None:
    one, two = _quantized(models, "f32", tmp_path)
    assert_same(two, one)


def _quantized(models: dict[str, Path], activations: str, folder: Path) -> list[Answers]:
    """One token of a model with weights of 8 bits, of one device and of two."""
    found = []
    for devices in (None, "0&1"):
        path = folder / f"{devices}.llmc"
        compile_model(models["grouped queries"], path, quant="q8", devices=devices, activations=activations)
        found.append(answered(Asked(path, devices, PROMPTS, 1), folder / f"{devices}"))
    return found


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.model
@pytest.mark.thorough_if(case=lambda devices: devices not in _SOME["SmolLM2"])
@pytest.mark.parametrize("devices", PLACEMENTS)
def test_smollm2(devices: str, smollm2_gguf: Path, smollm2_artifact: Callable[..., Path], tmp_path: Path) -> None:
    tokens = 16 if devices in _SOME["SmolLM2"] else NEW_TOKENS
    prompt = np.random.default_rng(0).integers(5, 49000, 24).tolist()
    compile_model(smollm2_gguf, tmp_path / "parts.llmc", quant="f32", devices=devices)
    found = answered(Asked(tmp_path / "parts.llmc", devices, [prompt], tokens), tmp_path / "parts")
    assert_same(found, answered(Asked(smollm2_artifact("f32"), None, [prompt], tokens), tmp_path / "whole"))
