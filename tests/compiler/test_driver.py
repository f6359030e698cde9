"""compile_model: what it writes, that it writes the same twice, and that it refuses before it works."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler import artifact
from llmc.compiler.driver import compile_model, contents, libraries, machine_code
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import OFFERED
from llmc.compiler.spec import to_toml
from llmc.frontends.source import open_model


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("anew")
@pytest.mark.thorough_if(case=lambda quant: quant != "q8")
@pytest.mark.parametrize("quant", ["f32", "bf16", "q8", "q4", "c3h"])
def test_two_compiles_are_byte_identical(quant: str, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    first, second = (compile_model(tiny_llama(), tmp_path / name, quant=quant).path for name in ("a.llmc", "b.llmc"))
    assert _files(first) == _files(second)
    assert filecmp.cmpfiles(first, second, _files(first), shallow=False) == (_files(first), [], [])


def test_every_tensor_starts_on_64_bytes_and_sizes_are_as_told(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    result = compile_model(tiny_llama(hidden_size=12 * 3, num_attention_heads=3, num_key_value_heads=1), tmp_path / "a")
    raw = (result.path / artifact.WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert all((8 + length + entry["data_offsets"][0]) % 64 == 0 for entry in header.values() if entry["dtype"] != "U8")
    manifest = json.loads((result.path / "manifest.json").read_text())
    stored = sum(
        header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in manifest["weights"]["order"]
    )
    with open_model(tiny_llama(hidden_size=12 * 3, num_attention_heads=3, num_key_value_heads=1)) as source:
        count = sum(int(np.prod(tensor.shape)) for tensor in source.tensors.values())
    assert result.bits_per_weight == pytest.approx(8 * stored / count, abs=1e-3)
    assert result.bytes == sum(path.stat().st_size for path in result.path.rglob("*") if path.is_file())


def test_an_edited_spec_makes_another_model(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    with open_model(tiny_llama()) as source:
        text = to_toml(source.spec)
    (tmp_path / "my.toml").write_text(text.replace("theta = 10000.0", "theta = 500.0"))
    plain = compile_model(tiny_llama(), tmp_path / "a.llmc", quant="f32").path
    edited = compile_model(tiny_llama(), tmp_path / "b.llmc", quant="f32", spec=tmp_path / "my.toml").path
    ids = list(range(5, 60))
    with llmc.load(plain) as one, llmc.load(edited) as other:
        a = one.runner.step([(one.runner.new_sequence(), ids)]).logits
        b = other.runner.step([(other.runner.new_sequence(), ids)]).logits
    assert np.abs(a - b).max() > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "q7"}, f"unknown weight format 'q7'; llmc knows: auto, {', '.join(OFFERED)}"),
        ({"quant": "q4_k"}, "only keeps what a checkpoint stores"),
        ({"kv": "q3"}, "unknown KV format 'q3'; llmc knows: auto, f32, bf16, q8, q4"),
        ({"bpw": 3.5, "quant": "q4"}, "--quant and --bpw each choose the formats"),
        ({"bpw": 0.0}, "wanted more than 0"),
        ({"size": -5}, "wanted a positive number"),
        ({"activations": "i4"}, "unknown activations 'i4'; llmc knows: auto, i8, f32"),
        ({"target": "tpu"}, "unknown target 'tpu'; llmc knows: cpu"),
        ({"spec": "no.toml"}, "no.toml: cannot read the spec"),
    ],
)
def test_what_is_not_understood_is_refused_before_any_work(
    options: dict[str, Any], message: str, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(LlmcError, match=message):
        compile_model(tiny_llama(), tmp_path / "a.llmc", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", [(libraries, "write_library"), (contents, "write_weights")])  # at the same time
def test_a_failure_half_way_leaves_the_old_artifact_and_nothing_else(
    part: tuple[Any, str], tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compile_model(tiny_llama(), tmp_path / "a.llmc").path
    before = (path / "manifest.json").read_bytes()

    def fail(*args: object) -> None:
        raise LlmcError("no room")

    monkeypatch.setattr(*part, fail)
    with pytest.raises(LlmcError, match="no room"):
        compile_model(tiny_llama(), path, quant="f32")
    assert (path / "manifest.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.llmc"]
    llmc.load(path).close()


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _said(*_: object) -> None:
    raise LlmcError("nvcc refused the kernels:\nfor want of room")


def _broken(*_: object) -> None:
    raise ValueError("Traceback\nno such register")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_killed, r"cpu-[a-z0-9_]+: its code could not be made: its process was ended by signal 9"),
        (_said, "nvcc refused the kernels:\nfor want of room"),
        (_broken, r"cpu-[a-z0-9_]+: its code could not be made: no such register"),
    ],
)
def test_what_became_of_the_code_is_told(
    write: Callable[..., None], message: str, tiny_llama: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(libraries, "write_library", write)
    with pytest.raises(LlmcError) as error:
        compile_model(tiny_llama(), tmp_path / "a.llmc")
    assert re.fullmatch(message, str(error.value))
    assert list(tmp_path.iterdir()) == []
    with contextlib.suppress(ChildProcessError):  # there are no children
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # those of others are at work


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            _killed,
            "cpu-[a-z0-9_]+: its code could not be made: (its process|the process that made [a-z0-9_]+) was ended.*",
        ),
        (_said, "nvcc refused the kernels:\nfor want of room"),
        (_broken, "cpu-[a-z0-9_]+: its code could not be made: no such register"),
    ],
)
def test_what_became_of_a_kernel_is_told(
    write: Callable[..., None], message: str, count: int, tiny_llama: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(libraries, "default_threads", lambda: count)
    monkeypatch.setattr(machine_code, "write_kernel", write)
    with pytest.raises(LlmcError) as error:
        compile_model(tiny_llama(), tmp_path / "a.llmc")
    assert re.fullmatch(message, str(error.value))
    assert list(tmp_path.iterdir()) == []
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)


@pytest.mark.parametrize(
    ("end", "message"),
    [(_killed, "its process was ended by signal 9"), (_said, "nvcc refused"), (_broken, "no such register")],
)
def test_a_helper_that_ends_is_missed(
    end: Callable[..., None], message: str, tiny_llama: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It has come for a kernel, and nobody else makes that."""

    def help_and_end(kernels: machine_code.Kernels, turns: machine_code.Turns) -> None:
        with turns:
            assert kernels._take() is not None
            end()

    monkeypatch.setattr(libraries, "default_threads", lambda: 2)
    monkeypatch.setattr(machine_code.Kernels, "help", help_and_end)
    with pytest.raises(LlmcError, match=f"{message}|its code could not be made: the process that made .* was ended"):
        compile_model(tiny_llama(), tmp_path / "a.llmc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("anew")
def test_the_code_is_the_same_whoever_makes_it(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for count in (1, 2, 5):
        monkeypatch.setattr(libraries, "default_threads", lambda count=count: count)
        path = compile_model(tiny_llama(), tmp_path / f"{count}.llmc").path
        (library,) = path.glob("lib/cpu-*.so")
        found.add(library.read_bytes())
        assert {each.name for each in path.glob("lib/*")} == {library.name, "libtvm_runtime.so"}
    assert len(found) == 1


def test_something_that_is_no_artifact_is_not_overwritten(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(LlmcError, match="exists and is not an artifact"):
        compile_model(tiny_llama(), tmp_path / "mine")
    with pytest.raises(LlmcError, match="its folder does not exist"):
        compile_model(tiny_llama(), tmp_path / "none" / "a.llmc")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_a_missing_linker_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LlmcError, match="gcc is needed to link code for"):
        compile_model("no-such-model", tmp_path / "a.llmc")


@pytest.mark.parametrize("can_swap", [True, False])
def test_an_artifact_is_replaced_whole(
    can_swap: bool, tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_swap:
        monkeypatch.setattr(artifact, "_exchange", lambda one, other: False)
    path = compile_model(tiny_llama(), tmp_path / "a.llmc", quant="q8").path
    compile_model(tiny_llama(), path, quant="f32")
    assert json.loads((path / "manifest.json").read_text())["quantization"]["format"] == "f32"
    assert [p.name for p in tmp_path.iterdir()] == ["a.llmc"]
    llmc.load(path).close()


def test_what_a_killed_compile_left_is_removed_by_the_next(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / ".a.llmc.abcd1234" / "lib").mkdir(parents=True)
    (tmp_path / ".a.llmc.holiday1").mkdir()  # no artifact of ours
    compile_model(tiny_llama(), tmp_path / "a.llmc")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.llmc.holiday1", "a.llmc"]
