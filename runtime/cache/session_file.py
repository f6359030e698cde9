"""A sequence in a file: its tokens, its place in the text and its pages, so that it goes on another day unread.

A safetensors file (https://github.com/huggingface/safetensors#format), written aside and renamed when it is whole, that
only its user may read. Tensors, with n tokens, b blocks of 16 slots, k of them with a page in the layer's group:

    tokens   int32 (n,)           those in the pages by slot, then those that are still to be fed
    held.G   bool (b,)            which blocks have a page in group G: not those that a window has left behind
    kv.L     (k, *page_shape)     pages of layer L in order, as the pool has them

Metadata: the format, the artifact, slots, position and hole, a note of the caller's, and the SHA-256 of all of this. It
finds damage, not intent: whoever may write the file may also change what the model remembers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from llmc.runtime.cache.pages import PagePool, Sequence, first_seen, pages_for
from llmc.runtime.cache.swap import Copy, copy_out, put_back
from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.loading import schema
from llmc.runtime.loading.manifest import PAGE_TOKENS, Manifest

FORMAT = "1"  # the layout that this runtime writes and reads
_MAX_INT32 = 2**31 - 1
_MOST_TOKENS = 2**28  # that a file is believed to have
_METADATA = schema.record(
    format=schema.one_of(FORMAT), artifact=schema.sha256_hex, model=schema.text, slots=schema.text,
    position=schema.text, hole_first=schema.text, hole_after=schema.text, note=schema.text, sha256=schema.sha256_hex,
)  # fmt: skip

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Session:
    """What a file gave back: `ids[sequence.length:]` are still to be fed. `note` is what was saved beside them."""

    sequence: Sequence
    ids: list[int]
    note: str


def save_session(
    path: str | os.PathLike[str], pool: PagePool, sequence: Sequence, ids: SequenceOf[int], manifest: Manifest,
    note: str = "",
) -> None:  # fmt: skip
    """Write a sequence to a file. `ids` are its tokens by slot, and any that follow; the sequence stays as it is.

    Raises RequestError for a sequence that answers to a source, too few ids, or a path that cannot be written; a file
    that was there stays then.
    """
    if sequence.source is not None:
        raise RequestError("a sequence that answers to a source cannot be saved; save the text of the source")
    with pool.lock:
        if len(ids) < sequence.length:
            raise RequestError(f"ids: got {len(ids)} tokens for {sequence.length} slots of the sequence")
        copy = copy_out(pool, sequence)
    tensors: Tensors = {"tokens": np.array(ids, np.int32)}
    tensors |= {f"held.{group}": held for group, held in enumerate(copy.held)}
    tensors |= {f"kv.{layer}": pages for layer, pages in enumerate(copy.layers)}
    about = {
        "format": FORMAT, "artifact": manifest.sha256, "model": str(manifest.raw["name"]), "slots": str(copy.length),
        "position": str(copy.position), "hole_first": str(copy.hole[0]), "hole_after": str(copy.hole[1]), "note": note,
    }  # fmt: skip
    try:
        _write(Path(path), tensors, {**about, "sha256": _digest(about, tensors)})
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror or error}") from error


def load_session(path: str | os.PathLike[str], pool: PagePool, manifest: Manifest) -> Session:
    """The session in a file, in pages of its own; release its sequence when it is done with.

    Raises ArtifactError for a file that is damaged, of another format or of another artifact, and CacheFull if too few
    pages are free; no page has changed hands then.
    """
    about, tensors = _read(Path(path), pool, manifest)
    copy, problems = _copy(about, tensors, pool)
    ids = tensors["tokens"]
    if copy.length > len(ids) or np.any((ids < 0) | (ids >= manifest.vocab)):
        problems.append(f"tokens: {len(ids)} for {copy.length} slots, all of them below {manifest.vocab} wanted")
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; save the session again")
    sequence = pool.new_sequence()
    put_back(pool, sequence, copy)
    return Session(sequence, ids.tolist(), about["note"])


def _write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """The file, whole or not at all; mkstemp lets only this user read it."""
    fd, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(fd)
    try:
        save_file(tensors, aside, metadata)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except safetensors.SafetensorError as error:  # what it makes of a full disk
        raise OSError(None, str(error).splitlines()[0]) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside)


def _read(path: Path, pool: PagePool, manifest: Manifest) -> tuple[dict[str, str], Tensors]:
    """Metadata and tensors: of this artifact, of the shapes that this pool wants, and intact."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ArtifactError(f"{path}: not a plain file")
        with safetensors.safe_open(path, "np") as file:
            about = dict(file.metadata() or {})
            _check_owner(path, about, manifest)
            tensors = _tensors(path, file, pool)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"{path}: damaged, or no session: {str(error).splitlines()[0][:200]}") from error
    problems = _METADATA(about, "metadata")
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; save the session again")
    if _digest({key: value for key, value in about.items() if key != "sha256"}, tensors) != about["sha256"]:
        raise ArtifactError(f"{path}: damaged: its SHA-256 is not the one it states; save the session again")
    return about, tensors


def _check_owner(path: Path, about: dict[str, str], manifest: Manifest) -> None:
    if "format" not in about or "artifact" not in about:
        raise ArtifactError(f"{path}: a safetensors file, but no session")
    if about["format"] != FORMAT:
        raise ArtifactError(
            f"{path}: format {about['format'][:20]!r}, and this llmc reads format {FORMAT!r}; "
            "use the llmc that saved it, or let the text be read again"
        )
    if about["artifact"] != manifest.sha256:
        theirs, ours = f"{about.get('model', '')[:80]!r} ({about['artifact'][:12]}...)", manifest.sha256[:12]
        raise ArtifactError(
            f"{path}: saved by another artifact, {theirs}; this is {manifest.raw['name']!r} ({ours}...), "
            "and pages are good for one artifact only: let the text be read again"
        )


def _tensors(path: Path, file: Any, pool: PagePool) -> Tensors:
    """The tensors that a session of this pool has. Shapes are checked before anything large is read."""
    groups, found = range(len(pool.groups)), dict[str, NDArray[Any]]()
    small: dict[str, Any] = {"tokens": np.int32, **{f"held.{group}": np.bool_ for group in groups}}
    large = {f"kv.{layer}": (layer, group) for group in groups for layer in pool.groups[group].layers}
    if set(file.keys()) != {*small, *large}:
        raise ArtifactError(f"{path}: its tensors are not those of a session of this model; save the session again")
    problems = []
    for name, dtype in small.items():
        shape = file.get_slice(name).get_shape()
        if len(shape) != 1 or shape[0] > _MOST_TOKENS:
            raise ArtifactError(f"{path}: {name}: got shape {shape}, wanted a list of at most {_MOST_TOKENS}")
        found[name] = file.get_tensor(name)
        if found[name].dtype != dtype:
            raise ArtifactError(f"{path}: {name}: got {found[name].dtype}, wanted {np.dtype(dtype)}")
    for name, (layer, group) in large.items():
        wanted = [int(found[f"held.{group}"].sum()), *pool.layers[layer].shape[1:]]
        shape = file.get_slice(name).get_shape()
        if shape != wanted:
            problems.append(f"{name}: got shape {shape}, wanted {wanted}")
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; save the session again")
    found |= {name: file.get_tensor(name) for name in large}
    problems = [name for name, (layer, _) in large.items() if found[name].dtype != pool.layers[layer].dtype]
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}: not of the pool's dtype; save the session again")
    return found


def _copy(about: dict[str, str], tensors: Tensors, pool: PagePool) -> tuple[Copy, list[str]]:
    """What the sequence was, and what contradicts itself in it."""
    names = ("slots", "position", "hole_first", "hole_after")
    numbers = [int(about[name]) if about[name].isdecimal() and len(about[name]) < 11 else -1 for name in names]
    slots, position, first, after = numbers
    held = tuple(tensors[f"held.{group}"] for group in range(len(pool.groups)))
    problems = []
    if not 0 <= slots <= _MAX_INT32 or not 0 <= position <= _MAX_INT32 or not 0 <= first <= after <= slots:
        problems.append(f"slots, position and hole: got {', '.join(about[name][:20] for name in names)}")
    for number, (group, blocks) in enumerate(zip(pool.groups, held, strict=True)):
        if len(blocks) != pages_for(max(0, slots)):
            problems.append(f"held.{number}: {len(blocks)} blocks for {slots} slots")
        if not blocks[first_seen(group.window, slots) // PAGE_TOKENS :].all():
            problems.append(f"held.{number}: pages that the next token looks at are missing")
    layers = tuple(tensors[f"kv.{layer}"] for layer in range(len(pool.layers)))
    return Copy(slots, position, (first, after), None, held, layers), problems


def _digest(about: dict[str, str], tensors: Tensors) -> str:
    """SHA-256 of the metadata and of every tensor with its name, in hexadecimal."""
    digest = hashlib.sha256(schema.canonical_json(about))
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()
