"""An artifact of several variants: the same weights, the same answers, and the one that was asked for is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading.artifact import open_artifact
from llmc.runtime.loading.cpu import cpu_flags
from llmc.targets import target as targets

X86 = pytest.mark.skipif(targets.native().arch != "x86_64", reason="variants of x86-64")
IDS = np.random.default_rng(5).integers(3, 320, 37).tolist()


@pytest.fixture(scope="module")
def stages() -> list[tuple[str, int, int]]:
    """What the compile of `portable` reported."""
    return []


@pytest.fixture(scope="module")
def portable(
    tiny_llama: Callable[..., Path], stages: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny artifact for any x86-64 CPU, with codes that are looked up in tables."""
    path = tmp_path_factory.mktemp("portable") / "tiny.llmc"
    compile_model(tiny_llama(), path, quant="c4", target="cpu:x86_64", progress=lambda *step: stages.append(step))
    return path


def _here(path: Path) -> list[str]:
    """The variants that this machine can run."""
    variants = json.loads((path / "manifest.json").read_text())["variants"]
    return [v["name"] for v in variants if cpu_flags().issuperset(v["requires"])]


def _mapped(path: Path) -> set[str]:
    """Names of the artifact's variants that this process has in memory."""
    maps = Path("/proc/self/maps").read_text()
    return {lib.stem for lib in (path / "lib").glob("cpu-*.so") if str(lib) in maps}


def _answer(path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """The logits of IDS, and the tokens that follow."""
    before = _mapped(path)
    monkeypatch.setenv("LLMC_VARIANT", variant)
    with llmc.load(path, threads=1) as model:
        assert variant in _mapped(path) <= before | {variant}
        output = model.runner.step([(model.runner.new_sequence(), IDS)])
        return np.array(output.logits), list(model.generate(IDS, max_tokens=24, ignore_eos=True).ids)


@X86
def test_every_variant_gives_the_same_and_is_the_one_that_runs(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _here(portable)
    assert names[-1] == "cpu-x86_64"
    answers = {name: _answer(portable, name, monkeypatch) for name in names}
    logits, made = answers[names[0]]
    for name, (others, ids) in answers.items():
        assert ids == made, name
        if name == "cpu-x86_64":  # it has no fused multiply-add: the same formulas, rounded once more
            np.testing.assert_allclose(others, logits, atol=1e-4 * np.abs(logits).max())
        else:
            np.testing.assert_array_equal(others, logits, name)


@X86
def test_variants_stand_best_first_and_the_first_that_fits_is_taken(portable: Path) -> None:
    names = [v["name"] for v in json.loads((portable / "manifest.json").read_text())["variants"]]
    assert names == [target.name for target in targets.variants("x86_64")]
    assert sorted(path.name for path in (portable / "lib").glob("cpu-*")) == sorted(f"{name}.so" for name in names)
    machine = llmc.runtime.inspect(portable)["machine"]
    assert machine["variant"] == _here(portable)[0]
    assert open_artifact(portable).variant.name == machine["variant"]


@X86
def test_progress_names_each_variant(portable: Path, stages: list[tuple[str, int, int]]) -> None:
    done = [stage for stage, at, total in stages if stage.startswith("library ") and at == total]
    assert sorted(done) == sorted(f"library {target.name}" for target in targets.variants("x86_64"))


@X86
@pytest.mark.thorough
def test_a_variant_alone_is_the_same_to_the_byte(
    portable: Path, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    alone = compile_model(tiny_llama(), tmp_path / "alone.llmc", quant="c4", target="cpu:avx2").path
    for name in ("weights.safetensors", "lib/cpu-avx2.so", "lib/libtvm_runtime.so"):
        assert (alone / name).read_bytes() == (portable / name).read_bytes()
    assert [path.name for path in (alone / "lib").glob("cpu-*")] == ["cpu-avx2.so"]


@X86
def test_a_variant_whose_code_another_has_is_left_out(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    path = compile_model(tiny_llama(), tmp_path / "f32.llmc", quant="f32", target="cpu:x86_64").path
    names = [v["name"] for v in json.loads((path / "manifest.json").read_text())["variants"]]
    assert names == ["cpu-avx512f", "cpu-avx2", "cpu-x86_64"]  # without tables, without bytes


@X86
def test_a_variant_that_cannot_be_taken_is_refused_by_name(
    portable: Path, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(variant: str, flags: frozenset[str] | None = None) -> str:
        monkeypatch.setenv("LLMC_VARIANT", variant)
        if flags is not None:
            monkeypatch.setattr("llmc.runtime.loading.cpu.cpu_flags", lambda: flags)
        with pytest.raises(ArtifactError) as caught:
            llmc.load(portable)
        assert str(portable) in str(caught.value)
        return str(caught.value)

    said = refused("cpu-of-tomorrow")
    assert "LLMC_VARIANT=cpu-of-tomorrow: no such variant; it has cpu-amx_int8, " in said
    assert llmc.runtime.inspect(portable)["machine"]["variant"] is None
    done = subprocess.run([native / "embed_cpp", portable, "--ids", "5 6"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (1, f"embed_cpp: {said}")
    assert "cannot run it: cpu-avx2 needs avx avx2" in refused("cpu-avx2", frozenset({"fma"}))


@X86
def test_the_native_loader_takes_the_variant_that_is_named(portable: Path, native: Path) -> None:
    names = _here(portable)
    made = {}
    for name in names:
        command = [native / "embed_cpp", portable, "--max-tokens", "8", "--ids", " ".join(map(str, IDS))]
        environment = {**os.environ, "LLMC_VARIANT": name, "LD_DEBUG": "files"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr[-500:]
        assert {line for line in names if f"/lib/{line}.so" in done.stderr} == {name}
        made[name] = done.stdout
    assert len(set(made.values())) == 1, made


def test_a_failing_variant_is_named_and_nothing_is_left(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = targets.Target("cpu-broken", targets.native().arch, ("fma",))
    monkeypatch.setattr(targets.Target, "linker", property(lambda self: "gcc" if self.requires == () else "false"))
    monkeypatch.setattr(targets, "get", lambda name: (broken, targets.Target("cpu-fine", broken.arch, ())))
    monkeypatch.setattr("llmc.compiler.driver.request.shutil.which", lambda name: name)
    with pytest.raises(LlmcError, match="cpu-broken: its code could not be made"):
        compile_model(tiny_llama(), tmp_path / "a.llmc", quant="f32")
    assert list(tmp_path.iterdir()) == []


def test_doctor_shows_what_this_machine_takes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmc", "doctor", "--json"], capture_output=True, text=True, check=True
    )
    fitting = [t.name for t in targets.variants(targets.native().arch) if cpu_flags().issuperset(t.requires)]
    assert json.loads(done.stdout)["cpu"]["variants"] == fitting
