"""Artifacts for CPU and GPU together, and for two GPUs, answer as one CPU does: workers whose device is emulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
    ("grouped queries", "cuda:0&cuda:1;cuda:2"),
    ("grouped queries", "cpu;cuda:0&cuda:1"),
    ("experts", "cuda:0&cuda:1"),
    ("an encoder", "cuda:0;cuda:1"),
    ("an encoder", "cuda:0&cuda:1;cuda:2&cuda:3"),
    ("an encoder", "cuda:0;cuda:1;cuda:2"),
    ("grouped queries", "cpu&cuda:0;cuda:1"),
    ("one kv head for all", "cuda:0&cpu"),
    ("an encoder", "cuda:0;cpu"),
]

EXACT: dict[str, Any] = {"quant": "q8", "kv": "f32", "activations": "f32"}
models = matrix.models


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes of which each has an emulated device."""
    folder = emulated.build(tmp_path_factory.mktemp("device"))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def mixed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A function: structure, placement -> the artifact, in which nothing but weights is rounded."""
    folder = tmp_path_factory.mktemp("mixed")

    def artifact(name: str, devices: str) -> Path:
        path = folder / f"{name}-{devices.replace(':', '')}.llmc"
        if not path.exists():
            target = TARGET if "cpu" in devices else "cuda:sm_80"
            with emulated.compiling():
                compile_model(models[name], path, devices=devices, target=target, **EXACT)
        return path

    return artifact


@pytest.mark.thorough  # the commands below run on such devices every time
@pytest.mark.parametrize(("name", "devices"), CASES)
def test_a_model_on_devices_of_two_kinds(
    name: str,
    devices: str,
    models: dict[str, Path],
    mixed: Callable[[str, str], Path],
    device: dict[str, str],
    tmp_path: Path,
) -> None:
    """Tokens are those of one CPU, of prompts in common steps, and logits nearly."""
    compile_model(models[name], tmp_path / "whole.llmc", **EXACT)
    asked = matrix.Asked(tmp_path / "whole.llmc", None, PROMPTS, NEW_TOKENS)
    wanted = matrix.answered(asked, tmp_path / "one")
    asked = matrix.Asked(mixed(name, devices), devices, PROMPTS, NEW_TOKENS)
    matrix.assert_same(matrix.answered(asked, tmp_path / "several", device), wanted)


LACKING = (
    ({"LD_LIBRARY_PATH": ""}, "only compiled for GPUs: cuda-sm_80 needs an NVIDIA driver"),
    ({"LLMC_EMULATED_BYTES": "50000"}, "the device has no room for the weights"),
    ({"CUDA_VISIBLE_DEVICES": "1,0", "LLMC_EMULATED_CHIP": "75"}, "needs a device that runs sm_80 (here: sm_75)"),
)


@pytest.mark.parametrize("devices", ["cpu;cuda:0", "cuda:0;cpu"])
@pytest.mark.thorough_if(case=lambda devices: devices.startswith("cuda"))
def test_commands_for_devices_of_two_kinds(
    devices: str, mixed: Callable[[str, str], Path], device: dict[str, str]
) -> None:
    """What a user sees: what is where, an answer, and in a line what a machine lacks or a device has no room for.

    Nobody waits for a worker that cannot begin, be it the front or another one, nor where there is no launcher.
    """
    path, place = mixed("grouped queries", devices), devices.split(";").index("cuda:0")
    ranks = inspect(path)["devices"]["ranks"]
    assert [rank["on_host"] for rank in ranks] == [each == "cpu" for each in devices.split(";")]
    options = ["hello", "--raw", "--max-tokens", "4"]

    def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=device | more, capture_output=True, text=True, timeout=60, check=False)

    llmc_run = [sys.executable, "-m", "llmc", "run", str(path), *options]
    done = run(*llmc_run, "--devices", "--json", LLMC_VARIANT="cuda-sm_80")  # the other device has no such one
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ids"]) == 4
    for more, message in LACKING:
        done = run(*llmc_run, "--devices", **more)
        assert done.returncode == 1
        assert f"llmc: worker {place} (device cuda:0): " in done.stderr or place == 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        done = run(str(matrix.MPIRUN), "-n", "2", *llmc_run, **more)
        assert done.returncode != 0
        assert message in done.stderr


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
