"""Damage: each kind is one line of ArtifactError before any library is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.errors import ArtifactError
from llmc.runtime.load_model import load
from llmc.runtime.loading import cpu, integrity, library
from llmc.runtime.loading.artifact import inspect, open_artifact, verify
from llmc.runtime.loading.manifest import KvGroup
from llmc.runtime.loading.package import FORMAT

Reseal = Callable[[Path, dict[str, Any]], None]

EVERY_FILE = [
    "manifest.json",
    "weights.safetensors",
    "lib/cpu-test.so",
    "lib/libtvm_runtime.so",
    "tokenizer.json",
    "chat_template.jinja",
]


@pytest.fixture(autouse=True)
def _no_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        pytest.fail("a library was loaded")

    monkeypatch.setattr(library, "load_functions", fail)
    monkeypatch.setattr("ctypes.CDLL", fail)


def refused(path: Path, how: Callable[..., Any] = load) -> str:
    """The one line with which the artifact is refused."""
    with pytest.raises(ArtifactError) as caught:
        how(path)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def test_a_whole_artifact_is_accepted(fake_artifact: Path) -> None:
    verify(fake_artifact)
    artifact = open_artifact(fake_artifact)
    assert artifact.variant.name == "cpu-test"
    assert artifact.manifest.eos == {1}
    shown = inspect(fake_artifact)
    assert shown["name"] == "tiny"
    assert shown["machine"]["variant"] == "cpu-test"
    assert shown["bytes"] == sum(p.stat().st_size for p in fake_artifact.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("how", [load, verify])
def test_a_flipped_bit_anywhere_in_any_file(fake_artifact: Path, name: str, how: Callable[..., Any]) -> None:
    path = fake_artifact / name
    data = bytearray(path.read_bytes())
    for place in (0, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert name.rpartition("/")[2] in refused(fake_artifact, how)
    path.write_bytes(data)
    verify(fake_artifact)


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_file_cut_short(fake_artifact: Path, name: str) -> None:
    path = fake_artifact / name
    os.truncate(path, path.stat().st_size - 1)
    text = refused(fake_artifact)
    assert name in text
    assert name == "manifest.json" or "cut short" in text


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_missing_file(fake_artifact: Path, name: str) -> None:
    (fake_artifact / name).unlink()
    assert name in refused(fake_artifact)


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_symbolic_link(fake_artifact: Path, tmp_path: Path, name: str) -> None:
    shutil.move(fake_artifact / name, tmp_path / "elsewhere")
    (fake_artifact / name).symlink_to(tmp_path / "elsewhere")
    refused(fake_artifact)
    refused(fake_artifact, verify)
    refused(fake_artifact, inspect)


def test_a_linked_folder_inside(fake_artifact: Path, tmp_path: Path) -> None:
    shutil.move(fake_artifact / "lib", tmp_path / "lib")
    (fake_artifact / "lib").symlink_to(tmp_path / "lib")
    assert "symbolic link" in refused(fake_artifact)


def test_weights_swapped_after_they_were_remembered(fake_artifact: Path) -> None:
    path = fake_artifact / "weights.safetensors"
    os.utime(path, ns=(1, 1))
    key = integrity.identity(path, open_artifact(fake_artifact).manifest.sha256)
    integrity.remember(key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))  # same size and time; the inode's change time still tells
    assert "damaged" in refused(fake_artifact)


def test_weights_are_hashed_once(fake_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "settled", lambda path: True)
    open_artifact(fake_artifact)
    monkeypatch.setattr(integrity, "wrong_chunk", lambda *_: pytest.fail("hashed again"))
    open_artifact(fake_artifact)
    shutil.copytree(fake_artifact, fake_artifact.with_name("copy.llmc"))
    with pytest.raises(BaseException, match="hashed again"):
        open_artifact(fake_artifact.with_name("copy.llmc"))


@pytest.mark.parametrize("memory", [b"", b"{", b"[1, null]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_broken_memory_is_no_error(fake_artifact: Path, memory: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "settled", lambda path: True)
    integrity.cache_folder().mkdir(parents=True)
    (integrity.cache_folder() / "verified.json").write_bytes(memory)
    open_artifact(fake_artifact)
    monkeypatch.setattr(integrity, "wrong_chunk", lambda *_: pytest.fail("hashed again"))
    open_artifact(fake_artifact)


def test_an_unwritable_memory_is_no_error(fake_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", "/proc/nowhere")
    open_artifact(fake_artifact)


def test_a_newer_format(fake_artifact: Path, reseal: Reseal) -> None:
    reseal(fake_artifact, {"format": FORMAT + 1, "surprise": 1})
    assert "made by a newer llmc" in refused(fake_artifact)


def test_unknown_and_missing_keys_are_all_named(fake_artifact: Path, reseal: Reseal) -> None:
    manifest = manifest_of(fake_artifact)
    del manifest["vocab"]
    manifest["kv"]["colour"] = 1
    manifest["extra"] = 1
    reseal(fake_artifact, manifest)
    text = refused(fake_artifact)
    assert all(word in text for word in ("'vocab'", "'colour'", "'extra'"))


def test_names_of_the_manifest_s_own_choice_are_told_on_one_line(fake_artifact: Path, reseal: Reseal) -> None:
    manifest = manifest_of(fake_artifact)
    manifest["files"]["a\nb"] = {"sha256": "x", "bytes": 1}
    reseal(fake_artifact, manifest)
    text = refused(fake_artifact)
    assert "files.'a\\nb'.sha256" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab", 0),
        ("vocab", True),
        ("vocab", 2**70),
        ("context", -1),
        ("variants", []),
        ("runtime", "lib/other.so"),
        ("tokenizer", 5),
        ("files", {"../evil": {"sha256": "0" * 64, "bytes": 1}}),
        ("files", {}),
        ("weights", {"file": "weights.safetensors", "chunk_bytes": 0, "chunks": [], "order": []}),
        ("task", "embed"),
        ("task", "translate"),
        ("pooling", {"kind": "mean", "normalize": True}),
        ("languages", {"fr": 97}),
        ("languages", ["fr"]),
        ("prefixes", {"en to de": 5}),
        ("functions", []),
        ("functions", ["turn"]),
        ("invariance", "nearly"),
        ("endless", ["always"]),
        ("parts", [0, 2]),
    ],
)
def test_values_that_make_no_sense(fake_artifact: Path, reseal: Reseal, key: str, value: Any) -> None:
    reseal(fake_artifact, manifest_of(fake_artifact) | {key: value})
    refused(fake_artifact)
    refused(fake_artifact, inspect)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("bos", None, "add_bos is true"),
        ("bos", 97, "bos 97"),
        ("end", 97, "end 97"),
        ("eos", [1, 97], "eos 97"),
        ("forced", [97], "forced 97"),
        ("suppressed", [97], "suppressed 97"),
        ("start", 0, "translate and a tokens.start go together"),
    ],
)
def test_token_ids_that_make_no_sense(fake_artifact: Path, reseal: Reseal, key: str, value: Any, said: str) -> None:
    manifest = manifest_of(fake_artifact)
    manifest["tokens"][key] = value
    reseal(fake_artifact, manifest)
    assert said in refused(fake_artifact)


@pytest.mark.parametrize("layers", [[[0]], [[0, 1], [1]], [[0], [2]], [[]], []])
def test_groups_have_every_layer_once(fake_artifact: Path, reseal: Reseal, layers: list[list[int]]) -> None:
    manifest = manifest_of(fake_artifact)
    manifest["kv"]["groups"] = [{"layers": each, "window": 0} for each in layers]
    reseal(fake_artifact, manifest)
    assert "groups" in refused(fake_artifact)


def test_parts_have_functions_and_every_layer(fake_artifact: Path, reseal: Reseal) -> None:
    reseal(fake_artifact, manifest_of(fake_artifact) | {"parts": [1, 2], "functions": ["step", "embed", "part_0"]})
    text = refused(fake_artifact)
    assert "they have 3 layers in all, and the cache 2" in text
    assert "head is missing" in text
    assert "part_1 is missing" in text


def test_layers_with_a_window_are_a_group(fake_artifact: Path, reseal: Reseal) -> None:
    manifest = manifest_of(fake_artifact)
    manifest["kv"]["groups"] = [{"layers": [1], "window": 0}, {"layers": [0], "window": 33}]
    reseal(fake_artifact, manifest)
    read = open_artifact(fake_artifact).manifest
    assert read.kv.groups == (KvGroup((1,)), KvGroup((0,), 33))
    assert (read.functions, read.invariance) == (("step", "turn"), "exact")


def test_a_translator_s_manifest(fake_artifact: Path, reseal: Reseal) -> None:
    manifest = manifest_of(fake_artifact) | {"task": "translate", "languages": {"fr": 96}, "prefixes": {"a to b": "x "}}
    manifest["tokens"] |= {"start": 0, "forced": [4], "suppressed": [5, 6]}
    manifest["functions"] = ["encode", "step"]
    reseal(fake_artifact, manifest)
    read = open_artifact(fake_artifact).manifest
    assert (read.task, read.start, read.forced, read.suppressed) == ("translate", 0, (4,), (5, 6))
    assert (read.languages, read.prefixes) == ({"fr": 96}, {"a to b": "x "})


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "lib/../../x", "a\\b", "lib//x", "./x", "a\nb", "", "lib/\x00"]
)
def test_paths_that_leave_the_folder(fake_artifact: Path, reseal: Reseal, name: str) -> None:
    manifest = manifest_of(fake_artifact)
    manifest["files"][name] = manifest["files"]["tokenizer.json"]
    manifest["tokenizer"] = name
    reseal(fake_artifact, manifest)
    assert "not a plain relative path" in refused(fake_artifact)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a":1,"a":2}',
        b"\xff",
        b'{"a":' + b"9" * 9999 + b"}",
    ],
)
def test_manifests_that_are_no_json(fake_artifact: Path, text: bytes) -> None:
    (fake_artifact / "manifest.json").write_bytes(text)
    assert "damaged" in refused(fake_artifact)


def test_lone_surrogates_in_the_manifest(fake_artifact: Path) -> None:
    (fake_artifact / "manifest.json").write_text('{"format": 3, "name": "\\ud800"}')
    assert "damaged" in refused(fake_artifact)


def test_a_cpu_without_the_features(fake_artifact: Path, reseal: Reseal) -> None:
    manifest = manifest_of(fake_artifact)
    manifest["variants"][0]["requires"] = ["fpu_of_the_future", "flag_x"]
    reseal(fake_artifact, manifest)
    assert "cpu-test needs flag_x fpu_of_the_future" in refused(fake_artifact)
    manifest["variants"][0] |= {"requires": [], "arch": "riscv64"}
    reseal(fake_artifact, manifest)
    assert "arch riscv64" in refused(fake_artifact)
    assert inspect(fake_artifact)["machine"]["variant"] is None


def test_the_first_variant_that_fits_is_taken(
    fake_artifact: Path, reseal: Reseal, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(fake_artifact)
    plain = manifest["variants"][0]
    best = plain | {"name": "best", "requires": ["avx9"]}
    amx = plain | {"name": "amx", "requires": ["amx_tile"]}
    manifest["variants"] = [best, amx, plain]
    reseal(fake_artifact, manifest)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"amx_tile"}))
    monkeypatch.setattr(cpu, "_allow_amx", lambda: False)
    assert open_artifact(fake_artifact).variant.name == "cpu-test"
    monkeypatch.setattr(cpu, "_allow_amx", lambda: True)
    assert open_artifact(fake_artifact).variant.name == "amx"


def test_verify_refuses_files_that_are_not_listed(fake_artifact: Path) -> None:
    (fake_artifact / "lib" / "extra.so").write_bytes(b"")
    open_artifact(fake_artifact)
    assert "lib/extra.so" in refused(fake_artifact, verify)


@pytest.mark.parametrize("path", ["nowhere.llmc", "a\x00b", ""])
def test_a_path_that_is_no_artifact(tmp_path: Path, path: str) -> None:
    refused(tmp_path / path if "\x00" not in path else Path(path))


def test_a_library_that_changes_after_it_was_hashed(fake_artifact: Path) -> None:
    artifact = open_artifact(fake_artifact)
    artifact.check_unchanged("lib/cpu-test.so")
    (fake_artifact / "lib/cpu-test.so").write_bytes(b"something new")
    with pytest.raises(ArtifactError, match="changed while"):
        artifact.check_unchanged("lib/cpu-test.so")
