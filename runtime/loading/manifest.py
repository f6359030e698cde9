"""The manifest of an artifact: what is in the folder and how to run it. Reading it never runs anything.

Its layout is docs/artifact.md; the writer is compiler/artifact.py.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import schema

FORMAT = 4  # the newest layout this runtime reads
PAGE_TOKENS = 16  # the kernels are compiled for this page size
KV_BYTES = {"f32": 4, "bf16": 2, "q8": 1, "q4": 1}  # dtype of the KV cache -> bytes of an element
MANIFEST = "manifest.json"
_MAX_BYTES = 64 << 20  # 16 MiB chunks: the hashes of a 10 TB weights file still fit
_MAX_LISTED = 5  # problems an error names before it counts the rest
_INT32 = 2**31 - 1

# What a model is for: text that goes on, one vector a text, the words behind masks, or a text made of another one.
TASKS = ("generate", "embed", "fill", "translate")
DEVICES = "devices"  # the key of an artifact that device_manifest.py reads
GRAPH = "graph"  # the task of an artifact that graph_manifest.py reads
_ID = schema.whole(0, _INT32)

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

_SCHEMA = schema.record(
    **PACKAGE,
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
        groups=schema.items(
            schema.record(layers=schema.items(schema.whole(0, 2**16)), window=schema.whole(0, _INT32)), least=1
        ),
    ),
    functions=schema.items(schema.text, least=1),
    parts=schema.items(schema.whole(1, 2**16)),
    invariance=schema.one_of("exact", "none"),
    endless=schema.items(schema.one_of("sinks", "shift", "reevaluate")),
    tokens=schema.record(
        bos=schema.maybe(_ID),
        eos=schema.items(_ID),
        add_bos=schema.flag,
        end=schema.maybe(_ID),
        start=schema.maybe(_ID),
        forced=schema.items(_ID),
        suppressed=schema.items(_ID),
        special=schema.mapping(schema.text),
    ),
    languages=schema.mapping(_ID),
    prefixes=schema.mapping(schema.text),
    chat_template=schema.maybe(schema.text),
    tokenizer=schema.text,
    generation=schema.anything,
)


@dataclass(frozen=True)
class FileEntry:
    """What the manifest promises about one file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Device:
    """A GPU that a variant is for. `runtime`: the file that TVM needs for it, beside its own."""

    kind: str  # "cuda"
    arch: str  # as sm_90
    runtime: str


@dataclass(frozen=True)
class Variant:
    """One compiled library and the CPU flags it needs, or what it needs of a device."""

    file: str
    name: str
    arch: str
    requires: tuple[str, ...]
    device: Device | None = None


@dataclass(frozen=True)
class KvGroup:
    """Layers that share a page table. `window`: how many slots a row sees, its own among them; 0: all."""

    layers: tuple[int, ...]
    window: int = 0


@dataclass(frozen=True)
class KvLayout:
    """Shape of the KV cache: L layers of pages."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # "f32"; "bf16" kept as its bits in uint16; "q8" or "q4", codes and their scales in uint8
    groups: tuple[KvGroup, ...] = ()  # none: one group of all layers, which sees everything

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """One page of one layer, as docs/artifact.md lays it out."""
        padded, groups = -(-self.head_dim // 16) * 16, -(-self.head_dim // 32)
        if self.dtype == "q8":
            return (1, self.kv_heads, 64 + 32 * padded)
        if self.dtype == "q4":
            return (1, self.kv_heads, 32 + 64 * groups + 20 * padded)
        size = self.head_dim + (self.dtype == "bf16" and self.head_dim % 2)  # elements lie in pairs
        return (2, self.kv_heads, PAGE_TOKENS * size)

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


@dataclass(frozen=True)
class Manifest(Package):
    """The checked manifest of a model of text."""

    task: str
    pooling: Pooling | None
    vocab: int
    context: int
    kv: KvLayout
    functions: tuple[str, ...]  # of the library
    parts: tuple[int, ...]  # layers of each part of the step, where it was compiled in parts too
    invariance: str  # "exact": what a row computes does not depend on the rows beside it, to the last bit
    endless: tuple[str, ...]  # ways in which a text can go on when its cache is full
    bos: int | None
    eos: frozenset[int]
    add_bos: bool
    end: int | None
    start: int | None  # what a translation begins with
    forced: tuple[int, ...]  # ids that follow it, whatever the logits
    suppressed: tuple[int, ...]  # ids that are never chosen
    special: dict[str, str]
    languages: dict[str, int]  # name -> id that stands before a text in it
    prefixes: dict[str, str]  # "en to de" -> what to write before a text to have it translated so
    tokenizer: str
    chat_template: str | None


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, checked in itself; the files it lists are not looked at.

    Raises ArtifactError when it is missing, damaged, newer than this runtime, or not laid out as it should be.
    """
    path, raw = folder / MANIFEST, read_document(folder)
    if raw.get("task") == GRAPH:
        raise ArtifactError(f"{folder}: a graph, not a model of text; give it arrays: llmc run {folder.name} --input")
    if DEVICES in raw:
        raise ArtifactError(
            f"{folder}: compiled for several devices, a process each: llmc run --devices {folder.name}, or compile "
            "it without --devices"
        )
    return model_manifest(path, raw)


def model_manifest(path: Path, raw: dict[str, Any]) -> Manifest:
    """The manifest in a document, which is of one device."""
    problems = _SCHEMA(raw, "manifest")
    if problems:
        raise ArtifactError(f"{path}: {listed(problems)}; compile the model again")
    manifest = _build(raw)
    problems = _contradictions(manifest, raw)
    if problems:
        raise ArtifactError(f"{path}: {listed(problems)}; compile the model again")
    return manifest


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


def _build(raw: dict[str, Any]) -> Manifest:
    kv, tokens = raw["kv"], raw["tokens"]
    groups = tuple(KvGroup(tuple(group["layers"]), group["window"]) for group in kv["groups"])
    return Manifest(
        **package_fields(raw),
        task=raw["task"],
        pooling=Pooling(**raw["pooling"]) if raw["pooling"] else None,
        vocab=raw["vocab"],
        context=raw["context"],
        kv=KvLayout(kv["layers"], kv["kv_heads"], kv["head_dim"], kv["dtype"], groups),
        functions=tuple(raw["functions"]),
        parts=tuple(raw["parts"]),
        invariance=raw["invariance"],
        endless=tuple(raw["endless"]),
        bos=tokens["bos"],
        eos=frozenset(tokens["eos"]),
        add_bos=tokens["add_bos"],
        end=tokens["end"],
        start=tokens["start"],
        forced=tuple(tokens["forced"]),
        suppressed=tuple(tokens["suppressed"]),
        special=tokens["special"],
        languages=raw["languages"],
        prefixes=raw["prefixes"],
        tokenizer=raw["tokenizer"],
        chat_template=raw["chat_template"],
    )


def _contradictions(manifest: Manifest, raw: dict[str, Any]) -> list[str]:
    """Problems that only show when parts of the manifest are held against each other."""
    texts = [manifest.tokenizer, *([] if manifest.chat_template is None else [manifest.chat_template])]
    problems = package_problems(manifest, texts)
    if (manifest.task == "embed") != (manifest.pooling is not None):
        problems.append("task embed and a pooling go together")
    if (manifest.task == "translate") != (manifest.start is not None):
        problems.append("task translate and a tokens.start go together")
    problems += [f"{key} {i} is not below vocab {manifest.vocab}" for key, i in _ids(manifest) if i >= manifest.vocab]
    if not manifest.order:
        problems.append("weights.order names no tensor")
    if manifest.add_bos and manifest.bos is None:
        problems.append("tokens.add_bos is true but tokens.bos is null")
    if tuple(raw["kv"]["page_shape"]) != manifest.kv.page_shape:
        problems.append(f"kv.page_shape: got {raw['kv']['page_shape']}, wanted {list(manifest.kv.page_shape)}")
    if sorted(layer for group in manifest.kv.groups for layer in group.layers) != list(range(manifest.kv.layers)):
        problems.append(f"kv.groups: wanted each of the layers 0..{manifest.kv.layers - 1} in one of them")
    wanted = {"step", "encode"} if manifest.task == "translate" else {"step"}
    if manifest.parts:
        wanted |= {"embed", "head", *(f"part_{number}" for number in range(len(manifest.parts)))}
        if sum(manifest.parts) != manifest.kv.layers:
            problems.append(f"parts: they have {sum(manifest.parts)} layers in all, and the cache {manifest.kv.layers}")
    problems += [f"functions: {name} is missing" for name in sorted(wanted - set(manifest.functions))]
    return problems


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


def _ids(manifest: Manifest) -> list[tuple[str, int]]:
    """Every token id the manifest names, with what it is for."""
    one = {"bos": manifest.bos, "end": manifest.end, "start": manifest.start}
    many = {"eos": sorted(manifest.eos), "forced": manifest.forced, "suppressed": manifest.suppressed}
    ids = [(key, i) for key, i in one.items() if i is not None]
    ids += [(key, i) for key, each in many.items() for i in each]
    return ids + [(f"language {name[:80]!r}", i) for name, i in manifest.languages.items()]


def _plain(name: str) -> bool:
    """Whether `name` stays inside the folder by its spelling alone.

    >>> [_plain(n) for n in ("lib/a.so", "../a", "/a", "a//b", "./a", "manifest.json")]
    [True, False, False, False, False, False]
    """
    parts = name.split("/")
    good = all(part not in ("", ".", "..") for part in parts)
    return good and name != MANIFEST and "\\" not in name and name.isprintable()


def listed(problems: list[str]) -> str:
    """The first problems, and how many more."""
    more = len(problems) - _MAX_LISTED
    return "; ".join(problems[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
