"""A GGUF file, or all parts of one that llama-gguf-split cut: NAME-00001-of-00003.gguf and so on, read as one.

Each part is a whole GGUF file with some of the tensors; the first has the metadata of the model too. `split.no` (from
0), `split.count` and `split.tensors.count` are in every part.
https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/gguf-split.cpp
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.binding import group_names
from llmc.frontends.files.mapped_file import inside
from llmc.frontends.gguf.file import GgufFile, read_gguf

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def model_stem(path: Path) -> str:
    """What a file is called, without suffix and the number of its part."""
    match = _NAME.fullmatch(path.name)
    return match.group(1) if match else path.stem


def read_parts(path: Path) -> GgufFile:
    """The model that starts in this file: its metadata and the tensors of all its parts.

    Raises SourceError when a part is missing, or does not belong to the others.
    """
    first = read_gguf(path)
    count = first.metadata.get(COUNT, 1)
    if count in (0, 1) and not first.metadata.get(NUMBER):
        return GgufFile(first.file, _own(first.metadata), first.tensors, first.listed)
    parts = {path.name: first}
    for name in _names(path, first)[1:]:
        real = inside(path.parent, name)
        if not real.exists():
            raise SourceError(f"{path.name}: part {clip(name)} of {count} is not beside it; fetch it")
        parts[name] = read_gguf(real)
    _check(parts, count)
    tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
    return GgufFile(first.file, _own(first.metadata), tensors, first.listed)


def _own(metadata: dict[str, Any]) -> dict[str, Any]:
    """The keys that are about the model."""
    return {key: value for key, value in metadata.items() if not key.startswith("split.")}


def _names(path: Path, first: GgufFile) -> list[str]:
    """What all the parts are called. Raises SourceError unless the file is the first and its name says so."""
    number, count = first.metadata.get(NUMBER), first.metadata.get(COUNT)
    match = _NAME.fullmatch(path.name)
    called = f"{NUMBER} = {clip(number)}, {COUNT} = {clip(count)}"
    if not match or (number, count) != (int(match.group(2)) - 1, int(match.group(3))):
        raise SourceError(
            f"{path.name}: one of several parts ({called}), which are called NAME-00001-of-00003.gguf and so on; "
            "give it its name again"
        )
    stem, part, parts = match.groups()
    names = [f"{stem}-{at:05}-of-{parts}.gguf" for at in range(1, int(parts) + 1)]
    if path.name != names[0]:
        raise SourceError(f"{path.name}: part {int(part)} of {int(parts)}; give the first, {names[0]}")
    return names


def _check(parts: dict[str, GgufFile], count: int) -> None:
    """Every part says that it is the one its name says, and has tensors and keys of its own."""
    first = next(iter(parts.values())).metadata
    total = first.get(TENSORS)
    seen: set[str] = set()
    for number, (name, part) in enumerate(parts.items()):
        found = [part.metadata.get(key) for key in (NUMBER, COUNT, TENSORS)]
        if found != [number, count, total]:
            raise SourceError(
                f"{name}: {NUMBER}, {COUNT}, {TENSORS} are {clip(found)}, wanted {[number, count, total]}"
            )
        if other := [key for key, value in _own(part.metadata).items() if key not in first or first[key] != value]:
            raise SourceError(f"{name}: has {', '.join(map(clip, other[:5]))} unlike the first part; fetch both again")
        if twice := seen & part.tensors.keys():
            raise SourceError(f"{name}: {group_names(sorted(twice))} are in an earlier part too; fetch the parts again")
        seen |= part.tensors.keys()
    if len(seen) != total:
        raise SourceError(
            f"{next(iter(parts))}: {len(seen)} tensors in {count} parts, wanted {clip(total)}; fetch them again"
        )
