"""An artifact on disk: opened, checked, inspected. Nothing here runs anything of it.

The order of checks at a load: manifest, then presence and size of every file, then the CPU, then the hashes of
everything but the weights, then the weights (remembered). Only after that is a library loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import cuda, integrity
from llmc.runtime.loading.cpu import (
    choose_variant,
    cpu_arch,
    cpu_flags,
    default_threads,
    fitting_variant,
    missing_flags,
)
from llmc.runtime.loading.device_manifest import (
    DeviceManifest,
    device_facts,
    for_devices,
    read_device_manifest,
    variants_besides,
)
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.loading.manifest import Manifest, read_manifest
from llmc.runtime.loading.package import DEVICES, MANIFEST, Package, Variant

P = TypeVar("P", bound=Package)

_MAX_TEXT_BYTES = 256 << 20  # tokenizer and template are read into memory


@dataclass(frozen=True)
class Artifact(Generic[P]):
    """A checked artifact: safe to load as far as hashes can tell."""

    folder: Path
    manifest: P
    variant: Variant
    identities: dict[str, str]  # library file -> its identity when it was hashed

    def path(self, name: str) -> Path:
        """Absolute path of a listed file."""
        return self.folder / name

    def read(self, name: str) -> bytes:
        """Content of a small listed file, hashed as it is read."""
        path, entry = self.path(name), self.manifest.files[name]
        with os.fdopen(integrity.open_plain(path), "rb") as file:
            data = file.read(min(entry.bytes, _MAX_TEXT_BYTES) + 1)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactError(_damaged(path))
        return data

    def check_unchanged(self, name: str) -> None:
        """Raise ArtifactError if a library is no longer the file that was hashed."""
        if integrity.identity(self.path(name), self.manifest.sha256) != self.identities[name]:
            raise ArtifactError(f"{self.path(name)}: changed while it was being loaded; load again")


def open_artifact(
    path: str | os.PathLike[str], always_hash: bool = False, progress: Progress | None = None
) -> Artifact[Manifest]:
    """The artifact of a model of text at `path`, all checks done. Raises ArtifactError at the first that fails.

    Of one for several devices it is what this process, one of as many workers, has of it.

    `always_hash` hashes the weights even if they are remembered as intact.
    """
    return open_package(path, _own_manifest, always_hash, progress)


def _own_manifest(folder: Path) -> Manifest:
    if not for_devices(folder):
        return read_manifest(folder)
    from llmc.runtime.workers.world import place  # with MPI

    manifest = read_device_manifest(folder, place())
    if all(variant.device is not None for variant in manifest.variants):
        cuda.show_only(manifest.ranks[manifest.rank].number)
    return manifest


def open_package(
    path: str | os.PathLike[str], read: Callable[[Path], P], always_hash: bool, progress: Progress | None
) -> Artifact[P]:
    """The same for an artifact whose manifest `read` takes."""
    folder = _folder(path)
    manifest = read(folder)
    _check_presence(folder, manifest)
    variant = choose_variant(manifest, folder)
    identities = {}
    for name, entry in manifest.files.items():
        if name == manifest.weights or name in manifest.elsewhere:
            continue
        identities[name] = integrity.identity(folder / name, manifest.sha256)
        if integrity.file_sha256(folder / name) != entry.sha256:
            raise ArtifactError(_damaged(folder / name))
    _check_weights(folder, manifest, always_hash, progress)
    return Artifact(folder, manifest, variant, identities)


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Hash every byte of the artifact and compare with the manifest; nothing is remembered from before.

    Files that the manifest does not list are refused too. Raises ArtifactError at the first damage.
    """
    from llmc.runtime.loading.graph_manifest import read_any

    folder = _folder(path)
    manifest = read_any(folder)
    _check_presence(folder, manifest)
    extra = sorted(set(_all_files(folder)) - set(manifest.files) - {MANIFEST})
    if extra:
        raise ArtifactError(f"{folder}: files that the manifest does not list: {', '.join(extra[:5])}")
    for done, (name, entry) in enumerate(manifest.files.items()):
        if integrity.file_sha256(folder / name) != entry.sha256:
            raise ArtifactError(_damaged(folder / name))
        if progress:
            progress("verify files", done + 1, len(manifest.files))
    _check_weights(folder, manifest, True, progress)


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest as a dict, with `path`, `bytes` of the folder, and `machine`: what of it runs here.

    Of an artifact for several devices, `devices` says what each of them holds too (device_manifest.py).

    Reads manifest.json and file sizes only; nothing is loaded, hashed or executed.
    """
    from llmc.runtime.loading.graph_manifest import read_any

    folder = _folder(path)
    manifest = read_any(folder)
    _check_presence(folder, manifest)
    total = sum(entry.bytes for entry in manifest.files.values())
    devices = {DEVICES: device_facts(manifest)} if isinstance(manifest, DeviceManifest) else {}
    return {
        **manifest.raw,
        **devices,
        "path": str(folder),
        "bytes": total + (folder / MANIFEST).stat().st_size,
        "machine": _machine(manifest),
    }


def _machine(manifest: Package) -> dict[str, Any]:
    """What this machine lacks for each variant, and which one it takes; of several devices, all have to have one.

    nccl: whether GPUs exchange by it, where GPUs alone do: all of them, or those of a stage.
    """
    arch, flags = cpu_arch(), cpu_flags()
    if not isinstance(manifest, DeviceManifest):
        missing = {v.name: missing_flags(v, arch, flags) for v in manifest.variants}
        return {"arch": arch, "variant": fitting_variant(missing), "missing": missing}
    missing, taken = {}, []
    for number, rank in enumerate(manifest.ranks):
        own = {v.name: missing_flags(v, arch, flags, rank.number) for v in rank.variants}
        taken.append(fitting_variant(own, variants_besides(manifest.ranks, number)))
        missing |= {name: lacks for name, lacks in own.items() if not missing.get(name)}
    names = list(dict.fromkeys(filter(None, taken)))
    among_gpus = manifest.all_gpus or any(map(manifest.shared_by_gpus, range(len(manifest.groups))))
    return {
        "arch": arch, "variant": ", ".join(names) if all(taken) else None, "missing": missing,
        **({"nccl": cuda.nccl() is not None} if among_gpus else {}),
    }  # fmt: skip


def _folder(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{str(path)[:200]!r}: not a usable path: {error}") from error


def _check_presence(folder: Path, manifest: Package) -> None:
    """Every listed file is a plain file of the stated size, reached without links."""
    for name, entry in manifest.files.items():
        path = folder
        for part in name.split("/"):
            path = path / part
            try:
                info = path.lstat()
            except OSError as error:
                raise ArtifactError(f"{folder / name}: missing; copy or compile the artifact again") from error
            if stat.S_ISLNK(info.st_mode):
                raise ArtifactError(f"{path}: a symbolic link; an artifact holds plain files only")
        if not stat.S_ISREG(info.st_mode):
            raise ArtifactError(f"{path}: not a plain file")
        if info.st_size != entry.bytes:
            cut = "cut short" if info.st_size < entry.bytes else "too long"
            raise ArtifactError(
                f"{path}: {cut}: got {info.st_size} bytes, wanted {entry.bytes}; copy or compile the artifact again"
            )


def _check_weights(folder: Path, manifest: Package, always: bool, progress: Progress | None) -> None:
    path = folder / manifest.weights
    key = integrity.identity(path, manifest.sha256)
    if not always and integrity.is_remembered(key):
        return
    settled = integrity.settled(path)
    wrong = integrity.wrong_chunk(path, manifest.chunk_bytes, manifest.chunks, default_threads(), progress)
    if wrong is not None:
        start = wrong * manifest.chunk_bytes
        raise ArtifactError(f"{_damaged(path)} (in the {manifest.chunk_bytes} bytes from {start})")
    if settled and integrity.identity(path, manifest.sha256) == key:
        integrity.remember(key)


def _all_files(folder: Path) -> list[str]:
    found = (entry for entry in folder.rglob("*") if entry.is_symlink() or not entry.is_dir())
    return [str(entry.relative_to(folder)) for entry in found]


def _damaged(path: Path) -> str:
    return f"{path}: damaged: its SHA-256 is not the manifest's; copy or compile the artifact again"
