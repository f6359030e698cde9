"""Artifacts for CPU and GPU together, and for two GPUs, answer as one CPU does: workers whose device is emulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.runtime.loading.artifact import inspect

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "gpu"), str(Path(__file__).parent)]
import emulated
import test_device_matrix as matrix

pytestmark = [
    pytest.mark.skipif(not emulated.available(), reason="no g++ here, or not an x86-64 processor"),
    *matrix.pytestmark,
]
TARGET = "cuda:sm_80,cpu"
PROMPTS = [matrix.PROMPTS[0], matrix.PROMPTS[1]]
NEW_TOKENS = 12  # an emulated device is slow

# Structure and placement.
CASES = [
    ("grouped queries", "cpu;cuda:0"),
    ("experts", "cuda:0&cpu"),
    ("grouped queries", "cuda:0;cpu"),
    ("grouped queries", "cuda:0&cuda:1"),
    ("grouped queries", "cpu&cuda:0;cuda:1"),
    ("one kv head for all", "cuda:0&cpu"),
    ("an encoder", "cuda:0;cpu"),
]
ALWAYS = CASES[:2]  # of every run

models = matrix.models


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes of which each has an emulated device."""
    folder = emulated.build(tmp_path_factory.mktemp("device"))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def compile_mixed(source: Path, path: Path, devices: str, **more: Any) -> None:
    with emulated.compiling():
        target = TARGET if "cpu" in devices else "cuda:sm_80"
        compile_model(source, path, devices=devices, target=target, activations="f32", **more)


@pytest.mark.thorough_if(case=lambda name, devices: (name, devices) not in ALWAYS)
@pytest.mark.parametrize(("name", "devices"), CASES)
def test_a_model_on_devices_of_two_kinds(
    name: str, devices: str, models: dict[str, Path], device: dict[str, str], tmp_path: Path
) -> None:
    """Tokens are those of one CPU, of prompts in common steps, and logits nearly."""
    compile_model(models[name], tmp_path / "whole.llmc", quant="q8", activations="f32", kv="f32")
    compile_mixed(models[name], tmp_path / "parts.llmc", devices, quant="q8", kv="f32")
    asked = matrix.Asked(tmp_path / "whole.llmc", None, PROMPTS, NEW_TOKENS)
    wanted = matrix.answered(asked, tmp_path / "one")
    asked = matrix.Asked(tmp_path / "parts.llmc", devices, PROMPTS, NEW_TOKENS)
    matrix.assert_same(matrix.answered(asked, tmp_path / "several", device), wanted)


def test_commands_for_devices_of_two_kinds(models: dict[str, Path], device: dict[str, str], tmp_path: Path) -> None:
    """What a user sees: an answer, what is where, and in a line what a machine lacks or a device has no room for."""
    path = tmp_path / "parts.llmc"
    compile_mixed(models["grouped queries"], path, "cpu;cuda:0", quant="q8", split="1:3")
    ranks = inspect(path)["devices"]["ranks"]
    assert [(rank["device"], rank["layers"], rank["on_host"]) for rank in ranks] == [
        ("cpu:0", [0], True),
        ("cuda:0", [1, 2, 3], False),
    ]

    def run(*options: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llmc", "run", "--devices", str(path), "hello", "--raw", "--max-tokens", "4"]
        return subprocess.run(
            [*command, *options], env=device | more, capture_output=True, text=True, timeout=200, check=False
        )

    done = run("--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ids"]) == 4
    for more, message in (
        ({"LD_LIBRARY_PATH": ""}, "only compiled for GPUs: cuda-sm_80 needs an NVIDIA driver"),
        ({"LLMC_EMULATED_BYTES": "50000"}, "the device has no room for the weights"),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "LLMC_EMULATED_CHIP": "75"}, "needs a device that runs sm_80 (here: sm_75)"),
    ):
        done = run(**more)
        assert done.returncode == 1
        assert "llmc: worker 1 (device cuda:0): " in done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "devices", "reason"),
    [
        ("cpu", "cpu;cuda:0", "cuda:0: --target cpu makes no code for it"),
        ("cuda:sm_80", "cpu;cuda:0", "cpu:0: --target cuda:sm_80 makes no code"),
        ("cuda:sm_80,cpu", "0;1", "numbers alone, and --target names CPUs and GPUs"),
        ("cuda:sm_80,cpu", "cuda:0;cuda:1", "for no device of"),
        ("cpu", "cuda:0", "makes no code for it"),
    ],
)
def test_devices_and_targets_that_do_not_fit(
    target: str, devices: str, reason: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with emulated.compiling(), pytest.raises(LlmcError, match=reason):
        compile_model(models["grouped queries"], tmp_path / "no.llmc", target=target, devices=devices)
    assert not (tmp_path / "no.llmc").exists()
