"""What nvcc says of CUDA kernels: a few are compiled here for two chips, docs/make_cuda_page.py has all of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from llmc.compiler.errors import LlmcError
from llmc.targets.cuda import nvcc
from llmc.targets.cuda.target import CUDA_TARGETS

ROOT = Path(__file__).parents[2]
MAIN = (
    "packed_linear q4", "packed_linear c3h", "bf16_linear", "packed_experts_in q4", "packed_experts_out q4",
    "bf16_linear q4", "bf16_linear_gated_bf16 q4", "rope_attention_bf16 bf16", "attention q8", "add_rms_norm", "top",
)  # fmt: skip
REPORT = """ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'one_kernel' for 'sm_90'
ptxas info    : Function properties for one_kernel
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 4.000 ms
ptxas info    : Compiling entry function 'two_kernel' for 'sm_90'
ptxas info    : Function properties for two_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
SOURCE = """extern "C" __global__ void __launch_bounds__(128) one_kernel(float* a);
extern "C" __global__ void __launch_bounds__(512) two_kernel(float* a);"""


@pytest.fixture(scope="module")
def page(script: Callable[[str], ModuleType]) -> ModuleType:
    """The script that writes docs/cuda_kernels.md."""
    return script("docs/make_cuda_page.py")


def test_a_report_is_read() -> None:
    found = nvcc.resources(REPORT, SOURCE)
    assert found == {
        "one_kernel": nvcc.Resources(128, 40, 8, 16, 512),
        "two_kernel": nvcc.Resources(512, 255, 0, 0, 0),
    }


def test_what_is_beyond_the_limits_is_named(page: ModuleType) -> None:
    target = CUDA_TARGETS["cuda:sm_80"]
    fine = nvcc.Resources(128, 40, 0, 0, 512)
    assert page.faults(fine, target) == []
    assert page.faults(replace(fine, spill_bytes=page.MOST_SPILLED), target) == []
    assert page.faults(replace(fine, spill_bytes=140), target) == ["140 bytes spilled"]
    assert page.faults(replace(fine, shared_bytes=170000), target) == ["170000 bytes of shared memory"]
    assert page.faults(replace(fine, threads=512, registers=130), target) == ["130 registers"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: CUDA code cannot be compiled")
@pytest.mark.thorough_if(case=lambda chip: chip == "cuda:sm_80")
@pytest.mark.parametrize("chip", ["cuda:sm_80", "cuda:sm_90"])
def test_main_kernels_compile_within_the_limits(chip: str, page: ModuleType) -> None:
    target = CUDA_TARGETS[chip]
    taken = page.compiled(MAIN, target)
    several = {"packed_linear": 6, "bf16_linear": 6, "attention": 4, "rope_attention_bf16": 5, "top": 2}
    several["bf16_linear_gated_bf16"] = 8 if target.wgmma else 9  # of a batch, what adds strands activates
    assert {name: len(launches) for name, launches in taken.items()} == {
        name: several.get(name.split()[0], 2 if "experts" in name else 1) for name in MAIN
    }
    wrong = {name: [page.faults(launch, target) for launch in launches] for name, launches in taken.items()}
    assert not any(any(launches) for launches in wrong.values()), wrong
    assert not any(launch.spill_bytes for launches in taken.values() for launch in launches), taken


def test_the_page_has_every_kernel(page: ModuleType) -> None:
    rows = re.findall(r"^\| ([a-z].*?)(?: \(\d\))? \|", (ROOT / "docs/cuda_kernels.md").read_text(), re.MULTILINE)
    assert set(rows) - {"kernel"} == set(page.cases())


def test_what_nvcc_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = CUDA_TARGETS["cuda:sm_90"]
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'kernels.cu(1): error: no such thing' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LlmcError, match="nvcc refused the kernels for sm_90: .*no such thing"):
        nvcc.machine_code("", target)
    fake.unlink()
    with pytest.raises(LlmcError, match="nvcc is needed to compile for CUDA and is not on PATH; install"):
        nvcc.machine_code("", target)
