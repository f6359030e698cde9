"""The manifest of an artifact: what is in the folder and how to run it. Reading it never runs anything.

Its layout is docs/artifact.md; the writer is compiler/artifact.py.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.runtime import schema
from llmc.runtime.errors import ArtifactError

FORMAT = 2  # the newest layout this runtime reads
PAGE_TOKENS = 16  # the kernels are compiled for this page size
KV_BYTES = {"f32": 4, "bf16": 2, "q8": 1, "q4": 1}  # dtype of the KV cache -> bytes of an element
MANIFEST = "manifest.json"
_MAX_BYTES = 64 << 20  # 16 MiB chunks: the hashes of a 10 TB weights file still fit
_MAX_LISTED = 5  # problems an error names before it counts the rest
_INT32 = 2**31 - 1

# What a model is for: text that goes on, one vector a text, or the words behind masks.
TASKS = ("generate", "embed", "fill")

_SCHEMA = schema.record(
    format=schema.one_of(FORMAT),
    name=schema.text,
    task=schema.one_of(*TASKS),
    pooling=schema.maybe(schema.record(kind=schema.one_of("mean", "first", "last"), normalize=schema.flag)),
    spec=schema.anything,
    vocab=schema.whole(1, 2**24),
    context=schema.whole(1, 2**30),
    kv=schema.record(
        layers=schema.whole(1, 2**16),
        kv_heads=schema.whole(1, 2**16),
        head_dim=schema.whole(1, 2**16),
        page_tokens=schema.one_of(PAGE_TOKENS),
        dtype=schema.one_of(*KV_BYTES),
        page_shape=schema.items(schema.whole(1, _INT32), 3),
    ),
    quantization=schema.anything,
    variants=schema.items(
        schema.record(file=schema.text, name=schema.text, arch=schema.text, requires=schema.items(schema.text)),
        least=1,
    ),
    runtime=schema.text,
    weights=schema.record(
        file=schema.text,
        chunk_bytes=schema.whole(4096, 2**31),
        chunks=schema.items(schema.sha256_hex, 1),
        order=schema.items(schema.text, 1),
    ),
    tokens=schema.record(
        bos=schema.maybe(schema.whole(0, _INT32)),
        eos=schema.items(schema.whole(0, _INT32)),
        add_bos=schema.flag,
        end=schema.maybe(schema.whole(0, _INT32)),
        special=schema.mapping(schema.text),
    ),
    chat_template=schema.maybe(schema.text),
    tokenizer=schema.text,
    generation=schema.anything,
    compiler=schema.anything,
    files=schema.mapping(
        schema.record(sha256=schema.sha256_hex, bytes=schema.whole(0, 2**60)),
    ),
    manifest_sha256=schema.sha256_hex,
)


@dataclass(frozen=True)
class FileEntry:
    """What the manifest promises about one file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Variant:
    """One compiled library and the CPU flags it needs."""

    file: str
    name: str
    arch: str
    requires: tuple[str, ...]


@dataclass(frozen=True)
class KvLayout:
    """Shape of the KV cache: L layers of pages."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # "f32"; "bf16" kept as its bits in uint16; "q8" or "q4", codes and their scales in uint8

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """One page of one layer, as docs/artifact.md lays it out."""
        padded, groups = -(-self.head_dim // 16) * 16, -(-self.head_dim // 32)
        if self.dtype == "q8":
            return (1, self.kv_heads, 64 + 32 * padded)
        if self.dtype == "q4":
            return (1, self.kv_heads, 32 + 64 * groups + 20 * padded)
        return (2, self.kv_heads, PAGE_TOKENS * self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers."""
        return self.layers * math.prod(self.page_shape) * KV_BYTES[self.dtype] // PAGE_TOKENS


@dataclass(frozen=True)
class Pooling:
    """How an encoder's outputs of a text become one vector: "mean", "first" or "last"; `normalize` to length 1."""

    kind: str
    normalize: bool


@dataclass(frozen=True)
class Manifest:
    """The checked manifest; `raw` is the document as it stands in the file."""

    raw: dict[str, Any]
    sha256: str
    task: str
    pooling: Pooling | None
    vocab: int
    context: int
    kv: KvLayout
    variants: tuple[Variant, ...]
    runtime: str
    weights: str
    chunk_bytes: int
    chunks: tuple[str, ...]
    order: tuple[str, ...]
    bos: int | None
    eos: frozenset[int]
    add_bos: bool
    end: int | None
    special: dict[str, str]
    tokenizer: str
    chat_template: str | None
    files: dict[str, FileEntry]


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, checked in itself; the files it lists are not looked at.

    Raises ArtifactError when it is missing, damaged, newer than this runtime, or not laid out as it should be.
    """
    path = folder / MANIFEST
    raw = _parse(path)
    version = raw.get("format")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT:
        raise ArtifactError(
            f"{path}: format {version} was made by a newer llmc; this one reads format {FORMAT}: upgrade llmc"
        )
    _check_own_hash(path, raw)
    problems = _SCHEMA(raw, "manifest")
    if problems:
        raise ArtifactError(f"{path}: {_listed(problems)}; compile the model again")
    manifest = _build(raw)
    problems = _contradictions(manifest, raw)
    if problems:
        raise ArtifactError(f"{path}: {_listed(problems)}; compile the model again")
    return manifest


def _parse(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ArtifactError(f"{path.parent}: no such artifact folder; `llmc compile` makes one")
    if path.is_symlink() or not path.is_file():
        raise ArtifactError(f"{path}: no such file, so {path.parent.name} is not an llmc artifact")
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ArtifactError(f"{path}: {size} bytes, and a manifest has at most {_MAX_BYTES}")
        raw = schema.parse_json(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        reason = str(error).replace("\n", " ")
        raise ArtifactError(f"{path}: damaged: not readable as JSON: {reason[:200]}") from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: damaged: got a {type(raw).__name__}, wanted an object")
    return raw


def _check_own_hash(path: Path, raw: dict[str, Any]) -> None:
    rest = {key: value for key, value in raw.items() if key != "manifest_sha256"}
    try:
        actual = hashlib.sha256(schema.canonical_json(rest)).hexdigest()
    except ValueError as error:
        raise ArtifactError(f"{path}: damaged: text that is not Unicode") from error
    if raw.get("manifest_sha256") != actual:
        stated = str(raw.get("manifest_sha256"))[:12]
        raise ArtifactError(
            f"{path}: damaged: its SHA-256 is {actual[:12]}..., it states {stated}...; copy or compile it again"
        )


def _build(raw: dict[str, Any]) -> Manifest:
    kv, weights, tokens = raw["kv"], raw["weights"], raw["tokens"]
    return Manifest(
        raw=raw,
        sha256=raw["manifest_sha256"],
        task=raw["task"],
        pooling=Pooling(**raw["pooling"]) if raw["pooling"] else None,
        vocab=raw["vocab"],
        context=raw["context"],
        kv=KvLayout(kv["layers"], kv["kv_heads"], kv["head_dim"], kv["dtype"]),
        variants=tuple(Variant(v["file"], v["name"], v["arch"], tuple(v["requires"])) for v in raw["variants"]),
        runtime=raw["runtime"],
        weights=weights["file"],
        chunk_bytes=weights["chunk_bytes"],
        chunks=tuple(weights["chunks"]),
        order=tuple(weights["order"]),
        bos=tokens["bos"],
        eos=frozenset(tokens["eos"]),
        add_bos=tokens["add_bos"],
        end=tokens["end"],
        special=tokens["special"],
        tokenizer=raw["tokenizer"],
        chat_template=raw["chat_template"],
        files={name: FileEntry(f["sha256"], f["bytes"]) for name, f in raw["files"].items()},
    )


def _contradictions(manifest: Manifest, raw: dict[str, Any]) -> list[str]:
    """Problems that only show when parts of the manifest are held against each other."""
    problems = [f"files: {name[:80]!r} is not a plain relative path" for name in manifest.files if not _plain(name)]
    named = [manifest.runtime, manifest.weights, manifest.tokenizer, *(v.file for v in manifest.variants)]
    if manifest.chat_template is not None:
        named.append(manifest.chat_template)
    problems += [f"{name[:80]!r} is used but not listed in files" for name in named if name not in manifest.files]
    ids = [("eos", i) for i in sorted(manifest.eos)]
    ids += [(key, i) for key, i in (("bos", manifest.bos), ("end", manifest.end)) if i is not None]
    if (manifest.task == "embed") != (manifest.pooling is not None):
        problems.append("task embed and a pooling go together")
    problems += [f"{key} {i} is not below vocab {manifest.vocab}" for key, i in ids if i >= manifest.vocab]
    if manifest.add_bos and manifest.bos is None:
        problems.append("tokens.add_bos is true but tokens.bos is null")
    if tuple(raw["kv"]["page_shape"]) != manifest.kv.page_shape:
        problems.append(f"kv.page_shape: got {raw['kv']['page_shape']}, wanted {list(manifest.kv.page_shape)}")
    if len(set(manifest.order)) != len(manifest.order):
        problems.append("weights.order names a tensor twice")
    if manifest.weights in manifest.files:
        size = manifest.files[manifest.weights].bytes
        wanted = -(-size // manifest.chunk_bytes)
        if len(manifest.chunks) != wanted:
            problems.append(f"weights.chunks: got {len(manifest.chunks)} hashes, {size} bytes want {wanted}")
    return problems


def _plain(name: str) -> bool:
    """Whether `name` stays inside the folder by its spelling alone.

    >>> [_plain(n) for n in ("lib/a.so", "../a", "/a", "a//b", "./a", "manifest.json")]
    [True, False, False, False, False, False]
    """
    parts = name.split("/")
    good = all(part not in ("", ".", "..") for part in parts)
    return good and name != MANIFEST and "\\" not in name and name.isprintable()


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MAX_LISTED
    return "; ".join(problems[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
