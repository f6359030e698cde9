"""`llmc spec`: writes a spec once, and says of an edited one what the model's weights say to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from llmc.cli import command
from llmc.compiler.spec import from_toml

MakeGguf = Callable[..., Path]
Q = '"layers.{layer}.q" = "blk.{layer}.attn_q.weight"'


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["spec", *map(str, arguments)])


def refused(*arguments: str | Path, code: int = 1) -> str:
    """The only line on standard error."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def model(tiny_gguf: MakeGguf) -> Path:
    return tiny_gguf()


@pytest.fixture
def file(model: Path, tmp_path: Path) -> Path:
    """The model's own spec, written by the command."""
    path = tmp_path / "own.toml"
    result = run(model, "-o", path)
    assert (result.exit_code, result.output) == (0, "")
    return path


def edit(path: Path, old: str, new: str) -> Path:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def test_a_written_spec_is_the_printed_one(model: Path, file: Path, tmp_path: Path) -> None:
    assert run(model).stdout == file.read_text(encoding="utf-8")
    assert from_toml(file.read_text(encoding="utf-8")).sizes.layers == 2
    result = run(model, "-o", tmp_path / "again.toml", "--json")
    assert json.loads(result.stdout) == {"path": str(tmp_path / "again.toml")}
    assert (tmp_path / "again.toml").read_bytes() == file.read_bytes()


def test_a_file_that_is_there_stays_as_it_is(model: Path, file: Path) -> None:
    file.write_text("edited", encoding="utf-8")
    assert "own.toml: is there already; remove it" in refused(model, "-o", file)
    assert file.read_text(encoding="utf-8") == "edited"


def test_check_writes_nothing(model: Path, file: Path) -> None:
    assert "leave out -o" in refused(model, "--check", file, "-o", "x", code=2)


def test_what_fits(model: Path, file: Path) -> None:
    assert run(model, "--check", file).stdout == f"{file}: fits {model}, same values\n"
    edit(file, "theta = 10000.0", "theta = 20000.0")
    assert run(model, "--check", file).stdout == (
        f"{file}: fits {model}, with other values:\n  position.theta = 20000.0, the model says 10000.0\n"
    )
    found = json.loads(run(model, "--check", file, "--json").stdout)
    assert found == {"fits": True, "differences": [{"key": "position.theta", "model": 10000.0, "file": 20000.0}]}


@pytest.mark.parametrize(
    ("old", "new", "reasons"),
    [
        (Q, Q.replace("attn_q", "attention_q"), ["missing blk.{0-1}.attention_q.weight", "not read by any block blk.",
                                                 "attention_q.weight may be blk.{0-1}.attn_q.weight"]),
        ("ffn = 96", "ffn = 80", ["blk.{0-1}.ffn_up.weight is [96, 64], wanted [80, 64]"]),
        ("layers = 2", "layers = 1", ["not read by any block blk.1.attn_norm.weight, blk.1.attn_q.weight"]),
        (Q, Q.replace("weight", "weight | q k v"), ["tensors: nothing reads k, v of 'blk.{layer}.attn_q.weight'"]),
        (Q, Q.replace("weight", "weight | skip 2"), ["is [64, 64], wanted [66, 64] (2 rows to skip, 64 rows of q)"]),
        ("theta", "tetha", ["unknown key position.'tetha' (near: theta)"]),
        ("vocab", "]", ["not TOML"]),
    ],
)  # fmt: skip
def test_what_does_not_fit(old: str, new: str, reasons: list[str], model: Path, file: Path) -> None:
    line = refused(model, "--check", edit(file, old, new))
    assert line.startswith(f"llmc: {file}: ")
    for reason in reasons:
        assert reason in line


def test_a_turned_matrix_is_read_as_the_spec_says(file: Path, tiny_gguf: MakeGguf) -> None:
    from llmc.frontends.source import open_model

    q = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    model = tiny_gguf(tensors={f"blk.{layer}.attn_q.weight": q for layer in range(2)})
    edit(file, Q, Q.replace("weight", "weight | transposed"))
    assert "tensors.layers.{layer}.q = 'blk.{layer}.attn_q.weight | transposed'" in run(model, "--check", file).stdout
    with open_model(model, from_toml(file.read_text(encoding="utf-8"))) as source:
        np.testing.assert_array_equal(source.tensors["layers.1.q"].read(), q.T)


def test_a_model_without_a_spec_of_its_own(file: Path, tiny_gguf: MakeGguf) -> None:
    unknown: dict[str, Any] = {"llama.rope.scaling.type": "nosuch"}
    model = tiny_gguf(keys=unknown)
    reason = refused(model).removeprefix("llmc: ")
    assert "nosuch" in reason
    assert run(model, "--check", file).stdout == f"{file}: fits {model}, which has no spec of its own: {reason}\n"
    found = json.loads(run(model, "--check", file, "--json").stdout)
    assert found == {"fits": True, "differences": [], "no_own_spec": reason}
    assert "missing" in refused(model, "--check", edit(file, Q, Q.replace("attn_q", "q")))


def test_files_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    assert "none.toml: cannot read the spec: no such file" in refused(model, "--check", tmp_path / "none.toml")
    (tmp_path / "latin").write_bytes(b"\xff")
    assert "latin: cannot read the spec: not UTF-8" in refused(model, "--check", tmp_path / "latin")
