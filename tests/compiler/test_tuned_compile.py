"""The database file, `compile --tuned`, and the commands round them."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import llmc
from llmc.cli import command
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.tuning.database import Database, Entry, Section, Tried, read_database, write_database
from llmc.compiler.driver.tuning.model_kernels import model_calls, tunable
from llmc.compiler.errors import LlmcError
from llmc.runtime.loading.manifest import read_manifest
from llmc.targets import target as targets
from llmc.targets.tuned import target_key

KEY = "i8_linear format=q4 width=64: m,16 4,96 m,64"


def _database() -> Database:
    entry = Entry(
        {"prefetch_bytes": 2048, "row_block": 128}, 1,
        [Tried({"prefetch_bytes": 0, "row_block": 128}, {"1": 1.25, "512": 1.0}, "holds")],
        {"prefetch_bytes": 0, "row_block": 128}, {"1": [10.0, 8.0], "512": [99.5, 99.0]},
    )  # fmt: skip
    return Database({"x86_64 avx fma": Section({KEY: entry}, {"tiny": {"decode": 1, "prefill": 2}})})


def test_a_database_is_read_back_as_it_was_written_and_spelled_the_same(tmp_path: Path) -> None:
    path = tmp_path / "db.json"
    write_database(path, _database())
    assert read_database(path) == _database()
    text = path.read_text()
    write_database(path, read_database(path))
    assert path.read_text() == text == _database().text()
    assert [file.name for file in tmp_path.iterdir()] == ["db.json"]


def _changed(change: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads(_database().text())
    change(raw)
    return json.dumps(raw)


def _entry_of(raw: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = raw["targets"]["x86_64 avx fma"]["kernels"][KEY]
    return entry


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not readable as JSON"),
        ("\xff", "not readable as JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "got [], wanted an object"),
        ('{"format": 1}', "missing key 'targets'"),
        ('{"format": 1, "format": 1, "targets": {}}', "keys given twice: format"),
        ('{"format": 2, "targets": {}}', "format 2 was made by a newer llmc"),
        ('{"format": "1", "targets": {}}', "database.format: got '1', wanted 1"),
        (_changed(lambda raw: raw.update(more=1)), "unknown key 'more'"),
        (_changed(lambda raw: _entry_of(raw).update(speed=3)), "unknown key 'speed'"),
        (_changed(lambda raw: _entry_of(raw).pop("tried")), "missing key 'tried'"),
        (_changed(lambda raw: _entry_of(raw).update(best={"warp": 9})), "unknown knob 'warp', llmc knows: prefetch"),
        (_changed(lambda raw: _entry_of(raw).update(best={"row_block": 0})), "row_block: got 0, wanted 32 or 64"),
        (_changed(lambda raw: _entry_of(raw).update(best={"row_block": True})), "row_block: got True"),
        (_changed(lambda raw: _entry_of(raw).update(best=[1])), "best: got [1], wanted an object"),
        (_changed(lambda raw: _entry_of(raw).update(threads=0)), "threads: got 0"),
        (_changed(lambda raw: _entry_of(raw).update(microseconds={"x": [1, 1]})), "key 'x' is no number of rows"),
        (_changed(lambda raw: _entry_of(raw).update(microseconds={"1": [-1, 1]})), "wanted a positive number"),
        (_changed(lambda raw: _entry_of(raw).update(microseconds={"1": [1]})), "a list of 2"),
        (_changed(lambda raw: _entry_of(raw).update(tried=[{"knobs": {}, "gain": {}, "verdict": "?"}])), "verdict"),
        (_changed(lambda raw: raw["targets"].update(x=3)), "database.targets.x: got 3"),
    ],
)  # fmt: skip
def test_a_damaged_database_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "db.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(LlmcError) as caught:
        read_database(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- compile --tuned ---


@pytest.fixture(scope="module")
def tiny(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's artifact without a database."""
    result = compile_model(tiny, tmp_path_factory.mktemp("plain") / "plain.llmc", quant="q4", kv="q8")
    assert result.tuned is None
    return result.path


def _tuned(tiny: Path, path: Path) -> Path:
    """A database with other knobs for every linear layer of the tiny model, and an entry of another machine."""
    _, calls = model_calls(Request(tiny, Path("x"), "q4"), lambda *_: None)
    section = Section()
    for key, call in calls.items():
        if call.name == "i8_linear":
            section.kernels[key] = Entry({"row_block": 128}, 1, best={"prefetch_bytes": 0, "row_block": 32})
    database = _database()
    database.targets[target_key(targets.native())] = section
    write_database(path, database)
    return path


def test_tuned_knobs_change_the_code_and_nothing_it_computes(tiny: Path, plain: Path, tmp_path: Path) -> None:
    database = _tuned(tiny, tmp_path / "db.json")
    tuned, again = (
        compile_model(tiny, tmp_path / name, quant="q4", kv="q8", tuned=database) for name in ("tuned", "again")
    )
    library = f"lib/{targets.native().name}.so"
    assert not filecmp.cmp(plain / library, tuned.path / library, shallow=False)
    files = [library, "weights.safetensors", "manifest.json"]
    assert filecmp.cmpfiles(tuned.path, again.path, files, shallow=False) == (files, [], [])
    assert filecmp.cmp(plain / files[1], tuned.path / files[1], shallow=False)
    ids = list(range(5, 200))
    with llmc.load(plain) as one, llmc.load(tuned.path) as other:
        a, b = (m.runner.step([(m.runner.new_sequence(), ids)]).logits for m in (one, other))
    np.testing.assert_array_equal(a, b)
    assert tuned.tuned is not None
    assert "kernels have knobs from" in tuned.tuned
    assert tuned.tuned.endswith("; its 1 of other targets are ignored")


def test_an_artifact_has_the_kernels_of_the_model_it_was_made_from(tiny: Path, plain: Path) -> None:
    source, artifact = (Request(tiny, Path("x"), "q4", "q8"), Request(plain, Path("x")))
    listed = [model_calls(request, lambda *_: None)[1] for request in (source, artifact)]
    assert list(listed[0]) == list(listed[1])
    assert [call.count for call in listed[0].values()] == [call.count for call in listed[1].values()]


# --- the commands ---


def _llmc(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def _refused(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_tune_goes_on_with_what_it_has_and_says_what_is_left(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "db.json"
    for trials in (1, 2):
        result = _llmc("tune", tiny, "-o", path, "--quant", "q8", "--trials", 1, "--threads", 1, "--json")
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert (said["trials"], said["complete"], said["threads"]) == (1, False, None)
        assert {kernel["state"] for kernel in said["kernels"]} == {"unfinished"}
        (section,) = read_database(path).targets.values()
        assert [len(entry.tried) for entry in section.kernels.values()] == [trials]
    table = _llmc("tune", tiny, "-o", path, "--quant", "q8", "--trials", 1, "--threads", 1)
    assert "the same command goes on with them" in table.stdout
    assert table.stderr == ""


def test_threads_are_measured_once_the_kernels_of_an_artifact_are_decided(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "db.json", targets.native()
    kernels = tunable(model_calls(Request(plain, Path("x")), lambda *_: None)[1], target)
    known = [{name: getattr(kernel.default, name) for name in kernel.knobs} for kernel in kernels]
    entries = {kernel.key: Entry(default, 2, best=default) for kernel, default in zip(kernels, known, strict=True)}
    write_database(path, Database({target_key(target): Section(entries)}))
    rates = {1: (10.0, 100.0), 2: (19.0, 150.0), 4: (19.2, 290.0)}  # threads -> of answers, of prompts

    def measured(case: dict[str, Any]) -> dict[str, Any]:
        decode, prefill = rates[case["threads"]]
        return {"decode": [1.0, decode], "prefill": [prefill]}

    monkeypatch.setattr("llmc.cli_bench.worker", measured)
    monkeypatch.setattr("llmc.runtime.loading.cpu.default_threads", lambda: 4)
    result = _llmc("tune", plain, "-o", path, "--threads", 2, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["complete"], said["trials"], said["threads"]) == (True, 0, {"decode": 2, "prefill": 4})
    assert list(read_database(path).targets[target_key(target)].threads.values()) == [{"decode": 2, "prefill": 4}]


def test_help_says_how_and_what_for() -> None:
    result = _llmc("tune", "--help")
    assert result.exit_code == 0
    for piece in ("Examples:", "--trials N", "--minutes M", "goes on where it was", "--tuned tuned.json"):
        assert piece in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--trials", "0"], 2, "--trials"),
        (["--minutes", "0"], 2, "--minutes"),
        (["--quant", "q7"], 2, "--quant"),
        (["--target", "cpu:tpu"], 1, "unknown target 'cpu:tpu'"),
        (["--target", "cpu:aarch64"], 1, "aarch64"),
        (["-o", "no/such/db.json"], 1, "its folder does not exist"),
        (["-o", "."], 1, "a folder; name a file"),
    ],
)
def test_tune_refuses_before_it_works(
    arguments: list[str], code: int, message: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = [] if "-o" in arguments else ["-o", "db.json"]
    assert message in _refused(_llmc("tune", tiny, *output, *arguments), code)
    assert list(tmp_path.iterdir()) == []


def test_commands_refuse_what_is_no_database(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "db.json").write_text("{}")
    for arguments in (("tune", tiny, "-o", tmp_path / "db.json"),
                      ("compile", tiny, "-o", tmp_path / "a.llmc", "--tuned", tmp_path / "db.json")):  # fmt: skip
        assert "not a database of llmc tune" in _refused(_llmc(*arguments))
    missing = _llmc("compile", tiny, "-o", tmp_path / "a.llmc", "--tuned", tmp_path / "no.json")
    assert "cannot read the database: no such file or directory" in _refused(missing)
    assert not (tmp_path / "a.llmc").exists()


def test_an_artifact_keeps_the_formats_it_has(plain: Path, tmp_path: Path) -> None:
    line = _refused(_llmc("tune", plain, "-o", tmp_path / "db.json", "--quant", "q4"))
    assert line.endswith("--quant: an artifact has its formats already; leave it out")


def test_kernels_that_tuning_does_not_know_are_refused(tiny: Path, tmp_path: Path) -> None:
    path = compile_model(tiny, tmp_path / "rounded.llmc", quant="q4", activations="bf16").path
    assert read_manifest(path).raw["quantization"]["activations"] == "bf16"
    line = _refused(_llmc("tune", path, "-o", tmp_path / "db.json"))
    assert line.endswith("compiled with --activations bf16, whose kernels llmc tune does not know")
    rows = [row.split() for row in _llmc("inspect", path).stdout.splitlines()]
    assert ["activations", "bf16"] in rows
