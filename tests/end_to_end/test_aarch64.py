"""Code for 64-bit Arm, run by an emulator: every variant answers as this machine does, through the C interface.

It needs qemu-user, a cross compiler and two wheels for aarch64 (`make cross` gets them), and is skipped without.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.recipe import recipe_text, uniform
from llmc.compiler.driver.tvm_runtime import find_runtime
from llmc.compiler.errors import LlmcError
from llmc.frontends.source import open_model

_COMPILER, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_SYSROOT = Path("/usr/aarch64-linux-gnu")
# A CPU that the emulator knows, the variant that it takes, and the next better one, which it has not the flags for.
_CPUS = (
    ("cortex-a72", "cpu-aarch64", "cpu-asimddp"),
    ("neoverse-n1", "cpu-asimddp", "cpu-i8mm"),
    ("max", "cpu-i8mm", ""),
)
_IDS = np.random.default_rng(3).integers(3, 320, 21).tolist()


def _wheel(root: Path, name: str) -> Path:
    """A wheel that `make cross` fetched."""
    found = sorted((root / "build" / "aarch64").glob(f"{name}-*aarch64.whl"))
    if not found:
        pytest.skip(f"no {name} wheel for aarch64 in build/aarch64: make cross")
    return found[-1]


@pytest.fixture(scope="module")
def runner(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function `(cpu, artifact, **environment) -> process` that runs examples/embed_cpp on an emulated CPU."""
    for program in (_COMPILER, _EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here: make cross")
    folder = tmp_path_factory.mktemp("aarch64")
    with zipfile.ZipFile(_wheel(root, "apache_tvm_ffi")) as wheel:
        library = folder / "libtvm_ffi.so"
        library.write_bytes(wheel.read("tvm_ffi/lib/libtvm_ffi.so"))
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    machine = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={_COMPILER}"]
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0 -Werror"]
    configure = [cmake, "-S", root / "examples" / "embed_cpp", "-B", folder / "build", f"-DLLMC_TVM_FFI={library}"]
    for command in ([*configure, *machine, *options], [cmake, "--build", folder / "build", "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def run(cpu: str, artifact: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        places = f"LD_LIBRARY_PATH={folder}:{folder / 'build' / 'llmc'}"
        told = ["-E", places, "-E", "LD_DEBUG=files"]  # which names the libraries that it opens
        command = [_EMULATOR, "-L", _SYSROOT, "-cpu", cpu, *told, folder / "build" / "embed_cpp"]
        asked = ["--max-tokens", "24", "--threads", "1", "--ids", " ".join(map(str, _IDS))]
        return subprocess.run(
            [*command, artifact, *asked], capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
        )

    return run


@pytest.fixture(scope="module")
def source(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and a recipe with kernels of every kind: wide bytes, tables of 16 and 128, plain codes."""
    folder, recipe = tiny_llama(), tmp_path_factory.mktemp("recipe") / "recipe.toml"
    with open_model(folder) as model:
        names = sorted(uniform(model.spec, "q4"))
    formats = {name: ("q8", "c3h", "c4", "q4", "r4")[number % 5] for number, name in enumerate(names)}
    recipe.write_text(recipe_text(formats), encoding="utf-8")
    return folder, recipe


def test_every_arm_variant_answers_as_this_machine_does(
    runner: Callable[..., subprocess.CompletedProcess[str]], source: tuple[Path, Path], root: Path, tmp_path: Path
) -> None:
    folder, recipe = source
    here = compile_model(folder, tmp_path / "here.llmc", recipe=recipe).path
    wheel = _wheel(root, "apache_tvm")
    there = compile_model(folder, tmp_path / "there.llmc", recipe=recipe, target="cpu:aarch64", tvm_runtime=wheel).path
    assert (here / "weights.safetensors").read_bytes() == (there / "weights.safetensors").read_bytes()
    with llmc.load(here) as model:
        wanted = model.generate(_IDS, max_tokens=24).ids
    for cpu, variant, better in _CPUS:
        done = runner(cpu, there)
        assert done.returncode == 0, (cpu, done.stderr[-500:])
        assert [int(line) for line in done.stdout.split()] == wanted, cpu
        assert set(re.findall(r"file=\S*/lib/(cpu-\w+)\.so", done.stderr)) == {variant}, cpu
        if better:
            refused = runner(cpu, there, LLMC_VARIANT=better)
            assert f"cannot run it: {better} needs" in refused.stderr, cpu


@pytest.mark.skipif(platform.machine() == "aarch64", reason="this machine's own runtime fits")
def test_an_artifact_for_arm_needs_arm_s_runtime(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.compiler.driver.request.shutil.which", lambda name: name)

    def refused(**options: object) -> str:
        with pytest.raises(LlmcError) as caught:
            compile_model(tiny_llama(), tmp_path / "a.llmc", target="cpu:aarch64", **options)  # type: ignore[arg-type]
        return str(caught.value)

    assert "--tvm-runtime: get the wheel with pip download" in refused()
    own = find_runtime(platform.machine(), None)
    assert f"{own}: got {platform.machine()}, wanted TVM's runtime for aarch64" in refused(tvm_runtime=own)
    assert "cannot be read" in refused(tvm_runtime=tmp_path / "none.so")
    (tmp_path / "text.so").write_text("nothing")
    assert "got no ELF library" in refused(tvm_runtime=tmp_path / "text.so")
    for name, version, member in (("old", "0.1", "tvm/lib/libtvm_runtime.so"), ("empty", None, "tvm/else")):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            told = version or importlib.metadata.version("apache-tvm")
            wheel.writestr("apache_tvm.dist-info/METADATA", f"Name: apache-tvm\nVersion: {told}\n")
            wheel.writestr(member, b"")
    assert "TVM 0.1, and this compiler is TVM" in refused(tvm_runtime=tmp_path / "old.whl")
    assert "wanted an apache-tvm wheel" in refused(tvm_runtime=tmp_path / "empty.whl")
    assert not (tmp_path / "a.llmc").exists()
