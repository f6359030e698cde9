"""The manifest of an artifact for several devices: of each a library and weights of its own (docs/partition.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import schema
from llmc.runtime.loading.manifest import KvGroup, KvLayout, Manifest, model_manifest
from llmc.runtime.loading.package import (
    DEVICES,
    MANIFEST,
    VARIANTS,
    WEIGHTS,
    Variant,
    loaded_fields,
    package_problems,
    read_document,
)

_MOST = 4096  # devices
_HOST = "cpu"  # the kind of device whose memory is the host's
_DEVICE = re.compile(r"((cpu|cuda):)?\d{1,4}", re.ASCII)


def _device_name(value: Any, where: str) -> list[str]:
    known = isinstance(value, str) and _DEVICE.fullmatch(value)
    return [] if known else [f"{where}: wanted a device, as 0, cpu:0 or cuda:0"]


_SCHEMA = schema.record(
    placement=schema.text,
    ranks=schema.items(
        schema.record(
            stage=schema.whole(0, _MOST),
            device=_device_name,
            layers=schema.items(schema.whole(0, 2**16), least=1),
            kv_heads=schema.whole(1, 2**16),
            outputs=schema.mapping(schema.items(schema.whole(0, 2**16))),
            variants=VARIANTS,
            weights=WEIGHTS,
        ),
        least=2,
    ),
)


class Rank(NamedTuple):
    """What a device has of a model. outputs: which of the outputs of each function it gives, in order."""

    stage: int
    device: str
    layers: tuple[int, ...]
    kv: KvLayout
    outputs: dict[str, tuple[int, ...]]
    variants: tuple[Variant, ...]
    files: frozenset[str]

    @property
    def kind(self) -> str:
        """The kind of its device; nothing where all are of the target that the model was compiled for."""
        kind, _, _ = self.device.partition(":")
        return "" if kind.isdecimal() else kind

    @property
    def is_gpu(self) -> bool:
        """Whether its code is for a GPU."""
        return all(variant.device is not None for variant in self.variants)

    @property
    def number(self) -> int:
        """Which device of its kind."""
        return int(self.device.rpartition(":")[2])


@dataclass(frozen=True)
class DeviceManifest(Manifest):
    """The manifest as one of the workers has it: its own library and weights, its own layers of the cache."""

    rank: int
    ranks: tuple[Rank, ...]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        stages = sorted({each.stage for each in self.ranks})
        return tuple(tuple(r for r, each in enumerate(self.ranks) if each.stage == stage) for stage in stages)

    @property
    def all_gpus(self) -> bool:
        """Whether all devices are GPUs."""
        return all(each.is_gpu for each in self.ranks)

    def shared_by_gpus(self, stage: int) -> bool:
        """Whether a stage has several devices, and all of them are GPUs."""
        ranks = [self.ranks[rank] for rank in self.groups[stage]]
        return len(ranks) > 1 and all(each.is_gpu for each in ranks)

    @property
    def elsewhere(self) -> frozenset[str]:
        """Files of other ranks."""
        return frozenset().union(*(each.files for each in self.ranks)) - self.ranks[self.rank].files

    @property
    def variants_elsewhere(self) -> frozenset[str]:
        """Names of variants that only other ranks have."""
        return variants_besides(self.ranks, self.rank)


def variants_besides(ranks: tuple[Rank, ...], rank: int) -> frozenset[str]:
    """Names of variants that a rank does not have, and others do."""
    names = [frozenset(variant.name for variant in each.variants) for each in ranks]
    return frozenset().union(*names) - names[rank]


def for_devices(folder: Path) -> bool:
    """Whether the artifact is for several devices. Raises ArtifactError as `read_document`."""
    return DEVICES in read_document(folder)


def read_device_manifest(folder: Path, place: tuple[int, int] | None = None) -> DeviceManifest:
    """The manifest in `folder` for the worker at a place: its rank, and of how many; None for looking at it alone.

    Raises ArtifactError when it is not laid out as it should be, or when there are not as many workers as devices.
    """
    path, raw = folder / MANIFEST, read_document(folder)
    whole = model_manifest(path, {key: value for key, value in raw.items() if key != DEVICES})
    problems = _SCHEMA(raw[DEVICES], f"manifest.{DEVICES}") or _contradictions(whole, raw)
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; compile the model again")
    entries = raw[DEVICES]["ranks"]
    rank, size = place or (0, len(entries))
    if size != len(entries):
        raise ArtifactError(
            f"{folder}: compiled for {len(entries)} devices ({raw[DEVICES]['placement'][:80]}), and this is a run of "
            f"{size}: mpirun -n {len(entries)} llmc run {folder.name}, or llmc run --devices"
        )
    own = entries[rank]
    kept = {field.name: getattr(whole, field.name) for field in fields(Manifest)}
    ranks = tuple(_rank(entry, whole.kv) for entry in entries)
    return DeviceManifest(**{**kept, **loaded_fields(own), "raw": raw, "kv": ranks[rank].kv}, rank=rank, ranks=ranks)


def device_facts(manifest: DeviceManifest) -> dict[str, Any]:
    """The manifest's `devices`, and of each rank what its parts amount to.

    weight_bytes: of its file of weights; kv_token_bytes: a token's in its layers; on_host: whether it keeps layers in
    the host's memory while others have memory of their own.
    """
    devices, kinds = manifest.raw[DEVICES], {each.kind for each in manifest.ranks}
    facts = [
        {
            **entry,
            "weight_bytes": manifest.files[entry["weights"]["file"]].bytes,
            "kv_token_bytes": rank.kv.token_bytes,
            "on_host": rank.kind == _HOST and len(kinds) > 1,
        }
        for rank, entry in zip(manifest.ranks, devices["ranks"], strict=True)
    ]
    return {**devices, "ranks": facts}


def _rank(raw: dict[str, Any], kv: KvLayout) -> Rank:
    outputs = {name: tuple(numbers) for name, numbers in raw["outputs"].items()}
    variants = loaded_fields(raw)["variants"]
    files = frozenset([raw["weights"]["file"], *(variant.file for variant in variants)])
    own = _own_layers(kv, raw["layers"], raw["kv_heads"])
    return Rank(raw["stage"], raw["device"], tuple(raw["layers"]), own, outputs, variants, files)


def _own_layers(kv: KvLayout, layers: list[int], kv_heads: int) -> KvLayout:
    """The cache of these layers alone, numbered anew; page tables are those of the whole."""
    number = {layer: place for place, layer in enumerate(layers)}
    groups = tuple(
        KvGroup(tuple(number[layer] for layer in group.layers if layer in number), group.window) for group in kv.groups
    )
    return KvLayout(len(layers), kv_heads, kv.head_dim, kv.dtype, groups)


def _contradictions(whole: Manifest, raw: dict[str, Any]) -> list[str]:
    entries, problems = raw[DEVICES]["ranks"], []
    for rank, entry in enumerate(entries):
        where, layers = f"devices.ranks[{rank}]", entry["layers"]
        own = replace(whole, **loaded_fields(entry))
        problems += [f"{where}: {problem}" for problem in package_problems(own, [])]
        if layers != sorted(set(layers)) or layers[-1] >= whole.kv.layers:
            problems.append(f"{where}.layers: wanted some of 0..{whole.kv.layers - 1} in order")
        if set(entry["outputs"]) != set(whole.functions):
            problems.append(f"{where}.outputs: wanted those of {', '.join(whole.functions)}")
    stages = [entry["stage"] for entry in entries]
    if sorted(set(stages)) != list(range(len(set(stages)))) or stages != sorted(stages):
        problems.append(f"devices: got stages {stages[:8]}, wanted them in order from 0")
    for key in ("variants", "weights"):
        if raw[key] != entries[0][key]:
            problems.append(f"{key}: wanted those of devices.ranks[0]")
    return problems
