"""What README shows is what happens: its commands, their output, its --help, its Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _commands(help_only: bool) -> list[tuple[str, str]]:
    """Return (command, the output shown below it) for `$ llmc ...` lines, in README's order."""
    found = []
    for language, text in _BLOCKS.findall(README):
        if language != "console":
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if command.startswith("llmc ") and command.endswith("--help") == help_only:
                found.append((command, output))
    return found


def _masked(text: str) -> list[str]:
    """Return lines with what differs by machine and by run taken out: hashes, CPU names, numbers, widths."""
    for pattern, name in ((r"\b[0-9a-f]{16}\b", "HASH"), (r"\bcpu-\w+", "VARIANT"), (r"\d[\d.]*", "N")):
        text = re.sub(pattern, name, text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _run(command: str, cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    done = subprocess.run(["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("command", "shown"), _commands(help_only=True))
def test_help_is_as_shown(command: str, shown: str, tmp_path: Path) -> None:
    assert _run(command, tmp_path) == shown


@pytest.mark.model
def test_commands_print_what_is_shown(
    smollm2_gguf: Path, minilm: Path, minilm_onnx: Path, flan_t5: Path, tmp_path: Path
) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.gguf").symlink_to(smollm2_gguf)
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(minilm)
    (tmp_path / "minilm.onnx").symlink_to(minilm_onnx)
    (tmp_path / "flan-t5-small").symlink_to(flan_t5)
    ids = np.array([[101, 1037, 4937, 102]])  # [CLS] a cat [SEP]
    for name, values in (("ids", ids), ("mask", np.ones_like(ids)), ("types", np.zeros_like(ids))):
        np.save(tmp_path / f"{name}.npy", values)
    (tmp_path / "LICENSE").symlink_to(ROOT / "LICENSE")  # a text that who reads README has
    commands = _commands(help_only=False)
    assert len(commands) >= 3
    servers = [(command, shown) for command, shown in commands if command.startswith("llmc serve ")]
    for command, shown in commands:
        if (command, shown) not in servers:
            assert _masked(_run(command, tmp_path)) == _masked(shown), command
    # README's Python comes after its commands and uses the artifact they made, and the server they started.
    scripts = [text for language, text in _BLOCKS.findall(README) if language == "python"]
    assert scripts
    (server,) = servers
    with _serving(*server, tmp_path):
        for script in scripts:
            _run(f"{sys.executable} - <<'END'\n{script}END", tmp_path)
    shutil.rmtree(tmp_path)


@contextmanager
def _serving(command: str, shown: str, cwd: Path) -> Iterator[None]:
    """A server that README starts, until the end of what goes on beside it."""
    arguments = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(arguments, cwd=cwd, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert server.stderr.readline() == shown.strip() + "\n"
            yield
        finally:
            server.terminate()


def test_every_folder_and_variable_that_exists_is_described() -> None:
    for folder in ("compiler", "frontends", "passes", "targets", "runtime", "tests", "examples"):
        assert f"`{folder}/`" in README
    named = set()
    for folder in ("compiler", "frontends", "passes", "targets", "runtime", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"\bLLMC_[A-Z]+(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8")))
    described = set(re.findall(r"^\| `(LLMC_[A-Z_]+)`", README, flags=re.MULTILINE))
    assert named == described
