"""The manifest of a model of text: what it is and how to run it. Reading it never runs anything.

Its layout is docs/artifact.md; the writer is compiler/artifact.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import schema
from llmc.runtime.loading.package import (
    DEVICES,
    GRAPH,
    MANIFEST,
    PACKAGE,
    Package,
    package_fields,
    package_problems,
    read_document,
)

PAGE_TOKENS = 16  # the kernels are compiled for this page size
KV_BYTES = {"f32": 4, "bf16": 2, "q8": 1, "q4": 1}  # dtype of the KV cache -> bytes of an element
_INT32 = 2**31 - 1

# What a model is for: text that goes on, one vector a text, the words behind masks, or a text made of another one.
TASKS = ("generate", "embed", "fill", "translate")
_ID = schema.whole(0, _INT32)

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


class KvGroup(NamedTuple):
    """Layers that share a page table. `window`: how many slots a row sees, its own among them; 0: all."""

    layers: tuple[int, ...]
    window: int = 0


class KvLayout(NamedTuple):
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


class Pooling(NamedTuple):
    """How an encoder's outputs of a text become one vector: "mean", "first" or "last"; `normalize` to length 1."""

    kind: str
    normalize: bool


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
        raise ArtifactError(f"{path}: {schema.listed(problems)}; compile the model again")
    manifest = _build(raw)
    problems = _contradictions(manifest, raw)
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; compile the model again")
    return manifest


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


def _ids(manifest: Manifest) -> list[tuple[str, int]]:
    """Every token id the manifest names, with what it is for."""
    one = {"bos": manifest.bos, "end": manifest.end, "start": manifest.start}
    many = {"eos": sorted(manifest.eos), "forced": manifest.forced, "suppressed": manifest.suppressed}
    ids = [(key, i) for key, i in one.items() if i is not None]
    ids += [(key, i) for key, each in many.items() for i in each]
    return ids + [(f"language {name[:80]!r}", i) for name, i in manifest.languages.items()]
