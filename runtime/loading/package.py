"""What the manifests of all artifacts have in common: the document, and what it says of files. Reading runs nothing.

Its layout is docs/artifact.md; the writer is compiler/artifact.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import schema

FORMAT = 4  # the newest layout this runtime reads
MANIFEST = "manifest.json"
_MAX_BYTES = 64 << 20  # 16 MiB chunks: the hashes of a 10 TB weights file still fit
DEVICES = "devices"  # the key of an artifact that device_manifest.py reads
GRAPH = "graph"  # the task of an artifact that graph_manifest.py reads

_LIBRARY = {"file": schema.text, "name": schema.text, "arch": schema.text, "requires": schema.items(schema.text)}
_DEVICE = schema.record(kind=schema.one_of("cuda"), arch=schema.text, runtime=schema.text)
VARIANTS = schema.items(
    schema.either("device", schema.record(**_LIBRARY, device=_DEVICE), schema.record(**_LIBRARY)), least=1
)
WEIGHTS = schema.record(
    file=schema.text,
    chunk_bytes=schema.whole(4096, 2**31),
    chunks=schema.items(schema.sha256_hex, 1),
    order=schema.items(schema.text),
)

# What every artifact has, whatever it is for.
PACKAGE: dict[str, schema.Check] = {
    "format": schema.one_of(FORMAT),
    "name": schema.text,
    "quantization": schema.anything,
    "variants": VARIANTS,
    "runtime": schema.text,
    "weights": WEIGHTS,
    "compiler": schema.anything,
    "files": schema.mapping(
        schema.record(sha256=schema.sha256_hex, bytes=schema.whole(0, 2**60)),
    ),
    "manifest_sha256": schema.sha256_hex,
}


class FileEntry(NamedTuple):
    """What the manifest promises about one file."""

    sha256: str
    bytes: int


class Device(NamedTuple):
    """A GPU that a variant is for. `runtime`: the file that TVM needs for it, beside its own."""

    kind: str  # "cuda"
    arch: str  # as sm_90
    runtime: str


class Variant(NamedTuple):
    """One compiled library and the CPU flags it needs, or what it needs of a device."""

    file: str
    name: str
    arch: str
    requires: tuple[str, ...]
    device: Device | None = None


@dataclass(frozen=True)
class Package:
    """What every artifact's manifest says of its files; `raw` is the document as it stands in the file."""

    raw: dict[str, Any]
    sha256: str
    variants: tuple[Variant, ...]
    runtime: str
    weights: str
    chunk_bytes: int
    chunks: tuple[str, ...]
    order: tuple[str, ...]
    files: dict[str, FileEntry]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Files that other processes load and check, and this one does not."""
        return frozenset()

    @property
    def variants_elsewhere(self) -> frozenset[str]:
        """Names of variants for devices of another kind than this process has."""
        return frozenset()


def read_document(folder: Path) -> dict[str, Any]:
    """The manifest in `folder` as it stands there, not newer than this runtime and with its own hash."""
    path = folder / MANIFEST
    raw = _parse(path)
    version = raw.get("format")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT:
        raise ArtifactError(
            f"{path}: format {version} was made by a newer llmc; this one reads format {FORMAT}: upgrade llmc"
        )
    _check_own_hash(path, raw)
    return raw


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


def package_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Package from a document that PACKAGE has checked."""
    return {
        "raw": raw,
        "sha256": raw["manifest_sha256"],
        **loaded_fields(raw),
        "runtime": raw["runtime"],
        "files": {name: FileEntry(f["sha256"], f["bytes"]) for name, f in raw["files"].items()},
    }


def loaded_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Those that say what one process loads."""
    weights = raw["weights"]
    return {
        "variants": tuple(map(_variant, raw["variants"])),
        "weights": weights["file"],
        "chunk_bytes": weights["chunk_bytes"],
        "chunks": tuple(weights["chunks"]),
        "order": tuple(weights["order"]),
    }


def _variant(raw: dict[str, Any]) -> Variant:
    device = Device(**raw["device"]) if "device" in raw else None
    return Variant(raw["file"], raw["name"], raw["arch"], tuple(raw["requires"]), device)


def package_problems(manifest: Package, texts: list[str]) -> list[str]:
    """What is wrong with the files it lists; `texts` are those it uses beside weights and libraries."""
    problems = [f"files: {name[:80]!r} is not a plain relative path" for name in manifest.files if not _plain(name)]
    named = [manifest.runtime, manifest.weights, *texts, *(v.file for v in manifest.variants)]
    named += [v.device.runtime for v in manifest.variants if v.device is not None]
    problems += [f"{name[:80]!r} is used but not listed in files" for name in named if name not in manifest.files]
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
