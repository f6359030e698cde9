"""The wheel alone, with no extra, in a clean environment: complete, small, quick, and it runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDERS = ("compiler", "frontends", "passes", "runtime", "targets")
OWN_MB = 9  # sources of the compiler and byte code among them
INSTALLED_MB = 175  # everything that `pip install llmc` brings, numpy and tokenizers included


def _call(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build writes into its source folder."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy / name)
    for folder in FOLDERS:
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--wheel", "--no-isolation", "--outdir", out)
    _call(sys.executable, "-m", "build", *options, copy, cwd=out)
    (built,) = out.glob("llmc-*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that holds the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("clean")
    _call(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    _call(python, "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return python


def test_the_wheel_holds_every_file(wheel: Path, root: Path) -> None:
    on_disk = {p.relative_to(root) for f in FOLDERS for p in (root / f).rglob("*.py")}
    wanted = {Path("llmc", *(p.parts[2:] if p.parts[:2] == ("compiler", "llmc") else p.parts)) for p in on_disk}
    with zipfile.ZipFile(wheel) as archive:
        held = {Path(name) for name in archive.namelist()}
    assert wanted <= held
    assert Path("llmc/py.typed") in held
    assert any(path.name == "LICENSE" for path in held)
    extra = {path for path in held - wanted if ".dist-info" not in path.parts[0]}
    families = {Path("llmc", path.relative_to(root)) for path in (root / "frontends" / "families").iterdir()}
    data = {
        "llmc/py.typed", "llmc/compiler/driver/sample.txt", "llmc/compiler/driver/sample_scaling.txt",
        "llmc/runtime/serving/page.html", "llmc/targets/tuned_defaults.json",
    }  # fmt: skip
    assert extra == {*map(Path, data), *families}


def test_it_brings_no_compiler_and_little_else(clean: Path) -> None:
    listed = json.loads(_call(clean, "-m", "pip", "list", "--format=json", cwd=clean.parent))
    names = {entry["name"].lower() for entry in listed}
    assert "apache-tvm-ffi" in names
    assert not names & {"apache-tvm", "torch", "transformers", "gguf", "onnx"}
    (site,) = clean.parent.parent.glob("lib/python*/site-packages")
    files = [path for path in site.rglob("*") if path.is_file() and not path.is_symlink()]
    own = [path for path in files if path.relative_to(site).parts[0] not in ("pip", "setuptools")]
    megabytes = sum(path.stat().st_size for path in own) / 1e6
    ours = sum(path.stat().st_size for path in (site / "llmc").rglob("*") if path.is_file()) / 1e6
    print(f"\ninstalled size: llmc {ours:.1f} MB, with its dependencies {megabytes:.0f} MB")
    assert ours < OWN_MB
    assert megabytes < INSTALLED_MB


def test_the_runtime_is_imported_in_half_a_second(clean: Path, tmp_path: Path) -> None:
    code = "import time; start = time.perf_counter(); import llmc.runtime;print(time.perf_counter() - start)"
    seconds = min(float(_call(clean, "-c", code, cwd=tmp_path)) for _ in range(3))
    print(f"\nimport llmc.runtime: {seconds:.3f} s")
    assert seconds < 0.5


@pytest.mark.model
def test_it_runs_an_artifact_as_the_checkout_does(
    clean: Path, smollm2_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    artifact = smollm2_artifact("q8")
    arguments = ("run", artifact, "Name three colours.", "--max-tokens", "16", "--json")
    there = json.loads(_call(clean.parent / "llmc", *arguments, cwd=tmp_path))
    here = json.loads(_call(sys.executable, "-m", "llmc", *arguments, cwd=tmp_path))
    assert there["ids"] == here["ids"]
    assert there["text"] == here["text"]


def test_it_translates_as_the_checkout_does(clean: Path, tiny_translator: Path, tmp_path: Path) -> None:
    drawn = ("--temperature", "1", "--seed", "5", "--max-tokens", "9")
    arguments = ("translate", tiny_translator / "tiny.llmc", "a", "b c", "--from", "en", "--to", "de", *drawn, "--json")
    there = json.loads(_call(clean.parent / "llmc", *arguments, cwd=tmp_path))
    here = json.loads(_call(sys.executable, "-m", "llmc", *arguments, cwd=tmp_path))
    assert len(there["translations"]) == 2
    assert there == here


@pytest.mark.model
def test_it_maps_no_compiler_library(clean: Path, smollm2_artifact: Callable[..., Path], tmp_path: Path) -> None:
    code = (
        "import sys, llmc\n"
        "with llmc.load(sys.argv[1]) as model:\n"
        "    model.generate('Once', max_tokens=2)\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libtvm_runtime' in maps\n"
        "assert 'libtvm_compiler' not in maps and 'libLLVM' not in maps\n"
        "assert not {'tvm', 'torch'} & set(sys.modules)\n"
    )
    _call(clean, "-c", code, smollm2_artifact("q8"), cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "extra"), [(("compile", "x.gguf", "-o", "x.llmc"), "compile"), (("serve", "x.llmc"), "serve")]
)
def test_it_says_what_other_commands_need(clean: Path, tmp_path: Path, command: tuple[str, ...], extra: str) -> None:
    done = subprocess.run([clean.parent / "llmc", *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"pip install 'llmc[{extra}]'" in done.stderr
