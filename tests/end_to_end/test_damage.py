"""Damage, through the real command: one line on standard error that names the cause, exit code 1, nothing loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import llmc
from llmc.cli import command
from llmc.compiler import artifact as writer
from llmc.compiler.driver import compile_model


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "tiny.llmc"
    compile_model(tiny_llama(), path, quant="f32")
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of a good artifact, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "tiny.llmc"))


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(*arguments: str | Path, code: int = 1) -> str:
    """The one line with which `llmc ...`, a process of its own, refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "llmc", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    return _one_line(done.returncode, done.stdout, done.stderr, code)


def compile_refused(*arguments: str | Path, code: int = 1) -> str:
    """The same for `llmc compile ...` in this process: starting one that compiles takes seconds."""
    done = CliRunner().invoke(command, ["compile", *map(str, arguments)], prog_name="llmc")
    return _one_line(done.exit_code, done.stdout, done.stderr, code)


def _one_line(found: int, printed: str, errors: str, code: int) -> str:
    assert (found, printed) == (code, ""), errors
    (line,) = errors.splitlines()
    assert line.startswith("llmc: ")
    assert "internal error" not in line
    return line


def run_refused(folder: Path) -> str:
    return refused("run", folder, "one", "--max-tokens", "1")


_EACH = """
import sys
import llmc
from llmc.runtime import ArtifactError
for folder in sys.argv[1:]:
    try:
        llmc.load(folder)
    except ArtifactError as error:
        assert len(str(error).splitlines()) == 1, error
        print(error)
    with open("/proc/self/maps") as maps:
        assert ".llmc/" not in maps.read(), "something of the artifact was mapped"
    assert "tvm_ffi" not in sys.modules
"""


def api_refused(folders: list[Path]) -> list[str]:
    """The line of each folder's ArtifactError; a process of its own sees that nothing of them was loaded."""
    done = subprocess.run([sys.executable, "-c", _EACH, *map(str, folders)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(folders)
    return lines


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None], seal: bool = True) -> None:
    """Change the manifest; with `seal` its own hash is made right again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    if seal:
        del manifest["manifest_sha256"]
        manifest["manifest_sha256"] = hashlib.sha256(writer.canonical(manifest)).hexdigest()
    path.write_text(json.dumps(manifest), encoding="utf-8")


# --- files of an artifact ---


@pytest.mark.parametrize(
    ("damage", "says"), [(flip, "damaged"), (cut, "cut short"), (Path.unlink, "missing")], ids=["flip", "cut", "lost"]
)
def test_every_file_in_turn(whole: Path, tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    names = files_of(whole)
    assert {Path(name).name for name in names} >= {
        "manifest.json",
        "weights.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "libtvm_runtime.so",
    }
    folders = [Path(shutil.copytree(whole, tmp_path / f"{number}.llmc")) for number in range(len(names))]
    for folder, name in zip(folders, names, strict=True):
        damage(folder / name)
    lines = api_refused(folders)
    for folder, name, line in zip(folders, names, lines, strict=True):
        for said in (run_refused(folder), line):
            assert name in said
            assert says in said or name == "manifest.json"


def test_nothing_but_damage_is_refused(copy: Path) -> None:
    llmc.verify(copy)
    done = subprocess.run(
        [sys.executable, "-m", "llmc", "run", copy, "one", "--max-tokens", "1"], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_verify_names_the_file(copy: Path) -> None:
    flip(copy / "weights.safetensors")
    assert "weights.safetensors" in refused("verify", copy)


def test_files_of_another_good_artifact(whole: Path, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    other = tmp_path / "other.llmc"
    compile_model(tiny_llama(seed=1), other, quant="f32")
    assert files_of(other) == files_of(whole)
    for name in ("weights.safetensors", "manifest.json"):
        mixed = Path(shutil.copytree(whole, tmp_path / f"mixed-{name}.llmc"))
        shutil.copyfile(other / name, mixed / name)
        assert "weights.safetensors" in run_refused(mixed)
        assert "weights.safetensors" in api_refused([mixed])[0]


@pytest.mark.parametrize("seal", [True, False])
def test_a_newer_format(copy: Path, seal: bool) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(format=2, surprise=1), seal)
    for line in (run_refused(copy), *api_refused([copy]), refused("inspect", copy)):
        assert "manifest.json" in line
        assert "newer" in line


def test_a_cpu_without_the_features(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["variants"][0]["requires"].append("flag_of_tomorrow"))
    for line in (run_refused(copy), *api_refused([copy])):
        assert "flag_of_tomorrow" in line
    edit_manifest(copy, lambda manifest: manifest["variants"][0].update(arch="pdp11", requires=[]))
    assert "pdp11" in run_refused(copy)


@pytest.mark.model
def test_a_real_model(smollm2_artifact: Callable[..., Path], tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(smollm2_artifact(), tmp_path / "smollm2.llmc"))
    with (damaged / "weights.safetensors").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for line in (run_refused(damaged), *api_refused([damaged])):
        assert "weights.safetensors: damaged" in line


# --- what is compiled ---


@pytest.mark.model
@pytest.mark.parametrize("size", [-1, 5_000_000, 1000, 0])
def test_a_gguf_cut_short(smollm2_gguf: Path, tmp_path: Path, size: int) -> None:
    short = tmp_path / "short.gguf"
    with smollm2_gguf.open("rb") as file:
        short.write_bytes(file.read(size if size >= 0 else smollm2_gguf.stat().st_size - 1))
    assert "short.gguf" in compile_refused(short, "-o", tmp_path / "x.llmc")
    assert list(tmp_path.glob("*x.llmc*")) == []


def test_an_unknown_config_key(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "colour": "red", "twice_as": 2}))
    line = refused("compile", folder, "-o", tmp_path / "x.llmc")
    assert all(word in line for word in ("config.json", "colour", "twice_as"))
    assert not (tmp_path / "x.llmc").exists()


def test_weights_cut_short(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
    cut(folder / "model.safetensors")
    assert "model.safetensors" in compile_refused(folder, "-o", tmp_path / "x.llmc")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("/nowhere")])
def test_output_that_is_no_artifact(
    tiny_llama: Callable[..., Path], tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "mine")
    assert "not an artifact" in compile_refused(tiny_llama(), "-o", tmp_path / "mine")
    assert os.path.lexists(tmp_path / "mine")


def test_wrong_usage_is_exit_code_2(copy: Path) -> None:
    assert "--quant" in refused("compile", "x", "-o", "y", "--quant", "q99", code=2)
    assert "--temperature" in refused("run", copy, "one", "--temperature", "nan", code=2)


# --- a compile that does not end ---


@pytest.fixture
def output(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """The name of an old artifact to compile to; afterwards it is what it was."""
    path = Path(shutil.copytree(whole, tmp_path / "out.llmc"))
    before = (path / "manifest.json").read_bytes()
    yield path
    assert (path / "manifest.json").read_bytes() == before
    llmc.verify(path)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.thorough_if(case=lambda stop: stop == signal.SIGTERM)
def test_a_compile_that_is_stopped(tiny_llama: Callable[..., Path], output: Path, stop: int) -> None:
    command = [sys.executable, "-m", "llmc", "compile", str(tiny_llama(seed=1)), "-o", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(output.parent.glob(".out.llmc.*/weights.safetensors")):  # it has begun to write
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(stop)
    printed, errors = process.communicate(timeout=60)
    assert printed == ""
    assert "Traceback" not in errors
    if stop != signal.SIGKILL:
        assert process.returncode == 128 + stop
        assert list(output.parent.glob(".out.llmc*")) == []


def test_a_compile_that_fails_half_way(
    tiny_llama: Callable[..., Path], output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_manifest", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        compile_model(tiny_llama(seed=1), output, quant="f32")
    assert sorted(tmp_path.iterdir()) == before
