"""Every example runs, and uses only the public names of llmc."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import llmc

ROOT = Path(__file__).resolve().parents[1]
SAYS = {"01_compile_and_chat.py": "Stay hydrated", "02_look_into_the_compiler.py": "'llmc.add_rms_norm': 3"}
INSIDE = {"02_look_into_the_compiler.py"}  # shows what is inside, so it may import it
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(path: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path), str(smollm2_gguf)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[path.name] in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in INSIDE], ids=lambda p: p.name)
def test_example_uses_public_names_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not str(node.module).startswith("llmc"), "examples say `import llmc`"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "llmc" or node.attr in llmc.__all__
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
