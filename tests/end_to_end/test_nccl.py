"""GPUs that share layers exchange by NCCL: emulated devices, and a library of ours in NCCL's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.tvm_runtime import CUDA_RUNTIME, RUNTIME, copy_runtime, find_runtime
from llmc.targets.cuda.build import compile_kernels
from llmc.targets.cuda.lower import ADD_PARTS, add_parts
from llmc.targets.cuda.target import CUDA_TARGETS

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "gpu"), str(Path(__file__).parent)]
import emulated
from test_launch import ENDLESS, LLMC, MPIRUN, workers_of

pytestmark = [
    pytest.mark.skipif(not emulated.available(), reason="no g++ here, or not an x86-64 processor"),
    pytest.mark.mpi,
    pytest.mark.usefixtures("plain_code"),
]
TARGET = "cuda:sm_80"
PROMPT, NEW_TOKENS = list(range(5, 40)), 12


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes of which each has an emulated device."""
    folder = emulated.build(tmp_path_factory.mktemp("device"))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def source(tiny_llama: Callable[..., Path]) -> Path:
    """A random model."""
    return tiny_llama(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module")
def pair(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It for two GPUs that have unequal shares of its heads."""
    return compiled(source, "cuda:0&cuda:1", tmp_path_factory.mktemp("nccl") / "pair.llmc", split="3:1")


def compiled(source: Path, devices: str | None, path: Path, **more: Any) -> Path:
    """The model for emulated devices, or one CPU."""
    with emulated.compiling():
        compile_model(
            source, path, target="cpu" if devices is None else TARGET, devices=devices, quant="q8", kv="f32",
            activations="f32", **more,
        )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What one CPU answers."""
    with llmc.load(compiled(source, None, tmp_path_factory.mktemp("one") / "one.llmc")) as model:
        return list(model.generate(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True).ids)


ANSWER = f"""
import ctypes, json, sys
import llmc.runtime
from llmc.runtime.workers.attend import attend
count = ctypes.CDLL("libcudart.so.13").emulated_count
if not attend(sys.argv[1], threads=1):
    with llmc.runtime.load(sys.argv[1], threads=1, cache_tokens=640) as model:
        ids = [list(model.generate({PROMPT}, max_tokens={NEW_TOKENS}, ignore_eos=True).ids) for _ in range(3)]
        found = {{name: count(name.encode()) for name in ("exchanges", "graphs", "captures")}}
        print(json.dumps({{"ids": ids, **found}}))
"""


def answered(pair: Path, device: dict[str, str], **of_other: str) -> dict[str, Any]:
    """What both say of the prompt, three times; `of_other`: of the environment of rank 1 alone."""
    script = [sys.executable, "-c", ANSWER, str(pair)]
    more = [f"{name}={value}" for name, value in of_other.items()]
    command = [str(MPIRUN), "-n", "1", *script, ":", "-n", "1", "env", *more, *script]
    done = subprocess.run(command, env=device, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_devices(size: int, device: dict[str, str], tmp_path: Path) -> None:
    with emulated.compiling():
        module, _ = compile_kernels({ADD_PARTS: add_parts(CUDA_TARGETS[TARGET])}, CUDA_TARGETS[TARGET])
    folder = tmp_path / "kernels"
    folder.mkdir()
    module.export_library(str(folder / "kernels.so"))
    for name in (RUNTIME, CUDA_RUNTIME):
        copy_runtime(find_runtime("x86_64", None, name), folder, name)
    done = subprocess.run(
        [sys.executable, str(ROOT / "gpu" / "check_nccl.py"), str(tmp_path)],
        env=device, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("right")) == (0, 4), done.stdout + done.stderr
    case = ROOT / "runtime" / "nccl_case.py"
    command = [str(MPIRUN), "-n", str(size), sys.executable, str(case), str(folder)]
    done = subprocess.run(command, env=device, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.count("equal")) == (0, size), done.stdout + done.stderr


@pytest.mark.thorough
def test_steps_with_exchanges_are_captured(pair: Path, wanted: list[int], device: dict[str, str]) -> None:
    found = answered(pair, device)
    assert found["ids"] == [wanted] * 3
    assert found["exchanges"] > 3 * NEW_TOKENS
    assert found["graphs"] >= 2 * NEW_TOKENS


@pytest.mark.thorough
def test_steps_of_stages_are_captured(
    source: Path, wanted: list[int], device: dict[str, str], tmp_path: Path
) -> None:  # fmt: skip
    found = answered(compiled(source, "cuda:0;cuda:1", tmp_path / "stages.llmc"), device)
    assert found["ids"] == [wanted] * 3
    assert found["exchanges"] >= 3 * NEW_TOKENS
    assert found["graphs"] >= 2 * NEW_TOKENS


def test_without_nccl_on_one_of_them_all_do_without(pair: Path, wanted: list[int], device: dict[str, str]) -> None:
    found = answered(pair, device, LLMC_NCCL="0")
    assert found == {"ids": [wanted] * 3, "exchanges": 0, "graphs": 0, "captures": 0}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_is_named_though_the_other_waits_on_its_device(
    killed: int, pair: Path, device: dict[str, str]
) -> None:
    """Within five seconds, and nobody stays."""
    command = [*LLMC, "run", "--devices", str(pair), *ENDLESS]
    with subprocess.Popen(command, env=device, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.read(20)
        os.kill(workers_of(pair)[killed], signal.SIGKILL)
        _, said = run.communicate(timeout=5)
    assert run.returncode == 1
    assert said.decode().startswith(f"llmc: worker {killed} (device cuda:{killed}) ended: it was killed")
    end = time.monotonic() + 5
    while workers_of(pair) and time.monotonic() < end:
        time.sleep(0.05)
    assert not workers_of(pair)


@pytest.mark.parametrize(
    ("more", "direct"), [({}, True), ({"LLMC_NCCL": "0"}, False), ({"LD_LIBRARY_PATH": ""}, False)]
)
def test_inspect_says_how_gpus_exchange(
    more: dict[str, str], direct: bool, pair: Path, device: dict[str, str]
) -> None:  # fmt: skip
    for options in ([], ["--json"]):
        done = subprocess.run(
            [*LLMC, "inspect", str(pair), *options], env=device | more, capture_output=True, text=True, check=True
        )
        if options:
            assert json.loads(done.stdout)["machine"]["nccl"] is direct
        else:
            assert ("from GPU to GPU, by NCCL" if direct else "pip install nvidia-nccl-cu13") in done.stdout


def test_what_nccl_says_is_said(pair: Path, device: dict[str, str]) -> None:
    done = subprocess.run(
        [*LLMC, "run", "--devices", str(pair), "abc", "--raw", "--max-tokens", "2"],
        env=device | {"LLMC_EMULATED_NCCL": "fails"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ncclCommInitRank: emulated error (error 2) (LLMC_NCCL=0 does without NCCL" in done.stderr
    assert "Traceback" not in done.stderr
