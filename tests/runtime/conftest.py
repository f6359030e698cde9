"""Fixtures of the runtime's tests: a NumPy model behind the real runner, and a small artifact on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.engine.engine import Engine
from llmc.runtime.loading.manifest import KvLayout
from llmc.runtime.loading.schema import canonical_json
from llmc.runtime.parts import Parts
from llmc.runtime.runner import Runner
from llmc.runtime.text.tokenizer import Tokenizer

_SPECIAL = ["<s>", "</s>", "<|im_start|>"]


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def reference(script: Callable[[str], ModuleType]) -> ModuleType:
    """The module reference_step.py."""
    return script("tests/runtime/reference_step.py")


@pytest.fixture(scope="session")
def translator(script: Callable[[str], ModuleType], reference: ModuleType) -> ModuleType:
    """The module reference_translator.py."""
    return script("tests/runtime/reference_translator.py")


@pytest.fixture
def make_runner(reference: ModuleType) -> Callable[..., Runner]:
    """A function `(pages=64, chunk=512, calls=None) -> Runner` over the NumPy step, which is there in parts too."""

    def make(pages: int = 64, chunk: int = 512, calls: list[int] | None = None) -> Runner:
        layout = KvLayout(reference.LAYERS, reference.KV_HEADS, reference.HEAD_DIM, "f32")
        pool = PagePool(layout, pages * 16)
        step = reference.make_step(reference.make_weights(), pool.layers, calls)
        parts = Parts(*reference.make_parts(reference.make_weights(), pool.layers))
        return Runner(step, pool, reference.VOCAB, reference.CONTEXT, chunk, parts=parts)

    return make


@pytest.fixture
def make_translator(reference: ModuleType, translator: ModuleType) -> Callable[..., Runner]:
    """A function `(pages=64, chunk=512, calls=[]) -> Runner` over the NumPy step and encode."""

    def make(pages: int = 64, chunk: int = 512, calls: list[tuple[str, int]] | None = None) -> Runner:
        layout = KvLayout(reference.LAYERS, reference.KV_HEADS, reference.HEAD_DIM, "f32")
        pool = PagePool(layout, pages * 16)
        step, encode = translator.make_functions(translator.make_weights(), pool.layers, [] if calls is None else calls)
        return Runner(step, pool, reference.VOCAB, reference.CONTEXT, chunk, encode)

    return make


def tokenizer_json(kind: str = "byte-level", vocab_size: int = 400) -> bytes:
    """A small trained tokenizer: "byte-level" BPE, "fallback" (SentencePiece-like) or "wordpiece"."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    texts = ["The cat sat on the mat, naïve café.", "Grüße aus Köln 日本語 🙂🙃", "def f(x):\n\treturn x  + 1"] * 4
    if kind == "byte-level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    elif kind == "fallback":
        backend = Backend(models.BPE(byte_fallback=True, unk_token="<0x00>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        byte_tokens = [AddedToken(f"<0x{i:02X}>", special=False) for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*_SPECIAL, *map(str, byte_tokens)])
    else:
        backend = Backend(models.WordPiece(unk_token="<s>"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=_SPECIAL)
    trainer.show_progress = False
    backend.train_from_iterator(texts, trainer)
    text: str = backend.to_str()
    if kind == "fallback":  # byte tokens are part of the vocabulary there, not added tokens
        document = json.loads(text)
        document["added_tokens"] = [t for t in document["added_tokens"] if not t["content"].startswith("<0x")]
        text = json.dumps(document)
    return text.encode()


@pytest.fixture(scope="session")
def make_tokenizer_json() -> Callable[..., bytes]:
    """`tokenizer_json`."""
    return tokenizer_json


@pytest.fixture
def make_engine(make_runner: Callable[..., Runner]) -> Callable[..., Engine]:
    """A function `(eos=(), settings={}, **runner) -> Engine` whose tokens are single bytes of text."""

    def make(eos: tuple[int, ...] = (), settings: dict[str, Any] | None = None, **runner: Any) -> Engine:
        return Engine(make_runner(**runner), Tokenizer(tokenizer_json()), frozenset(eos), **(settings or {}))

    return make


def weights_file(tensors: dict[str, Any], order: list[str]) -> bytes:
    """A weights.safetensors with tensors at multiples of 64 bytes."""
    header: dict[str, Any] = {}
    body = b""
    names = {"float32": "F32", "int32": "I32", "uint8": "U8"}
    for name in order:
        data = tensors[name].tobytes()
        entry = {"dtype": names[str(tensors[name].dtype)], "shape": list(tensors[name].shape)}
        header[name] = {**entry, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
        gap = -len(body) % 64
        if gap:
            header[f"pad.{name}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [len(body), len(body) + gap]}
            body += bytes(gap)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + body


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with its own hash."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    rest["manifest_sha256"] = hashlib.sha256(canonical_json(rest)).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(rest), encoding="utf-8")


@pytest.fixture(scope="session")
def reseal() -> Callable[[Path, dict[str, Any]], None]:
    """`seal`."""
    return seal


@pytest.fixture
def fake_artifact(tmp_path: Path) -> Path:
    """A whole artifact for the machine the test runs on; its libraries are text, so loading them would fail."""
    import platform

    folder = tmp_path / "tiny.llmc"
    (folder / "lib").mkdir(parents=True)
    order = ["table", "odd", "codes"]
    random = np.random.default_rng(0)
    tensors = {
        "table": random.standard_normal((97, 32)).astype(np.float32),
        "odd": random.standard_normal(7).astype(np.float32),
        "codes": random.integers(0, 99, (300, 16), dtype=np.int32),
    }
    contents = {
        "weights.safetensors": weights_file(tensors, order),
        "lib/cpu-test.so": b"not a library",
        "lib/libtvm_runtime.so": b"not a library either",
        "tokenizer.json": tokenizer_json(),
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    weights, size = contents["weights.safetensors"], 8192
    chunks = [hashlib.sha256(weights[at : at + size]).hexdigest() for at in range(0, len(weights), size)]
    manifest = {
        "format": 4,
        "task": "generate",
        "pooling": None,
        "name": "tiny",
        "spec": {},
        "vocab": 97,
        "context": 120,
        "kv": {
            "layers": 2,
            "kv_heads": 2,
            "head_dim": 8,
            "page_tokens": 16,
            "dtype": "f32",
            "page_shape": [2, 2, 128],
            "groups": [{"layers": [0, 1], "window": 0}],
        },
        "functions": ["step", "turn"],
        "parts": [],
        "invariance": "exact",
        "endless": ["sinks", "shift", "reevaluate"],
        "quantization": {"format": "f32"},
        "variants": [{"file": "lib/cpu-test.so", "name": "cpu-test", "arch": platform.machine(), "requires": []}],
        "runtime": "lib/libtvm_runtime.so",
        "weights": {"file": "weights.safetensors", "chunk_bytes": size, "chunks": chunks, "order": order},
        "tokens": {
            "bos": 0,
            "eos": [1],
            "add_bos": True,
            "end": None,
            "start": None,
            "forced": [],
            "suppressed": [],
            "special": {"bos_token": "<s>"},
        },
        "languages": {},
        "prefixes": {},
        "chat_template": "chat_template.jinja",
        "tokenizer": "tokenizer.json",
        "generation": {},
        "compiler": {"llmc": "0.1.0", "tvm": "0.27.0.post1"},
        "files": {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in contents.items()
        },
    }
    seal(folder, manifest)
    return folder
