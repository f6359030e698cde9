"""llmc in an app: the C++ example beside Python's runtime, and artifacts that are damaged or lie."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.compiler.artifact import canonical
from llmc.compiler.driver import compile_model
from llmc.runtime.loading import integrity
from llmc.runtime.loading.artifact import open_artifact

_TIMEOUT_S = 120


def run(native: Path, *arguments: object, given: str = "") -> subprocess.CompletedProcess[str]:
    """A program of the build folder, such as "embed_cpp"."""
    name, *rest = map(str, arguments)
    return subprocess.run([native / name, *rest], input=given, capture_output=True, text=True, timeout=_TIMEOUT_S)


def probe(native: Path, *arguments: object, given: str = "") -> list[str]:
    """What the probe writes, in lines."""
    done = run(native, "llmc/native_probe", *arguments, given=given)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:]
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what the runtimes remember."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- the same as Python ---


@pytest.mark.model
def test_the_example_writes_what_python_writes(native: Path, smollm2_artifact: Callable[..., Path], root: Path) -> None:
    path = smollm2_artifact()
    with llmc.load(path) as model:
        chat = model.decode(model.chat_prompt([{"role": "user", "content": "Name three colours, with emoji."}]), True)
        long = (root / "LICENSE").read_text(encoding="utf-8")[:3000]  # more than one step reads
        for prompt in (chat, long, "naïve café 日本語 🙂"):
            wanted = model.generate(prompt, max_tokens=16)
            done = run(native, "embed_cpp", path, "--max-tokens", 16, prompt)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == wanted.text + "\n"
        ids = run(native, "embed_cpp", path, "--max-tokens", 16, "--ids", " ".join(map(str, wanted.prompt_ids)))
        assert [int(line) for line in ids.stdout.split()] == wanted.ids
        assert len(model.encode(long)) > 512


@pytest.mark.model
def test_readme_s_program_is_c_and_runs(
    native: Path, smollm2_artifact: Callable[..., Path], root: Path, tmp_path: Path
) -> None:
    (program,) = re.findall(r"^```c\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "app.c").write_text(program)
    (tmp_path / "smollm2.llmc").symlink_to(smollm2_artifact())
    warnings = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    places = [f"-I{root / 'runtime' / 'native'}", f"-L{native / 'llmc'}", f"-Wl,-rpath,{native / 'llmc'}"]
    subprocess.run(["cc", *warnings, "app.c", *places, "-lllmc", "-o", "app"], cwd=tmp_path, check=True)
    done = subprocess.run(["./app"], cwd=tmp_path, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    with llmc.load(smollm2_artifact()) as model:
        assert done.stdout == model.generate("Once upon a time", max_tokens=20).text


_PROMPTS = [[5, 6, 7], [9] * 40, [11, 12], list(range(20, 37))]


@pytest.fixture(scope="module")
def whole(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny artifact with float32 pages."""
    path = tmp_path_factory.mktemp("whole") / "tiny.llmc"
    compile_model(tiny_llama(), path, quant="f32", kv="f32", check=False)
    return path


@pytest.fixture(scope="module")
def windowed(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with two groups of layers, and codes in its pages."""
    path = tmp_path_factory.mktemp("windowed") / "tiny.llmc"
    layers = ["sliding_attention"] * 2 + ["full_attention"]
    sizes = {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 3, "layer_types": layers}
    compile_model(tiny_model("gemma3_text", **sizes), path, quant="f32", kv="q8", check=False)
    return path


@pytest.mark.parametrize("name", ["whole", "windowed"])
def test_sequences_of_one_step_and_of_many_threads_say_what_they_say_alone(
    native: Path, name: str, request: pytest.FixtureRequest
) -> None:
    kind = request.getfixturevalue(name)
    with llmc.load(kind, threads=1) as model:
        wanted = [model.generate(prompt, max_tokens=30, ignore_eos=True).ids for prompt in _PROMPTS]
        stopped = [model.generate(prompt, max_tokens=30).ids for prompt in _PROMPTS]
    lines = "".join(" ".join(map(str, prompt)) + "\n" for prompt in _PROMPTS)
    together = probe(native, "together", kind, 30, given=lines)
    assert [[int(i) for i in line.split()] for line in together] == wanted
    threads = probe(native, "threads", kind, 30, given=lines)
    assert [[int(i) for i in line.split()] for line in threads] == stopped


# --- what cannot be ---


@pytest.fixture
def copies(whole: Path, tmp_path: Path) -> Callable[[], Path]:
    """A function that gives a copy of a good artifact, to be damaged."""
    numbers = iter(range(10_000))
    return lambda: Path(shutil.copytree(whole, tmp_path / f"{next(numbers)}.llmc"))


def refusals(native: Path, folders: list[Path], status: str = "1") -> list[str]:
    """Why each is refused: one process opens all, so that it survives each is a part of the test."""
    lines = probe(native, "open", *folders)
    assert len(lines) == len(folders)
    assert [line for line in lines if not line.startswith(f"{status} ")] == []
    return [line[2:] for line in lines]


def test_a_good_one_is_opened(native: Path, copies: Callable[[], Path]) -> None:
    refusals(native, [copies(), copies()], "0")


def test_wishes_that_cannot_be_fulfilled(native: Path, whole: Path) -> None:
    *statuses, alone, both, kept, end = probe(native, "wishes", whole)
    assert statuses == ["2"] * 7
    assert alone.startswith("3 0 prompt: 60 tokens leave no room")  # three pages free, and nothing fed
    assert both == "2 1 16 16"  # the page that the first could have had went back
    assert kept == "2 options: keep_mapped and always_hash are 0 or 1"
    assert end == "3"


def test_the_example_says_why_on_one_line(native: Path, tmp_path: Path, whole: Path) -> None:
    for arguments, code in (((tmp_path, "x"), 1), ((whole,), 2), ((whole, "x", "--max-tokens", "0"), 2)):
        done = run(native, "embed_cpp", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("embed_cpp: ")
        assert done.stderr.count("\n") == 1


def test_damage_to_any_file(native: Path, copies: Callable[[], Path], whole: Path, tmp_path: Path) -> None:
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    folders, wanted = [], []
    for name in names:
        for change in (_flip, _cut, _grow, Path.unlink, _link, _folder, _pipe):
            folders.append(copies())
            change(folders[-1] / name)
            wanted.append(name)
    for line, name in zip(refusals(native, folders), wanted, strict=True):
        assert name in line, line
    linked = copies()
    shutil.move(linked / "lib", tmp_path / "lib")
    (linked / "lib").symlink_to(tmp_path / "lib")
    nothing = tmp_path / "nothing.llmc"
    assert ["symbolic link" in line for line in refusals(native, [linked])] == [True]
    assert "no such artifact folder" in refusals(native, [nothing])[0]


# --- weights that were found intact ---


def _key(folder: Path) -> str:
    return integrity.identity(folder / "weights.safetensors", open_artifact(folder).manifest.sha256)


def test_both_runtimes_remember_the_same(native: Path, copies: Callable[[], Path], cache: Path) -> None:
    one, two, damaged = copies(), copies(), copies()
    keys = [_key(one), _key(two), _key(damaged)]  # which hashes them, too early to remember
    assert not cache.exists()
    time.sleep(0.1)
    refusals(native, [one, one], "0")
    assert integrity.is_remembered(keys[0])
    assert json.loads((cache / "verified.json").read_text()) == keys[:1]
    open_artifact(two)
    refusals(native, [two, one], "0")
    assert json.loads((cache / "verified.json").read_text()) == keys[:2]
    _flip(damaged / "weights.safetensors")
    assert "weights.safetensors: damaged" in refusals(native, [damaged])[0]
    stated = json.loads((damaged / "manifest.json").read_text())["manifest_sha256"]
    integrity.remember(integrity.identity(damaged / "weights.safetensors", stated))
    refusals(native, [damaged], "0")  # so it believes what is remembered,
    lines = probe(native, "hash", damaged, one)  # unless it is told not to
    assert lines[0].startswith("1 ")
    assert "weights.safetensors: damaged" in lines[0]
    assert lines[1] == "0 "


def test_a_young_file_is_hashed_again(native: Path, copies: Callable[[], Path], cache: Path) -> None:
    folder = copies()
    ahead = time.time() + 60  # as after a change in this moment
    os.utime(folder / "weights.safetensors", (ahead, ahead))
    refusals(native, [folder], "0")
    assert not cache.exists()


@pytest.mark.parametrize("memory", [b"", b"{", b"[1, null]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_broken_memory_is_no_error(native: Path, copies: Callable[[], Path], cache: Path, memory: bytes) -> None:
    folder = copies()
    cache.mkdir()
    (cache / "verified.json").write_bytes(memory)
    time.sleep(0.1)
    refusals(native, [folder], "0")
    assert integrity.is_remembered(_key(folder))
    assert list(cache.iterdir()) == [cache / "verified.json"]


def test_an_old_memory_goes(native: Path, copies: Callable[[], Path], cache: Path) -> None:
    folder = copies()
    for number in range(300):
        integrity.remember(f"{number}")
    time.sleep(0.1)
    refusals(native, [folder], "0")
    kept = json.loads((cache / "verified.json").read_text())
    assert kept == [*map(str, range(45, 300)), _key(folder)]


def test_where_nothing_can_be_kept_it_is_opened_too(
    native: Path, copies: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copies()
    monkeypatch.setenv("LLMC_CACHE_DIR", "/proc/nowhere")
    refusals(native, [folder], "0")
    for name in ("LLMC_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    refusals(native, [folder], "0")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the hash that it then has."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    rest["manifest_sha256"] = hashlib.sha256(canonical(rest)).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(rest), encoding="utf-8")


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Put other content into a file, with its hashes made right."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    weights = manifest["weights"]
    if name == weights["file"]:
        size = weights["chunk_bytes"]
        weights["chunks"] = [hashlib.sha256(data[at : at + size]).hexdigest() for at in range(0, len(data), size)]
    seal(folder, manifest)


_WRONG_VALUES = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**70),
    1.5,
    1e300,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a\0b",
    "\ud7ff\n",
    [],
    {},
    [[]],
]


# What only other tasks than plain text are about, or nobody reads.
_UNREAD = {
    *("spec", "quantization", "generation", "manifest_sha256", "special", "pooling", "languages", "prefixes", "parts"),
    *("chat_template", "invariance", "endless", "end", "start", "forced", "suppressed"),
}


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document."""
    yield at
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(item, (*at, key))


def test_every_value_of_the_manifest_made_wrong(native: Path, whole: Path, tmp_path: Path) -> None:
    """All of them parse and have the right hash; none may end the process, and what Python refuses is refused."""
    from llmc.runtime.loading.manifest import read_manifest

    manifest = json.loads((whole / "manifest.json").read_text())
    places = [place for place in _paths(manifest) if place and not set(place) & _UNREAD]
    shuffled, folders, sound = random.Random(0), [], []
    for number, place in enumerate(places):
        for value in shuffled.sample(_WRONG_VALUES, 4):
            changed = json.loads(json.dumps(manifest))
            _put(changed, place, value)
            folder = tmp_path / f"{number}-{len(folders)}.llmc"
            folder.mkdir()
            seal(folder, changed)
            folders.append(folder)
            try:
                read_manifest(folder)
                sound.append(True)
            except llmc.runtime.ArtifactError:
                sound.append(False)
    lines = refusals(native, folders)  # those whose manifest is sound lack their files
    assert sum(sound) < len(sound) / 3
    for line, good in zip(lines, sound, strict=True):
        assert good or "missing" not in line or "missing key" in line, line


def _put(document: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def test_paths_that_leave_the_folder(native: Path, copies: Callable[[], Path], whole: Path) -> None:
    folders = []
    for name in (
        "../0.llmc/tokenizer.json",
        "/etc/passwd",
        "lib/../tokenizer.json",
        "./tokenizer.json",
        "lib//x",
        "a\\b",
        "",
    ):
        folders.append(copies())
        manifest = json.loads((whole / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"].pop("tokenizer.json")
        manifest["tokenizer"] = name
        seal(folders[-1], manifest)
    assert ["not a plain relative path" in line for line in refusals(native, folders)] == [True] * len(folders)


def test_a_cpu_without_the_features_and_a_newer_format(native: Path, copies: Callable[[], Path], whole: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    folders = [copies() for _ in range(5)]
    variant = manifest["variants"][0]
    seal(folders[0], {**manifest, "variants": [{**variant, "requires": ["flag_of_tomorrow"]}]})
    seal(folders[1], {**manifest, "variants": [{**variant, "arch": "pdp11"}]})
    seal(folders[2], {**manifest, "format": 99})
    device = {"kind": "cuda", "arch": "sm_90", "runtime": manifest["runtime"]}
    cuda = {**variant, "name": "cuda-sm_90", "requires": ["cuda", "sm_90"], "device": device}
    seal(folders[3], {**manifest, "variants": [cuda]})
    seal(folders[4], {**manifest, "variants": [{**cuda, "device": {**device, "kind": "abacus"}}]})
    wanted = ["flag_of_tomorrow", "pdp11", "newer", "cuda-sm_90 needs cuda sm_90", "wanted cuda"]
    for line, what in zip(refusals(native, folders), wanted, strict=True):
        assert what in line


def test_weights_that_lie(native: Path, copies: Callable[[], Path], whole: Path) -> None:
    data = (whole / "weights.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    first, second = list(header)[:2]
    f32 = {"dtype": "F32", "shape": [2**48, 2**48], "data_offsets": [0, 0]}
    lies: list[Any] = [
        {**header, first: {**header[first], "shape": [2**31, 2**31, 4]}},
        {**header, first: {**header[first], "data_offsets": [0, 2**60]}},
        {**header, first: {**header[first], "data_offsets": [2**60, 0]}},
        {**header, first: {**header[first], "data_offsets": header[second]["data_offsets"]}},
        {**header, first: {**header[first], "data_offsets": [64]}},
        {**header, first: {**header[first], "dtype": "F8"}},
        {**header, first: {**header[first], "shape": [1] * 100_000}},
        {**header, "more": f32},
        {name: entry for name, entry in header.items() if name != first},
        {**header, "pad.x": f32},
        [],
        {},
    ]
    texts = [json.dumps(lie).encode() for lie in lies] + [b"[" * 100_000, b"{", b"\xff", b""]
    contents = [len(t).to_bytes(8, "little") + t + b" " * (-(8 + len(t)) % 64) + data[start:] for t in texts]
    contents += [b"", b"1234", b"\xff" * 8 + data[8:], (2**40).to_bytes(8, "little") + data[8:]]
    folders = [copies() for _ in contents]
    for folder, content in zip(folders, contents, strict=True):
        replace_file(folder, "weights.safetensors", content)
    for line in refusals(native, folders):
        assert "weights" in line, line


def test_tokenizers_and_libraries_that_are_none(native: Path, copies: Callable[[], Path], whole: Path) -> None:
    tokenizers = [
        *(
            b"",
            b"{}",
            b"[]",
            b'{"model": 3}',
            b'{"model": {"vocab": {}}}',
            b'{"model": {"vocab": {"a": -1}}}',
            b"[" * 99_999,
        ),
        *(
            b'{"model": {"vocab": [[1]]}}',
            b'{"model": {"vocab": {"a": 4294967296}}}',
            b"\xff\xfe",
            b'{"model": {"vocab": {"a": "0"}}}',
        ),
        b'{"model": {"vocab": {"a": 1}}, "added_tokens": [{"content": "x"}]}',
    ]
    folders = [copies() for _ in tokenizers]
    for folder, content in zip(folders, tokenizers, strict=True):
        replace_file(folder, "tokenizer.json", content)
    for line in refusals(native, folders):
        assert "tokenizer.json" in line
    (library,) = (str(path.relative_to(whole)) for path in whole.glob("lib/cpu-*.so"))
    broken = copies()
    replace_file(broken, library, b"not a library")
    assert "cannot be loaded" in refusals(native, [broken])[0]
