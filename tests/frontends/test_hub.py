"""hf:org/name: what is fetched, from a hub on this machine; what is said when there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.errors import SourceError
from llmc.frontends.hub import Place, is_hub, place_of, with_revision

sys.path.insert(0, str(Path(__file__).parent))
from hub_server import Hub, serve

pytest.importorskip("huggingface_hub")

CHUNK = 10 << 20  # huggingface-hub keeps what it has got in pieces of this size

# What a fetch prints: the path, the files beside it, and how many bytes it told of.
_FETCH = """
import json, sys
from pathlib import Path
from llmc.compiler.errors import LlmcError
from llmc.frontends.hub import fetch
told = []
try:
    path = fetch(sys.argv[1], lambda stage, done, total: told.append((done, total)))
    folder = path if path.is_dir() else path.parent
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    print(json.dumps({"path": str(path), "files": files, "told": told}))
except LlmcError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "served"
    names = ["config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "README.md", "onnx/model.onnx"]
    for name in (*names, "1_Pooling/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}" if name.endswith(".json") else name.encode())
    with serve(Hub({"org/tiny": folder})) as running:
        yield running


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(source: str, **environment: str) -> dict[str, Any]:
        found = subprocess.run(
            [sys.executable, "-c", _FETCH, source], capture_output=True, text=True, timeout=120,
            env=_environment(hub, tmp_path) | environment,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        assert "\n" not in answer.get("error", "")
        return answer

    return run


def _environment(hub: Hub, home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    without = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}
    return kept | without | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "home")}


def test_a_folder_then_offline(hub: Hub, fetch: Callable[..., dict[str, Any]]) -> None:
    """Only what a compile reads, each file once; the line breaks off and the rest is fetched; then the cache does."""
    size = 3 * CHUNK // 2
    (hub.repositories["org/tiny"] / "model.safetensors").write_bytes(bytes(size))
    hub.broken["model.safetensors"] = CHUNK + 100_000
    found = fetch("hf:org/tiny")
    assert found["files"] == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert Path(found["path"], "model.safetensors").stat().st_size == size
    assert hub.ranges == [("model.safetensors", f"bytes={CHUNK}-")]
    total = size + 3 * 2
    assert found["told"][-1] == [total, total]
    assert [done for done, _ in found["told"]] == sorted(done for done, _ in found["told"])
    before = len(hub.fetched)
    assert fetch("hf:org/tiny")["path"] == found["path"]
    offline = fetch("hf:org/tiny", HF_HUB_OFFLINE="1")
    assert offline.get("error") is None
    assert (offline["path"], offline["files"]) == (found["path"], found["files"])
    nobody = fetch("hf:org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert nobody["path"] == found["path"]
    assert len(hub.fetched) == before


def test_one_gguf_file_and_its_parts(hub: Hub, fetch: Callable[..., dict[str, Any]]) -> None:
    folder = hub.repositories["org/tiny"]
    parts = [f"big-0000{i}-of-00002.gguf" for i in (1, 2)]
    for name in parts:
        (folder / name).write_bytes(name.encode())
    found = fetch(f"hf:org/tiny:{parts[0]}")
    assert (Path(found["path"]).name, found["files"]) == (parts[0], parts)
    assert "has no 'y.gguf'; its GGUF files: 'big-00001" in fetch("hf:org/tiny:y.gguf")["error"]
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink()
    assert "has GGUF files; give one: hf:org/tiny:big-00001-of-00002.gguf" in fetch("hf:org/tiny")["error"]


def test_shards(hub: Hub, fetch: Callable[..., dict[str, Any]]) -> None:
    folder = hub.repositories["org/tiny"]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert fetch("hf:org/tiny")["files"][2:4] == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    hub.repositories["org/bad"] = shutil.copytree(folder, folder.with_name("bad"))
    (folder.with_name("bad") / index.name).write_text(json.dumps({"weight_map": {"a": "../../x"}}))
    assert "index.json names ['../../x'], which are not there" in fetch("hf:org/bad")["error"]


def test_what_is_said(hub: Hub, fetch: Callable[..., dict[str, Any]]) -> None:
    hub.gated.add("org/closed")
    says = {
        "hf:org/closed": "hf:org/closed: is gated; accept its terms",
        "hf:org/none": "hf:org/none: not found; check the name",
        "hf:org/tiny@v9": "hf:org/tiny@v9: has no revision 'v9'",
    }
    for source, message in says.items():
        assert message in fetch(source)["error"], source
    nowhere = fetch("hf:org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "is not in the cache, and the hub cannot be reached" in nowhere["error"]
    assert "is not in the cache" in fetch("hf:org/tiny:x.gguf", HF_HUB_OFFLINE="1")["error"]


def test_the_command_reads_a_folder(hub: Hub, tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:
    """`llmc spec hf:org/name` from the cache's links, named as the repository is."""
    folder = hub.repositories["org/tiny"]
    shutil.rmtree(folder)
    shutil.copytree(tiny_llama(), folder)
    found = subprocess.run(
        [sys.executable, "-m", "llmc", "spec", "hf:org/tiny", "--revision", "v1"], capture_output=True, text=True,
        timeout=120, env=_environment(hub, tmp_path),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith('name = "tiny"')
    assert hub.fetched.count("model.safetensors") == 1


def test_names() -> None:
    assert is_hub("hf:a/b")
    assert not is_hub(Path("hf"))
    assert place_of("hf:a/b@refs/pr/1") == Place("a/b", "refs/pr/1", None)
    assert place_of("hf:a/b:q/c.gguf") == Place("a/b", "main", "q/c.gguf")
    assert with_revision("hf:a/b:c.gguf", "v1") == "hf:a/b@v1:c.gguf"
    for wrong in ("hf:", "hf:a", "hf:a/b/c", "hf:../b", "hf:a/b@", "hf:a/b:c.bin", "hf:a/b:../c.gguf", "hf:a/b@-x"):
        with pytest.raises(SourceError, match="wanted hf:org/name"):
            place_of(wrong)
    for source in ("model.gguf", "hf:a/b@v2", "hf:a/b@x y"):
        with pytest.raises(SourceError, match="wanted hf:org/name|is another one"):
            with_revision(source, "v1")
